"""Take the pictures out of a row, and leave a mark in its text where each is seen.

Data sets write pictures in these ways, which may be mixed in one row:
- parts of a message's content: {"type": "image"} with "image", "path", "url" or "base64", or without any of
  them and then with the next picture of the row's column; {"type": "image_url", "image_url": {"url": ...}};
- `<image>` in a text, for the next picture of the column, as LLaMA-Factory writes it;
- a column alone: "images", "image", or imagefolder's "file_name". Its pictures stand before the text of the
  first user message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .columns import strings
from .messages import PICTURES
from .row_values import Malformed, parsed

MARK = "\ufdd0"
"""Stands for a picture in the text of a message. Unicode gives this code point to no character."""

COLUMNS = ("images", "image", "image_path", "image_paths")
"""Columns of pictures, in the order of preference; data.fields may name another one as images."""

IN_METADATA = ("file_name", "file_names")
"""Columns of pictures in the metadata file of a folder of pictures (`datasets`' imagefolder)."""

PLACE = "<image>"
"""LLaMA-Factory's place of a picture in a text."""

NOWHERE = "no message of a user to put it before"
"""The end of the reason if a row has pictures in a column, and no text that asks about them."""

SOURCES = ("image", "image_url", "path", "url", "base64", "bytes")
"""Keys of a part that hold its picture."""

CONVERSATIONS = ("messages", "conversations", "prompt", "completion")
TEXTS = ("system", "history", "instruction", "input", "prompt", "output", "completion", "text")
"""Roles of columns with messages, and with texts, in the order in which a sample has them."""


def refuse_pictures(row: Mapping[str, Any], fields: Mapping[str, str]) -> None:
    """Refuse a row that has pictures in a column, and `<image>` in its texts for them.

    Raises:
        Malformed
    """
    try:
        column, values = _column(row, fields, COLUMNS)
    except Malformed:
        return
    if column is not None and values and _has_places(row, column):
        raise Malformed("it holds pictures, and the recipe has no data.images: {}")


def _has_places(row: Mapping[str, Any], column: str) -> bool:
    return any(PLACE in text for name, value in row.items() if name != column for text in strings(value))


def in_column(
    row: Mapping[str, Any], fields: Mapping[str, str], metadata: bool = False
) -> tuple[str | None, list[Any]]:
    """Return the name of a row's column of pictures, None without one, and its pictures; they may be
    anything.

    Raises:
        Malformed: the column is no list that can be read.
    """
    return _column(row, fields, _usual(metadata))


def _usual(metadata: bool) -> tuple[str, ...]:
    return (*COLUMNS, *IN_METADATA) if metadata else COLUMNS


def taken(
    row: Mapping[str, Any], fields: Mapping[str, str], metadata: bool = False
) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """Return a row with marks instead of pictures, and the pictures in the order of the marks.

    Args:
        row: columns by their names in the source.
        fields: name used here -> name in the source.
        metadata: whether the row is of the metadata file of a folder of pictures.

    Returns:
        The row, and of each picture its name in the row and its value.

    Raises:
        Malformed: the places and the pictures differ in number, or a part of a message is not understood.
    """
    usual = _usual(metadata)
    column, values = _column(row, fields, usual)
    work = _Work(column, values, any(name in row for name in _names(fields, usual)))
    changed = dict(row)
    conversations = [name for role in CONVERSATIONS if (name := fields.get(role, role)) in row]
    contents = {name: _messages(row[name], name) for name in conversations}
    contents = {name: value for name, value in contents.items() if value is not None}
    work.parts = any(
        _is_picture(part)
        for messages in contents.values()
        for message in messages or ()
        for part in _parts(message, fields)
    )
    for name, messages in contents.items():
        new = [_message(message, fields, work, i) for i, message in enumerate(messages or ())]
        if work.changed:
            changed[name] = new
    for role in TEXTS:
        name = fields.get(role, role)
        if name in row and name not in contents and work.marked:
            changed[name] = _replaced(row[name], work)
    if values and not work.places:
        if work.pictures:
            raise Malformed(
                f"{_counted(len(work.pictures), 'picture')} in parts of messages, and {len(values)} more in "
                f"{column!r}"
            )
        _put_first(changed, fields, contents, len(values), work)
    if values and not work.places:
        raise Malformed(f"{_counted(len(values), 'picture')}, and {NOWHERE}")
    if work.left:
        number, pictures = work.places, len(values)
        raise Malformed(f"{_counted(number, 'place')} of pictures, and {_counted(pictures, 'picture')}")
    if column is not None:
        del changed[column]
    return (changed, work.pictures) if work.pictures else (dict(row), [])


@dataclass
class _Work:
    """The pictures of a row as they are taken out.

    Attributes:
        column, values: the column of pictures, None without one, and its pictures.
        has_column: whether the row has a column of pictures; it may be empty.
        parts: whether parts of messages say where pictures are, so that `<image>` is text.
        places: number of places in the texts for pictures of the column.
        pictures: those with a place, in order.
        changed: whether a message was changed.
    """

    column: str | None
    values: list[Any]
    has_column: bool = False
    parts: bool = False
    places: int = 0
    pictures: list[tuple[str, Any]] = field(default_factory=list)
    changed: bool = False

    @property
    def marked(self) -> bool:
        """Return whether `<image>` in a text is a place of a picture."""
        return self.has_column and not self.parts

    @property
    def left(self) -> bool:
        return self.places != len(self.values)

    def next(self, number: Any = None) -> str:
        """Take a picture of the column, and return its mark.

        Args:
            number: of the picture; the next one if it is no number.
        """
        if not isinstance(number, int) or not 0 <= number < len(self.values):
            number = self.places
        if number < len(self.values):
            self.pictures.append((f"picture {number} of {self.column!r}", self.values[number]))
        self.places += 1
        self.changed = True
        return MARK

    def own(self, what: str, value: Any) -> str:
        """Take a picture that stands in the message itself, and return its mark."""
        self.pictures.append((what, value))
        self.changed = True
        return MARK


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _column(
    row: Mapping[str, Any], fields: Mapping[str, str], usual: tuple[str, ...]
) -> tuple[str | None, list[Any]]:
    """Return the column of a row's pictures, and the pictures."""
    for name in _names(fields, usual):
        value = row.get(name)
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = parsed(value, repr(name))
        if value in (None, "", [], {}):
            continue
        values = value if isinstance(value, list | tuple) else [value]
        return name, [item for item in values if item is not None]
    return None, []


def _names(fields: Mapping[str, str], usual: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the columns that may have pictures."""
    return (fields["images"],) if "images" in fields else usual


def _messages(value: Any, name: str) -> list[Any] | None:
    """Return a column's messages; None if it holds something else."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parsed(value, repr(name))
    return value if isinstance(value, list) else None


def _content_key(message: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    if "content" in fields:
        return fields["content"]
    return "content" if message.get("content") is not None or message.get("value") is None else "value"


def _parts(message: Any, fields: Mapping[str, str]) -> Iterator[Any]:
    if isinstance(message, Mapping):
        content = message.get(_content_key(message, fields))
        if isinstance(content, list):
            yield from content


def _is_picture(part: Any) -> bool:
    if not isinstance(part, Mapping):
        return False
    name = part.get("type")
    return name in PICTURES or (name is None and part.get("text") is None and part.get("image") is not None)


def _message(message: Any, fields: Mapping[str, str], work: _Work, number: int) -> Any:
    if not isinstance(message, Mapping):
        return message
    key = _content_key(message, fields)
    content = message.get(key)
    before = len(work.pictures), work.places
    if isinstance(content, list):
        new: Any = [_part(part, f"part {i} of message {number}", work) for i, part in enumerate(content)]
    else:
        new = _replaced(content, work) if work.marked else _checked(content)
    if (len(work.pictures), work.places) == before:
        return message
    role = message.get(fields.get("role", "role"), message.get("from"))
    if role in ("assistant", "gpt", "model", "bot"):
        raise Malformed(f"message {number} ({role}) holds a picture, and the model writes only text")
    return {**message, key: new}


def _part(part: Any, what: str, work: _Work) -> Any:
    if not _is_picture(part):
        if isinstance(part, Mapping) and isinstance(part.get("text"), str):
            _checked(part["text"])
        return part
    value = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    if value is None and not work.has_column:
        raise Malformed(f"{what} names no picture, and the row has no column of pictures")
    if value is None:
        return {"type": "text", "text": work.next(part.get("index"))}
    if part.get("base64") is not None:
        value = {"base64": part["base64"]}
    return {"type": "text", "text": work.own(what, value)}


def _checked(text: Any) -> Any:
    if isinstance(text, str) and MARK in text:
        raise Malformed("a text holds U+FDD0, which is no character")
    return text


def _replaced(value: Any, work: _Work) -> Any:
    """Return a text, or the texts in lists, with a mark for each `<image>`."""
    if isinstance(value, list):
        return [_replaced(item, work) for item in value]
    if not isinstance(value, str):
        return value
    first, *rest = _checked(value).split(PLACE)
    return first + "".join(work.next() + text for text in rest)


def _put_first(
    row: dict[str, Any],
    fields: Mapping[str, str],
    contents: Mapping[str, list[Any] | None],
    count: int,
    work: _Work,
) -> None:
    """Put the pictures of a column before the text of the first user message."""

    def marks() -> str:
        return "".join(work.next() for _ in range(count))

    for name in contents:
        for i, message in enumerate(row[name] if isinstance(row[name], list) else contents[name] or ()):
            if not isinstance(message, Mapping):
                continue
            role = message.get(fields.get("role", "role"), message.get("from"))
            if role in ("user", "human"):
                key = _content_key(message, fields)
                content = message.get(key)
                text = marks()
                new = (
                    [{"type": "text", "text": text}, *content]
                    if isinstance(content, list)
                    else text + (content if isinstance(content, str) else "")
                )
                messages = [*(row[name] if isinstance(row[name], list) else contents[name] or ())]
                messages[i] = {**message, key: new}
                row[name] = messages
                return
    for role in ("instruction",):
        name = fields.get(role, role)
        if isinstance(row.get(name), str):
            row[name] = marks() + row[name]
            return


def with_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as a chat template of a model that reads pictures takes them: a content with marks
    becomes a list of parts."""
    if not any(MARK in message["content"] for message in messages if isinstance(message.get("content"), str)):
        return messages
    return [
        {**message, "content": _of_marks(message["content"])}
        if isinstance(message.get("content"), str) and MARK in message["content"]
        else message
        for message in messages
    ]


def _of_marks(content: str) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(MARK)):
        if number:
            parts.append({"type": "image"})
        if text:
            parts.append({"type": "text", "text": text})
    return parts
