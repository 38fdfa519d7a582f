"""Losses of texts to write that weight each target by what the model predicts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.interpreters import pxla
from jax.sharding import PartitionSpec

from ..model import sharding
from ..settings import TrainSettings
from .loss import token_nll


def _dft(_: TrainSettings, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Weight a target by its own probability, which has no gradient (Wu et al. 2025, eq. 9)."""
    nll = token_nll(logits, targets)
    return nll * jax.lax.stop_gradient(jnp.exp(-nll))


def _eaft(train: TrainSettings, logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Weight a target by the entropy of the likeliest tokens, which has no gradient, as LLaMA-Factory does.
    eaft_entropy is the 3 by which it divides the entropy of 20 tokens."""
    entropy = top_entropy(jax.lax.stop_gradient(logits), train.eaft_top_k)
    return token_nll(logits, targets) * (entropy / train.eaft_entropy) ** train.eaft_alpha


def _asft(train: TrainSettings, logits: jax.Array, targets: jax.Array, before: jax.Array) -> jax.Array:
    """Add the KL divergence of the model before training to `_dft`, as LLaMA-Factory does.

    Args:
        before: logits of the model that training starts from.
    """
    reference, model = jax.nn.log_softmax(before, axis=-1), jax.nn.log_softmax(logits, axis=-1)
    divergence = (jnp.exp(reference) * (reference - model)).sum(-1)
    return _dft(train, logits, targets) + train.asft_alpha * divergence


TOKEN_LOSSES: dict[str, Callable[..., jax.Array]] = {"dft": _dft, "eaft": _eaft, "asft": _asft}
"""Losses by train.loss_type: (settings, logits float32[B, T, V], targets int32[B, T]) -> float32[B, T]. Those
with a reference (`Objective.reference`) also get its logits."""


def top_entropy(logits: jax.Array, count: int) -> jax.Array:
    """Return float32[B, T], the entropy of the `count` largest logits' softmax, or of all if there are fewer.

    Each device first finds the largest of its own part of the vocabulary, so that logits that tp splits stay
    where they are. XLA would gather them for a top_k of the whole.
    """
    mesh = pxla.thread_resources.env.physical_mesh
    axes = (None,) * 3 if mesh.empty else sharding.activation_axes(logits, ("fsdp", None, "tp"), mesh)
    rows, tokens, split = axes

    def entropy(part: jax.Array) -> jax.Array:
        found = _largest(part.astype(jnp.float32), count)
        if split is not None:
            found = _largest(jax.lax.all_gather(found, split, axis=2, tiled=True), count)
        logps = jax.nn.log_softmax(found, axis=-1)
        return -(jnp.exp(logps) * logps).sum(-1)

    if not mesh.empty:
        places = {"in_specs": PartitionSpec(*axes), "out_specs": PartitionSpec(rows, tokens)}
        entropy = jax.shard_map(entropy, mesh=mesh, check_vma=False, **places)
    return entropy(logits)


def _largest(logits: jax.Array, count: int) -> jax.Array:
    return jax.lax.top_k(logits, min(count, logits.shape[-1]))[0]
