"""Markdown of a model card: commands, code spans, tables."""

from __future__ import annotations

import re
from collections.abc import Sequence

SHELL_LINE = 90
"""Characters of a command that stays on one line."""


def shell(command: str, options: Sequence[str]) -> str:
    """A block with a command, on one line where that is short."""
    line = " ".join((command, *options))
    text = line if len(line) <= SHELL_LINE else " \\\n    ".join((command, *options))
    return f"```sh\n{text}\n```"


def listed(names: Sequence[str]) -> str:
    """The names of what was trained, as code."""
    return ", ".join(map(code, names)) or "its projections"


def code(text: str) -> str:
    """A code span, which may itself hold backticks."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; bars in its cells are escaped."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)
