"""The ways in which the rows of an optimizer step can be laid out on an accelerator's devices.

`recipe new` and `recipe port` try them in this order, and take the first that passes the recipe's checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipec.compiler.checks.train import E0501
from recipec.compiler.wording import divisors
from recipec.spec.diagnostics import Diagnostic

SETTLED = (E0501,)
"""Errors that another mesh or micro-batch cures, in addition to the mesh's own group of codes."""


@dataclass(frozen=True)
class Arrangement:
    """The sizes of the axes, and the rows of a micro-batch and of a step."""

    fsdp: int
    tp: int
    micro: int
    rows: int
    ep: int = 1

    @property
    def parallel(self) -> int:
        """Devices, or groups of tp devices, that compute different rows."""
        return self.fsdp * self.ep

    @property
    def accumulation(self) -> int:
        return self.rows // (self.parallel * self.micro)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes as a recipe gives them."""
        return {"fsdp": self.fsdp, **({"ep": self.ep} if self.ep > 1 else {}), "tp": self.tp}


def arrangements(devices: int, rows: int, micro: int, experts: int = 1) -> Iterator[Arrangement]:
    """Yield what can be tried, the best first: the same rows with less and less fsdp, then more rows.

    Experts that are split over ep come after all devices on fsdp. Over fsdp the experts of a layer are
    gathered, which may not fit in memory.

    Args:
        experts: of a layer, that ep can split; 1 for none.
    """
    sizes = sorted(divisors(devices), reverse=True)
    for fsdp in sizes:
        if rows % fsdp == 0:
            yield _arranged(fsdp, devices // fsdp, rows, micro)
        if fsdp == devices and rows % devices == 0:
            for ep in sizes:
                if ep > 1 and experts % ep == 0:
                    yield _arranged(devices // ep, 1, rows, micro, ep)
    for fsdp in sizes:
        if rows % fsdp:
            yield _arranged(fsdp, devices // fsdp, -(-rows // fsdp) * fsdp, micro)


def splittable(family: Any, architecture: Any) -> int:
    """Return the number of experts of a layer that the mesh axis ep can split; 1 for none."""
    split = [
        size
        for parameter in family.parameters(architecture)
        for size, axis in zip(parameter.shape, parameter.spec, strict=False)
        if axis == "ep"
    ]
    return math.gcd(*split) if split else 1


def _arranged(fsdp: int, tp: int, rows: int, micro: int, ep: int = 1) -> Arrangement:
    """Choose the largest micro-batch, at most the source's, that divides the rows of a device."""
    return Arrangement(fsdp, tp, max(m for m in divisors(rows // (fsdp * ep)) if m <= micro), rows, ep)


def concerns_mesh(problem: Diagnostic) -> bool:
    """Return whether a diagnostic is about the mesh, so that another mesh may not cause it."""
    return problem.code[1:3] == "02" or problem.code in SETTLED
