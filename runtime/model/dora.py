"""DoRA adds to LoRA a magnitude for each output of a projection (Liu et al. 2024), computed as in PEFT."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix

from .adapters import Adapter


def magnitude_scale(
    adapter: Adapter, w_axes: str, weight: jax.Array, pair: tuple[jax.Array, jax.Array], m: jax.Array
) -> jax.Array:
    """Return the factor of the outputs of W + B A, [*rest of the weight]: m / |W + B A|; 1 for projections
    without an adapter.

    The length of each output's column gets no gradient (section 4.3 of the paper). It is computed without
    W + B A itself, as |W|^2 + 2 W.(B A) + |B A|^2.

    Args:
        w_axes: a letter for each axis of the weight.
        pair: A [*contracted, rank] and B [rank, *rest], B with LoRA's scale.
        m: the magnitudes, [*rest].
    """
    weight, a, b = (jax.lax.stop_gradient(x.astype(jnp.float32)) for x in (weight, *pair))
    contracted = "".join(w_axes[axis] for axis in adapter.target.contract)
    rest = "".join(axis for axis in w_axes if axis not in contracted)
    r, q, *_ = (letter for letter in "rqyz" if letter not in w_axes)
    cross = jnp.einsum(f"{contracted}{r},{w_axes}->{r}{rest}", a, weight)
    gram = jnp.einsum(f"{contracted}{r},{contracted}{q}->{r}{q}", a, a)
    squares = jnp.einsum(f"{w_axes},{w_axes}->{rest}", weight, weight)
    squares += (b * (2.0 * cross + jnp.einsum(f"{r}{q},{q}{rest}->{r}{rest}", gram, b))).sum(0)
    scale = m / jnp.sqrt(squares)
    trained = np.zeros(len(adapter.target.projections), bool)
    trained[[part.slot for part in adapter.projections]] = True
    if trained.all():
        return scale
    return jnp.where(trained.reshape(-1, *(1 for _ in scale.shape[1:])), scale, 1.0)


def magnitudes(adapter: Adapter, weight: jax.Array | qwix.QArray, dtype: Any) -> jax.Array:
    """Return the first magnitudes, float32[*rest of the weight]: the lengths of W's columns.

    Args:
        weight: W, or its codes and scales. Then the lengths are those of the numbers that they represent.
        dtype: the model's.
    """
    if isinstance(weight, qwix.QArray):
        from .quantize import dequantize

        weight = dequantize(weight, dtype)
    return jnp.sqrt(jnp.square(weight.astype(jnp.float32)).sum(adapter.target.contract))
