"""The loss of a policy on completions that it sampled, for one micro-batch.

All arrays have a token's value at the same place: its own, or that of the token before it, where
`runtime.training.losses.token_logps` returns log-probabilities. Log-probabilities are those of the
distribution that was sampled from, at its temperature. The losses and the metrics of a step's micro-batches
add up to the step's, because each token has its weight in the whole step.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .loss_types import KL_ESTIMATORS, LOSS_TYPES, RATIOS, LossSettings

METRICS = ("ratio", "clip_low", "clip_high", "kl", "entropy")
"""Means over the step's completion tokens: the ratio; the share of tokens whose ratio is clipped below and
above, for cispo only above; the estimated divergence from the reference in nats, if beta is not 0; the
entropy in nats, if it is passed."""


@dataclass(frozen=True)
class Completions:
    """The completions of a micro-batch, several packed into a row.

    Attributes:
        mask: bool[B, T], the trained tokens of completions.
        segment_ids: int32[B, T], which completion of its row a token belongs to, at most T.
        advantages: float32[B, T], the advantage of each token's completion.
        weights: float32[B, T], of `token_weights.token_weights`.
        tokens: float32[], the number of trained tokens of the whole step.
        old: float32[B, T], log-probabilities under the policy that sampled; None for the current ones, which
            is the same in the first update after a rollout.
        reference: float32[B, T], log-probabilities under the reference; needed if beta is not 0.
        correction: float32[B, T], factors of the policy's loss, of `correction.importance_weights`; None for
            1. The divergence from the reference is not multiplied.
    """

    mask: jax.Array
    segment_ids: jax.Array
    advantages: jax.Array
    weights: jax.Array
    tokens: jax.Array | float
    old: jax.Array | None = None
    reference: jax.Array | None = None
    correction: jax.Array | None = None


def policy_loss(
    settings: LossSettings, logps: jax.Array, batch: Completions, entropy: jax.Array | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute a micro-batch's part of the step's loss, and of the step's METRICS.

    Args:
        logps: float32[B, T], log-probabilities under the current policy; their gradient trains it.
        entropy: float32[B, T], of the distributions of tokens, only for the metric.

    Returns:
        float32[], and float32[] by name.

    Raises:
        ValueError: settings name something unknown, or beta needs a reference that is None.
    """
    loss_type = LOSS_TYPES[settings.loss_type]
    level = settings.ratio or loss_type.ratio
    if level not in RATIOS or settings.kl not in KL_ESTIMATORS:
        raise ValueError(f"unknown ratio {level!r} or divergence {settings.kl!r}")
    mask = batch.mask
    # Values outside of the mask are arbitrary. They must not reach exp, whose gradient may be NaN there.
    logps = jnp.where(mask, logps, 0.0)
    old = jax.lax.stop_gradient(logps if batch.old is None else jnp.where(mask, batch.old, 0.0))
    log_ratio = logps - old
    if level != "token":
        log_ratio = _over_completions(log_ratio, batch, mean=level == "sequence")
    ratio = jnp.exp(log_ratio)
    advantages = jnp.where(mask, batch.advantages, 0.0)
    epsilon_high = settings.epsilon if settings.epsilon_high is None else settings.epsilon_high
    if loss_type.clips_gradient:
        low, high = 1 - settings.epsilon, 1 + epsilon_high
        losses = -jnp.minimum(ratio * advantages, jnp.clip(ratio, low, high) * advantages)
        clip_low = (ratio < low) & (advantages < 0)
    else:
        high = epsilon_high
        losses = -jax.lax.stop_gradient(jnp.minimum(ratio, high)) * advantages * logps
        clip_low = jnp.zeros_like(mask)

    if batch.correction is not None:
        losses = losses * jax.lax.stop_gradient(jnp.where(mask, batch.correction, 1.0))

    def mean(values: jax.Array) -> jax.Array:
        share = jnp.where(batch.tokens > 0, 1.0 / jnp.maximum(batch.tokens, 1.0), 0.0)
        return jax.lax.stop_gradient(jnp.where(mask, values, 0.0).sum() * share)

    metrics = {
        "ratio": mean(ratio),
        "clip_low": mean(clip_low.astype(jnp.float32)),
        "clip_high": mean(((ratio > high) & (advantages > 0)).astype(jnp.float32)),
    }
    if settings.beta:
        if batch.reference is None:
            raise ValueError("beta needs the reference's log-probabilities")
        kl = _divergence(settings.kl, logps, jnp.where(mask, batch.reference, 0.0))
        if settings.kl_bias_correction:
            kl = kl * ratio
        losses = losses + settings.beta * kl
        metrics["kl"] = mean(kl)
    if entropy is not None:
        metrics["entropy"] = mean(entropy)
    return jnp.where(mask, batch.weights * losses, 0.0).sum(), metrics


def _divergence(estimator: str, logps: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the estimated divergence of each token, in nats."""
    difference = jax.lax.stop_gradient(reference) - logps
    return -difference if estimator == "k1" else jnp.exp(difference) - difference - 1


def _over_completions(values: jax.Array, batch: Completions, mean: bool) -> jax.Array:
    """Return float32[B, T]: at each token the sum, or the mean, of its completion's values."""
    most = values.shape[1] + 1

    def row(values: jax.Array, segment_ids: jax.Array, mask: jax.Array) -> jax.Array:
        sums = jax.ops.segment_sum(values, segment_ids, most)
        if mean:
            counts = jax.ops.segment_sum(mask.astype(jnp.float32), segment_ids, most)
            sums = sums / jnp.maximum(counts, 1.0)
        return sums[segment_ids]

    return jax.vmap(row)(jnp.where(batch.mask, values, 0.0), batch.segment_ids, batch.mask)
