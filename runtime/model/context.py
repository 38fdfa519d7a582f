"""Context parallelism: the tokens of a row, split over the devices of the mesh axis cp.

Splash attention skips what the causal mask hides, so the last tokens of a row cost the most. For splash
attention a row is therefore cut into twice as many pieces as there are devices. Each device takes one piece
from the front and its mirror image from the back, so that all devices compute the same number of blocks.
Queries stay in place; keys and values are gathered. "dot" attention computes all scores in the row's order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import pxla

from .dealt import dealt_length
from .partition_rules import TOKENS


def devices() -> int:
    """Return the number of devices in the mesh in scope that the tokens of a row are split over."""
    return int(pxla.thread_resources.env.physical_mesh.shape.get(TOKENS, 1))


def order(length: int, count: int) -> np.ndarray:
    """Return int32[length]: for each token of the dealt row, its place in the original row.

    Args:
        length: of the dealt row.
    """
    pieces = np.arange(length, dtype=np.int32).reshape(2 * count, -1)
    return np.stack([pieces[:count], pieces[count:][::-1]], 1).reshape(-1)


def deal(x: jax.Array) -> jax.Array:
    """Put the tokens of [B, T, ...] in the order in which the devices of cp hold them, with zeros at the end.

    Everything computed from a batch is then in this order. Without cp it is the row's own order.
    """
    if (count := devices()) == 1:
        return x
    padding = dealt_length(x.shape[1], count) - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
    return x[:, order(x.shape[1], count)]


def collect(x: jax.Array, length: int) -> jax.Array:
    """Return [B, dealt tokens, ...] in the row's own order, [B, length, ...]."""
    if (count := devices()) == 1:
        return x
    return x[:, np.argsort(order(x.shape[1], count))[:length]]


def gather(x: jax.Array, axis: int) -> jax.Array:
    """Gather all tokens of an array that is split over cp, in the row's order. For use within jax.shard_map.

    Args:
        axis: the axis of the tokens.
    """
    front, back = jnp.split(x, 2, axis)
    front = jax.lax.all_gather(front, TOKENS, axis=axis, tiled=True)
    back = jnp.flip(jax.lax.all_gather(back, TOKENS, axis=axis), axis)
    return jnp.concatenate([front, back.reshape(front.shape)], axis)
