"""QLoRA of transformers' model: the frozen weights of projections are stored as codes and scales.

They are those of train.py's arrays (model/quantize.py): the same numbers in other shapes, because a tensor
[out, in] of Hugging Face has some of train.py's dimensions merged.
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
from ...model.families.family import Source
from ...model.partition_rules import Placement, Rule, resolved
from ...model.quantize import Layout, dequantize, layouts
from .placement import merged, tensor_specs

CODES, SCALES = "codes", "scales"
"""The buffers of a quantized projection, which replace its weight."""


def tensor_layouts(
    family: Family,
    architecture: Architecture,
    rules: Sequence[Rule],
    kind: str,
    axes: Mapping[str, int],
    began: Placement | None = None,
) -> dict[str, Layout]:
    """Return the layout of each quantized tensor, by its name without the checkpoint's prefix.

    Args:
        rules: the recipe's sharding rules.
        kind: "nf4" or "int8".
        axes: size of each mesh axis.
        began: the mesh whose blocks the run has, None for this one.
    """
    parameters = resolved(family.parameters(architecture), rules, axes)
    specs = tensor_specs(family, architecture, rules, axes)
    arrays = layouts(family, architecture, parameters, kind, axes, began)
    out = {}
    for parameter in parameters:
        if parameter.path not in arrays:
            continue
        how = arrays[parameter.path]
        own_blocks, whole_blocks = (
            [n for axis, n in enumerate(sizes) if axis not in parameter.stacked]
            for sizes in (how.blocks, how.shared)
        )
        for source in parameter.sources:
            spec = specs[source.name]
            blocks, shared = _blocks(own_blocks, source), _blocks(whole_blocks, source)
            whole = (b == n for b, n in zip(blocks, source.shape, strict=True))
            scale_spec = tuple(
                None if undivided else axis for undivided, axis in zip(whole, spec, strict=True)
            )
            out[source.name] = Layout(kind, source.shape, spec, blocks, scale_spec, shared)
    return out


def _blocks(blocks: Sequence[int], source: Source) -> tuple[int, ...]:
    """Return the block sizes of a tensor, from those of the array that it becomes."""
    split = [1] * len(source.reshape)
    for block, place in zip(blocks, source.transpose, strict=True):
        split[place] = block
    return tuple(math.prod(split[i] for i in group) for group in merged(source))


def shapes(how: Layout, mesh: Mesh) -> qwix.QArray:
    """Return a tensor's codes and scales as jax.ShapeDtypeStruct, with shardings."""
    stored = how.abstract()

    def placed(leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding.named(mesh, spec))

    return replace(stored, qvalue=placed(stored.qvalue, how.spec), scale=placed(stored.scale, how.scale_spec))


class QuantizedLinear(torch.nn.Module):
    """A linear layer whose weight is stored as codes and scales.

    The weight is dequantized where it is used, and again in the backward pass. As a residual, the dequantized
    weight would take up memory from the forward pass on.

    Args:
        linear: on the device meta; its bias is kept.
        stored: shapes of the weight's codes and scales.
        dtype: that the weight is dequantized to.
    """

    def __init__(self, linear: torch.nn.Linear, stored: qwix.QArray, dtype: Any) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._qtype, self._dtype = stored.qtype, dtype
        # 8-bit placeholders for nf4's 4-bit codes: torch has no 4-bit type, and these values are never read.
        self.register_buffer(CODES, torch.empty(stored.shape, dtype=torch.int8, device="meta"))
        self.register_buffer(SCALES, torch.empty(stored.scale.shape, device="meta"))
        self.bias = linear.bias

    def forward(self, inputs: Any) -> Any:
        env = torchax.default_env()

        def product(inputs: jax.Array, stored: qwix.QArray) -> jax.Array:
            weight = env.j2t_iso(dequantize(stored, self._dtype))
            return env.t2j_iso(torch.nn.functional.linear(env.j2t_iso(inputs), weight))

        states, codes, scales = env.t2j_iso(
            env.v2t_iso((inputs, getattr(self, CODES), getattr(self, SCALES)))
        )
        stored = qwix.QArray(codes, scales, qtype=self._qtype)
        out = env.j2t_iso(jax.checkpoint(product)(states, stored))
        return out if self.bias is None else out + self.bias


def replace_linears(module: torch.nn.Module, stored: Mapping[str, qwix.QArray], dtype: Any) -> None:
    """Replace some of a model's linear layers by QuantizedLinears.

    Args:
        stored: shapes of their weights' codes and scales, by the weights' names in the module.
        dtype: of the products.
    """
    for name, array in stored.items():
        path, _, _ = name.rpartition(".")
        parent, _, attribute = path.rpartition(".")
        linear: Any = module.get_submodule(path)
        setattr(module.get_submodule(parent), attribute, QuantizedLinear(linear, array, dtype))


def spread(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by their names in the module, from arrays and quantized weights by the weights' names."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, qwix.QArray):
            path, _, _ = name.rpartition(".")
            out |= {f"{path}.{CODES}": value.qvalue, f"{path}.{SCALES}": value.scale}
        else:
            out[name] = value
    return out
