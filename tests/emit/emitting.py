"""Recipes for the tests of this folder, and the tools that emitted files are held against."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

BIN = Path(sys.executable).parent

RECIPE = """\
recipe: 1
name: sample
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}   # a comment that stays
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
serve: {accelerator: v6e-8}
"""


def program_of(folder: Path, sets: Sequence[str] = (), text: str = RECIPE) -> Program:
    """The program of a recipe that is written into `folder` as recipe.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return compiled(folder / "recipe.yaml", sets)


def compiled(path: Path, sets: Sequence[str] = ()) -> Program:
    """The program of a recipe's file."""
    lowered = lower(load(path, sets))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    return lowered.program


def files_of(folder: Path, sets: Sequence[str] = (), text: str = RECIPE) -> dict[str, bytes]:
    """The artifact of a recipe that is written into `folder`."""
    return emit(program_of(folder, sets, text))


def tool(name: str, *arguments: object, cwd: Path | None = None) -> str:
    """What a command of the development environment prints when it fails; "" when it succeeds."""
    command = [str(BIN / name), *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return "" if done.returncode == 0 else f"{name}: {done.stdout}{done.stderr}"
