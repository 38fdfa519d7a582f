"""Which mesh axis each dimension of each parameter is split over. These are pure functions: the compiler and
the runtime decide with the same code."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .families.family import EXPERTS, Parameter, Spec

Rule = tuple[str, Spec]
"""A regular expression over a whole parameter path, and the sharding of what it matches."""


@dataclass(frozen=True)
class Placement:
    """What decides how parameters are split over devices.

    Attributes:
        axes: size of each mesh axis.
        rules: the recipe's sharding rules.
    """

    axes: Mapping[str, int]
    rules: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, recorded: Mapping[str, Any]) -> Placement:
        """Read it from a run's record: the axes, and rules of `match` and `spec`."""
        rules = ((rule["match"], tuple(rule["spec"])) for rule in recorded["rules"])
        return cls(dict(recorded["axes"]), tuple(rules))


def apply_rules(
    parameters: Sequence[Parameter], rules: Sequence[Rule], axes: Mapping[str, int]
) -> tuple[Parameter, ...]:
    """Give each parameter the sharding of the first rule that matches its whole path, or else its default.

    Args:
        parameters: with the family's default shardings.
        axes: size of each mesh axis.
    """
    compiled = [(re.compile(pattern), tuple(spec)) for pattern, spec in rules]
    out = []
    for parameter in parameters:
        ruled = (spec for pattern, spec in compiled if pattern.fullmatch(parameter.path))
        spec = next(ruled, _whole_experts(parameter, axes))
        out.append(parameter if spec == parameter.spec else replace(parameter, spec=spec))
    return tuple(out)


def _whole_experts(parameter: Parameter, axes: Mapping[str, int]) -> Spec:
    """Return a parameter's default sharding. Where ep does not split a layer's experts, fsdp does.

    A device then holds whole experts. If fsdp splits the inputs of every expert instead, each array that
    was gathered is copied into another layout: 0.35 GiB a layer more for Gemma 4 26B-A4B on fsdp 4, and a
    step that takes 8 % longer (estimates of `recipe plan`).
    """
    spec = parameter.spec
    if not EXPERTS.search(parameter.path) or axes.get("ep", 1) > 1 or "fsdp" not in spec:
        return spec
    if parameter.shape[0] % shards("fsdp", axes):
        return spec
    return ("fsdp", *(None if axis == "fsdp" else axis for axis in spec[1:]))


def resolved(
    parameters: Sequence[Parameter], rules: Sequence[Rule], axes: Mapping[str, int]
) -> tuple[Parameter, ...]:
    """Return the parameters with their final shardings, over the axes that the mesh has.

    The first rule whose expression matches a parameter's whole path replaces the family's default. An axis
    that does not divide a dimension does not split it: the compiler has refused what a recipe does not allow.
    An axis of one device stays in the sharding: it splits nothing.

    Args:
        parameters: with the family's default shardings.
        rules: the recipe's `sharding.rules`.
        axes: devices along each mesh axis.
    """
    out = []
    for parameter in apply_rules(parameters, rules, axes):
        spec = divisible(parameter.shape, parameter.spec, axes)
        out.append(replace(parameter, spec=spec) if spec != parameter.spec else parameter)
    return tuple(out)


TOKENS = "cp"
"""The mesh axis that the tokens of each row are split over, and together with fsdp the weights."""


def axes_of(axis: str | None, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes that an axis in a weight's sharding stands for: "fsdp" includes cp.

    Args:
        axes: size of each mesh axis.
    """
    if axis is None or axis not in axes:
        return ()
    return (axis, TOKENS) if axis == "fsdp" and TOKENS in axes else (axis,)


def shards(axis: str | None, axes: Mapping[str, int]) -> int:
    """Return the number of devices over which an axis in a weight's sharding splits a dimension."""
    return math.prod(axes[name] for name in axes_of(axis, axes))


DATA = ("fsdp", "dcn", "ep")
"""The mesh axes that rows of a batch are split over: devices of a slice, which share the weights; slices; and
devices that share the experts.

The order matters: with rows over (dcn, fsdp), XLA's partitioner (jaxlib 0.10.2) confuses rows of different
slices if a product sums over tp, its weight is split over fsdp, and tp and fsdp are of the same size.
"""


def data_parallel(axes: Mapping[str, int]) -> int:
    """Return the number of devices that split the rows of a micro-batch, from the size of each mesh axis."""
    return math.prod(axes.get(axis, 1) for axis in DATA)


def row_axes(rows: int, axes: Mapping[str, int]) -> str | tuple[str, ...] | None:
    """Return the entry of a PartitionSpec that splits a batch's rows; None if the devices do not divide them.

    Args:
        axes: size of each mesh axis.
    """
    names = tuple(axis for axis in DATA if axis in axes)
    if not names or rows % data_parallel(axes):
        return None
    return names if len(names) > 1 else names[0]


def rows_at_once(rows: int, most: int | None, axes: Mapping[str, int]) -> int:
    """Return the completions that are generated at once: a multiple of the devices that split rows.

    Args:
        rows: completions of a batch.
        most: `rollout.rows`.
        axes: size of each mesh axis of the rollouts.
    """
    parts = data_parallel(axes)
    return -(-min(rows, most or rows) // parts) * parts


PIECE = 128
"""A piece of a row that is dealt to devices is a multiple of this many tokens: the smallest block of splash
attention."""


def dealt_length(length: int, count: int) -> int:
    """Return the tokens of a row that is dealt to `count` devices of TOKENS (attention.py): two whole pieces
    for each."""
    return length if count == 1 else length + -length % (2 * count * PIECE)


def divisible(shape: Sequence[int], spec: Sequence[str | None], axes: Mapping[str, int]) -> Spec:
    """Return a sharding without the axes that do not divide their dimension, or that the mesh lacks."""
    return tuple(
        axis if axis in axes and size % shards(axis, axes) == 0 else None
        for size, axis in zip(shape, spec, strict=False)
    )
