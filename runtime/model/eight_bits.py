"""Products in eight bits: activations are quantized on the fly, and multiply the codes of frozen weights.

Each row of activations gets a scale: its largest magnitude divided by the type's largest number. Each output
of the weight already has a scale (quantize.py). Qwix's einsum multiplies the codes, exactly in int32, or for
fp8 with sums in float32. The product is then multiplied by both scales. Qwix's own training (dot_general_qt)
quantizes weights in each pass and keeps them for the backward pass, so this file has its own backward pass:
the gradient of the output is multiplied by the weight's scales, and is then either rounded by row like
activations, or multiplies the codes in its own type.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from qwix._src.core import einsum as quantized

from .matrices import letters
from .quantize import quantized_weight


def product_of(both: bool) -> Callable[..., jax.Array]:
    """Return the function that computes a module's product, a `runtime.model.lora.Product`.

    Args:
        both: whether the gradient of the activations is computed in eight bits too.
    """

    def product(
        compute: Callable[[jax.Array, jax.Array], jax.Array],
        equation: str,
        x: jax.Array,
        weight: jax.Array,
        module: Any,
    ) -> jax.Array:
        stored = quantized_weight(module, weight)
        if stored is None:
            return compute(x, weight)
        return product_of_codes(equation, both, x, stored.qvalue, stored.scale)

    return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product_of_codes(
    equation: str, both: bool, x: jax.Array, codes: jax.Array, scale: jax.Array
) -> jax.Array:
    """Multiply activations by a weight's codes in an einsum; the result has the activations' type.

    Args:
        scale: float32, broadcastable to the codes: 1 along the axes that are summed over.
    """
    x_axes, w_axes, _ = letters(equation)
    rows = _rows(x, x_axes, w_axes, codes.dtype)
    return quantized.einsum(equation, rows, qwix.QArray(codes, scale)).astype(x.dtype)


def _forward(
    equation: str, both: bool, x: jax.Array, codes: jax.Array, scale: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return product_of_codes(equation, both, x, codes, scale), (codes, scale)


def _backward(
    equation: str, both: bool, kept: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, Any, jax.Array]:
    """Return the gradient of the activations, ignoring the rounding of all operands; none for the weight."""
    codes, scale = kept
    x_axes, w_axes, output = letters(equation)
    dtype = gradient.dtype
    scaled = gradient.astype(jnp.float32) * _along(scale, w_axes, x_axes, output)
    back = f"{output},{w_axes}->{x_axes}"
    if both:
        rows = _rows(scaled, output, w_axes, codes.dtype)
        ones = jnp.ones((1,) * codes.ndim, jnp.float32)
        out = quantized.einsum(back, rows, qwix.QArray(codes, ones)).astype(dtype)
    else:
        out = jnp.einsum(back, scaled.astype(dtype), codes.astype(dtype))
    none = np.zeros(codes.shape, jax.dtypes.float0) if codes.dtype == jnp.int8 else jnp.zeros_like(codes)
    return out, none, jnp.zeros_like(scale)


product_of_codes.defvjp(_forward, _backward)


def _rows(x: jax.Array, axes: str, others: str, dtype: Any) -> qwix.QArray:
    """Quantize activations, or gradients, with one scale over all axes that are summed over."""
    kept = [number for number, axis in enumerate(axes) if axis not in others]
    return qwix.quantize(x.astype(jnp.float32), dtype, channelwise_axes=kept)


def _along(scale: jax.Array, w_axes: str, x_axes: str, output: str) -> jax.Array:
    """Return the scales of a weight's outputs, broadcast along the result of the product."""
    outputs = [axis for axis in output if axis in w_axes and axis not in x_axes]
    size = {axis: scale.shape[w_axes.index(axis)] for axis in outputs}
    ordered = jnp.transpose(scale, [*map(w_axes.index, outputs), *_summed(w_axes, outputs)])
    return ordered.reshape([size.get(axis, 1) for axis in output])


def _summed(w_axes: str, outputs: list[str]) -> list[int]:
    return [number for number, axis in enumerate(w_axes) if axis not in outputs]
