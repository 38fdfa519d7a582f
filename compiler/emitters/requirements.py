"""requirements-train.txt: the tested packages of train.py and merge.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler import pins
from compiler.render import render

if TYPE_CHECKING:
    from compiler.program import Program


def emit_requirements(program: Program) -> str:
    """The text of requirements-train.txt."""
    packages = pins.training(program)
    return render(
        "requirements-train.txt",
        scripts="train.py and merge.py",
        platform={"tpu": "TPU", "cpu": "CPU"}[program.accelerator.platform],
        direct=packages.direct,
        transitive=packages.transitive,
    )
