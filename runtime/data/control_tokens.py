"""Tell the control tokens in the texts of samples from those that the chat template writes.

A tokenizer reads the text of a control token, such as <|im_end|>, as that token wherever it stands: in
the template's markup, and in what a user wrote. Control tokens are those that the tokenizer marks as
special.

With `data.special_tokens: text` those of the data become ordinary text. In the tokenizer, each control
token gets another text, of the same length, that occurs in no data. A rendering gets these texts where
the template wrote a control token. So the tokenizer reads those as control tokens, and the tokens' own
texts in the data as ordinary text. Offsets stay those of the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import UserError
from .masking import Inconsistent
from .row_values import JsonObject
from .template import Span


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return the texts of a tokenizer's special tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added | set(tokenizer.all_special_tokens), key=lambda token: (-len(token), token)))


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
        tokens = (text[slice(*span)] for text in _texts(data) for span in self.find(text))
        return list(dict.fromkeys(tokens))

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

        rendering = render(_mapped(data, marked))
        if rendering.replace(before, "").replace(after, "") != text:
            return None
        places = []
        removed = last = 0
        for start, end in self.find(rendering):
            removed += (rendering.count(before, last, start) + rendering.count(after, last, start)) * len(
                before
            )
            last = end
            # A template may drop a token of the data and keep its mark.
            if not (rendering.endswith(before, 0, start) and rendering.startswith(after, end)):
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
        changed = {change(key): _mapped(value, change) for key, value in data.items()}
        if isinstance(data, JsonObject):
            changed = JsonObject(changed)
            changed.text = change(data.text)
        return changed
    if isinstance(data, list | tuple):
        return type(data)(_mapped(value, change) for value in data)
    return data


PRIVATE = 0xF0000
"""The first character of a plane of Unicode that is reserved for private use."""

MOST = 0xFFFD

FOREIGN = re.compile(f"[{chr(PRIVATE)}-{chr(PRIVATE + MOST)}]")
"""Characters that the data must not contain."""


def as_text(tokenizer: str, special: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Return a tokenizer.json that reads control tokens of the data as text, and its texts for these tokens.

    Args:
        special: from `special_tokens`.

    Raises:
        UserError: a control token cannot be told from text.
    """
    names = _private_names(tokenizer, special)
    return _renamed(tokenizer, names), names


def _private_names(tokenizer: str, special: Sequence[str]) -> dict[str, str]:
    """Return another text for each control token of a tokenizer.json, as long as its own."""
    entries = json.loads(tokenizer).get("added_tokens") or ()
    known = {entry["content"] for entry in entries if not entry.get("single_word")}
    return {
        token: chr(PRIVATE + i) * len(token) for i, token in enumerate(special[: MOST + 1]) if token in known
    }


def _renamed(tokenizer: str, names: dict[str, str]) -> str:
    """Return a tokenizer.json in which control tokens have other texts, and the same ids.

    Raises:
        UserError: the ids do not stay the same.
    """
    from tokenizers import Tokenizer

    content = json.loads(tokenizer)
    ids: dict[str, int] = {}
    for entry in content.get("added_tokens") or ():
        if (token := entry["content"]) in names:
            ids[token], entry["content"] = entry["id"], names[token]
    model = content["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    text = json.dumps(content, ensure_ascii=False)
    renamed_tokenizer = Tokenizer.from_str(text)
    for token, index in ids.items():
        if renamed_tokenizer.token_to_id(names[token]) != index:
            raise UserError(
                f"data.special_tokens is text, and the tokenizer's `{token}` cannot be told from text",
                "remove data.special_tokens, or take control tokens out of the data with data.transform",
            )
    return text


def _makes(merge: Any, names: dict[str, str]) -> bool:
    """Return whether a merge of a byte-pair encoding uses or makes a control token."""
    parts = merge.split(" ") if isinstance(merge, str) else merge
    return "".join(parts) in names or any(part in names for part in parts)


def check_foreign(text: str) -> None:
    """Refuse a text that contains the texts of control tokens in the tokenizer.

    Raises:
        Inconsistent
    """
    if FOREIGN.search(text):
        raise Inconsistent("a character of it is for private use, and marks control tokens")


class Literal:
    """Write renderings for a tokenizer whose control tokens have other texts.

    Args:
        control: finds the tokenizer's control tokens.
        names: from `as_text`.
    """

    def __init__(self, control: ControlTokens, names: Mapping[str, str]) -> None:
        self._control, self._names = control, names

    def written(self, text: str, data: Data, render: Callable[[Data], str]) -> str:
        """Return a rendering in which the control tokens of the template have their texts in the tokenizer.

        Args:
            text, data, render: as for `ControlTokens.places`.

        Raises:
            Inconsistent: the template's control tokens cannot be told from those of the data.
        """
        check_foreign(text)
        held = self._control.held(data)
        places = self._control.places(text, data, render) if held else self._control.find(text)
        if places is None:
            raise Inconsistent(f"the chat template depends on {', '.join(held)} in the texts of the sample")
        parts, end = [], 0
        for start, stop in places:
            token = text[start:stop]
            parts += [text[end:start], self._names.get(token, token)]
            end = stop
        return "".join([*parts, text[end:]])
