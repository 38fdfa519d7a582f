"""Tests of the registry of codes and its page, and that every code has a test."""

from __future__ import annotations

import re
from pathlib import Path

from recipec.spec import codes
from recipec.spec.codes import CODES, PAGE, RETIRED

CODE = re.compile(r"\b[EWN]\d{4}\b")


WITHOUT_GOLDEN = {
    "E0000": "a fault of the compiler's own, which a test has to make",
    "E0003": "a file of more than 256 KiB",
    "E0040": "of `recipe explain` with a path",
    "E0041": "of two recipes in one command",
    "E0042": "of a check that takes a minute",
    "E0043": "of two recipes in one command",
    "E0425": "of a pipe, which no repository holds",
    "E1001": "of a compiled step",
    "E1002": "of a compiled step",
    "E1003": "of a compiled step",
    "E1004": "of a compiled step",
    "W1005": "of a compiled step",
    "W1007": "of a compiled step",
    "E1008": "of libtpu, when it is loaded",
    "E1050": "of `recipe parity`, by the packages that are installed",
    "W1118": "of a port's compiled steps",
    "W1119": "of a port to standard output, which leaves no recipe.yaml",
}
"""Codes that no stderr.txt holds, and why. Other tests check their messages."""


def used(*files: Path) -> set[str]:
    return {
        code for file in files for code in CODE.findall(file.read_text(encoding="utf-8", errors="replace"))
    }


def test_every_code_is_well_formed() -> None:
    for code, entry in CODES.items():
        assert not entry.title.endswith("."), code
        assert entry.cause.endswith(".") and entry.cure.endswith((".", "`")), code


def test_each_group_of_the_page_holds_its_codes_once_and_in_order() -> None:
    headings: list[str] = []
    for group in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        own = re.findall(r"^### (\w+)", group, re.M)
        assert len({code[1:3] for code in own}) == 1
        assert own == sorted(set(own), key=lambda code: (code[1:], code[0]))
        headings += own
    assert headings == list(CODES)


def test_no_retired_code_is_used_again() -> None:
    assert not set(RETIRED) & set(CODES)
    assert all(CODE.fullmatch(code) for code in RETIRED)


def test_codes_in_the_sources_are_exactly_the_registered_codes(root: Path) -> None:
    sources = [file for part in ("spec", "compiler", "port") for file in (root / part).rglob("*.py")]
    given = used(*(file for file in sources if file != Path(codes.__file__).resolve()))
    assert given == set(CODES)


def test_every_code_is_in_a_golden_case_or_in_the_exception_list(root: Path) -> None:
    assert set(CODES) - used(*(root / "tests").rglob("stderr.txt")) == set(WITHOUT_GOLDEN)
