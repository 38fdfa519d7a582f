"""QLoRA of transformers' model: projections whose frozen weights are codes and scales.

They are those of train.py's arrays (model/quantize.py), which hold the same numbers in other shapes: a tensor
[out, in] of Hugging Face has Tunix's dimensions merged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import qwix
import torch
import torchax
from jax.sharding import Mesh

from ...model import sharding
from ...model.families import Architecture, Family
from ...model.families.base import Source
from ...model.partition_rules import Rule, resolve_specs
from ...model.quantize import Layout, dequantize, layouts
from .placement import merged, tensor_specs

CODES, SCALES = "codes", "scales"
"""A quantized projection's buffers, in the place of its weight."""


def tensor_layouts(
    family: Family, architecture: Architecture, rules: Sequence[Rule], kind: str, axes: Mapping[str, int]
) -> dict[str, Layout]:
    """The layout of each tensor that is quantized, by its name without the checkpoint's prefix.

    Args:
        rules: the recipe's sharding rules.
        kind: "nf4" or "int8".
        axes: size of each mesh axis.

    Raises:
        ValueError: when a rule has another number of dimensions than the array that it names.
    """
    parameters = resolve_specs(family.parameters(architecture), rules, axes, "replicate")
    specs = tensor_specs(family, architecture, rules, axes)
    arrays = layouts(family, architecture, parameters, kind, axes)
    out = {}
    for parameter in parameters:
        if parameter.path not in arrays:
            continue
        own = [n for axis, n in enumerate(arrays[parameter.path].blocks) if axis not in parameter.stacked]
        for source in parameter.sources:
            spec = specs[source.name]
            blocks = _blocks(own, source)
            whole = (b == n for b, n in zip(blocks, source.shape, strict=True))
            scale_spec = tuple(None if one else axis for one, axis in zip(whole, spec, strict=True))
            out[source.name] = Layout(kind, source.shape, spec, blocks, scale_spec)
    return out


def _blocks(blocks: Sequence[int], source: Source) -> tuple[int, ...]:
    """The blocks of a tensor, from those of the array that it becomes."""
    split = [1] * len(source.reshape)
    for block, place in zip(blocks, source.transpose, strict=True):
        split[place] = block
    return tuple(math.prod(split[i] for i in group) for group in merged(source))


def shapes(how: Layout, mesh: Mesh) -> qwix.QArray:
    """A tensor's codes and scales as jax.ShapeDtypeStruct, with their shardings."""
    stored = how.abstract()

    def placed(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.named(mesh, spec))

    return replace(stored, qvalue=placed(stored.qvalue, how.spec), scale=placed(stored.scale, how.scale_spec))


class QuantizedLinear(torch.nn.Module):
    """A linear layer that is computed with what its codes and scales stand for.

    The weight is dequantized where it is used, and again in the backward pass: as a residual, it would be
    kept from the forward pass on, in the model's dtype.

    Args:
        linear: on the device meta; its bias is taken over.
        stored: the shapes of its weight's codes and scales.
        dtype: that the weight is dequantized to.
    """

    def __init__(self, linear: torch.nn.Linear, stored: qwix.QArray, dtype: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._qtype, self._dtype = stored.qtype, dtype
        # Eight bits for the four of nf4's codes: torch has no type of so few, and these are never read.
        self.register_buffer(CODES, torch.empty(stored.shape, dtype=torch.int8, device="meta"))
        self.register_buffer(SCALES, torch.empty(stored.scale.shape, device="meta"))
        self.bias = linear.bias

    def forward(self, inputs: Any) -> Any:
        env = torchax.default_env()

        def product(inputs: jax.Array, stored: qwix.QArray) -> jax.Array:
            weight = env.j2t_iso(dequantize(stored, self._dtype))
            return env.t2j_iso(torch.nn.functional.linear(env.j2t_iso(inputs), weight))

        found, codes, scales = env.t2j_iso(env.v2t_iso((inputs, getattr(self, CODES), getattr(self, SCALES))))
        stored = qwix.QArray(codes, scales, qtype=self._qtype)
        out = env.j2t_iso(jax.checkpoint(product)(found, stored))
        return out if self.bias is None else out + self.bias


def replace_linears(module: torch.nn.Module, stored: Mapping[str, qwix.QArray], dtype: Any) -> None:
    """Puts QuantizedLinears into a model in the place of some of its linear layers.

    Args:
        stored: the shapes of their weights' codes and scales, by the weights' names in the module.
        dtype: that products are computed in.
    """
    for name, array in stored.items():
        path, _, _ = name.rpartition(".")
        parent, _, own = path.rpartition(".")
        linear: Any = module.get_submodule(path)
        setattr(module.get_submodule(parent), own, QuantizedLinear(linear, array, dtype))


def spread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays by their names in the module, from arrays and quantized weights by the weights' names."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, qwix.QArray):
            path, _, _ = name.rpartition(".")
            out |= {f"{path}.{CODES}": value.qvalue, f"{path}.{SCALES}": value.scale}
        else:
            out[name] = value
    return out
