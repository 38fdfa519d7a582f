"""Find dimensions of arrays that the devices of their mesh axis do not divide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipec.runtime.model.families.family import Parameter, Spec
from recipec.runtime.model.partition_rules import Rule, apply_rules, resolved, shards


@dataclass(frozen=True)
class Indivisible:
    """A dimension whose length the devices of its mesh axis do not divide.

    Attributes:
        path: of the array.
        dimension: index into its shape.
        length: of that dimension.
        axis, size: the mesh axis, and the number of devices that the dimension is split over.
    """

    path: str
    dimension: int
    length: int
    axis: str
    size: int

    def __str__(self) -> str:
        return (
            f"dimension {self.dimension} of {self.path} has length {self.length}, "
            f"which {self.axis}={self.size} does not divide"
        )


def indivisible(path: str, shape: Sequence[int], spec: Spec, axes: Mapping[str, int]) -> list[Indivisible]:
    """Return the dimensions of one array that their axes do not divide."""
    return [
        Indivisible(path, i, length, axis, size)
        for i, (length, axis) in enumerate(zip(shape, spec, strict=True))
        if axis is not None and length % (size := shards(axis, axes))
    ]


def resolve_specs(
    parameters: Sequence[Parameter],
    rules: Sequence[Rule],
    axes: Mapping[str, int],
    on_indivisible: str = "error",
) -> tuple[Parameter, ...]:
    """Return `resolved`; a dimension that its axis does not divide is not split, or is an error.

    Args:
        on_indivisible: "error", or "replicate".

    Raises:
        ValueError: naming the first dimension, when `on_indivisible` is "error".
    """
    if on_indivisible == "error":
        for parameter in apply_rules(parameters, rules, axes):
            if misfit := indivisible(parameter.path, parameter.shape, parameter.spec, axes):
                raise ValueError(str(misfit[0]))
    return resolved(parameters, rules, axes)
