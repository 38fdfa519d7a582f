"""The registry of codes, its page, and that every code is put to the test."""

from __future__ import annotations

import re
from pathlib import Path

from spec import codes
from spec.codes import CODES, GROUPS, RETIRED, page

CODE = re.compile(r"\b[EWN]\d{4}\b")


def used(*files: Path) -> set[str]:
    return {
        code for file in files for code in CODE.findall(file.read_text(encoding="utf-8", errors="replace"))
    }


def test_the_page_is_current(root: Path) -> None:
    text = (root / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    assert text == page(), "run: python -m spec.codes > docs/diagnostics.md"


def test_every_code_is_well_formed() -> None:
    for code, entry in CODES.items():
        assert CODE.fullmatch(code) and code[1:3] in GROUPS, code
        assert entry.title and not entry.title.endswith("."), code
        assert entry.cause.endswith(".") and entry.cure.endswith((".", "`")), code


def test_no_code_is_registered_twice(root: Path) -> None:
    source = Path(codes.__file__).read_text(encoding="utf-8")
    registered = re.findall(r'^    "([EWN]\d{4})": Code\(', source, re.M)
    assert sorted(registered) == sorted(CODES)


def test_no_retired_code_is_used_again() -> None:
    assert not set(RETIRED) & set(CODES)
    assert all(CODE.fullmatch(code) for code in RETIRED)


def test_every_code_is_given_somewhere_and_every_given_one_is_registered(root: Path) -> None:
    sources = [file for part in ("spec", "compiler") for file in (root / part).rglob("*.py")]
    given = used(*(file for file in sources if file != Path(codes.__file__)))
    assert given == set(CODES)


def test_every_code_is_put_to_the_test(root: Path) -> None:
    tests = [*(root / "tests").rglob("*.py"), *(root / "tests").rglob("stderr.txt")]
    assert set(CODES) - used(*tests) == set()
