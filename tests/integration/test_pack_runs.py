"""Tests that the archive of `recipe pack` runs in another folder with only its own wheel and data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from recipec.compiler import catalog
from recipec.compiler.artifacts.artifact import write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.compiler.pack import pack
from recipec.spec.load import load

RUN = """
import runpy, sys
script = sys.argv[1]
sys.argv = sys.argv[1:]
try:
    runpy.run_path(script, run_name="__main__")
except SystemExit as done:
    import runtime
    print("runtime:", runtime.__file__)
    loaded = {name.split(".")[0] for name in sys.modules}
    print("modules:", *sorted(loaded & {"recipec", "spec", "compiler", "templates"}))
    sys.exit(done.code)
"""
"""Runs a script as a command does, and prints which runtime it used."""


@pytest.mark.e2e
def test_an_unpacked_archive_trains_and_merges(root: Path, tmp_path: Path) -> None:
    recipe = root / "recipes" / "quickstart.yaml"
    program = lower(load(recipe)).program
    assert program is not None
    write(tmp_path / "generated", {program.name: emit(program)})
    archive = pack(program.name, tmp_path / "generated", recipe, tmp_path / "quickstart.tar.gz")
    elsewhere = tmp_path / "elsewhere"
    with tarfile.open(archive) as packed:
        packed.extractall(elsewhere, filter="data")
    (wheel,) = elsewhere.glob("*.whl")
    with zipfile.ZipFile(wheel) as installed:
        installed.extractall(elsewhere / "site")
    config = complete(catalog.entries()["recipec/tiny-gemma4"]["config"])
    write_checkpoint(tmp_path / "model", config, dtype="float32")

    artifact = elsewhere / program.name
    model = ["--model", str(tmp_path / "model")]
    printed = run(artifact / "train.py", [*model, "--steps", "2"], elsewhere)
    assert "done: steps=2" in printed
    printed += run(artifact / "merge.py", model, elsewhere)
    assert printed.count(f"runtime: {elsewhere / 'site' / 'runtime' / '__init__.py'}") == 2
    assert "modules:\n" in printed, "neither spec nor compiler is needed"
    record = json.loads((artifact / "merged" / "merge.json").read_text())
    assert "model.safetensors" in record["files"]
    assert all((artifact / "merged" / file).is_file() for file in record["files"])
    assert (artifact / "merged" / "recipe.lock.json").read_bytes() == (
        artifact / "recipe.lock.json"
    ).read_bytes()


def run(script: Path, arguments: list[str], folder: Path) -> str:
    """Run a script, which must exit with 0, and return its output."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(folder / "site")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(script), *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
