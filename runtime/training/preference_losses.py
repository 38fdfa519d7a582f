"""The losses of preferences, written once for JAX and PyTorch: of pairs of answers, a row of PAIR_LOSSES for
each, and of single answers, each desirable or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .objectives import OBJECTIVES

if TYPE_CHECKING:
    from ..settings import TrainSettings

Array = Any
"""A jax or torch array: float32[P] of P pairs, or float32[B] of B answers."""


class Functions(NamedTuple):
    """The array functions that losses are made of, from jax or torch."""

    exp: Callable[[Array], Array]
    log1p: Callable[[Array], Array]
    relu: Callable[[Array], Array]
    sigmoid: Callable[[Array], Array]
    log_sigmoid: Callable[[Array], Array]


@dataclass(frozen=True)
class PairLoss:
    """The loss of a pair of answers.

    Attributes:
        of: (functions, score of the chosen answer, of the rejected one, settings) -> the loss. An answer's
            score is its log-probability, minus the reference's if the objective has a reference.
        mean: whether the score is the mean over the answer's tokens instead of their sum.
    """

    of: Callable[[Functions, Array, Array, TrainSettings], Array]
    mean: bool = False


def _logistic(f: Functions, margin: Array, smoothing: float) -> Array:
    """Compute conservative DPO (Mitchell 2023), which assumes that a share of the preferences is wrong."""
    return -(1 - smoothing) * f.log_sigmoid(margin) - smoothing * f.log_sigmoid(-margin)


def _sigmoid(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of Rafailov et al. 2023, eq. 7; without a reference Xu et al. 2024 (CPO), eq. 3."""
    return _logistic(f, train.beta * (chosen - rejected), train.label_smoothing)


def _simpo(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of Meng et al. 2024, eq. 6."""
    return _logistic(f, train.beta * (chosen - rejected) - train.simpo_gamma, train.label_smoothing)


def _hinge(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of Zhao et al. 2023 (SLiC), with beta as the inverse of its margin."""
    return f.relu(1 - train.beta * (chosen - rejected))


def _ipo(_: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute Azar et al. 2023, eq. 17, with tau = beta; scores are means over tokens, as in TRL."""
    return (chosen - rejected - 1 / (2 * train.beta)) ** 2


def _robust(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute Chowdhury et al. 2024, eq. 10: an unbiased estimate of the loss without wrong preferences."""
    margin, smoothing = train.beta * (chosen - rejected), train.label_smoothing
    kept, turned = f.log_sigmoid(margin), f.log_sigmoid(-margin)
    return (smoothing * turned - (1 - smoothing) * kept) / (1 - 2 * smoothing)


def _apo_zero(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of D'Oosterlinck et al. 2024, eq. 7."""
    return 1 - f.sigmoid(train.beta * chosen) + f.sigmoid(train.beta * rejected)


def _apo_down(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of D'Oosterlinck et al. 2024, eq. 8."""
    return f.sigmoid(train.beta * chosen) + 1 - f.sigmoid(train.beta * (chosen - rejected))


def _sppo_hard(_: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute the loss of Wu et al. 2024 (SPPO), eq. 4.7: the chosen answer wins with probability 1."""
    half = 0.5 / train.beta
    return (chosen - half) ** 2 + (rejected + half) ** 2


def _odds_ratio(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Compute Hong et al. 2024 (ORPO), eq. 7, weighted as in eq. 6; scores are means over tokens (TRL)."""
    odds = (chosen - rejected) - (f.log1p(-f.exp(chosen)) - f.log1p(-f.exp(rejected)))
    return -train.beta * f.log_sigmoid(odds)


PAIR_LOSSES = {
    "sigmoid": PairLoss(_sigmoid),
    "sigmoid_norm": PairLoss(_sigmoid, mean=True),
    "robust": PairLoss(_robust),
    "hinge": PairLoss(_hinge),
    "ipo": PairLoss(_ipo, mean=True),
    "apo_zero": PairLoss(_apo_zero),
    "apo_down": PairLoss(_apo_down),
    "sppo_hard": PairLoss(_sppo_hard),
    "simpo": PairLoss(_simpo, mean=True),
    "odds_ratio": PairLoss(_odds_ratio, mean=True),
}
"""Losses by train.loss_type, with TRL's names; ORPO's only loss is not a loss_type."""


def pair_loss(train: TrainSettings) -> PairLoss:
    """Return the loss of a run's pairs."""
    return PAIR_LOSSES[str(OBJECTIVES[train.objective].loss(train.loss_type))]


def unpaired_losses(
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
        xp: numpy, or jax's: the library of the arrays.
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
    prompt = place < starts
    kept = (prompt | (there < ends[other])) & real.any(1)[:, None]
    there = xp.clip(there, 0, length - 1)

    def joined(values: Array, others: Array) -> Array:
        return xp.where(kept, xp.where(prompt, values, xp.take_along_axis(others, there, 1)), 0)

    return {
        "tokens": joined(tokens, tokens[other]).astype(tokens.dtype),
        "positions": xp.where(kept, place, 0).astype(tokens.dtype),
        "segment_ids": kept.astype(tokens.dtype),
        "loss_mask": joined(answers, answers[other]).astype(bool),
    }
