"""Tests of `recipe rehearse` on the shipped recipes: a miniature artifact, from train to verify."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from recipec.compiler.rehearse.pipeline import new_console
from recipec.compiler.rehearse.rehearse import rehearse, write_miniature, write_recipe
from tests.emit.emitting import compiled
from tests.preloaded import preloaded_scripts

STEPS = ["miniature", "compile", "train", "kill", "resume", "compare", "merge", "verify"]


@pytest.mark.e2e
def test_gemma4_31b_recipe_passes_its_rehearsal(root: Path, tmp_path: Path) -> None:
    screen = io.StringIO()
    flagship = compiled(root / "recipes" / "gemma4-31b-v5p8.yaml")
    with preloaded_scripts(tmp_path):
        done = rehearse(flagship, steps=8, folder=tmp_path / "work", console=new_console(screen))
    assert done.ok, screen.getvalue()
    assert list(done.seconds) == STEPS
    assert "bit-identical" in screen.getvalue()
    # The same recipe, except for its size, data and mesh.
    lock = json.loads((tmp_path / "work" / "generated" / flagship.name / "recipe.lock.json").read_text())
    small, large = lock["recipe"], flagship.recipe.model_dump(mode="json", include={"lora", "remat", "mesh"})
    assert small["lora"] == large["lora"]
    assert small["remat"] == large["remat"]
    assert small["mesh"]["axes"] == large["mesh"]["axes"]
    config = json.loads((tmp_path / "work" / "model" / "config.json").read_text())
    assert config["text_config"]["attention_k_eq_v"] is True


def test_a_step_that_fails_ends_the_rehearsal(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipec.compiler.rehearse import rehearse as module

    def broken(folder: Path, artifacts: dict[str, dict[str, bytes]]) -> None:
        for name in artifacts:
            (folder / name).mkdir(parents=True)
            (folder / name / "train.py").write_text("raise SystemExit('error: no such thing')\n")

    monkeypatch.setattr(module, "write", broken)
    screen = io.StringIO()
    flagship = compiled(root / "recipes" / "gemma4-31b-v5p8.yaml")
    done = rehearse(flagship, folder=tmp_path / "work", console=new_console(screen))
    assert not done.ok
    assert list(done.seconds) == ["miniature", "compile", "train"]
    assert "error: no such thing" in screen.getvalue()
    assert f"kept: {tmp_path / 'work'}" in screen.getvalue()


@pytest.mark.parametrize("name", ["gemma4-31b-v5p8", "gemma4-31b-paper", "gemma3-270m-cpu", "quickstart"])
def test_miniature_recipe_lowers_and_keeps_adapter_targets(root: Path, tmp_path: Path, name: str) -> None:
    original = compiled(root / "recipes" / f"{name}.yaml")
    write_miniature(original, tmp_path)
    replaced = write_recipe(original, 8, tmp_path)
    small = compiled(tmp_path / "recipe.yaml")
    assert small.accumulation_steps <= original.accumulation_steps
    assert {change.path for change in replaced} >= {"model.id", "data.train"}
    kept = {"lora", "remat", "merge"} - {change.path.partition(".")[0] for change in replaced}
    assert {"remat"} <= kept
    assert {adapter.target.projection for adapter in small.adapters} == {
        adapter.target.projection for adapter in original.adapters
    }
