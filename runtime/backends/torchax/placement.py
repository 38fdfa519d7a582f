"""The sharding of transformers' weights over the mesh, which follows train.py's arrays of the same weights.

A recipe's sharding rules name train.py's arrays, such as [heads, features, head size]. A tensor of Hugging
Face has some of these dimensions merged, such as [heads * head size, features]. A merged dimension takes the
first mesh axis that its dimensions have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...model.families import Architecture, Family
from ...model.families.family import Parameter, Source, Spec
from ...model.partition_rules import Rule, divisible, resolved


def tensor_specs(
    family: Family, architecture: Architecture, rules: Sequence[Rule], axes: Mapping[str, int]
) -> dict[str, Spec]:
    """Return the sharding of each tensor of the text model, by its name without the checkpoint's prefix.

    Vectors (norms, biases) are replicated on every device. So is a dimension that an axis does not divide.

    Args:
        rules: the recipe's.
        axes: size of each mesh axis.
    """
    out: dict[str, Spec] = {}
    for parameter in resolved(family.parameters(architecture), rules, axes):
        for source in parameter.sources:
            spec = tensor_spec(parameter, source) if len(source.shape) > 1 else (None,) * len(source.shape)
            out[source.name] = divisible(source.shape, spec, axes)
    return out


def tensor_spec(parameter: Parameter, source: Source) -> Spec:
    """Return the sharding of one of the tensors that a parameter is made of."""
    unstacked = [axis for place, axis in enumerate(parameter.spec) if place not in parameter.stacked]
    split: list[str | None] = [None] * len(source.reshape)
    for axis, place in zip(unstacked, source.transpose, strict=True):
        split[place] = axis
    used: set[str] = set()
    out: list[str | None] = []
    for group in merged(source):
        chosen = next((split[i] for i in group if split[i] is not None and split[i] not in used), None)
        used |= {chosen} if chosen else set()
        out.append(chosen)
    return tuple(out)


def merged(source: Source) -> list[list[int]]:
    """Return, for each dimension of a tensor, the dimensions of `source.reshape` that are merged in it."""
    out, at = [], 0
    for size in source.shape:
        group, product = [], 1
        while at < len(source.reshape) and product < size:
            product *= source.reshape[at]
            group.append(at)
            at += 1
        out.append(group)
    return out


def adapter_specs(weight: Spec) -> tuple[Spec, Spec]:
    """Return the shardings of A [rank, in] and B [out, rank], from that of their weight [out, in]."""
    rows, columns = weight
    return (None, columns), (rows, None)
