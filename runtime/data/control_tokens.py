"""Find the control tokens in the texts of samples, and tell them from those that the chat template writes.

A tokenizer reads the text of a control token, such as <|im_end|>, as that token wherever it stands: in the
template's markup, and in what a user wrote. Control tokens are those that the tokenizer marks as special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .values import JsonObject

Span = tuple[int, int]
Data = tuple[Any, Any]
"""Messages, and tools."""


class ControlTokens:
    """Find control tokens in texts.

    Args:
        special: from `masking.special_tokens`.
    """

    def __init__(self, special: Sequence[str]) -> None:
        from tokenizers import AddedToken, Tokenizer, models

        # The library finds them as a model's tokenizer does, however many there are.
        self._finder = Tokenizer(models.WordLevel({"": 0}, ""))
        self._finder.add_special_tokens([AddedToken(token, normalized=False) for token in special])
        self._first = {token[0] for token in special if token}

    def find(self, text: str) -> list[Span]:
        """Return the places of the control tokens in a text, in order."""
        if self._first.isdisjoint(text):
            return []
        encoding = self._finder.encode(text, add_special_tokens=False)
        return [span for span, token in zip(encoding.offsets, encoding.ids, strict=True) if token]

    def held(self, data: Any) -> list[str]:
        """Return the control tokens in the texts of messages and tools, each once."""
        found = (text[slice(*span)] for text in _texts(data) for span in self.find(text))
        return list(dict.fromkeys(found))

    def places(self, text: str, data: Data, render: Callable[[Data], str]) -> list[Span] | None:
        """Return the places of the control tokens that the template writes in a rendering.

        The data is rendered a second time, with a mark before and after each control token in it.

        Args:
            text: the rendering.
            data: what is rendered.
            render: returns the rendering of changed data.

        Returns:
            The places; None if the rendering depends on the control tokens of the data.
        """
        mark = "zq"
        while mark in text or any(mark in part for part in _texts(data)):
            mark += "q"
        before, after = f"{mark}a", f"{mark}b"

        def marked(part: str) -> str:
            for start, end in reversed(self.find(part)):
                part = f"{part[:start]}{before}{part[start:end]}{after}{part[end:]}"
            return part

        made = render(_mapped(data, marked))
        if made.replace(before, "").replace(after, "") != text:
            return None
        places = []
        removed = last = 0
        for start, end in self.find(made):
            removed += (made.count(before, last, start) + made.count(after, last, start)) * len(before)
            last = end
            # A template may drop a token of the data and keep its mark.
            if not (made.endswith(before, 0, start) and made.startswith(after, end)):
                places.append((start - removed, end - removed))
        return places


def _texts(data: Any) -> Iterator[str]:
    """Yield the texts in a value, at every depth."""
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from _texts(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _texts(value)


def _mapped(data: Any, change: Callable[[str], str]) -> Any:
    """Return a value with each text in it changed."""
    if isinstance(data, str):
        return change(data)
    if isinstance(data, dict):
        made = {change(key): _mapped(value, change) for key, value in data.items()}
        if isinstance(data, JsonObject):
            made = JsonObject(made)
            made.text = change(data.text)
        return made
    if isinstance(data, list | tuple):
        return type(data)(_mapped(value, change) for value in data)
    return data
