"""Tests of the steps to add a model, and of the page for users of other tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from recipec.compiler import catalog
from recipec.compiler.catalog import listing
from recipec.compiler.cli.main import app
from recipec.port.keys import tools
from recipec.port.scripts import coming_from
from tests.compiler import test_catalog
from tests.docs.blocks import Block, blocks

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
    monkeypatch.setattr(listing, "DATA", data)
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


def test_tables_match_the_results_of_port(update: bool) -> None:
    text = coming_from.PAGE.read_text(encoding="utf-8")
    made = coming_from.page(text)
    if update:
        coming_from.PAGE.write_text(made, encoding="utf-8")
        text = made
    assert coming_from.BLOCK.findall(text) and text == made, (
        "run: python -m recipec.port.scripts.coming_from write"
    )
    assert {block[1] for block in coming_from.BLOCK.findall(text)} == set(coming_from.TRIED)


@pytest.mark.parametrize("tool", [name for name in coming_from.TRIED if name != "unsloth"])
def test_tried_keys_exist_in_the_tool(tool: str) -> None:
    known = {name.rpartition(".")[2] for section in tools()[tool]["sections"].values() for name in section}
    known |= {"accelerate_config"}
    assert {key.rpartition(".")[2] for key in coming_from.TRIED[tool]["keys"]} <= known
