"""Find what a chat template does not write of a conversation.

Each string of a conversation is looked for in the rendering: as it is, without white space around it, as JSON
writes it, or line by line. This is linear in the text. Only what is not found is rendered again, with another
text in its place: if the rendering stays the same, the template does not write it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from .columns import is_text, stands, strings
from .messages import REASONING, Messages, parted, taught
from .template import ChatTemplate, TemplateRefusal, Tools

Path: TypeAlias = tuple[str | int, ...]
Changes: TypeAlias = dict[tuple["Path", str], str]
"""By a string's place and its text: the text to put there."""

MESSAGES, TOOLS = "messages", "tools"
MARKED = "reasoning"
"""The name of reasoning at the beginning of a content."""
THOUGHTS = {*REASONING, MARKED}
EARLIER = "reasoning of earlier turns"


@dataclass(frozen=True)
class Leaf:
    """A string of a conversation.

    Attributes:
        name: what a report calls it: a message's key, "tools" or "ROLE messages".
        path: its place in {"messages": [...], "tools": [...]}.
        text: the string, or a part of it.
        part: whether it is a part of the sample by its key; otherwise its key has no known meaning.
        sure: whether finding it in the rendering shows that it is written.
    """

    name: str
    path: Path
    text: str
    part: bool = True
    sure: bool = True


def unwritten(
    template: ChatTemplate, messages: Messages, tools: Tools, text: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what a rendering lacks: names of parts of the sample, and names of other text.

    Reasoning of earlier turns is other text if any reasoning is written: templates leave it out on purpose.

    Args:
        text: the conversation as the template renders it.
    """
    sample = {MESSAGES: messages, TOOLS: tools}

    def rendered(changes: Changes) -> str | None:
        changed = _changed(sample, (), changes)
        try:
            return template.render(changed[MESSAGES], changed[TOOLS])
        except TemplateRefusal:
            return None

    hidden: list[Leaf] = []
    seen: set[str] = set()
    place = 0
    for message in _leaves(messages):
        after = place
        for leaf in message:
            end = _end(leaf.text, text, place)
            if end is None or not leaf.sure:
                hidden.append(leaf)
            else:
                seen.add(leaf.name)
                after = max(after, end)
        place = after
    if tools:
        hidden += [leaf for leaf in _of_tools(tools) if _end(leaf.text, text, 0) is None]
    others: list[str] = []
    if THOUGHTS & seen and any(leaf.name in THOUGHTS for leaf in hidden):
        hidden, others = [leaf for leaf in hidden if leaf.name not in THOUGHTS], [EARLIER]
    missing = _missing(hidden, text, rendered) if hidden else []
    names = [leaf.name for leaf in missing if leaf.part]
    if tools and TOOLS not in names:
        with suppress(TemplateRefusal):
            names += [TOOLS] if template.render(messages, None) == text else []
    others += [leaf.name for leaf in missing if not leaf.part]
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(others))


def _leaves(messages: Messages) -> Iterator[list[Leaf]]:
    """Yield the strings of each message."""
    for i, message in enumerate(messages):
        at, known = (MESSAGES, i), taught(message)
        out: list[Leaf] = []
        content = message["content"]
        if message["role"] == "assistant":
            thoughts, rest = parted({"content": content})
            out += [Leaf(MARKED, (*at, "content"), thought) for thought in thoughts]
            content = rest["content"]
        for key in message:
            value = message[key]
            if key == "content":
                out.append(Leaf(f"{message['role']} messages", (*at, key), content))
            elif key == "tool_calls" and key in known:
                out += _of_calls(value, (*at, key))
            elif key in known or (key != "role" and any(map(is_text, strings(value)))):
                out += [Leaf(key, (*at, key, *path), leaf, key in known) for path, leaf in _walk(value)]
        yield [leaf for leaf in out if leaf.text.strip()]


def _of_calls(calls: Sequence[dict[str, Any]], at: Path) -> Iterator[Leaf]:
    """Yield the names and the arguments' strings of calls. A repeated name may stand for another call."""
    for n, call in enumerate(calls):
        function = call["function"]
        yield Leaf("tool_calls", (*at, n, "function", "name"), function["name"], sure=not n)
        for path, leaf in _walk(function.get("arguments")):
            yield Leaf("tool_calls", (*at, n, "function", "arguments", *path), leaf)


def _of_tools(tools: Sequence[dict[str, Any]]) -> Iterator[Leaf]:
    """Yield the names of tools and the texts of their schemas."""
    for n, tool in enumerate(tools):
        for path, leaf in _walk(tool):
            part = path in (("function", "name"), ("function", "description"))
            if part or path[-1] == "description":
                yield Leaf(TOOLS if part else "descriptions in tools", (TOOLS, n, *path), leaf, part)


def _walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the strings within a value, at every depth, with their places."""
    pending = [(path, value)]
    while pending:
        at, item = pending.pop()
        if isinstance(item, str):
            if item.strip():
                yield at, item
        elif isinstance(item, dict):
            pending += [((*at, key), inner) for key, inner in reversed(item.items())]
        elif isinstance(item, (list, tuple)):
            pending += [((*at, n), inner) for n, inner in reversed([*enumerate(item)])]


def _end(leaf: str, text: str, place: int) -> int | None:
    """Return where a string that stands in the text after a place ends; None if it does not stand there.

    Its lines may stand anywhere: then the place is returned.
    """
    leaf = leaf.strip()
    found = text.find(leaf, place)
    if found >= 0:
        return found + len(leaf)
    if '"' in leaf or "\\" in leaf or "\n" in leaf or not leaf.isascii():
        for form in (json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]):
            found = text.find(form, place)
            if found >= 0:
                return found + len(form)
    return place if "\n" in leaf and stands(leaf, text) else None


def _missing(hidden: Sequence[Leaf], text: str, rendered: Callable[[Changes], str | None]) -> list[Leaf]:
    """Return the strings that a rendering does not depend on, or of which it lacks whole lines."""

    def same(leaves: Sequence[Leaf]) -> bool:
        return rendered({(leaf.path, leaf.text): marker for leaf in leaves}) == text

    marker = "substitute"
    while marker in text:
        marker += "x"
    marks = {n: f"{marker}{n}x" for n in range(len(hidden))}
    whole = rendered({(leaf.path, leaf.text): marks[n] for n, leaf in enumerate(hidden)})
    written = "" if whole is None else whole.lower()
    absent = [leaf for n, leaf in enumerate(hidden) if marks[n] not in written]
    missing = absent
    if absent and not same(absent):
        missing = [leaf for leaf in absent if same([leaf])]
    # The template writes these in another form, or in part.
    for leaf in (leaf for leaf in hidden if leaf.sure and leaf not in absent and "\n" in leaf.text):
        lines = [line for line in leaf.text.split("\n") if line.strip() and line.strip() not in text]
        if lines and rendered({(leaf.path, line): marker for line in lines}) == text:
            missing = [*missing, leaf]
    return missing


def _changed(value: Any, path: Path, changes: Changes) -> Any:
    """Return a copy of a value with other texts in some places."""
    if not any(place[: len(path)] == path for place, _ in changes):
        return value
    if isinstance(value, dict):
        return {key: _changed(item, (*path, key), changes) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, (*path, n), changes) for n, item in enumerate(value)]
    for (place, old), new in changes.items():
        if place == path:
            value = value.replace(old, new, 1)
    return value
