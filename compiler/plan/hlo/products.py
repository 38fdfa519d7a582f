"""FLOPs of matrix products. A TPU's compiler writes them as convolutions."""

from __future__ import annotations

import functools
import math
import re

from compiler.plan.hlo.parse import Instruction, Module

LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
PRECISION = re.compile(r"\boperand_precision=\{(\w+),(\w+)\}")
PARTS = {"highest": 3, "high": 2}
"""Into how many bfloat16 numbers the MXU splits a float32 one."""
CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


class Products:
    """FLOPs of a module's instructions.

    Args:
        passes: count a product of float32 as often as the MXU computes it for the precision asked for.
    """

    def __init__(self, module: Module, passes: bool = False) -> None:
        self._module = module
        self._passes = passes
        self._of_computation: dict[str, float] = {}

    def flops(self, instruction: Instruction, computation: str) -> float:
        """Of one instruction, of a fusion's all products together.

        Args:
            computation: the name of the one that it stands in.
        """
        if instruction.opcode == "fusion":
            return sum(self._all(name) for name in instruction.calls)
        if instruction.opcode in ("convolution", "dot"):
            named = self._module.by_name[computation]
            left, right = (named[operand] for operand in instruction.operands[:2])
            flops = product_flops(instruction, _shape(left), _shape(right))
            return flops * (mxu_passes(instruction, left, right) if self._passes else 1)
        return 0.0

    def _all(self, computation: str) -> float:
        if computation not in self._of_computation:
            instructions = self._module.computations.get(computation, ())
            total = math.fsum(self.flops(instruction, computation) for instruction in instructions)
            self._of_computation[computation] = total
        return self._of_computation[computation]


def product_flops(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Two for each multiplication of a dot or a convolution. What falls on a convolution's padding is not
    computed, and not counted.

    Args:
        left, right: shapes of the operands.
    """
    result = _shape(instruction)
    if instruction.opcode == "dot":
        contracted = CONTRACTED.search(instruction.attributes)
        dimensions = [int(n) for n in contracted[1].split(",") if n] if contracted else []
        return 2.0 * math.prod(result) * math.prod(left[n] for n in dimensions)
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        return 0.0
    inputs, kernels, results = labels[1], labels[2], labels[3]
    groups = dict(GROUPS.findall(instruction.attributes))
    count = left[inputs.index("f")] // int(groups.get("feature", 1)) * right[kernels.index("o")]
    count *= left[inputs.index("b")] // int(groups.get("batch", 1))
    for axis, window in enumerate(_windows(instruction, sum(label.isdigit() for label in results))):
        size, label = left[inputs.index(str(axis))], str(axis)
        count *= _valid(size, right[kernels.index(label)], result[results.index(label)], *window)
    return 2.0 * count


def mxu_passes(instruction: Instruction, left: Instruction, right: Instruction) -> int:
    """How often the MXU, which multiplies bfloat16, computes a product: of all pairs of the operands' parts,
    those that matter. 6 for two float32 operands at the highest precision; 1 at the default one."""
    precision = PRECISION.search(instruction.attributes)
    if precision is None:
        return 1
    wide = [array.dtype == "f32" for operand in (left, right) for array in operand.arrays[:1]]
    parts = [
        PARTS.get(name, 1) if is_wide else 1 for name, is_wide in zip(precision.groups(), wide, strict=True)
    ]
    most = max(parts)
    return sum(i + j < most for i in range(parts[0]) for j in range(parts[1]))


def _shape(instruction: Instruction) -> tuple[int, ...]:
    return instruction.arrays[0].dimensions if instruction.arrays else ()


def _windows(instruction: Instruction, axes: int) -> list[tuple[int, int, int, int]]:
    """Stride, padding before, and the dilations of input and kernel, of each spatial axis."""
    match = WINDOW.search(instruction.attributes)
    fields = dict(item.split("=") for item in match[1].split()) if match else {}

    def each(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * axes

    return [
        (int(stride), int(pad.split("_")[0]), int(left), int(right))
        for stride, pad, left, right in zip(
            each("stride", "1"),
            each("pad", "0_0"),
            each("lhs_dilate", "1"),
            each("rhs_dilate", "1"),
            strict=True,
        )
    ]


@functools.cache
def _valid(inputs: int, kernel: int, outputs: int, stride: int, pad: int, left: int, right: int) -> int:
    """How many pairs of an output and a kernel position meet an element of the input, along one axis.

    Args:
        inputs, kernel, outputs: sizes.
        pad: positions before the input.
        left, right: dilations of the input and the kernel.
    """
    last = (inputs - 1) * left
    count = 0
    for position in range(kernel):
        offset = position * right - pad
        first_output = max(0, -(offset // stride))
        last_output = min(outputs - 1, (last - offset) // stride)
        if left == 1:
            count += max(0, last_output - first_output + 1)
        else:
            met = range(first_output, last_output + 1)
            count += sum((output * stride + offset) % left == 0 for output in met)
    return count
