"""requirements-train.txt: the tested packages of train.py and merge.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.emitters.render import render
from recipec.compiler.lowering import pins

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program


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
