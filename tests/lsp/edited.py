"""The edited recipes, and helpers for their places and diagnostics."""

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
    """Return the line and character of a part of a text."""
    offset = text.index(marked) + inside
    return text.count("\n", 0, offset), offset - (text.rfind("\n", 0, offset) + 1)


def recipe_check(path: Path, place: Path) -> list[tuple[str, int, int]]:
    """Return codes and places from the command, counted from 0."""
    from recipec.compiler.lower import lower
    from recipec.spec.load import load

    spans = [(d.code, d.span) for d in lower(load(path)).diagnostics]
    return [(code, span.line - 1, span.column - 1) for code, span in spans if span is not None]


def recipe_explain(path: Path, text: str, key: str) -> str:
    """Return the command's explanation of a key, for an unsaved text."""
    from recipec.compiler.explain.explain import explain
    from recipec.compiler.lower import lower
    from recipec.compiler.pages.text import write
    from recipec.spec.load import load

    loaded = load(path, text=text)
    program = lower(loaded).program
    assert program is not None
    return write(explain(program, loaded, key))


def mended(text: str, edit: types.TextEdit) -> str:
    """Return the text after an edit."""
    lines = text.splitlines(keepends=True)
    first, last = edit.range.start, edit.range.end
    begin = sum(map(len, lines[: first.line])) + first.character
    end = sum(map(len, lines[: last.line])) + last.character
    return text[:begin] + edit.new_text + text[end:]
