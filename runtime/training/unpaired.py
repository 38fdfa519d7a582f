"""The loss of single answers, each desirable or not: written once for JAX and for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..settings import TrainSettings

Array = Any
"""A numpy, jax or torch array."""


def losses(
    sigmoid: Callable[[Array], Array], gains: Array, sides: Array, kl: Array | float, train: TrainSettings
) -> Array:
    """Return the losses of KTO (Ethayarajh et al. 2024, eq. 7). With `kl` 0 they are the losses of APO
    (D'Oosterlinck et al. 2024, eq. 7) for a single answer: TRL's apo_zero_unpaired.

    Args:
        gains: float32[B], the log-probabilities of the answers, minus the reference's.
        sides: float32[B], -1 or 1: above 0 for desirable answers and below for undesirable ones.
        kl: float32[], how far the model is from the reference, 0 or more.

    Returns:
        float32[B], with desirable_weight and undesirable_weight.
    """
    weights = (sides + 1) / 2 * train.desirable_weight + (1 - sides) / 2 * train.undesirable_weight
    return weights * (1 - sigmoid(train.beta * sides * (gains - kl)))


def mismatched(xp: Any, batch: Mapping[str, Array], size: int) -> dict[str, Array]:
    """Pair each prompt of a micro-batch with another row's answer, to estimate the distance from the
    reference. In every group of `size` rows a prompt gets the answer of the row before it, and the first
    prompt gets the last row's, as TRL's KTOTrainer pairs the rows of one process's batch.

    Args:
        xp: numpy, or jax's.
        batch: tokens and segment_ids int32[B, T], loss_mask bool[B, T], one sample a row; the mask covers
            the end of each. Rows that fill the batch up are the last of their `size`.
        size: train.micro_batch_size, which divides B.

    Returns:
        tokens, positions and segment_ids int32[B, T], loss_mask bool[B, T]; texts are cut off at T tokens.
    """
    tokens, real, answers = batch["tokens"], batch["segment_ids"] > 0, batch["loss_mask"]
    rows, length = tokens.shape
    starts, ends = answers.argmax(1)[:, None], real.sum(1)[:, None]
    filled = xp.repeat(real.any(1).reshape(-1, size).sum(1), size)
    number = xp.arange(rows)
    within = number % size
    other = xp.where(within == 0, number + xp.maximum(filled, 1) - 1, number - 1)
    place = xp.arange(length)[None]
    there = place - starts + starts[other]
    own = place < starts
    kept = (own | (there < ends[other])) & real.any(1)[:, None]
    there = xp.clip(there, 0, length - 1)

    def joined(values: Array, others: Array) -> Array:
        return xp.where(kept, xp.where(own, values, xp.take_along_axis(others, there, 1)), 0)

    return {
        "tokens": joined(tokens, tokens[other]).astype(tokens.dtype),
        "positions": xp.where(kept, place, 0).astype(tokens.dtype),
        "segment_ids": kept.astype(tokens.dtype),
        "loss_mask": joined(answers, answers[other]).astype(bool),
    }
