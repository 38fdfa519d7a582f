"""Roles of a row's columns: one table of names for all formats.

A format reads the columns of its roles. A required role is read from the column of its own name, or the one
that data.fields names; the other names in NAMES are only proposed. An optional role that data.fields does not
name is also read from a column of another name: the context of a question, or reasoning under "cot".

A column that no role reads is one of three kinds: a part of the sample (`Unread.parts`), other text
(`Unread.texts`), or a value such as an id, a score or a category (`Unread.values`). A text that the sample
repeats elsewhere is none of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

NAMES: dict[str, tuple[str, ...]] = {
    "messages": ("conversations", "conversation", "dialogue", "dialog", "turns", "chat"),
    "instruction": ("prompt", "question", "query", "problem", "task", "input"),
    "output": ("response", "completion", "answer", "attempt", "target", "solution"),
    "prompt": (
        *("question", "instruction", "query", "problem", "input", "task", "user", "source"),
        *("document", "article", "dialogue", "text"),
    ),
    "completion": (
        *("response", "output", "answer", "attempt", "solution", "generated_solution", "target"),
        *("assistant", "summary", "highlights"),
    ),
    "text": ("content", "document", "body"),
    "chosen": ("preferred", "accepted", "better", "positive"),
    "rejected": ("dispreferred", "declined", "worse", "negative"),
    "label": ("kto_tag", "desirable", "liked", "is_chosen", "thumbs_up"),
    "input": ("context",),
    "system": ("system_prompt", "system_message"),
    "history": (),
    "reasoning": (
        *("reasoning_content", "thinking", "thought", "thoughts", "cot", "chain_of_thought", "complex_cot"),
        *("reasoning_trace", "thinking_trajectory", "thinking_trajectories", "deepseek_reasoning"),
        "rationale",
    ),
    "tools": (),
}
"""Other names of a role's column in public data sets, in lower case, the most common first."""

READS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("chosen", "rejected"), ("prompt", "system", "tools")),
    "unpaired_preference": (("prompt", "completion", "label"), ("tools",)),
    "chat": (("messages",), ("system", "reasoning", "tools")),
    "instruction": (("instruction", "output"), ("input", "system", "history", "reasoning", "tools")),
    "prompt_completion": (("prompt", "completion"), ("tools",)),
    "text": (("text",), ()),
}
"""The required and the optional roles of each format, the most characteristic format first."""

VAGUE = ("source", "task", "user", "text")
"""Other names of a prompt that are also names of metadata, or of whole texts."""

RENAMED = ("input", "system", "reasoning")
"""Optional roles that are read from columns of other names."""

PARTS = {
    **dict.fromkeys(("system", *NAMES["system"]), "system"),
    **dict.fromkeys(("context", "input"), "input"),
    **{name: name for name in ("tools", "images", "image", "videos", "audios", "documents", "history")},
    "chat_template_kwargs": "chat_template_kwargs",
}
"""Columns that are a part of a sample in whatever format they are, with their role."""

REASONING = re.compile(
    r"((deepseek|gemini|qwen|qwq|claude|gpt|r1|model|assistant|generated|complex|long)_)*"
    r"(reasoning|thinking|thoughts?|cot|chain_of_thought)(_(content|trace|text|steps|trajectory|trajectories))*",
    re.I,
)
"""Columns that hold reasoning if their value is text. Others, such as a judge's, are only text."""

ANSWERS = frozenset(
    (
        "answer",
        "answers",
        "response",
        "responses",
        "output",
        "completion",
        "solution",
        "summary",
        "highlights",
    )
)
"""Columns whose value is text of the sample even if it is a word."""

SWITCHES = frozenset(
    ("on", "off", "yes", "no", "true", "false", "none", "null", "n/a", "low", "medium", "high")
)
"""Values of a column named reasoning that are not reasoning, but say whether a model reasons."""

WORDS = 6
"""Words from which on a value of an unknown column is text, rather than a category or a title."""

WIDE = 12
"""Characters from which on a value in a script without spaces is text."""

EMPTY: tuple[Any, ...] = (None, "", [], {}, "[]", "{}")


class Unread(NamedTuple):
    """Names of the columns that a format does not read.

    Attributes:
        parts: columns that hold a part of the sample.
        texts: columns with other text.
        values: columns with ids, numbers, categories and the like.
        taken: "COLUMN as ROLE" of the columns of other names that are read.
    """

    parts: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


@lru_cache(maxsize=256)
def _candidates(role: str, columns: tuple[str, ...], mapped: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the columns that a role may be read from, in order."""
    fields = dict(mapped)
    if role in fields:
        return (fields[role],)
    candidates = [role] if role in columns else []
    if role in RENAMED:
        lowered = {str(column).lower(): column for column in reversed(columns)}
        candidates += [lowered[name] for name in (role, *NAMES[role]) if name in lowered]
    return tuple(dict.fromkeys(name for name in candidates if name not in fields.values()))


def column_of(role: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> str | None:
    """Return the column that an optional role is read from; None if there is none, or all are blank.

    A column of another name is read only if it holds text; a list of one text counts as reasoning.
    """
    for name in _candidates(role, tuple(row), tuple(fields.items())):
        value = row.get(name)
        if _is_blank(value):
            continue
        if name in (role, fields.get(role)) and role != "reasoning":
            return name
        if isinstance(only(value), str) and not (role == "reasoning" and _is_switch(value)):
            return name
    return None


def only(value: Any) -> Any:
    """Return the item of a list of one, and any other value unchanged."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _is_switch(value: Any) -> bool:
    return isinstance(value, str) and value.strip().lower() in SWITCHES


def unread(
    format: str,
    row: Mapping[str, Any],
    fields: Mapping[str, str],
    read: Mapping[str, str],
    texts: Iterable[str],
) -> Unread:
    """Return the columns of a row that were not read, by kind.

    Args:
        fields: `data.fields`.
        read: the column that each role was read from.
        texts: all texts of the parsed sample.
    """
    taken = tuple(
        f"{read[role]} as {role}" for role in RENAMED if role in read and read[role] != fields.get(role, role)
    )
    names = set(read.values())
    rest = [
        (str(column) or '""', value)
        for column, value in row.items()
        if column is not None and column not in names and value not in EMPTY  # None: cells without a header
    ]
    if not rest:
        return _interned((), (), (), taken)
    pieces = dict.fromkeys(piece for piece in map(str.strip, texts) if piece)
    whole = "\n".join(pieces)
    kinds: dict[str, list[str]] = {"parts": [], "texts": [], "values": []}
    for column, value in rest:
        name, leaves = column.lower(), [leaf for leaf in map(str.strip, strings(value)) if leaf]
        if leaves and all(leaf in pieces for leaf in leaves):
            continue
        part = PARTS.get(name)
        text = any(map(is_text, leaves))
        if part is None and format != "preference" and text and REASONING.fullmatch(name):
            part = "reasoning"
        if part == "input" and not text:
            part = None
        if not (part or text or (leaves and name in ANSWERS)):
            kinds["values"].append(column)
        elif not (leaves and (all(stands(leaf, whole) for leaf in leaves) or _repeats(leaves, pieces))):
            kinds["parts" if part and part not in read else "texts"].append(column)
    return _interned(*map(tuple, kinds.values()), taken)


@lru_cache(maxsize=1024)
def _interned(*kinds: tuple[str, ...]) -> Unread:
    """Return one object for all rows that are alike, so that they are small when sent to a process."""
    return Unread(*kinds)


def together(*unread: Unread) -> Unread:
    """Return the names of several, each once."""
    kinds = zip(*dict.fromkeys(unread), strict=True)
    return _interned(*(tuple(dict.fromkeys(chain(*kind))) for kind in kinds))


NOTHING = Unread()

COLUMN = "column "


def marked(unread: Unread) -> Unread:
    """Return the names of columns with parts of the sample marked as columns, next to keys of messages."""
    if not unread.parts:
        return unread
    return _interned(tuple(f"{COLUMN}{name}" for name in unread.parts), *unread[1:])


def texts_of(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of messages."""
    return strings(list(messages))


def strings(value: Any) -> Iterator[str]:
    """Yield the strings within a value, at every depth, without keys and roles. JSON text is parsed."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            if item[:1] in "[{" and item[-1:] in "]}" and item:
                try:
                    pending.append(json.loads(item))
                    continue
                except (ValueError, RecursionError):
                    pass
            yield item
        elif isinstance(item, dict):
            pending += reversed([inner for key, inner in item.items() if key not in ("role", "from")])
        elif isinstance(item, (list, tuple)):
            pending += reversed(item)


def is_text(value: str) -> bool:
    """Return whether a string is text for a reader, rather than an id, a category, an address or a title."""
    value = value.strip()
    if "\n" in value or len(value.split(None, WORDS)) >= WORDS:
        return True
    return not value.isascii() and sum(char > "\u2e7f" for char in value) >= WIDE


def stands(leaf: str, whole: str) -> bool:
    """Return whether a string, or each of its lines, stands in a text: a word as a word."""
    leaf = leaf.strip()
    if leaf in whole:
        return is_text(leaf) or re.search(rf"(?<!\w){re.escape(leaf)}(?!\w)", whole) is not None
    if "\n" not in leaf:
        return False
    place = 0
    for line in leaf.split("\n"):
        line = line.strip()
        start = whole.find(line, place)
        if start < 0 and (start := whole.find(line)) < 0:
            return False
        place = start + len(line)
    return True


def _repeats(leaves: Collection[str], texts: Collection[str]) -> bool:
    """Return whether a column is another writing of the whole sample, such as Alpaca's `text`."""
    return any(is_text(leaf) and all(stands(text, leaf) for text in texts) for leaf in leaves)


def _is_blank(value: Any) -> bool:
    return value in EMPTY or (isinstance(value, str) and not value.strip())
