"""Test that README.md shows the files that its recipe becomes."""

from __future__ import annotations

import re
from pathlib import Path

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.spec.load import load
from tests.docs.blocks import blocks
from tests.docs.shell import ROOT

BESIDE = {"recipe.schema.json", "recipec_runtime-*.whl", "recipec_runtime.html"}
"""Files next to the artifact, which tests/emit tests."""


def test_shown_tree_has_the_files_that_the_shown_recipe_becomes(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    (recipe,) = (block.text for block in blocks(page) if block.language == "yaml")
    (tree,) = (block.text for block in blocks(page) if block.text.startswith("generated/\n"))
    path = tmp_path / "support.yaml"
    path.write_text(recipe, encoding="utf-8")
    program = lower(load(path)).program
    assert program is not None
    written = {Path(name).name for name in emit(program)}
    assert files(tree) - BESIDE == {name for name in written if not name.startswith(".")} | {
        "recipe.lock.json"
    }


def files(tree: str) -> set[str]:
    """Return the names of files in a tree: at the start of a line, and in the text of a folder's line."""
    names = set()
    for line in tree.splitlines():
        first, _, about = line.strip().partition(" ")
        names.add(first)
        names |= set(re.findall(r"[\w-]+\.(?:sh|yaml|json)\b|Dockerfile", about))
    return {name for name in names if not name.endswith("/")}
