"""QLoRA: frozen weights are stored in 4 or 8 bits; products are computed in the model's dtype.

A model's linear layers and its experts are stored as Qwix's QArrays: codes and scales. nf4 is the 4-bit
NormalFloat of QLoRA (Dettmers et al. 2023, appendix E), in blocks of 64 inputs that share a float32 scale.
This is bitsandbytes' layout without double quantization. The blocks are those of the mesh that the run began
on: where another mesh splits one over devices, each part has its own copy of the scale. int8 and fp8
(float8_e4m3fn) have one scale for each output channel, of each expert, on any mesh. Products use dequantized
weights, or the codes themselves (eight_bits.py). Embeddings, norms, routers and the head keep the model's
dtype.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from flax.nnx.variablelib import MISSING
from jax.sharding import Mesh, PartitionSpec
from qwix._src.core import numerics, qarray

from ..errors import UserError
from . import sharding
from .families import Architecture, Family
from .families.base import Parameter, Spec
from .matrices import matrices
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
    found = {
        path: layout(by_path[path].shape, by_path[path].spec, contract, kind, axes)
        for path, contract in matrices(family, architecture, parameters).items()
    }
    if began is None or kind != "nf4":
        return found
    first = resolved(family.parameters(architecture), began.rules, began.axes)
    own = layouts(family, architecture, first, kind, began.axes)
    return {path: _kept(path, how, own[path].blocks, axes) for path, how in found.items()}


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
    made = tuple(blocks)
    return Layout(kind, shape, spec, made, _scale_spec(shape, spec, made), made)


class QuantizedParam(nnx.Param[Any]):
    """A frozen weight held as a QArray; reading it dequantizes it to the metadata's `dtype`."""

    def get_value(self, *, index: Any = MISSING) -> Any:
        value = dequantize(self.get_raw_value(), self.get_metadata()["dtype"])
        return value if index is MISSING or index is ... else value[index]


def attach(model: nnx.Module, weights: Mapping[str, Layout], dtype: Any) -> None:
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


def quantized_weight(module: Any, weight: jax.Array) -> qwix.QArray | None:
    """Return the QArray that a module's weight was dequantized from, None if it was not.

    Args:
        weight: the operand of the product that the module computes.
    """
    for value in vars(module).values() if module is not None else ():
        if isinstance(value, QuantizedParam) and value.get_raw_value().shape == weight.shape:
            return value.get_raw_value()
    return None


def product(
    compute: Callable[[jax.Array, jax.Array], jax.Array],
    equation: str,
    x: jax.Array,
    weight: jax.Array,
    module: Any,
) -> jax.Array:
    """Multiply by a module's weight, from codes and scales if it is stored quantized."""
    stored = quantized_weight(module, weight)
    return compute(x, weight) if stored is None else dequantized(compute, x, stored, weight.dtype)


def dequantized(
    compute: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, stored: qwix.QArray, dtype: Any
) -> jax.Array:
    """Multiply by a weight that is dequantized for the product, and again for the backward pass. As a
    residual it would be kept in the model's dtype from the forward pass on."""
    return jax.checkpoint(lambda x, stored: compute(x, dequantize(stored, dtype)))(x, stored)


@functools.cache
def _quantizer(how: Layout, mesh: Mesh) -> Any:
    """Compile the function that quantizes weights of one layout."""
    if how.kind == "nf4":
        return _blockwise(how, mesh)
    channels = tuple(i for i, block in enumerate(how.blocks) if block == 1)
    qtype = how.abstract().qtype

    def codes(weight: jax.Array) -> qwix.QArray:
        out = qwix.quantize(weight.astype(jnp.float32), qtype, channelwise_axes=channels)
        return out.replace(
            qvalue=jax.lax.with_sharding_constraint(out.qvalue, sharding.named(mesh, how.spec)),
            scale=jax.lax.with_sharding_constraint(out.scale, sharding.named(mesh, how.scale_spec)),
        )

    return jax.jit(codes)


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
