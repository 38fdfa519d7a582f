"""Advantages of completions from their rewards, as TRL computes them.

Completions of the same prompt are a group. A reward is NaN where no function scored the completion: it has no
part in its group's mean and spread, and its advantage is 0. All arithmetic is in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Array = np.ndarray

EPSILON = 1e-4
"""What TRL adds to a standard deviation before it divides by it."""
SCALES = ("group", "batch", "none")


def combined_rewards(by_function: Array, weights: Sequence[float]) -> Array:
    """Return float64[prompts, generations], the weighted sum of the rewards that functions gave.

    Args:
        by_function: float[functions, prompts, generations], NaN where a function did not score a completion.
        weights: one number for each function.

    Raises:
        ValueError: the number of weights is not the number of functions.
    """
    by_function = np.asarray(by_function, np.float64)
    if len(weights) != len(by_function):
        raise ValueError(f"{len(weights)} weights for {len(by_function)} reward functions")
    rewards = np.nansum(by_function * np.asarray(weights, np.float64)[:, None, None], axis=0)
    return np.where(np.isnan(by_function).all(0), np.nan, rewards)


def overlong_penalty(lengths: Array, max_completion_length: int, buffer: int) -> Array:
    """Return the soft penalty of long completions, float64 in the shape of `lengths` (DAPO, Yu et al. 2025,
    eq. 13): 0 up to `buffer` tokens before the maximum, then falling linearly to -1 at the maximum.

    Args:
        lengths: int, the tokens of each completion.
        max_completion_length: in tokens.
        buffer: in tokens; 0 for a penalty only beyond the maximum.
    """
    over = np.asarray(lengths, np.float64) - (max_completion_length - buffer)
    if not buffer:
        return np.where(over > 0, -1.0, 0.0)
    return -np.clip(over / buffer, 0.0, 1.0)


def without_difference(rewards: Array) -> Array:
    """Return bool[prompts]: groups whose rewards are all the same, or with fewer than two rewards. Nothing
    can be learned from them: their advantages are 0, unless RLOO's are normalized.

    Args:
        rewards: float[prompts, generations], NaN where a completion has no reward.
    """
    rewards = np.asarray(rewards, np.float64)
    lowest = np.where(np.isnan(rewards), np.inf, rewards).min(1)
    highest = np.where(np.isnan(rewards), -np.inf, rewards).max(1)
    return lowest >= highest


def group_advantages(rewards: Array, scale_rewards: str = "group") -> Array:
    """Return float32[prompts, generations]: rewards minus their group's mean, scaled.

    Args:
        rewards: float[prompts, generations], NaN where a completion has no reward.
        scale_rewards: "group" divides by the standard deviation of the group, "batch" by that of all rewards,
            both of n - 1 degrees of freedom and with EPSILON added; "none" divides by nothing.

    Raises:
        ValueError: for another scale_rewards.
    """
    rewards = np.asarray(rewards, np.float64)
    if scale_rewards not in SCALES:
        raise ValueError(f"scale_rewards is {scale_rewards!r}, not one of {', '.join(SCALES)}")
    centered = rewards - _mean(rewards, 1)
    # Not the rounding errors of a mean of equal rewards, which a small spread would magnify.
    centered[without_difference(rewards)] = 0.0
    if scale_rewards != "none":
        axis = 1 if scale_rewards == "group" else None
        centered = centered / (_deviation(rewards, axis) + EPSILON)
    return np.nan_to_num(np.where(np.isnan(rewards), 0.0, centered), nan=0.0).astype(np.float32)


def leave_one_out_advantages(rewards: Array, normalize: bool = False) -> Array:
    """Return float32[prompts, generations]: rewards minus the mean of the group's other rewards (RLOO,
    Ahmadian et al. 2024). A completion whose group has no other reward has the advantage 0.

    Args:
        rewards: float[prompts, generations], NaN where a completion has no reward.
        normalize: subtract the mean of all advantages, and divide by their standard deviation plus EPSILON.
    """
    rewards = np.asarray(rewards, np.float64)
    others = (~np.isnan(rewards)).sum(1, keepdims=True) - 1
    baseline = (np.nansum(rewards, 1, keepdims=True) - rewards) / np.where(others > 0, others, np.nan)
    advantages = rewards - baseline
    advantages[without_difference(rewards)] *= 0.0  # NaN stays NaN
    if normalize:
        advantages = (advantages - _mean(advantages, None)) / (_deviation(advantages, None) + EPSILON)
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def kl_penalty(old: Array, reference: Array, mask: Array) -> Array:
    """Return float64[rows], log p(completion) - log p_reference(completion), in nats: RLOO subtracts beta
    times this from a completion's reward, instead of a divergence in the loss.

    Args:
        old: float[rows, tokens], log-probabilities under the policy that sampled the tokens.
        reference: float[rows, tokens], log-probabilities under the reference.
        mask: bool[rows, tokens], the tokens of completions.
    """
    return np.where(mask, np.asarray(old, np.float64) - reference, 0.0).sum(1)


def _mean(values: Array, axis: int | None) -> Array:
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    return np.nansum(values, axis, keepdims=True) / np.where(count > 0, count, np.nan)


def _deviation(values: Array, axis: int | None) -> Array:
    """Return the standard deviation of n - 1 degrees of freedom; NaN for fewer than two values."""
    count = (~np.isnan(values)).sum(axis, keepdims=True)
    squares = np.nansum((values - _mean(values, axis)) ** 2, axis, keepdims=True)
    return np.sqrt(squares / np.where(count > 1, count - 1, np.nan))
