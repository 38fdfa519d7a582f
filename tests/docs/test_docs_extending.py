"""Tests that follow docs/extending.md: its catalog entry and its template are added to a copy, and work."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.compiler.lowering import catalog
from tests.compiler import test_catalog
from tests.docs.blocks import Block, blocks

SOURCES = ("spec", "compiler", "templates", "runtime")
NAME = "VAGOsolutions/Llama-3.1-SauerkrautLM-8b-Instruct"


@pytest.fixture(scope="module")
def files(root: Path) -> dict[str, Block]:
    """Return the page's files by path."""
    return {block.title: block for block in blocks(root / "docs" / "extending.md") if block.title}


def test_catalog_entry_of_the_page_passes_recipe_check(
    files: dict[str, Block], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = json.loads(files["compiler/data/models.json"].text)
    assert list(added) == [NAME] and NAME not in catalog.entries()
    data = tmp_path / "models.json"
    data.write_text(json.dumps({**catalog.entries(), **added}), encoding="utf-8")
    monkeypatch.setattr(catalog, "DATA", data)
    catalog.entries.cache_clear()
    try:
        command = ["check", str(root / "recipes" / "llama31-8b-v6e8.yaml"), "--set", f"model.id={NAME}"]
        done = CliRunner().invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
        monkeypatch.setattr(test_catalog, "ENTRIES", {**test_catalog.ENTRIES, **added})
        test_catalog.test_decoder_entries_match_the_size_and_chat_word_in_their_name()
    finally:
        monkeypatch.undo()
        catalog.entries.cache_clear()
    before = CliRunner().invoke(app, command, catch_exceptions=False)
    assert before.exit_code == 1 and "E0801" in before.stderr


def test_template_of_the_page_is_emitted_into_artifacts(
    files: dict[str, Block], root: Path, tmp_path: Path
) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in SOURCES:
        shutil.copytree(root / name, tmp_path / name, ignore=ignored)
    shutil.copytree(root / "recipec", tmp_path / "recipec", symlinks=True)
    for path in ("templates/Makefile.j2", "compiler/emitters/makefile.py"):
        assert not (tmp_path / path).exists()
        (tmp_path / path).write_text(files[path].text, encoding="utf-8")
    (tmp_path / "emit.diff").write_text(files["compiler/emitters/emit.py"].text, encoding="utf-8")
    subprocess.run(["git", "apply", "emit.diff"], cwd=tmp_path, check=True, timeout=60)

    def recipe(*arguments: str) -> None:
        command = [sys.executable, "-m", "recipec.compiler.cli.main", *arguments]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr

    quickstart = str(root / "recipes" / "quickstart.yaml")
    recipe("build", quickstart, "-o", "out")
    made = tmp_path / "out" / "quickstart"
    assert (
        (made / "Makefile")
        .read_text()
        .startswith("# quickstart: the commands of README.md.\n.PHONY: train merge\n")
    )
    assert "\n\tpython merge.py --verify\n" in (made / "Makefile").read_text()
    assert "Makefile" in json.loads((made / "recipe.lock.json").read_text())["files"]
    recipe("build", quickstart, "-o", "out", "--check")
