"""The recipes that are edited, and places and diagnostics in them."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types

BASE = """\
recipe: 1
name: base
model: {id: google/gemma-4-31B-it, attention: splash}
mesh:
  accelerator: v5p-8
  axes: {fsdp: 4, tp: 1}
lora: {rank: 16}
data:
  train: [train.jsonl]
  transform: prepare.py:clean
train:
  optimizer: {learning_rate: 2.0e-4}
"""
CHILD = """\
recipe: 1
name: child
extends: base.yaml
lora: {rank: 32}
train: {seed: 1}
"""


def where(text: str, marked: str, inside: int = 0) -> tuple[int, int]:
    """Line and character of a part of a text."""
    offset = text.index(marked) + inside
    return text.count("\n", 0, offset), offset - (text.rfind("\n", 0, offset) + 1)


def recipe_check(path: Path, place: Path) -> list[tuple[str, int, int]]:
    """Codes and places as the command finds them, from 0."""
    from compiler.lower import lower
    from spec.load import load

    spans = [(d.code, d.span) for d in lower(load(path)).diagnostics]
    return [(code, span.line - 1, span.column - 1) for code, span in spans if span is not None]


def linked(diagnostic: types.Diagnostic) -> str:
    """The line that a diagnostic's link leads to."""
    assert diagnostic.code_description is not None
    address, _, line = diagnostic.code_description.href.partition("#L")
    return Path(address.removeprefix("file://")).read_text(encoding="utf-8").split("\n")[int(line) - 1]


def inserted(text: str, item: types.CompletionItem) -> str:
    """The text with an item of a completion taken."""
    edit = item.text_edit
    assert isinstance(edit, types.TextEdit)
    lines = text.split("\n")
    start, end = edit.range.start, edit.range.end
    assert start.line == end.line
    lines[start.line] = (
        lines[start.line][: start.character] + edit.new_text + lines[start.line][end.character :]
    )
    return "\n".join(lines)
