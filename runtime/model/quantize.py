"""Weights in 4 or 8 bits: how frozen ones are stored, and how products use them or round them.

QLoRA: a model's linear layers and its experts are stored as Qwix's QArrays: codes and scales. nf4 is the
4-bit NormalFloat of QLoRA (Dettmers et al. 2023, appendix E), in blocks of 64 inputs that share a float32
scale. This is bitsandbytes' layout without double quantization. The blocks are those of the mesh that the run
began on: where another mesh splits one over devices, each part has its own copy of the scale. int8 and fp8
(float8_e4m3fn) have one scale for each output channel, of each expert, on any mesh. Embeddings, norms,
routers and the head keep the model's dtype.

Products use dequantized weights, or the codes themselves, with activations that are quantized on the fly. In
quantization-aware training, which stores nothing quantized, products round weights and activations instead,
with gradients as if unrounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import qwix
from flax import nnx
from flax.nnx.variablelib import MISSING
from jax.sharding import Mesh, PartitionSpec
from qwix._src.core import einsum as qwix_einsum
from qwix._src.core import numerics, qarray

from ..errors import UserError
from ..sections import FakeQuantization
from ..settings import ModelSettings
from . import sharding
from .families import Architecture, Family
from .families.family import LoraTarget, Parameter, Spec, matrices
from .partition_rules import Placement, resolved, shards

TYPES = {"nf4": jnp.uint4, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Kinds of quantization, by the type of their codes."""
BLOCK = 64
"""Inputs that share a scale in nf4, as in bitsandbytes."""
FEWEST = 8
"""The fewest entries that a float32 scale is stored for, unless a block has fewer."""


@dataclass(frozen=True)
class Layout:
    """How one weight is quantized.

    Attributes:
        kind: of TYPES.
        shape, spec: of the weight and of its codes.
        blocks: for each axis, the number of neighboring entries that share a stored scale.
        scale_spec: sharding of the scales.
        shared: for each axis, the number of entries that a scale is computed from, a multiple of `blocks`.
    """

    kind: str
    shape: tuple[int, ...]
    spec: Spec
    blocks: tuple[int, ...]
    scale_spec: Spec
    shared: tuple[int, ...]

    @property
    def scale_shape(self) -> tuple[int, ...]:
        return tuple(size // block for size, block in zip(self.shape, self.blocks, strict=True))

    def abstract(self) -> qwix.QArray:
        """Return the codes' and the scales' shapes."""
        dtype = TYPES[self.kind]
        return qwix.QArray(
            jax.ShapeDtypeStruct(self.shape, dtype),
            jax.ShapeDtypeStruct(self.scale_shape, jnp.float32),
            qtype=self.kind if self.kind == "nf4" else jnp.dtype(dtype),
        )


def layouts(
    family: Family,
    architecture: Architecture,
    parameters: tuple[Parameter, ...],
    kind: str,
    axes: Mapping[str, int],
    began: Placement | None = None,
) -> dict[str, Layout]:
    """Return the layout of each weight that is quantized, by its path.

    Args:
        parameters: with their final shardings.
        kind: of TYPES.
        axes: size of each mesh axis.
        began: the mesh whose blocks the run has, None for this one.

    Raises:
        UserError: when this mesh splits the run's blocks into pieces of fewer than FEWEST entries.
    """
    by_path = {parameter.path: parameter for parameter in parameters}
    here = {
        path: layout(by_path[path].shape, by_path[path].spec, contract, kind, axes)
        for path, contract in matrices(family, architecture, parameters).items()
    }
    if began is None or kind != "nf4":
        return here
    first = resolved(family.parameters(architecture), began.rules, began.axes)
    at_start = layouts(family, architecture, first, kind, began.axes)
    return {path: _kept(path, how, at_start[path].blocks, axes) for path, how in here.items()}


def _kept(path: str, how: Layout, shared: tuple[int, ...], axes: Mapping[str, int]) -> Layout:
    """Return a layout with the blocks of the run's start, in parts that this mesh does not split."""
    split = [size // shards(axis, axes) for size, axis in zip(how.shape, how.spec, strict=True)]
    blocks = tuple(math.gcd(block, size) for block, size in zip(shared, split, strict=True))
    if math.prod(blocks) < min(FEWEST, math.prod(shared)):
        raise UserError(
            f"nf4: the run began with blocks of {math.prod(shared)} entries in {path}, and this mesh splits "
            f"them into pieces of {math.prod(blocks)}: their scales would take more memory than 4 bits save",
            "continue on the mesh that the run began on, or on one with fewer devices along fsdp or tp",
        )
    return Layout(how.kind, how.shape, how.spec, blocks, _scale_spec(how.shape, how.spec, blocks), shared)


def _scale_spec(shape: tuple[int, ...], spec: Spec, blocks: tuple[int, ...]) -> Spec:
    """Return the sharding of the scales: one scale for all devices is not split."""
    return tuple(None if blocks[i] == shape[i] else name for i, name in enumerate(spec))


def layout(
    shape: tuple[int, ...], spec: Spec, contract: tuple[int, ...], kind: str, axes: Mapping[str, int]
) -> Layout:
    """Return how a weight is quantized by a run that begins on this mesh.

    nf4's blocks lie along the contracted axes, where neighbors are neighboring inputs of one output. They lie
    along the last axis. If that axis fits in a block (heads of 16 or 32), they extend over the axis before
    it. A block is the largest divisor of a device's part of the axis that is at most 64, so that no block is
    split over devices; it is the whole part if there is no divisor of at least 8.

    Args:
        spec: its sharding, in which each axis divides its dimension.
        contract: the axes that are summed with the input.
    """
    blocks = [1] * len(shape)
    if kind != "nf4":
        for axis in contract:
            blocks[axis] = shape[axis]
    else:
        room = BLOCK
        for axis in reversed(contract):
            local = shape[axis] // shards(spec[axis], axes)
            least, otherwise = (8, local) if axis == contract[-1] else (1, 1)
            blocks[axis] = max((n for n in range(least, room + 1) if local % n == 0), default=otherwise)
            if blocks[axis] < shape[axis]:
                break
            room //= blocks[axis]
    sizes = tuple(blocks)
    return Layout(kind, shape, spec, sizes, _scale_spec(shape, spec, sizes), sizes)


class QuantizedParam(nnx.Param[Any]):
    """A frozen weight held as a QArray; reading it dequantizes it to the metadata's `dtype`."""

    def get_value(self, *, index: Any = MISSING) -> Any:
        value = dequantize(self.get_raw_value(), self.get_metadata()["dtype"])
        return value if index is MISSING or index is ... else value[index]


def attach_quantized(model: nnx.Module, weights: Mapping[str, Layout], dtype: Any) -> None:
    """Replace an abstract model's parameters with quantized ones.

    Args:
        model: with shapes instead of values.
        weights: by path.
        dtype: of the products.
    """
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_modules(model)}
    for path, how in weights.items():
        module, _, name = path.rpartition(".")
        parameter = QuantizedParam(how.abstract(), out_sharding=how.spec, dtype=jnp.dtype(dtype))
        setattr(modules[module], name, parameter)


def quantize(weight: jax.Array, how: Layout, mesh: Mesh) -> qwix.QArray:
    """Return a weight's codes and scales, sharded like the weight, and free the weight's memory."""
    out = _quantizer(how, mesh)(weight)
    weight.delete()
    return out


@functools.cache
def _quantizer(how: Layout, mesh: Mesh) -> Any:
    """Compile the function that quantizes weights of one layout."""
    if how.kind == "nf4":
        return _blockwise(how, mesh)
    channels = tuple(i for i, block in enumerate(how.blocks) if block == 1)
    qtype = how.abstract().qtype

    def codes(weight: jax.Array) -> qwix.QArray:
        out = coded(weight, qtype, channels)
        return out.replace(
            qvalue=jax.lax.with_sharding_constraint(out.qvalue, sharding.named(mesh, how.spec)),
            scale=jax.lax.with_sharding_constraint(out.scale, sharding.named(mesh, how.scale_spec)),
        )

    return jax.jit(codes)


def coded(x: jax.Array, qtype: Any, channels: Sequence[int]) -> qwix.QArray:
    """Return the codes of an array, with one scale for each index of some axes."""
    return qwix.quantize(x.astype(jnp.float32), qtype, channelwise_axes=channels)


def _blockwise(how: Layout, mesh: Mesh) -> Any:
    """Compile the function that quantizes in blocks, by the steps of qwix.quantize.

    Codes are computed per device, because Qwix flattens them to look them up. Only the largest entries of
    blocks, which are few, are combined across devices.
    """
    spec = PartitionSpec(*how.spec)  # of the scales too: an axis with one scale has one device
    parts = tuple(shared // block for shared, block in zip(how.shared, how.blocks, strict=True))

    def largest(weight: jax.Array) -> jax.Array:
        return _largest(jnp.abs(weight.astype(jnp.float32)), how.blocks)

    def codes(weight: jax.Array, scale: jax.Array) -> qwix.QArray:
        return qarray.quantize_with_scale_zero_point(weight.astype(jnp.float32), how.kind, scale, None)

    reduced = jax.shard_map(largest, mesh=mesh, in_specs=spec, out_specs=spec)
    rounded = jax.shard_map(codes, mesh=mesh, in_specs=(spec, spec), out_specs=spec)

    def quantized(weight: jax.Array) -> qwix.QArray:
        whole = {"absmax": _largest(reduced(weight), parts)}
        scale, _ = qarray.compute_scale_zero_point(whole, how.kind)
        for axis, count in enumerate(parts):
            scale = jnp.repeat(scale, count, axis)
        return rounded(weight, scale)

    return jax.jit(quantized)


def _largest(values: jax.Array, blocks: tuple[int, ...]) -> jax.Array:
    """Return the largest value of each block."""
    pairs = zip(values.shape, blocks, strict=True)
    split = [part for size, block in pairs for part in (size // block, block)]
    return values.reshape(split).max(axis=tuple(range(1, len(split), 2)))


def dequantize(weight: qwix.QArray, dtype: Any) -> jax.Array:
    """Return the weight that codes and scales represent, computed in float32 and cast once.

    The result equals qwix.dequantize's bit for bit. For nf4 Qwix looks each code up by a gather, which a TPU
    does slowly, and flattens the codes, which gathers a sharded weight on every device. Here each code picks
    among the table's entries. The barrier keeps the codes in their blocks: XLA otherwise writes the scales to
    memory for each entry of the weight, in float32, and chooses again for each tile of the product.
    """
    if weight.qtype != "nf4":
        return qwix.dequantize(weight).astype(dtype)
    split: list[int] = []
    spread: list[int] = []
    for size, scales in zip(weight.shape, weight.scale.shape, strict=True):
        split += [size] if scales in (1, size) else [scales, size // scales]
        spread += [scales] if scales in (1, size) else [scales, 1]
    codes = jax.lax.optimization_barrier(weight.qvalue.reshape(split)).astype(jnp.int32)
    table = numerics.get_nf4_buckets()
    values = jnp.full(codes.shape, table[0], weight.scale.dtype)
    for code in range(1, 16):
        values = jnp.where(codes == code, table[code], values)
    return (values * weight.scale.reshape(spread)).astype(dtype).reshape(weight.shape)


Multiply = Callable[[jax.Array, jax.Array], jax.Array]
"""(activations, weight) -> the product as the model writes it."""

Product = Callable[[Multiply, str, jax.Array, jax.Array, Any], jax.Array]
"""(computes the einsum, its equation, activations, weight, the weight's module) -> the product."""


def product_of(settings: ModelSettings) -> Product:
    """Return the function that computes products with weights as the base stores them."""
    if settings.quantized_matmul is not None:
        return product_of_codes(settings.quantized_matmul == "both")
    return plain_product if settings.quantization is None else dequantized_product


def letters(equation: str) -> tuple[str, str, str]:
    """Return the axes of both operands of an einsum, and of its result."""
    inputs, output = equation.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    return x_axes, w_axes, output


def plain_product(
    compute: Multiply, equation: str, x: jax.Array, weight: jax.Array, module: Any
) -> jax.Array:
    """Multiply by a module's weight as it is."""
    return compute(x, weight)


def quantized_weight(module: Any, weight: jax.Array) -> qwix.QArray | None:
    """Return the QArray that a module's weight was dequantized from, None if it was not.

    Args:
        weight: the operand of the product that the module computes.
    """
    for value in vars(module).values() if module is not None else ():
        if isinstance(value, QuantizedParam) and value.get_raw_value().shape == weight.shape:
            return value.get_raw_value()
    return None


def dequantized_product(
    compute: Multiply, equation: str, x: jax.Array, weight: jax.Array, module: Any
) -> jax.Array:
    """Multiply by a module's weight, from codes and scales if it is stored quantized."""
    stored = quantized_weight(module, weight)
    return compute(x, weight) if stored is None else dequantized(compute, x, stored, weight.dtype)


def dequantized(compute: Multiply, x: jax.Array, stored: qwix.QArray, dtype: Any) -> jax.Array:
    """Multiply by a weight that is dequantized for the product, and again for the backward pass. As a
    residual it would be kept in the model's dtype from the forward pass on."""
    return jax.checkpoint(lambda x, stored: compute(x, dequantize(stored, dtype)))(x, stored)


def product_of_codes(both: bool) -> Product:
    """Return the function that multiplies quantized activations by the codes of a module's weight.

    Each row of activations gets a scale: its largest magnitude divided by the type's largest number. Each
    output of the weight already has a scale. Qwix's einsum multiplies the codes, exactly in int32, or for fp8
    with sums in float32. The product is then multiplied by both scales. Qwix's own training (dot_general_qt)
    quantizes weights in each pass and keeps them for the backward pass, so there is a backward pass here: the
    gradient of the output is multiplied by the weight's scales, and is then either rounded by row like
    activations, or multiplies the codes in its own type.

    Args:
        both: whether the gradient of the activations is computed in eight bits too.
    """

    def product(compute: Multiply, equation: str, x: jax.Array, weight: jax.Array, module: Any) -> jax.Array:
        stored = quantized_weight(module, weight)
        if stored is None:
            return compute(x, weight)
        return multiply_codes(equation, both, x, stored.qvalue, stored.scale)

    return product


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_codes(equation: str, both: bool, x: jax.Array, codes: jax.Array, scale: jax.Array) -> jax.Array:
    """Multiply activations by a weight's codes in an einsum; the result has the activations' type.

    Args:
        scale: float32, broadcastable to the codes: 1 along the axes that are summed over.
    """
    x_axes, w_axes, _ = letters(equation)
    rows = _rows(x, x_axes, w_axes, codes.dtype)
    return qwix_einsum.einsum(equation, rows, qwix.QArray(codes, scale)).astype(x.dtype)


def _codes_forward(
    equation: str, both: bool, x: jax.Array, codes: jax.Array, scale: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return multiply_codes(equation, both, x, codes, scale), (codes, scale)


def _codes_backward(
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
        out = qwix_einsum.einsum(back, rows, qwix.QArray(codes, ones)).astype(dtype)
    else:
        out = jnp.einsum(back, scaled.astype(dtype), codes.astype(dtype))
    none = np.zeros(codes.shape, jax.dtypes.float0) if codes.dtype == jnp.int8 else jnp.zeros_like(codes)
    return out, none, jnp.zeros_like(scale)


multiply_codes.defvjp(_codes_forward, _codes_backward)


def _rows(x: jax.Array, axes: str, others: str, dtype: Any) -> qwix.QArray:
    """Quantize activations, or gradients, with one scale over all axes that are summed over."""
    kept = [number for number, axis in enumerate(axes) if axis not in others]
    return coded(x, dtype, kept)


def _along(scale: jax.Array, w_axes: str, x_axes: str, output: str) -> jax.Array:
    """Return the scales of a weight's outputs, broadcast along the result of the product."""
    outputs = [axis for axis in output if axis in w_axes and axis not in x_axes]
    size = {axis: scale.shape[w_axes.index(axis)] for axis in outputs}
    ordered = jnp.transpose(scale, [*map(w_axes.index, outputs), *_summed(w_axes, outputs)])
    return ordered.reshape([size.get(axis, 1) for axis in output])


def _summed(w_axes: str, outputs: list[str]) -> list[int]:
    return [number for number, axis in enumerate(w_axes) if axis not in outputs]


_rounding: ContextVar[FakeQuantization | None] = ContextVar("rounding", default=None)


@contextmanager
def rounding(how: FakeQuantization | None) -> Iterator[None]:
    """Round the operands of products that are traced in this context; None for not at all."""
    token = _rounding.set(how)
    try:
        yield
    finally:
        _rounding.reset(token)


LEAST_SCALE = 2.0**-23
"""The smallest scale of activations."""
LEAST_RANGE = 1e-6
"""The smallest distance between the ends of an asymmetric group."""


def rounded_product(sites: Iterable[LoraTarget]) -> Product:
    """Return the function that rounds the operands of products in quantization-aware training.

    The numbers are those of torchao's fake quantizers, whose models are quantized after training. Weights are
    in groups of neighboring inputs of one output, activations have a scale for each token. Scales and zero
    points are computed in the operand's own type, and applied in float32.

    Qwix's fake quantization has other numbers: it divides by the scale instead of multiplying by its
    reciprocal, adds the zero point before it rounds, and passes gradients through codes that are cut off.

    Args:
        sites: the weights whose products are rounded.
    """
    modules = {site.weight.rpartition(".")[0] for site in sites}

    def product(compute: Multiply, equation: str, x: jax.Array, weight: jax.Array, module: Any) -> jax.Array:
        path = ".".join(map(str, getattr(module, "qwix_path", ())))
        how = _rounding.get()
        if how is None or path not in modules:
            return compute(x, weight)

        # The rounded weight is computed again for the backward pass, instead of being kept.
        @jax.checkpoint
        def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
            return compute(*rounded_operands(equation, x, weight, how))

        return multiply(x, weight)

    return product


def rounded_operands(
    equation: str, x: jax.Array, weight: jax.Array, how: FakeQuantization
) -> tuple[jax.Array, jax.Array]:
    """Return activations and weight of an einsum, both rounded."""
    x_axes, w_axes, output = letters(equation)
    summed = [axis for axis in w_axes if axis not in output]
    if how.activations == "int8":
        x = fake_int8(x, tuple(x_axes.index(axis) for axis in summed))
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


def fake_int4(weight: jax.Array, axis: int) -> jax.Array:
    """Round to codes from -8 to 7 with one scale for all entries along an axis: the largest magnitude / 7.5.

    As in torchao's Int8DynActInt4WeightQATQuantizer, codes that are cut off get no gradient.
    """
    largest = jnp.max(jnp.abs(weight.astype(jnp.float32)), axis=axis, keepdims=True)
    scale = jnp.maximum(held_in(weight.dtype, divided(largest, 7.5)), jnp.finfo(weight.dtype).tiny)
    return at_codes(weight, scale, 0, (-8, 7))


def fake_int4_asymmetric(weight: jax.Array, axis: int) -> jax.Array:
    """Round to 16 codes between the smallest and the largest entry along an axis, without a code for zero.

    As in torchao's Int4WeightFakeQuantizer, gradients pass through the scale and the smallest entry.
    """
    wide = weight.astype(jnp.float32)
    low = jnp.min(wide, axis=axis, keepdims=True)
    high = jnp.max(wide, axis=axis, keepdims=True)
    scale = jnp.maximum(divided(high - low, 15), LEAST_RANGE / 15)
    codes = clamped(rounded(divided(wide - low, scale)), 0, 15)
    return ((codes - 8) * scale + (low + scale * 8)).astype(weight.dtype)


def fake_int8(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Round to codes from -128 to 127, from the smallest to the largest number along some axes, with zero
    among the codes."""
    dtype, wide = x.dtype, x.astype(jnp.float32)
    low = jnp.minimum(jnp.min(wide, axis=axes, keepdims=True), 0)
    high = jnp.maximum(jnp.max(wide, axis=axes, keepdims=True), 0)
    scale = jnp.maximum(held_in(dtype, divided(held_in(dtype, high - low), 255)), LEAST_SCALE)
    zero = jnp.clip(-128 - jnp.round(held_in(dtype, divided(low, scale))), -128, 127)
    return at_codes(x, scale, zero, (-128, 127))


def at_codes(x: jax.Array, scale: jax.Array, zero: jax.Array | int, ends: tuple[int, int]) -> jax.Array:
    """Round to codes times a scale. Codes outside of the ends are cut off and get no gradient.

    Args:
        zero: the code of 0.
        ends: the smallest and the largest code.
    """
    codes = jnp.round(x.astype(jnp.float32) * (1.0 / scale)) + zero
    value = ((jnp.clip(codes, *ends) - zero) * scale).astype(x.dtype)
    return passing(x, value, (codes >= ends[0]) & (codes <= ends[1]))


def fake_mxfp4(x: jax.Array, axis: int) -> jax.Array:
    """Round to numbers of 4 bits (e2m1) times one power of two for all entries along an axis: the smallest
    one with which the largest entry is at most 6.

    This is the MX format of torchao's MXFakeQuantizedLinear. No gradient is cut off.
    """
    wide = x.astype(jnp.float32)
    part, exponent = jnp.frexp(divided(jnp.max(jnp.abs(wide), axis=axis, keepdims=True), 6.0))
    scale = jnp.maximum(jnp.ldexp(jnp.ones_like(part), exponent - (part == 0.5)), 2.0**-126)
    size = jnp.abs(wide / scale)
    step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0)) * scale
    return passing(x, (jnp.round(wide / step) * step).astype(x.dtype), size >= 0)


GROUPED: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    "int4": fake_int4,
    "int4_asymmetric": fake_int4_asymmetric,
    "mxfp4": fake_mxfp4,
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
