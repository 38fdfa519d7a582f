"""Tests that docs/architecture.md is true: its files exist, and its tables are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import architecture
from tests.test_layers import ROOMS

pytestmark = pytest.mark.usefixtures("without_collections")

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (.*) \| ([\d,]+) \| ([\d,]+) \|$", re.M)
DRIFT = 0.1
"""The share by which a number may change before the page is written again."""


def numbers(page: str) -> dict[str, tuple[int, int]]:
    return {name: (int(a.replace(",", "")), int(b.replace(",", ""))) for name, a, b in ROW.findall(page)}


def test_tables_are_those_of_the_code() -> None:
    """If this fails, run: python -m scripts.architecture write."""
    page, now = numbers(PAGE), numbers(architecture.text())
    assert page.keys() == now.keys()
    far = {
        name: (page[name], lines)
        for name, (_, lines) in now.items()
        if abs(page[name][1] - lines) > max(100, DRIFT * lines)
    }
    assert not far


def test_rooms_of_the_compiler_import_one_way() -> None:
    assert architecture.counts().pairs == 0


def test_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:spec|compiler|runtime|port|scripts|templates|tests)/[\w/.-]+)`", PAGE))
    assert len(named) > 30
    assert not [path for path in sorted(named - {"tests/golden/CASE/"}) if not (ROOT / path).exists()]


def test_table_of_the_compiler_names_every_room_in_order() -> None:
    part = PAGE.partition("### compiler\n")[2].partition("\n### ")[0]
    rooms = [room.removeprefix("compiler.") for room in ROOMS if room.startswith("compiler.")]
    first = [cell for row in part.splitlines() if row.startswith("| ") for cell in [row.split(" | ")[0]]]
    told = [name for cell in first for name in re.findall(r"`([a-z_]+)(?:/|\.py)`", cell)]
    assert told == [room for room in rooms if room in told]
    assert not [room for room in rooms if f"`{room}/`" not in part and f"`{room}.py`" not in part]
