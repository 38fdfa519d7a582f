"""Quantization-aware training: products of rounded weights and activations, with gradients as if unrounded.

The numbers are those of torchao's fake quantizers, whose models are quantized after training. Weights are in
groups of neighboring inputs of one output:

- int4 is symmetric: a group's scale is its largest magnitude / 7.5, and codes are cut off at -8 and 7. Like
  torchao's Int8DynActInt4WeightQATQuantizer, it gives codes that are cut off no gradient.
- int4_asymmetric spreads 16 codes from a group's smallest to its largest weight, without a code for zero.
  Like torchao's Int4WeightFakeQuantizer, it has gradients through both.
- mxfp4 is the MX format of 4 bits, as torchao's MXFakeQuantizedLinear has it, also for activations.

Other activations of a token are int8 from their smallest to their largest number, with zero among the codes.
Scales and zero points are computed in the operand's own type, and applied in float32.

Qwix's fake quantization has other numbers: it divides by the scale instead of multiplying by its reciprocal,
adds the zero point before it rounds, and passes gradients through codes that are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..options import FakeQuantization
from .adapters import Adapter
from .families.base import LoraTarget
from .matrices import letters

if TYPE_CHECKING:
    from .loading import Built

ACTIVE: FakeQuantization | None = None
"""How products are rounded while a model is traced: `Forward.replaced` sets it."""

LEAST_SCALE = 2.0**-23
"""The smallest scale of activations."""
LEAST_RANGE = 1e-6
"""The smallest distance between the ends of an asymmetric group."""

Slots = Collection[int] | None
"""The projections within a fused weight whose products are rounded, None for all."""


def product_of(places: Sequence[LoraTarget | Adapter]) -> Callable[..., jax.Array]:
    """Return the function that computes a module's product, a `runtime.model.lora.Product`.

    Args:
        places: the linear layers that are rounded, or adapters whose projections are.
    """
    rounded = dict(map(_place, places))

    def product(
        compute: Callable[[jax.Array, jax.Array], jax.Array],
        equation: str,
        x: jax.Array,
        weight: jax.Array,
        module: Any,
    ) -> jax.Array:
        path = ".".join(map(str, getattr(module, "qwix_path", ())))
        if ACTIVE is None or path not in rounded:
            return compute(x, weight)
        how = ACTIVE

        # The rounded weight is computed again for the backward pass, instead of being kept.
        @jax.checkpoint
        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            return compute(*operands(equation, x, weight, how))

        out, slots = multiply(x, weight), rounded[path]
        if slots is None:
            return out
        axis, size = _slots(equation, weight.shape)
        mask = jnp.isin(jnp.arange(size), jnp.asarray(sorted(slots)))
        mask = mask.reshape([size if i == axis else 1 for i in range(out.ndim)])
        return jnp.where(mask, out, compute(x, weight))

    return product


def _place(place: LoraTarget | Adapter) -> tuple[str, Slots]:
    """Return the path of a module, and which of its projections are rounded."""
    if isinstance(place, LoraTarget):
        return place.weight.rpartition(".")[0], None
    slots = {part.slot for part in place.projections}
    return place.module, slots if len(slots) < len(place.target.projections) else None


def unrounded(built: Built) -> Built:
    """Return a model that is computed without rounding."""
    forward = built.forward
    return replace(built, forward=replace(forward, settings=replace(forward.settings, qat=None)))


def operands(
    equation: str, x: jax.Array, weight: jax.Array, how: FakeQuantization
) -> tuple[jax.Array, jax.Array]:
    """Return activations and weight of an einsum, both rounded."""
    x_axes, w_axes, output = letters(equation)
    summed = [axis for axis in w_axes if axis not in output]
    if how.activations == "int8":
        x = int8(x, tuple(x_axes.index(axis) for axis in summed))
    elif how.activations is not None:
        x = _in_groups(how.activations, x, x_axes.index(summed[0]), len(summed), how.group_size)
    return x, _in_groups(how.weights, weight, w_axes.index(summed[0]), len(summed), how.group_size)


def _in_groups(kind: str, x: jax.Array, first: int, count: int, size: int) -> jax.Array:
    """Round groups of neighbors along some axes, which follow each other.

    Args:
        kind: of GROUPED.
        first, count: the first of the axes, and their number.
        size: of a group.
    """
    grouped = x.reshape(*x.shape[:first], -1, size, *x.shape[first + count :])
    return GROUPED[kind](grouped, first + 1).reshape(x.shape)


def int4(weight: jax.Array, axis: int) -> jax.Array:
    """Round to codes from -8 to 7 with one scale for all entries along an axis."""
    dtype, wide = weight.dtype, weight.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=axis, keepdims=True)
    scale = jnp.maximum(held_in(dtype, divided(largest, 7.5)), jnp.finfo(dtype).tiny)
    codes = jnp.round(wide * (1.0 / scale))
    value = (jnp.clip(codes, -8, 7) * scale).astype(dtype)
    return passing(weight, value, (codes >= -8) & (codes <= 7))


def int4_asymmetric(weight: jax.Array, axis: int) -> jax.Array:
    """Round to 16 codes between the smallest and the largest entry along an axis."""
    wide = weight.astype(jnp.float32)
    low = jnp.min(wide, axis=axis, keepdims=True)
    high = jnp.max(wide, axis=axis, keepdims=True)
    scale = jnp.maximum(divided(high - low, 15), LEAST_RANGE / 15)
    codes = clamped(rounded(divided(wide - low, scale)), 0, 15)
    return ((codes - 8) * scale + (low + scale * 8)).astype(weight.dtype)


def int8(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Round to codes from -128 to 127 with one scale and one zero point for all entries along some axes."""
    dtype, wide = x.dtype, x.astype(jnp.float32)
    low = jnp.minimum(jnp.min(wide, axis=axes, keepdims=True), 0)
    high = jnp.maximum(jnp.max(wide, axis=axes, keepdims=True), 0)
    scale = jnp.maximum(held_in(dtype, divided(held_in(dtype, high - low), 255)), LEAST_SCALE)
    zero = jnp.clip(-128 - jnp.round(held_in(dtype, divided(low, scale))), -128, 127)
    codes = jnp.round(wide * (1.0 / scale)) + zero
    value = ((jnp.clip(codes, -128, 127) - zero) * scale).astype(dtype)
    return passing(x, value, (codes >= -128) & (codes <= 127))


def mxfp4(x: jax.Array, axis: int) -> jax.Array:
    """Round to numbers of 4 bits (e2m1) times one power of two for all entries along an axis: the smallest
    one with which the largest entry is at most 6. No gradient is cut off."""
    wide = x.astype(jnp.float32)
    part, exponent = jnp.frexp(divided(jnp.max(jnp.abs(wide), axis=axis, keepdims=True), 6.0))
    scale = jnp.maximum(jnp.ldexp(jnp.ones_like(part), exponent - (part == 0.5)), 2.0**-126)
    size = jnp.abs(wide / scale)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0)) * scale
    return passing(x, (jnp.round(wide / step) * step).astype(x.dtype), size >= 0)


GROUPED: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    "int4": int4,
    "int4_asymmetric": int4_asymmetric,
    "mxfp4": mxfp4,
}
"""How operands are rounded in groups: (operand, the axis of the entries of a group) -> the result."""


def held_in(dtype: Any, x: jax.Array) -> jax.Array:
    """Round float32 to the precision of a type. XLA leaves out the rounding of a cast there and back."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x, info.nexp, info.nmant)


def divided(x: jax.Array, by: Any) -> jax.Array:
    """Divide exactly: XLA multiplies by the rounded reciprocal of what it sees as a constant or as broadcast,
    and numbers halfway between two codes would get the other code."""
    return x / jnp.where(x < jnp.inf, by, 1.0).astype(x.dtype)


@jax.custom_jvp
def passing(x: jax.Array, value: jax.Array, inside: jax.Array) -> jax.Array:
    """Return the value, with the gradient of x where it is inside, and none elsewhere."""
    return value


@passing.defjvp
def _passing(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return primals[1], jnp.where(primals[2], tangents[0], 0)


@jax.custom_jvp
def rounded(x: jax.Array) -> jax.Array:
    """Round halves to even; the gradient passes through."""
    return jnp.round(x)


@rounded.defjvp
def _rounded(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return jnp.round(primals[0]), tangents[0]


def clamped(x: jax.Array, low: float, high: float) -> jax.Array:
    """Cut off what is outside of the range, without a gradient; both ends are inside."""
    return jnp.where(x < low, low, jnp.where(x > high, high, x))


def _slots(equation: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the product's axis of the projections that a weight consists of, and their number."""
    _, w_axes, output = letters(equation)
    axis = next(axis for axis in w_axes if axis in output)
    return output.index(axis), shape[w_axes.index(axis)]
