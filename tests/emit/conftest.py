"""Fixtures with artifacts of every kind, written once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from emitting import EVERYTHING, RECIPE, program_of

from recipec.compiler.artifacts import artifact
from recipec.compiler.emitters.emit import emit

ROWS = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write artifacts that together use every branch of the emitters."""
    folder = tmp_path_factory.mktemp("variants")
    artifacts: dict[str, Mapping[str, bytes]] = {}
    for name, sets in EVERYTHING.items():
        settled = sets if any(item.startswith("name=") for item in sets) else [f"name={name}", *sets]
        settled = [item.replace("name=on", "name='on'") for item in settled]
        template = folder / "recipes" / name / "templates/a-folder-of-templates"
        template.mkdir(parents=True)
        (template / "a-template-with-a-long-name.jinja").write_text("<|turn>{{ messages }}<turn|>")
        program = program_of(folder / "recipes" / name, settled)
        artifacts[program.name] = emit(program)
    artifact.write(folder / "generated", artifacts)
    return folder / "generated"


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a recipe and its data."""
    (tmp_path / "recipes/data").mkdir(parents=True)
    (tmp_path / "recipes/sample.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "recipes/data/train.jsonl").write_text(ROWS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path
