"""Measure how a micro-batch's tokens spread over experts, and compute the loss that balances them.

Each layer with experts notes its load while it is computed, if a caller collects loads. A block that is
recomputed returns its notes together with its output, because nothing else may leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from . import sharding

Out = TypeVar("Out")


class Load(NamedTuple):
    """The load of a layer's experts, by row. Padding does not count.

    Attributes:
        tokens: int32[B, E], the number of the row's tokens that go through each expert.
        probabilities: float32[B, E], the sums over its tokens of the softmax of the router's logits; None
            where no loss is computed from them.
    """

    tokens: jax.Array
    probabilities: jax.Array | None


@dataclass
class Collected:
    """The loads of one forward pass.

    Attributes:
        real: bool[B, T], the tokens that count.
        probable: whether to record probabilities too.
        loads: of each layer with experts, in layer order.
    """

    real: jax.Array
    probable: bool
    loads: list[Load] = field(default_factory=list)

    def tokens(self) -> jax.Array:
        """Return int32[L, E]: the tokens of all rows that go through each expert of each layer."""
        return _over_rows([load.tokens for load in self.loads])

    def loss(self) -> jax.Array:
        """Return float32[], the load-balancing loss: equations 4 to 6 of Switch Transformers (Fedus et al.
        2021), as in transformers' `load_balancing_loss_func`.

        It is E * sum over the experts of f * p. f is the mean number of times that a token goes through an
        expert, p the mean probability that the router gives it, both over the tokens of all layers. It is K
        if each token goes through K experts and all experts get the same. It is 0 if all tokens are padding.
        """
        tokens = self.tokens().sum(0).astype(jnp.float32)
        by_layer = [load.probabilities for load in self.loads if load.probabilities is not None]
        probabilities = _over_rows(by_layer).sum(0)
        counted = jnp.maximum(self.real.sum() * len(self.loads), 1).astype(jnp.float32)
        return tokens.size * jnp.sum(tokens / counted * (probabilities / counted))


_collected: ContextVar[Collected | None] = ContextVar("collected", default=None)


@contextmanager
def collected(segment_ids: jax.Array, probable: bool) -> Iterator[Collected]:
    """Collect the loads of the layers that are traced in this context.

    Args:
        segment_ids: int32[B, T] of the batch, 0 for padding.
        probable: whether to record probabilities too.
    """
    loads = Collected(segment_ids > 0, probable)
    with _put(loads):
        yield loads


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no loads in this context."""
    with _put(None):
        yield


def note(logits: jax.Array, choices: jax.Array) -> None:
    """Add a layer's load to the collected ones, if loads are collected.

    Args:
        logits: [B, T, E], the router's.
        choices: int32[B, T, K], the experts of each token.
    """
    collected = _collected.get()
    if collected is None:
        return
    experts = jnp.arange(logits.shape[-1])
    chosen = (choices[..., None] == experts) & collected.real[..., None, None]
    probabilities = None
    if collected.probable:
        softmax = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        probabilities = jnp.where(collected.real[..., None], softmax, 0.0).sum(1)
    collected.loads.append(Load(chosen.sum((1, 2), dtype=jnp.int32), probabilities))


def through(transform: Callable[..., Any], block: Callable[..., Out]) -> Callable[..., Out]:
    """Apply a transformation such as jax.checkpoint to a block, and pass the block's loads out of it."""

    def noting(*args: Any) -> tuple[Out, list[Load]]:
        outer = _collected.get()
        if outer is None:
            return block(*args), []
        inner = Collected(outer.real, outer.probable)
        with _put(inner):
            return block(*args), inner.loads

    transformed = transform(noting)

    def call(*args: Any) -> Out:
        out: Out
        out, loads = transformed(*args)
        if loads:
            outer = _collected.get()
            assert outer is not None
            outer.loads += loads
        return out

    return call


@contextmanager
def _put(loads: Collected | None) -> Iterator[None]:
    token = _collected.set(loads)
    try:
        yield
    finally:
        _collected.reset(token)


def _over_rows(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return [L, E]: the sums over the rows of arrays [B, E], the same on every device."""
    return sharding.constrain(jnp.stack(arrays).sum(1), (None, None))
