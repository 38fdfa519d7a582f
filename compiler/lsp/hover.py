"""What an editor shows over a key or value: what the language says, and what it does in this recipe."""

from __future__ import annotations

import os

from compiler.lsp.analysis import Explanation
from compiler.lsp.completion import about
from compiler.lsp.outline import Outline, value_of
from spec.paths import join
from spec.structure import field_at

MOST_LINES = 30
"""Lines of what a value turns into that are shown; `recipe explain` prints them all."""


def target(outline: Outline, offset: int) -> tuple[str, tuple[int, int], bool] | None:
    """The recipe's path at a place of the text, its extent, and whether it is the key that stands there."""
    found = outline.at(offset)
    if found is None:
        return None
    entry, is_key = found
    return join(entry.path), (entry.key or entry.value) if is_key else entry.value, is_key


def text_of(outline: Outline, offset: int, explained: Explanation | None, file: str) -> str | None:
    """The Markdown to show at a place; None where there is nothing to say.

    Args:
        explained: what the recipe makes of it; None where that is not known.
        file: the document's path, absolute.
    """
    found = outline.at(offset)
    if found is None:
        return None
    entry, is_key = found
    info = field_at(entry.path)
    if info is None and explained is None:
        return None
    path = join(entry.path)
    value = f": `{explained.value}`" if explained and explained.value is not None else ""
    parts = [f"**{path}**{value}"]
    if info is not None:
        parts.append(about(info))
        extra = info.json_schema_extra
        words = extra.get("x-choices") if isinstance(extra, dict) else None
        if not is_key and isinstance(words, dict):
            word = str(value_of(outline.source[slice(*entry.value)]))
            parts += [f"`{word}`: {words[word]}"] if word in words else []
        elif isinstance(words, dict):
            parts.append("\n".join(f"- `{word}`: {meaning}" for word, meaning in words.items()))
    if explained is not None:
        parts += _made(explained, file)
    return "\n\n".join(parts)


def _made(explained: Explanation, file: str) -> list[str]:
    """Where a value comes from, and what it turns into."""
    out = []
    place = explained.place
    if explained.origin == "default":
        out.append("It has its default here.")
    elif place is not None and place.file != file:
        name = os.path.relpath(place.file, os.path.dirname(file))
        out.append(f"Given in {name}, line {place.line + 1}.")
    if explained.lines:
        shown = explained.lines[:MOST_LINES]
        more = len(explained.lines) - len(shown)
        if more:
            shown.append(f"... {more} more lines: recipe explain")
        out.append("```text\n" + "\n".join(line.replace("```", "'''") for line in shown) + "\n```")
    return out
