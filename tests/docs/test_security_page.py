"""Tests that docs/security.md names existing tests, and lists every code and test of its kind."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from recipec.spec.codes import CODES

NAMED = re.compile(r"`(tests/[\w./-]+)(?:::(\w+))?`")


def page(root: Path) -> str:
    return (root / "docs" / "security.md").read_text(encoding="utf-8")


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_that_it_names_is_there(root: Path) -> None:
    named = NAMED.findall(page(root))
    assert len(named) > 40
    for path, function in named:
        if function:
            assert function.startswith("test_") and function in functions(root / path), f"{path}::{function}"
        else:
            assert (root / path / "stderr.txt").is_file() and path.startswith("tests/golden/"), path


def test_it_names_every_test_of_strangers(root: Path) -> None:
    named = set(NAMED.findall(page(root)))
    for file in sorted((root / "tests" / "security").glob("test_*.py")):
        path = file.relative_to(root).as_posix()
        missing = {name for name in functions(file) if name.startswith("test_")} - {
            function for place, function in named if place == path
        }
        # A test that a good file passes is no defense.
        assert missing <= {
            "test_a_whole_record_is_read",
            "test_a_header_that_does_not_is_read",
            "test_a_link_within_the_folder_is_a_file_like_others",
        }, f"{path}: {missing}"


def test_its_codes_are_registered(root: Path) -> None:
    assert set(re.findall(r"\b[EWN]\d{4}\b", page(root))) <= set(CODES)


def test_it_can_be_found(root: Path) -> None:
    assert "security.md" in (root / "mkdocs.yml").read_text(encoding="utf-8")
    assert "docs/security.md" in (root / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/security.md" in (root / "README.md").read_text(encoding="utf-8")
