"""Tests of the codes that modules declare, of their page, and that every code has a test."""

from __future__ import annotations

import ast
import copy
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

from recipec.spec.codes import Code
from scripts.architecture import tree
from scripts.docs.diagnostics import declared, sources

pytestmark = pytest.mark.usefixtures("without_collections")

CODE = re.compile(r"\b[EWN]\d{4}\b")


WITHOUT_GOLDEN = {
    "E0000": "a fault of the compiler's own, which a test has to make",
    "E0003": "a file of more than 256 KiB",
    "E0040": "of `recipe explain` with a path",
    "E0041": "of two recipes in one command",
    "E0042": "of a check that takes a minute",
    "E0043": "of two recipes in one command",
    "E0425": "of a pipe, which no repository holds",
    "E0667": "of `recipe serve pin`",
    "E1001": "of a compiled step",
    "E1002": "of a compiled step",
    "E1003": "of a compiled step",
    "E1004": "of a compiled step",
    "W1005": "of a compiled step",
    "W1006": "of the plan of a server that does not start",
    "W1007": "of a compiled step",
    "E1008": "of libtpu, when it is loaded",
    "E1009": "of a compiled rollout",
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
    codes = declared()
    assert len(codes) > 300
    for name, code in codes.items():
        assert CODE.fullmatch(name) and not code.heading.endswith("."), name
        assert code.cause.endswith(".") and code.cure.endswith((".", "`")), name


def test_code_is_text_that_keeps_its_meaning_between_processes() -> None:
    code = Code("W0001", "a `title`, of two words", "A cause.", "A cure.")
    assert (code, code.severity, code.group) == ("W0001", "warning", "00")
    assert code.anchor == "w0001-a-title-of-two-words"
    for other in (pickle.loads(pickle.dumps(code)), copy.deepcopy(code)):
        assert type(other) is Code and other == code
        assert (other.heading, other.cause, other.cure) == (code.heading, code.cause, code.cure)


def test_each_code_is_written_once_as_text_and_otherwise_by_its_name() -> None:
    """A code that a check gives as text would have no title, cause and cure."""
    texts = [
        node.value
        for file in sources()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value)
    ]
    assert sorted(texts) == sorted(declared())


def test_every_declared_code_is_given() -> None:
    names = Counter(
        node.id
        for file in sources()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Name) and CODE.fullmatch(node.id)
    )
    assert {code for code in declared() if names[code] < 2} == set()


def test_every_code_is_in_a_golden_case_or_in_the_exception_list(root: Path) -> None:
    assert set(declared()) - used(*(root / "tests").rglob("stderr.txt")) == set(WITHOUT_GOLDEN)
