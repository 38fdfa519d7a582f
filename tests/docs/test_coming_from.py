"""Tests that docs/coming-from.md has port's results for all keys of the tools."""

from __future__ import annotations

import pytest

from recipec.compiler.port.keys import tools
from scripts import coming_from


def test_tables_match_the_results_of_port(update: bool) -> None:
    text = coming_from.PAGE.read_text(encoding="utf-8")
    made = coming_from.page(text)
    if update:
        coming_from.PAGE.write_text(made, encoding="utf-8")
        text = made
    assert coming_from.BLOCK.findall(text) and text == made, "run: python -m scripts.coming_from write"
    assert {block[1] for block in coming_from.BLOCK.findall(text)} == set(coming_from.TRIED)


@pytest.mark.parametrize("tool", [name for name in coming_from.TRIED if name != "unsloth"])
def test_tried_keys_exist_in_the_tool(tool: str) -> None:
    known = {name.rpartition(".")[2] for section in tools()[tool]["sections"].values() for name in section}
    known |= {"accelerate_config"}
    assert {key.rpartition(".")[2] for key in coming_from.TRIED[tool]["keys"]} <= known
