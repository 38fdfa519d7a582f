"""Write the text of a new recipe from its values: schema link, the language's order, comments."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipec.spec.diagnostics import printable
from recipec.spec.key_paths import split
from recipec.spec.language import Recipe
from recipec.spec.language.section import Section
from recipec.spec.recipe_text import LINE, block
from recipec.spec.schema import modeline

HEAD = modeline("recipe.schema.json")
"""The first line. Editors find the schema by it; `recipe port` writes the schema next to the recipe."""
WIDTH = 110
"""The last column of a comment on the same line as its key. Longer comments go above the key."""
ALIGNED = 44
"""The largest column at which the comments of a section are aligned."""
LONG = 32
"""The length from which a comment is not repeated on consecutive lines."""
BLOCKS = ("model", "mesh", "lora", "data", "train")
"""Sections that are always written as blocks, even if they are short."""

_SHOWN = r"[^\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ufeff]*"
_LITERAL = re.compile(rf"[!-~]{_SHOWN}\n{_SHOWN}\S\n?")
"""Matches texts of several lines that YAML's literal blocks preserve."""


@dataclass(frozen=True)
class Line:
    """A value of a new recipe, and its comment, "" for none."""

    value: Any
    comment: str = ""


Tree = dict[str, Any]
"""Maps keys to Lines, or to Trees."""


def recipe_text(lines: Mapping[str, Line], header: Sequence[str]) -> str:
    """Return the recipe's text."""
    tree = _unrepeated(_ordered(_tree(lines), Recipe), set())
    out = [HEAD, *(line for paragraph in header for line in _comment(paragraph, 0))]
    for number, (key, node) in enumerate(tree.items()):
        if number and isinstance(node, dict):
            out.append("")
        out += _entry(key, node, 0)
    return "\n".join(out) + "\n"


def flat_text(lines: Mapping[str, Line], header: Sequence[str]) -> str:
    """Return the text of keys without sections, as `recipe_text` does. PyYAML reads the same values."""
    head = [line for paragraph in header for line in _comment(paragraph, 0)]
    return "\n".join([*head, *_commented([*_unrepeated(lines, set()).items()], 0)]) + "\n"


def _tree(lines: Mapping[str, Line]) -> Tree:
    tree: Tree = {}
    for path, line in lines.items():
        *sections, last = split(path)
        node = tree
        for section in sections:
            below = node.setdefault(str(section), {})
            if isinstance(below, Line):
                raise ValueError(f"{path} lies in a value that was set whole")
            node = below
        if isinstance(node.get(str(last)), dict):
            raise ValueError(f"{path} is set whole, and in parts")
        node[str(last)] = line
    return tree


def _ordered(tree: Tree, kind: Any) -> Tree:
    """Put the keys into the language's order. Unknown keys follow, in their given order."""
    fields = getattr(kind, "model_fields", {})
    order = [*(name for name in fields if name in tree), *(name for name in tree if name not in fields)]
    return {
        name: _ordered(tree[name], _section_of(fields.get(name)))
        if isinstance(tree[name], dict)
        else tree[name]
        for name in order
    }


def _unrepeated(tree: Mapping[str, Any], seen: set[str]) -> Tree:
    """Leave out long sentences of comments that a comment above has. Consecutive equal comments stay."""
    out: Tree = {}
    before, kept = "", ""
    for key, node in tree.items():
        if not isinstance(node, Line):
            out[key] = _unrepeated(node, seen)
            continue
        sentences = node.comment.split("; ")
        if node.comment != before:
            kept = "; ".join(
                sentence for sentence in sentences if len(sentence) <= LONG or sentence not in seen
            )
        before = node.comment
        seen.update(sentences)
        out[key] = replace(node, comment=kept)
    return out


def _section_of(field: Any) -> Any:
    """Return the section that a field holds, or None for a plain value."""
    annotation = getattr(field, "annotation", None)
    for kind in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _entry(key: str, node: Any, indent: int) -> Iterator[str]:
    if isinstance(node, Line):
        yield from _commented([(key, node)], indent)
        return
    short = _whole(key, node, indent) if key not in BLOCKS else None
    if short is not None:
        yield short
        return
    yield f"{' ' * indent}{key}:"
    plain: list[tuple[str, Line]] = []
    for name, below in node.items():
        if isinstance(below, Line):
            plain.append((name, below))
            continue
        yield from _commented(plain, indent + 2)
        plain = []
        yield from _entry(name, below, indent + 2)
    yield from _commented(plain, indent + 2)


def _whole(key: str, node: Tree, indent: int) -> str | None:
    """Write a section on one line, or return None if it is too long or something in it has a comment."""
    values = _plain(node)
    if values is None:
        return None
    line, *more = block({key: values}, indent or 1)
    return None if more else line if indent else line[1:]


def _plain(node: Tree) -> Tree | None:
    """Return the values of a section, or None if something in it has a comment."""
    out: Tree = {}
    for key, below in node.items():
        value = _plain(below) if isinstance(below, dict) else None if below.comment else below.value
        if value is None and not (isinstance(below, Line) and below.value is None and not below.comment):
            return None
        out[key] = value
    return out


def _commented(lines: Sequence[tuple[str, Line]], indent: int) -> Iterator[str]:
    """Yield lines of plain values. Comments are aligned in one column, or above the key if they are long."""
    # A comment quotes values, so line breaks in it, in the sense of any YAML reader, are escaped.
    entries = [(key, replace(line, comment=printable(line.comment))) for key, line in _once(lines)]
    texts = [_lines(key, line.value, indent) for key, line in entries]
    on_line = [
        line.comment != "" and len(text) == 1 and len(text[0]) <= ALIGNED
        for text, (_, line) in zip(texts, entries, strict=True)
    ]
    column = (
        max((len(text[0]) for text, same_line in zip(texts, on_line, strict=True) if same_line), default=0)
        + 2
    )
    for text, (_, line), same_line in zip(texts, entries, on_line, strict=True):
        if same_line and column + 2 + len(line.comment) <= WIDTH and "\n" not in line.comment:
            yield f"{text[0]:<{column}}# {line.comment}"
            continue
        one_line = len(text) == 1 and "\n" not in line.comment
        if line.comment and one_line and len(text[0]) + 4 + len(line.comment) <= WIDTH:
            yield f"{text[0]}  # {line.comment}"
            continue
        yield from _comment(line.comment, indent) if line.comment else ()
        yield from text


def _lines(key: str, value: Any, indent: int) -> list[str]:
    """Return the lines of a plain value. A text of several lines becomes a block."""
    if not isinstance(value, str) or not _LITERAL.fullmatch(value):
        return list(block({key: value}, indent))
    sign = "|" if value.endswith("\n") else "|-"
    inner = [f"{' ' * (indent + 2)}{line}" if line else "" for line in value.removesuffix("\n").split("\n")]
    return [f"{' ' * indent}{key}: {sign}", *inner]


def _once(entries: Sequence[tuple[str, Line]]) -> Iterator[tuple[str, Line]]:
    """Yield the entries, and keep a long comment only once if consecutive lines have the same one."""
    before = ""
    for key, line in entries:
        again = line.comment == before and len(before) > LONG
        yield key, replace(line, comment="likewise") if again else line
        before = line.comment


def _comment(text: str, indent: int) -> list[str]:
    """Return the wrapped lines of a comment on lines of its own; "" gives an empty comment line."""
    if not text:
        return [" " * indent + "#"]
    lead = " " * indent + "# "
    return [
        line
        for part in printable(text).split("\n")
        for line in textwrap.wrap(
            part,
            LINE,
            initial_indent=lead,
            subsequent_indent=lead,
            break_long_words=False,
            break_on_hyphens=False,
        )
        or [lead.rstrip()]
    ]
