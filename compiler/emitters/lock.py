"""Emit recipe.lock.json: every value that determines the artifact, and a digest of each of its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from recipec.compiler import __version__
from recipec.compiler.artifacts import runtime
from recipec.compiler.artifacts.artifact import LOCK_VERSION, digest
from recipec.compiler.emitters import backends as other_backends
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.recorded import to_record

if TYPE_CHECKING:
    from recipec.compiler.lowering.backend import Backend
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.model.families import Architecture, Family


def compiler_name() -> str:
    """Return the compiler's name and version as locks record them."""
    return f"recipec {__version__}"


def emit_lock(program: Program, files: Mapping[str, bytes], backends: Sequence[Backend] = ()) -> str:
    """Return the text of recipe.lock.json.

    Args:
        files: the artifact's other files.
        backends: the backends besides Tunix that the artifact is built for.
    """
    lock: dict[str, Any] = {
        "lock": LOCK_VERSION,
        "compiler": compiler_name(),
        "name": program.name,
        "recipe": to_record(program.recipe),
        "model": _model(program.family, program.architecture),
        "packages": _packages(program),
        "runtime": runtime.record(),
        "files": {path: digest(content) for path, content in files.items()},
    }
    if program.teacher is not None:
        teacher = program.teacher
        lock["teacher"] = _model(teacher.family, teacher.architecture)
    if program.accelerator.hosts > 1:
        lock["hosts"] = program.accelerator.hosts
    if backends:
        lock["backends"] = other_backends.packages(program, backends)
    return json.dumps(lock, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _model(family: Family, architecture: Architecture) -> dict[str, Any]:
    """Return a model's family and description, which has a vision tower only if the recipe reads pictures."""
    described = asdict(architecture)
    if described["vision"] is None:
        del described["vision"]
    return {"family": family.name, "architecture": described}


def _packages(program: Program) -> dict[str, dict[str, str]]:
    """Return the packages of the training scripts. Logging packages are separate: they may change during a
    run."""
    alone, whole = pins.without_logging(program).all, pins.training(program).all
    logging = {name: version for name, version in whole.items() if name not in alone}
    return {"train": alone, "logging": logging} if logging else {"train": alone}
