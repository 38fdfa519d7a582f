"""Advice on what to write in a recipe when a source's columns do not match its format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from .columns import COLUMN, NAMES, PARTS, READS, VAGUE

SHAPES = {
    "chat": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "instruction": '{"instruction": "...", "input": "...", "output": "..."}',
    "prompt_completion": '{"prompt": "...", "completion": "..."}, each text or a list of messages',
    "text": '{"text": "..."}',
    "preference": '{"prompt": ..., "chosen": ..., "rejected": ...}, each text or a list of messages',
    "unpaired_preference": '{"prompt": ..., "completion": ..., "label": true}, text or lists of messages',
}
"""A row of each format."""

WRITTEN = "give data.chat_template a template that writes it, or move it into the content with data.transform"
WITHOUT = "to train without it, remove it with data.transform, or set data.max_invalid_ratio: 1"


def leftover(format: str, fields: Mapping[str, str], unused: Iterable[str]) -> str:
    """Return the advice if rows have content that is not used, and nothing is left without it.

    Args:
        unused: names of that content.
    """
    names = list(unused)
    columns = [name.removeprefix(COLUMN) for name in names if name.startswith(COLUMN)]
    system = next((column for column in columns if PARTS.get(column.lower()) == "system"), None)
    if format == "chat" and system is not None and "system" not in fields:
        others = f"; {WRITTEN}" if len(names) > 1 else ""
        return f"data.fields: {{system: {system}}} makes it the first message{others}; {WITHOUT}"
    if format == "prompt_completion" and columns:
        named = {
            role: fields.get(name, name)
            for role, name in (("instruction", "prompt"), ("output", "completion"))
        }
        renamed = ", ".join(f"{role}: {column}" for role, column in named.items())
        return (
            f"data.format: instruction, with data.fields: {{{renamed}}}, reads a context, a system prompt, "
            f"reasoning and tools; or move it into the text with data.transform; {WITHOUT}"
        )
    if columns and len(columns) == len(names):
        return f"move it into a column that the format reads with data.transform; {WITHOUT}"
    return f"{WRITTEN}; {WITHOUT}"


FOLDED = {
    "instruction": """\
def fold(row):
    if row.get("system"):
        row["instruction"] = row.pop("system") + "\\n\\n" + row["instruction"]
    return row""",
    "chat": """\
def fold(row):
    for turns in row.values():
        first = turns[0] if isinstance(turns, list) and len(turns) > 1 else None
        if isinstance(first, dict) and {"system", "developer"} & {first.get("role"), first.get("from")}:
            said = "content" if "content" in first else "value"
            turns[:2] = [{**turns[1], said: first[said] + "\\n\\n" + turns[1][said]}]
    return row""",
}
"""Functions for data.transform that put a system message at the beginning of the user's."""


SILENCED = """\
def only(row):
    for turns in row.values():
        for turn in turns if isinstance(turns, list) else []:
            if isinstance(turn, dict) and turn.get("tool_calls"):
                turn["content"] = ""
    return row"""
"""A function for data.transform that removes the text of messages that call tools."""


def folding(format: str, fields: Mapping[str, str]) -> str:
    """Return the advice for a chat template that accepts no system message."""
    code = _named(FOLDED.get(format, FOLDED["chat"]), fields)
    return f'fold it into the user\'s turn with data.transform: "fold.py:fold", where fold.py is\n{code}'


def silencing(fields: Mapping[str, str]) -> str:
    """Return the advice for a chat template that writes the text of a message after its tool calls."""
    return (
        "give the template of the model's newest revision as data.chat_template, if it writes the text "
        'first; or train without such texts, with data.transform: "calls.py:only", where calls.py is\n'
        + _named(SILENCED, fields)
    )


def _named(code: str, fields: Mapping[str, str]) -> str:
    for name, column in fields.items():
        code = code.replace(f'"{name}"', f'"{column}"')
    return code


def advice(format: str, fields: Mapping[str, str], columns: Sequence[str], place: str = "data") -> str:
    """Return what would fit a source: a line for the recipe, or the expected form of a row.

    Args:
        fields: the current `data.fields`.
        columns: names in the source's first row; empty if that row could not be read.
        place: where the recipe gives the source's format and fields: "data", or data.train[0] of several.
    """
    needed = READS[format][0]
    missing = [name for name in needed if fields.get(name, name) not in columns]
    if format == "preference" and not missing and "prompt" not in fields:
        column = _synonym("prompt", [name for name in columns if name not in VAGUE])
        column = None if column == "prompt" else column
        return f"{place}.fields: {{prompt: {column}}}" if column else f"a row is {SHAPES[format]}"
    if format == "prompt_completion" and not missing and "label" in columns:
        from .prompted import LIKED

        return LIKED
    if not columns or not missing:
        return f"a row is {SHAPES[format]}"
    for other, (required, _) in READS.items():
        if other != format and all(name in columns for name in required):
            return f"{place}.format: {other}"
    found = {name: synonym for name in missing if (synonym := _synonym(name, columns))}
    if len(found) == len(missing) and len(set(found.values())) == len(found):
        named = {name: column for name, column in {**fields, **found}.items() if name != column}
        if not named:
            line = "remove data.fields" if place == "data" else f"{place}.fields: {{}}"
            return f"{line}: the columns have the format's own names"
        return f"{place}.fields: {{{', '.join(f'{name}: {column}' for name, column in named.items())}}}"
    if format == "chat":
        asked = advice("instruction", {}, columns, place)
        if asked.startswith(f"{place}.fields: "):
            return f"{place}.format: instruction, and {asked}"
    return (
        f"it has {', '.join(map(repr, columns))}: say with {place}.fields which column is which, as in "
        f"{{{', '.join(f'{name}: COLUMN' for name in missing)}}}"
    )


def _synonym(name: str, columns: Sequence[str]) -> str | None:
    lowered = {column.lower(): column for column in reversed(columns)}
    return next((lowered[word] for word in (name, *NAMES[name]) if word in lowered), None)
