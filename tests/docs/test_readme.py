"""Test that README.md shows the files that its recipe becomes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from tests.docs.blocks import blocks
from tests.docs.shell import ROOT

PAGE = ROOT / "README.md"


def test_shown_tree_has_the_files_that_the_shown_recipe_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (recipe,) = (block.text for block in blocks(PAGE) if block.language == "yaml")
    (tree,) = (block.text for block in blocks(PAGE) if block.text.startswith("generated/\n"))
    Path("support.yaml").write_text(recipe, encoding="utf-8")
    done = CliRunner().invoke(app, ["build", "support.yaml"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    written = {path.name for path in Path("generated").rglob("*") if path.is_file() and path.name[0] != "."}
    wheel = next(name for name in written if name.endswith(".whl"))
    shown = {name.replace("recipec_runtime-*.whl", wheel) for name in _files(tree)}
    assert shown == written


def _files(tree: str) -> set[str]:
    """Return the names of files in a tree: at the start of a line, and in the text of a folder's line."""
    names = set()
    for line in tree.splitlines():
        first, _, about = line.strip().partition(" ")
        names.add(first)
        names |= set(re.findall(r"[\w-]+\.(?:sh|yaml|json)\b|Dockerfile", about))
    return {name for name in names if not name.endswith("/")}
