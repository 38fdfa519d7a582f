"""Tests that docs/security.md names existing tests, and lists every test of tests/security."""

from __future__ import annotations

import ast
import re
from pathlib import Path

NAMED = re.compile(r"`(tests/[\w./-]+)(?:::(\w+))?`")


def page(root: Path) -> str:
    return (root / "docs" / "security.md").read_text(encoding="utf-8")


def functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_test_named_on_the_page_exists(root: Path) -> None:
    named = NAMED.findall(page(root))
    assert len(named) > 40
    for path, function in named:
        if function:
            assert function.startswith("test_") and function in functions(root / path), f"{path}::{function}"
        else:
            assert (root / path / "stderr.txt").is_file() and path.startswith("tests/golden/"), path


def test_page_names_every_test_in_tests_security(root: Path) -> None:
    named = set(NAMED.findall(page(root)))
    for file in sorted((root / "tests" / "security").glob("test_*.py")):
        path = file.relative_to(root).as_posix()
        missing = {name for name in functions(file) if name.startswith("test_")} - {
            function for place, function in named if place == path
        }
        # A test that a good file passes is no defense.
        assert missing <= {
            "test_valid_lora_record_is_read",
            "test_valid_safetensors_header_is_read",
            "test_link_within_the_folder_is_built_as_a_regular_file",
        }, f"{path}: {missing}"


def test_page_is_linked_from_readme_and_security_md(root: Path) -> None:
    assert "docs/security.md" in (root / "SECURITY.md").read_text(encoding="utf-8")
    assert "docs/security.md" in (root / "README.md").read_text(encoding="utf-8")
