"""Which backends take part in a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recipec.compiler.emitters.backends import Backend, diagnosed
from recipec.compiler.packages import missing_packages
from recipec.compiler.wording import listing
from recipec.spec.diagnostics import Diagnostic, in_order
from recipec.spec.load import locate

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.load import Loaded

SCRIPTS = {
    Backend.TUNIX: "train.py",
    Backend.TRL: "baseline/train_trl.py",
    Backend.TORCHAX: "train_torchax.py",
}
"""The script of each backend in an artifact."""
PACKAGES = {
    Backend.TUNIX: (),
    Backend.TRL: ("torch", "peft", "accelerate", "trl"),
    Backend.TORCHAX: ("torch", "peft", "torchax"),
}
"""Packages that a backend's script imports besides those of train.py."""


@dataclass(frozen=True)
class Backends:
    """The backends that take part, and why others do not.

    Attributes:
        chosen: in the order of Backend.
        left_out: reasons by backend name.
    """

    chosen: tuple[Backend, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def choose(
    loaded: Loaded, program: Program, wanted: Sequence[Backend]
) -> tuple[Backends | None, list[Diagnostic]]:
    """Choose the wanted backends that can run a recipe here, or report why there are too few.

    Returns:
        None for the backends when fewer than two are left, with the refusals and E1050.
    """
    chosen: list[Backend] = []
    left_out: dict[str, str] = {}
    refusals: list[Diagnostic] = []
    for backend in (backend for backend in Backend if backend in wanted):
        found = locate(diagnosed(program, [backend]), loaded.sources)
        refused = [one for one in found if one.severity == "error"]
        missing = missing_packages(PACKAGES[backend])
        if refused:
            left_out[backend.value] = "; ".join(f"{one.code}, {one.message}" for one in refused)
            refusals += refused
        elif missing:
            left_out[backend.value] = f"{listing(missing)} cannot be imported"
        else:
            chosen.append(backend)
    if len(chosen) > 1:
        return Backends(tuple(chosen), left_out), []
    reasons = "".join(f"; {name} cannot: {reason}" for name, reason in left_out.items())
    able = listing(backend.value for backend in chosen) or "none"
    message = f"a comparison needs two backends, and of those given {able} can run this recipe here{reasons}"
    help = "--backend NAME of another one, or no --backend for all of them"
    if left_out and not refusals:
        name = next(iter(left_out))
        help = (
            f"recipe build --backend {name} writes the list of what its script needs: requirements-{name}.txt"
        )
    return None, in_order([*refusals, Diagnostic("E1050", message, help=help)])
