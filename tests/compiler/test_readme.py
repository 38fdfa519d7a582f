"""Tests that the README's recipe compiles, and that its mistake is reported as the README shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipec.compiler.lower import lower
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

NAME = "recipes/gemma4-31b-support.yaml"


@pytest.fixture
def readme(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the README's text, and write its recipe into the working folder."""
    text = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "recipes").mkdir()
    (tmp_path / NAME).write_text(blocks[0])
    monkeypatch.chdir(tmp_path)
    return text


def test_readme_recipe_compiles(readme: str) -> None:
    lowered = lower(load(Path(NAME)))
    assert lowered.program is not None, render_text(lowered.diagnostics)


def test_readme_shows_the_actual_errors_of_its_wrong_mesh(readme: str) -> None:
    path = Path(NAME)
    right = "{accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, "{accelerator: v6e-8, axes: {fsdp: 1, tp: 8}}"))
    lowered = lower(load(path))
    assert lowered.program is None
    errors = [d for d in lowered.diagnostics if d.severity == "error"]
    shown = render_text(errors).rpartition("\n\n")[0]
    assert f"```text\n{shown}\n```" in readme
