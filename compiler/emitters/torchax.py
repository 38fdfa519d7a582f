"""Emit the TorchAX backend's files: train_torchax.py, and the packages that it was tested with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.emitters.settings_text import devices, kind
from recipec.compiler.emitters.train import requirements_text, script
from recipec.compiler.lowering import pins
from recipec.compiler.python_text import docstring
from recipec.compiler.render import render

if TYPE_CHECKING:
    from recipec.compiler.lowering.pins import Pins
    from recipec.compiler.lowering.program import Program

SCRIPT = "train_torchax.py"
REQUIREMENTS = "requirements-torchax.txt"


def emit_torchax(program: Program) -> dict[str, str]:
    """Return the backend's files of an artifact."""
    return {SCRIPT: emit_script(program), REQUIREMENTS: requirements_text(program, packages(program), SCRIPT)}


def emit_alone(program: Program) -> dict[str, str]:
    """Return the files that train a model which Tunix does not have, under the names of Tunix's files."""
    return {
        "train.py": emit_script(program, "train.py", "train"),
        "requirements-train.txt": requirements_text(program, packages(program)),
    }


def emit_script(program: Program, name: str = SCRIPT, requirements: str = "torchax") -> str:
    """Return the text of train_torchax.py.

    Args:
        name: the script's name.
        requirements: the name of its requirements file, after "requirements-".
    """
    title = docstring(
        f"{kind(program)} of {program.recipe.model.id} on {devices(program)}, by transformers' model "
        "under torchax."
    )
    names = {"torchax": True, "name": name, "requirements": requirements}
    return render("train.py", title=title, **names, **script(program))


def packages(program: Program) -> Pins:
    """Return the environment of train_torchax.py: that of train.py, and torch."""
    return pins.training(program) | pins.torchax()
