"""Context parallelism: the tokens of a row, split over the devices of the mesh axis cp.

Splash attention leaves out what the causal mask hides, so that the last tokens of a row cost the most. For it
a row is cut into twice as many pieces as there are devices. Each device takes one piece from the front and
its mirror image from the back, so that all of them compute the same number of blocks. Queries stay where they
are; keys and values are gathered. Attention dot computes every score, and takes tokens in the row's order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import pxla

from .partition_rules import TOKENS, dealt_length


def devices() -> int:
    """Among how many devices of the mesh in scope the tokens of a row are split."""
    return int(pxla.thread_resources.env.physical_mesh.shape.get(TOKENS, 1))


def order(length: int, count: int) -> np.ndarray:
    """int32[length]: the place in the row of each token as it is dealt.

    Args:
        length: of the dealt row.
    """
    pieces = np.arange(length, dtype=np.int32).reshape(2 * count, -1)
    return np.stack([pieces[:count], pieces[count:][::-1]], 1).reshape(-1)


def deal(x: jax.Array) -> jax.Array:
    """Puts the tokens of [B, T, ...] in the order in which the devices of cp hold them, zeros at the end.

    All that is computed of a batch is in this order then. Without cp it is the row's own.
    """
    if (count := devices()) == 1:
        return x
    padding = dealt_length(x.shape[1], count) - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
    return x[:, order(x.shape[1], count)]


def collect(x: jax.Array, length: int) -> jax.Array:
    """[B, dealt tokens, ...] in the row's order again, [B, length, ...]."""
    if (count := devices()) == 1:
        return x
    return x[:, np.argsort(order(x.shape[1], count))[:length]]


def gather(x: jax.Array, axis: int) -> jax.Array:
    """All tokens of what each device of cp has a part of, in the row's order. For use within jax.shard_map.

    Args:
        axis: that of the tokens.
    """
    front, back = jnp.split(x, 2, axis)
    front = jax.lax.all_gather(front, TOKENS, axis=axis, tiled=True)
    back = jnp.flip(jax.lax.all_gather(back, TOKENS, axis=axis), axis)
    return jnp.concatenate([front, back.reshape(front.shape)], axis)
