"""Write a table as Markdown with the standard library alone, for reports of a plain TPU VM.

`compiler/pages/markdown.py` writes the documents of commands, which this package cannot import.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Collection[str]) -> list[str]:
    """Return the lines of a table. Numbers are right-aligned.

    Args:
        rows: cells in Markdown; `cell` escapes text.
        words: titles of the columns that hold text.
    """
    rule = "|".join("---" if title in words else "---:" for title in head)
    return [_row(head), f"|{rule}|", *map(_row, rows)]


def cell(text: str) -> str:
    """Escape text so that a table's cell shows it unchanged."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return shown.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
