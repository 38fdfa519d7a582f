"""What an editor offers while a recipe is typed: keys of the section at the cursor, and values of a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lsprotocol import types
from pydantic.fields import FieldInfo

from compiler.lsp.cursor import Cursor, cursor_at
from compiler.lsp.outline import Path as RecipePath
from compiler.lsp.text import Text
from compiler.lsp.values import Around, Choice, choices, keys
from compiler.wording import flow
from spec.language import Section
from spec.structure import field_at, section_at, section_of


def complete(
    text: Text, position: tuple[int, int], folder: Path, raw: Mapping[str, Any]
) -> list[types.CompletionItem]:
    """What can be typed at a place.

    Args:
        position: line and character, from 0.
        folder: of the recipe.
        raw: the recipe as it was when it could last be read, with what it extends.
    """
    cursor = cursor_at(text.source, text.offset(position))
    if cursor is None:
        return []

    def get(*path: Any) -> Any:
        found = cursor.outline.get(*path)
        return found if found is not None else _in(raw, path)

    around = Around(folder, cursor.typed, get)
    names = tuple(part for part in cursor.path if isinstance(part, str))
    items: list[types.CompletionItem] = []
    if cursor.key:
        items += _keys(cursor, names, text, around)
    if cursor.value:
        items += _values(cursor, names, text, around)
    for number, item in enumerate(items):
        item.sort_text = f"{number:04}"
    return items


def _in(raw: Any, path: tuple[Any, ...]) -> Any:
    for part in path:
        raw = raw.get(part) if isinstance(raw, Mapping) else None
    return raw


def _is_list(path: RecipePath) -> bool:
    """Whether the path is of a list of sections, rather than of one of them."""
    info = field_at(path)
    return bool(path) and isinstance(path[-1], str) and info is not None and section_of(info.annotation)[1]


def _keys(
    cursor: Cursor, names: tuple[str, ...], text: Text, around: Around
) -> Iterator[types.CompletionItem]:
    """The keys of the section at the cursor that it does not have yet."""
    typed = cursor.outline.source
    present = {
        entry.path[-1]
        for entry in cursor.outline.below(cursor.path)
        if not (entry.key and _is_typed(typed[slice(*entry.key)]))
    }
    for choice in keys(names, around):
        if choice.value not in present:
            yield _item(
                choice.value, cursor, text, _after_key(cursor, " "), types.CompletionItemKind.Property, choice
            )
    section = section_at(cursor.path)
    if section is None or _is_list(cursor.path):
        return
    # What must be given comes first, then what is given most.
    fields = sorted(section.model_fields.items(), key=lambda pair: not pair[1].is_required())
    for name, info in fields:
        if name not in present:
            kind = types.CompletionItemKind.Module if _opens(info) else types.CompletionItemKind.Property
            shown = Choice(name, "required" if info.is_required() else "", about(info))
            yield _item(name, cursor, text, _after_key(cursor, _lead(info, cursor, text)), kind, shown)


def _is_typed(key: str) -> bool:
    from compiler.lsp.cursor import MARK

    return MARK in key


def _opens(info: FieldInfo) -> bool:
    return section_of(info.annotation)[0] is not None


def _lead(info: FieldInfo, cursor: Cursor, text: Text) -> str:
    """What follows a key's colon: a blank, or the line of a section's first key."""
    section, is_list = section_of(info.annotation)
    if section is None or cursor.flow:
        return " "
    start = text.source.rfind("\n", 0, cursor.start) + 1
    indent = " " * (cursor.start - start + 2)
    return f"\n{indent}- " if is_list else f"\n{indent}"


def _after_key(cursor: Cursor, lead: str) -> str:
    return "" if cursor.colon else f"{cursor.quote}:{lead}"


def _values(
    cursor: Cursor, names: tuple[str, ...], text: Text, around: Around
) -> Iterator[types.CompletionItem]:
    """The values of the key or item at the cursor."""
    info = field_at(cursor.path)
    is_list = info is not None and "list[" in str(info.annotation) and isinstance(cursor.path[-1], str)
    alone = cursor.key and not cursor.item
    for choice in choices(names, around):
        value = choice.value
        if is_list and not isinstance(value, list) and value is not None:
            # The whole list is typed: on a line of its own this is its first item, else its only one.
            shown = f"- {_written(value, cursor)}" if alone else f"[{_written(value, cursor)}]"
            yield _item(value, cursor, text, "", types.CompletionItemKind.Value, choice, shown)
        elif isinstance(value, list) and not is_list and info is not None and "list[" in str(info.annotation):
            continue
        elif not alone or not isinstance(value, dict | list):
            kind = types.CompletionItemKind.File if choice.detail in ("file", "folder") else None
            kind = kind or types.CompletionItemKind.EnumMember
            yield _item(value, cursor, text, "", kind, choice, _written(value, cursor))


def _written(value: Any, cursor: Cursor) -> str:
    """A value as it stands in the text; within quotes as it is."""
    if cursor.quote and isinstance(value, str):
        return value
    return flow(value)


def _item(
    value: Any,
    cursor: Cursor,
    text: Text,
    after: str,
    kind: types.CompletionItemKind,
    choice: Choice,
    written: str | None = None,
) -> types.CompletionItem:
    label = value if isinstance(value, str) else flow(value)
    shown = f"{cursor.lead if not after else ''}{label if written is None else written}{after}"
    start, end = (types.Position(*text.position(at)) for at in (cursor.start, cursor.end))
    again = types.Command("suggest", "editor.action.triggerSuggest") if choice.goes_on else None
    return types.CompletionItem(
        label=label,
        kind=kind,
        detail=choice.detail or None,
        documentation=types.MarkupContent(types.MarkupKind.Markdown, choice.about) if choice.about else None,
        text_edit=types.TextEdit(types.Range(start, end), shown),
        insert_text_mode=types.InsertTextMode.AsIs,
        filter_text=label,
        command=again,
    )


def about(info: FieldInfo) -> str:
    """What the language says of a key, as Markdown, with examples."""
    text = info.description or ""
    shown = [f"`{flow(value)}`" for value in info.examples or () if not isinstance(value, Section)]
    return f"{text}\n\nFor example {', '.join(shown)}." if shown else text
