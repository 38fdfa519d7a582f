"""QLoRA: frozen weights are stored in 4 or 8 bits; products are computed in the model's dtype.

A model's linear layers and its experts are stored as Qwix's QArrays: codes and scales. nf4 is the 4-bit
NormalFloat of QLoRA (Dettmers et al. 2023, appendix E), in blocks of 64 inputs that share a float32 scale.
This is bitsandbytes' layout without double quantization. int8 and fp8 (float8_e4m3fn) have one scale for each
output channel, of each expert. Products use dequantized weights, or the codes themselves (eight_bits.py).
Embeddings, norms, routers and the head keep the model's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import qwix
from flax import nnx
from flax.nnx.variablelib import MISSING
from jax.sharding import Mesh, PartitionSpec
from qwix._src.core import numerics

from . import sharding
from .families import Architecture, Family
from .families.base import Parameter, Spec
from .matrices import matrices
from .partition_rules import shards

TYPES = {"nf4": jnp.uint4, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
"""Kinds of quantization, by the type of their codes."""
BLOCK = 64
"""Inputs that share a scale in nf4, as in bitsandbytes."""


@dataclass(frozen=True)
class Layout:
    """How one weight is quantized.

    Attributes:
        kind: of TYPES.
        shape, spec: of the weight and of its codes.
        blocks: for each axis, the number of neighboring entries that share a scale.
        scale_spec: sharding of the scales.
    """

    kind: str
    shape: tuple[int, ...]
    spec: Spec
    blocks: tuple[int, ...]
    scale_spec: Spec

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
) -> dict[str, Layout]:
    """Return the layout of each weight that is quantized, by its path.

    Args:
        parameters: with their final shardings.
        kind: of TYPES.
        axes: size of each mesh axis.
    """
    by_path = {parameter.path: parameter for parameter in parameters}
    return {
        path: layout(by_path[path].shape, by_path[path].spec, contract, kind, axes)
        for path, contract in matrices(family, architecture, parameters).items()
    }


def layout(
    shape: tuple[int, ...], spec: Spec, contract: tuple[int, ...], kind: str, axes: Mapping[str, int]
) -> Layout:
    """Return how a weight is quantized.

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
    scale_spec = tuple(
        None if blocks[i] == shape[i] else name for i, name in enumerate(spec)
    )  # one scale for all devices is not split
    return Layout(kind, shape, spec, tuple(blocks), scale_spec)


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
    channels = tuple(i for i, block in enumerate(how.blocks) if block == 1)
    # An axis whose entries share one scale is neither a channel nor tiled.
    tiles = {i: b for i, b in enumerate(how.blocks) if 1 < b < how.shape[i]}
    qtype = how.abstract().qtype

    def codes(weight: jax.Array) -> qwix.QArray:
        tiled = {i: b for i, b in tiles.items() if b < weight.shape[i]}
        return qwix.quantize(weight.astype(jnp.float32), qtype, channelwise_axes=channels, tiled_axes=tiled)

    if how.kind == "nf4":
        # Per device: a block lies on one device, and Qwix flattens the codes that it looks up.
        spec = PartitionSpec(*how.spec)
        return jax.jit(jax.shard_map(codes, mesh=mesh, in_specs=spec, out_specs=spec))

    def sharded(weight: jax.Array) -> qwix.QArray:
        out = codes(weight)
        return out.replace(
            qvalue=jax.lax.with_sharding_constraint(out.qvalue, sharding.named(mesh, how.spec)),
            scale=jax.lax.with_sharding_constraint(out.scale, sharding.named(mesh, how.scale_spec)),
        )

    return jax.jit(sharded)
