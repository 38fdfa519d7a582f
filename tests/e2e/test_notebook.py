"""notebook.ipynb from its first cell to its last, by nbclient on this machine: a session, and the next."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from recipec.compiler.artifacts.archive import pack
from recipec.compiler.artifacts.artifact import NOTEBOOK, write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.lower import lower
from recipec.compiler.rehearse.quickstart import RECIPE, write_model
from recipec.spec.load import load

SETS = ["mesh={accelerator: cpu-2, axes: {fsdp: 2, tp: 1}}", "train.steps=8", "checkpoint.every_steps=2"]
SETS += ["train.schedule.warmup_steps=2", "train.eval_every=4"]


def printed(notebook: Any, cell: str) -> str:
    (found,) = (one for one in notebook.cells if one.id == cell)
    return "".join(output.get("text", "") for output in found.outputs)


def session(notebook: Any, folder: Path) -> Any:
    """A notebook, executed; a cell that fails raises."""
    run = nbformat.from_dict(notebook)
    NotebookClient(run, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    return run


@pytest.mark.e2e
def test_a_notebook_runs_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_FLAGS", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    program = lower(load(RECIPE, SETS)).program
    assert program is not None
    program = replace(program, notebook=True)
    write(tmp_path / "generated", {program.name: emit(program)})
    write_model(tmp_path / "model", program)
    text = (tmp_path / "generated" / program.name / NOTEBOOK).read_text()
    recipe = tmp_path / "generated" / program.name / "recipe.yaml"
    for data in program.recipe.data.train + program.recipe.data.eval:
        target = recipe.parent / data.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(RECIPE.parent / data.path, target)
    pack(program.name, tmp_path / "generated", None, tmp_path / f"{program.name}.tar.gz")
    whole = nbformat.reads(text, as_version=nbformat.NO_CONVERT)

    # The first session is over before the run is, and leaves what is kept alone.
    short = nbformat.reads(text.replace("train.py --model", "train.py --steps 4 --model"), as_version=4)
    assert "steps=4" in printed(session(short, tmp_path), "train")
    for left in ("merged", "merged-adapter", program.name):
        shutil.rmtree(tmp_path / left)

    run = session(whole, tmp_path)
    assert "step 4" in printed(run, "train") and "steps=8" in printed(run, "train")
    assert [*(tmp_path / "merged").glob("*.safetensors")]
    assert (tmp_path / "kept" / f"{program.name}-run" / "merged-adapter" / "adapter_config.json").is_file()
    assert printed(run, "answers").strip()

    # What is done stays done.
    assert "steps=8" in printed(session(whole, tmp_path), "train")
