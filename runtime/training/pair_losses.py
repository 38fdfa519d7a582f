"""The losses of a pair of answers: one row per loss, written once for both JAX and PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from .objectives import OBJECTIVES

if TYPE_CHECKING:
    from ..settings import TrainSettings

Array = Any
"""A jax or torch array, float32[P]: one number for each of P pairs."""


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
    """Conservative DPO (Mitchell 2023): assumes that a share of the preferences is wrong."""
    return -(1 - smoothing) * f.log_sigmoid(margin) - smoothing * f.log_sigmoid(-margin)


def _sigmoid(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Rafailov et al. 2023, eq. 7; without a reference Xu et al. 2024 (CPO), eq. 3."""
    return _logistic(f, train.beta * (chosen - rejected), train.label_smoothing)


def _simpo(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Meng et al. 2024, eq. 6."""
    return _logistic(f, train.beta * (chosen - rejected) - train.simpo_gamma, train.label_smoothing)


def _hinge(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Zhao et al. 2023 (SLiC), with beta as the inverse of its margin."""
    return f.relu(1 - train.beta * (chosen - rejected))


def _ipo(_: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Azar et al. 2023, eq. 17, where beta is tau; scores are means over tokens, as in TRL."""
    return (chosen - rejected - 1 / (2 * train.beta)) ** 2


def _robust(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Chowdhury et al. 2024, eq. 10: an unbiased estimate of the loss without wrong preferences."""
    margin, smoothing = train.beta * (chosen - rejected), train.label_smoothing
    kept, turned = f.log_sigmoid(margin), f.log_sigmoid(-margin)
    return (smoothing * turned - (1 - smoothing) * kept) / (1 - 2 * smoothing)


def _apo_zero(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """D'Oosterlinck et al. 2024, eq. 7."""
    return 1 - f.sigmoid(train.beta * chosen) + f.sigmoid(train.beta * rejected)


def _apo_down(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """D'Oosterlinck et al. 2024, eq. 8."""
    return f.sigmoid(train.beta * chosen) + 1 - f.sigmoid(train.beta * (chosen - rejected))


def _sppo_hard(_: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Wu et al. 2024 (SPPO), eq. 4.7, where the chosen answer wins with probability 1."""
    half = 0.5 / train.beta
    return (chosen - half) ** 2 + (rejected + half) ** 2


def _odds_ratio(f: Functions, chosen: Array, rejected: Array, train: TrainSettings) -> Array:
    """Hong et al. 2024 (ORPO), eq. 7, with its weight in eq. 6; scores are means over tokens, as in TRL."""
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
