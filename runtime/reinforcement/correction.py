"""Weights of completions that a server generated, whose log-probabilities differ from the training step's.

A server computes the same model with other kernels, in another type, or with quantized weights. So it draws
from a slightly different distribution. The weight of a token, or of a whole completion, is its probability in
the training step divided by that in the server, within bounds: truncated or masked importance sampling, with
TRL's formulas. numpy only.
"""

from __future__ import annotations

import numpy as np

from ..errors import UserError
from ..sections import Rollout

Array = np.ndarray

OTHER_MODEL = 1.0
"""Log-probabilities of tokens that differ by more than this on average, in nats, are of another model."""


def importance_weights(trained: Array, served: Array, mask: Array, rollout: Rollout) -> Array:
    """Return float32[rows, tokens], the factor of each token in the policy's loss; 1 outside of the mask.

    Args:
        trained: float[rows, tokens], log-probabilities of the training step, before the batch's first update.
        served: float[rows, tokens], the server's; NaN where it reports none, which counts as no difference.
        mask: bool[rows, tokens], the trained tokens of completions.
        rollout: its `importance_sampling_...` settings.
    """
    level, _, limit = rollout.importance_sampling_mode.partition("_")
    difference = differences(trained, served, mask)
    if level == "sequence":
        difference = np.broadcast_to(difference.sum(1, keepdims=True), mask.shape)
    with np.errstate(over="ignore"):
        ratio = np.exp(difference)
    least, most = rollout.importance_sampling_clip_min, rollout.importance_sampling_clip_max
    low, high = -np.inf if least is None else least, np.inf if most is None else most
    if limit == "truncate":
        ratio = np.clip(ratio, low, high)
    else:
        ratio = np.where((ratio < low) | (ratio > high), 0.0, ratio)
    return np.where(mask, ratio, 1.0).astype(np.float32)


def differences(trained: Array, served: Array, mask: Array) -> Array:
    """Return float64[rows, tokens], the training step's log-probabilities minus the server's, in nats; 0
    outside of the mask, and where the server reports none."""
    difference = np.where(mask, np.asarray(trained, np.float64) - served, 0.0)
    return np.where(np.isnan(difference), 0.0, difference)


def mismatch(
    trained: Array, served: Array, mask: Array, weights: Array, rollout: Rollout
) -> dict[str, float]:
    """Return the metrics of the difference, as TRL logs them: the mean and the largest distance of the
    log-probabilities of tokens, in nats; and the mean, the smallest and the largest weight, of tokens or, in
    the sequence modes, of completions.

    Args:
        trained, served, mask, rollout: as for `importance_weights`.
        weights: its result.
    """
    distance = np.abs(differences(trained, served, mask))[mask & ~np.isnan(served)]
    ratios = weights[mask]
    if rollout.importance_sampling_mode.startswith("sequence"):
        ratios = np.array([row[inside][0] for row, inside in zip(weights, mask, strict=True) if inside.any()])
    return {
        "sampling_logp_difference": float(distance.mean()) if distance.size else 0.0,
        "sampling_logp_difference_max": float(distance.max(initial=0.0)),
        "importance_sampling_ratio": float(ratios.mean()) if ratios.size else 0.0,
        "importance_sampling_ratio_min": float(ratios.min()) if ratios.size else 0.0,
        "importance_sampling_ratio_max": float(ratios.max(initial=0.0)),
    }


def check_mismatch(numbers: dict[str, float]) -> None:
    """Check the metrics of a run's first batch.

    Raises:
        UserError: the server does not compute the model that is trained.
    """
    distance = numbers["sampling_logp_difference"]
    if distance > OTHER_MODEL:
        raise UserError(
            f"the rollout server's log-probabilities differ by {distance:.2f} nats a token from those of the "
            "training step: it does not serve the model that is trained",
            "start it with the recipe's model and revision, unquantized",
        )
