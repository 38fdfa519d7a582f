"""Tests that values are written as `ruff format` would write them."""

from __future__ import annotations

import ast
import random
from pathlib import Path

from emitting import tool

from recipec.compiler.emitters.settings_text import layer_numbers
from recipec.compiler.python_text import Call, Name, Value, assignment


def random_value(source: random.Random, depth: int = 0) -> Value:
    words = ["a", "it's", 'say "hi"', "both ' and \"", "tab\tnew\nline", "\\d+\\n.*", "é ü 語", "", "x" * 40]
    words.append("\x00\x7f")
    leaves: list[Value] = [None, True, 7, -3, 1e-8, 0.05, 64.0, 2.5e-7, 1e22, *words]
    if depth > 2 or source.random() < 0.4:
        return source.choice(leaves)
    items = [random_value(source, depth + 1) for _ in range(source.randrange(5))]
    kind = source.randrange(4)
    if kind == 0:
        return tuple(items)
    if kind == 1:
        return items
    if kind == 2:
        return {source.choice(words) + str(i): item for i, item in enumerate(items)}
    return Call("make", {f"name{i}" if i else "*0": item for i, item in enumerate(items)})


def test_random_values_are_ruff_formatted_and_read_back_equal(tmp_path: Path) -> None:
    source = random.Random(0)
    values = [random_value(source) for _ in range(400)]
    lines = [assignment(f"VALUE_{i}", value) for i, value in enumerate(values)]
    path = tmp_path / "values.py"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert tool("ruff", "format", "--isolated", "--no-cache", "--check", "--diff", path) == ""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for value, node in zip(values, tree.body, strict=True):
        if not has_call(value):
            assert isinstance(node, ast.Assign)
            assert ast.literal_eval(node.value) == value


def has_call(value: Value) -> bool:
    if isinstance(value, Call | Name):
        return True
    if isinstance(value, dict):
        return any(map(has_call, value.values()))
    return isinstance(value, tuple | list) and any(map(has_call, value))


def test_long_strings_get_parentheses_only_when_they_then_fit() -> None:
    assert assignment("NAME", "x" * 76).startswith('NAME = "')
    assert assignment("A_LONG_NAME", "x" * 80).startswith("A_LONG_NAME = (\n")
    assert assignment("NAME", "x" * 100).startswith('NAME = "')


def test_consecutive_layers_are_a_range() -> None:
    assert layer_numbers(range(20, 60)) == Name("tuple(range(20, 60))")
    assert layer_numbers((0, 1, 2)) == (0, 1, 2)
    assert layer_numbers((0, 2, 4, 6, 8, 10, 12, 14)) == (0, 2, 4, 6, 8, 10, 12, 14)
