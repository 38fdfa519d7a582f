"""The matrices among a model's weights, and the axes of their products."""

from __future__ import annotations

from collections.abc import Sequence

from .families.base import EXPERTS, Architecture, Family, Parameter

EXPERT_INPUTS = {"gating_einsum": 3, "linear": 1, "gate_up": 1, "down": 1}
"""The axis of each array that EXPERTS matches that is summed with the input, by the last part of its path."""


def matrices(
    family: Family, architecture: Architecture, parameters: Sequence[Parameter]
) -> dict[str, tuple[int, ...]]:
    """Return the axes summed with the input, of all linear layers' and experts' weights, by path."""
    linear = {target.weight: target.contract for target in family.lora_targets(architecture)}
    paths = [parameter.path for parameter in parameters if EXPERTS.search(parameter.path)]
    return linear | {path: (EXPERT_INPUTS[path.rpartition(".")[2]],) for path in paths}


def letters(equation: str) -> tuple[str, str, str]:
    """Return the axes of both operands of an einsum, and of its result."""
    inputs, output = equation.replace(" ", "").split("->")
    x_axes, w_axes = inputs.split(",")
    return x_axes, w_axes, output
