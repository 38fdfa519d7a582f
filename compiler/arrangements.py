"""The ways in which the rows of an optimizer step can be laid out on an accelerator's devices.

`recipe new` and `recipe port` try them in this order, and take the first that passes the recipe's checks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

    @property
    def accumulation(self) -> int:
        return self.rows // (self.fsdp * self.micro)


def arrangements(devices: int, rows: int, micro: int) -> Iterator[Arrangement]:
    """Yield what can be tried, the best first: the same rows with less and less fsdp, then more rows."""
    sizes = sorted(divisors(devices), reverse=True)
    for fsdp in sizes:
        if rows % fsdp == 0:
            yield _arranged(fsdp, devices // fsdp, rows, micro)
    for fsdp in sizes:
        if rows % fsdp:
            yield _arranged(fsdp, devices // fsdp, -(-rows // fsdp) * fsdp, micro)


def _arranged(fsdp: int, tp: int, rows: int, micro: int) -> Arrangement:
    """Choose the largest micro-batch, at most the source's, that divides the rows of a device."""
    return Arrangement(fsdp, tp, max(m for m in divisors(rows // fsdp) if m <= micro), rows)


def concerns_mesh(problem: Diagnostic) -> bool:
    """Return whether a diagnostic is about the mesh, so that another mesh may not cause it."""
    return problem.code[1:3] == "02" or problem.code in SETTLED
