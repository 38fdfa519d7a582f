"""Test that rules yield what they say: a statement or a rule that is only called is lost without a word."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from recipec import ROOT

PORT = ROOT / "port"
FOLDERS = ("dialects", "meaning")
FILES = [
    PORT / "common_keys.py",
    PORT / "rules.py",
    *(path for name in FOLDERS for path in sorted((PORT / name).glob("*.py"))),
]
MADE = ("Statement", "Says")
"""What Keys' methods return that make statements."""


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _name(path: Path) -> str:
    return ".".join(("recipec", *path.relative_to(ROOT).with_suffix("").parts))


def _returns(function: ast.FunctionDef) -> str:
    return ast.unparse(function.returns) if function.returns is not None else ""


def _functions(body: list[ast.stmt]) -> Iterator[ast.FunctionDef]:
    return (node for node in body if isinstance(node, ast.FunctionDef))


RULES = {
    f"{_name(path)}.{function.name}"
    for path in FILES
    for function in _functions(_tree(path).body)
    if _returns(function).startswith(("Says", "Statements["))
}
METHODS = {
    function.name
    for node in _tree(PORT / "keys.py").body
    if isinstance(node, ast.ClassDef) and node.name == "Keys"
    for function in _functions(node.body)
    if _returns(function) in MADE
}


def _imported(tree: ast.Module) -> Mapping[str, str]:
    """Return the full name of each name that a module imports or defines."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def _lost(tree: ast.Module, module: str) -> list[int]:
    """Return the lines of calls that make statements and do not yield them."""
    names = {**_imported(tree), **{one.name: f"{module}.{one.name}" for one in _functions(tree.body)}}
    yielded = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Yield | ast.YieldFrom)}
    yielded |= {id(node.body) for node in ast.walk(tree) if isinstance(node, ast.Lambda)}
    lines = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or id(call) in yielded:
            continue
        called = ast.unparse(call.func)
        base, _, attribute = called.rpartition(".")
        whole = f"{names.get(base, base)}.{attribute}" if base else names.get(called, called)
        if whole in RULES or (base and base not in names and attribute in METHODS):
            lines.append(call.lineno)
    return lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_statement_and_rule_is_yielded(path: Path) -> None:
    assert _lost(_tree(path), _name(path)) == []


@pytest.mark.parametrize(
    ("line", "lost"),
    [
        ("yield keys.same('a', note='b')", []),
        ("keys.same('a', note='b')", [3]),
        ("yield from model_names.say_flash(keys)", []),
        ("model_names.say_flash(keys)", [3]),
        ("run.keys.follow(TABLE)", [3]),
        ("rule = lambda run: run.keys.follow(TABLE)", []),
        ("found = model_names.say_model(keys, 'a', 'b')", [3]),
        ("found = yield from model_names.say_model(keys, 'a', 'b')", []),
        ("found = keys.value('a')", []),
    ],
)
def test_calls_that_lose_a_statement_are_noticed(line: str, lost: list[int]) -> None:
    text = f"from recipec.port.meaning import model_names\ndef rule(keys):\n    {line}\n"
    assert _lost(ast.parse(text), "recipec.port.dialects.new") == lost
