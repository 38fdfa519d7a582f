"""The loss of single answers, each desirable or not: written once for JAX and for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..settings import TrainSettings

Array = Any
"""Of numpy, jax or torch."""


def losses(
    sigmoid: Callable[[Array], Array], gains: Array, sides: Array, kl: Array | float, train: TrainSettings
) -> Array:
    """Ethayarajh et al. 2024 (KTO), eq. 7; with a `kl` of 0 D'Oosterlinck et al. 2024 (APO), eq. 7, of one
    answer, which is TRL's apo_zero_unpaired.

    Args:
        gains: float32[B], the log-probabilities of the answers, less the reference's.
        sides: float32[B], above 0 of desirable answers and below of the others, -1 or 1.
        kl: float32[], how far the model is from the reference, 0 or more.

    Returns:
        float32[B], with desirable_weight and undesirable_weight.
    """
    weights = (sides + 1) / 2 * train.desirable_weight + (1 - sides) / 2 * train.undesirable_weight
    return weights * (1 - sigmoid(train.beta * sides * (gains - kl)))


def mismatched(xp: Any, batch: Mapping[str, Array], size: int) -> dict[str, Array]:
    """The prompts of a micro-batch with other rows' answers, by which the distance from the reference is
    estimated: each prompt has the answer of the row before it among every `size` rows, and the first one that
    of the last, as TRL's KTOTrainer pairs what one of its processes computes at once.

    Args:
        xp: numpy, or jax's.
        batch: tokens and segment_ids int32[B, T], loss_mask bool[B, T], a sample a row; the mask covers the
            end of each. Rows that fill the batch up are the last of their `size`.
        size: train.micro_batch_size, which divides B.

    Returns:
        tokens, positions and segment_ids int32[B, T], loss_mask bool[B, T]: what is longer than T is cut off.
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
