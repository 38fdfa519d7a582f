"""Compare compiler/data/dialects.json with its sources."""

from __future__ import annotations

from recipec.compiler.port.keys import DATA
from scripts import dialects
from tests.port import wheels


def test_dialects_json_matches_its_sources() -> None:
    made = dialects.text(dialects.catalog(wheels.fetch()))
    assert DATA.read_text(encoding="utf-8") == made, "run: python scripts/dialects.py build/dialects"
