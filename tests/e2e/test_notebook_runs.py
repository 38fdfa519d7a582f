"""Tests of notebook.ipynb, run from the first cell to the last by nbclient, in two sessions."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from recipec.compiler.artifacts.artifact import NOTEBOOK, write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.compiler.pack import pack
from recipec.compiler.rehearse.quickstart import RECIPE, write_model
from recipec.spec.load import load

SHORT = """
extends: quickstart.yaml
recipe: 1
name: short
mesh: {accelerator: cpu-2, axes: {fsdp: 2, tp: 1}}
train: {steps: 8, eval_every: 4, schedule: {warmup_steps: 2}}
checkpoint: {every_steps: 2}
"""


def printed(notebook: Any, cell: str) -> str:
    (found,) = (one for one in notebook.cells if one.id == cell)
    return "".join(output.get("text", "") for output in found.outputs)


def session(notebook: Any, folder: Path) -> Any:
    """Execute a notebook. A cell that fails raises."""
    run = nbformat.from_dict(notebook)
    NotebookClient(run, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    return run


@pytest.mark.e2e
def test_notebook_trains_and_resumes_in_a_second_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_COMPILE", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    shutil.copytree(RECIPE.parent, tmp_path / "recipes")
    recipe = tmp_path / "recipes" / "short.yaml"
    recipe.write_text(SHORT)
    program = lower(load(recipe)).program
    assert program is not None
    program = replace(program, notebook=True)
    write(tmp_path / "generated", {"short": emit(program)})
    write_model(tmp_path / "model", program)
    pack("short", tmp_path / "generated", recipe, tmp_path / "short.tar.gz")
    text = (tmp_path / "generated" / "short" / NOTEBOOK).read_text()
    whole = nbformat.reads(text, as_version=nbformat.NO_CONVERT)

    # The first session ends before the run does. Only the kept folder remains.
    short = nbformat.reads(text.replace("train.py --model", "train.py --steps 4 --model"), as_version=4)
    assert "steps=4" in printed(session(short, tmp_path), "train")
    for left in ("merged", "merged-adapter", "short"):
        shutil.rmtree(tmp_path / left)

    run = session(whole, tmp_path)
    assert "step 4" in printed(run, "train") and "steps=8" in printed(run, "train")
    assert [*(tmp_path / "merged").glob("*.safetensors")]
    assert (tmp_path / "kept" / "short-run" / "merged-adapter" / "adapter_config.json").is_file()
    assert printed(run, "answers").strip()
