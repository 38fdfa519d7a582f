"""Tokenize control tokens in the data as ordinary text: `data.special_tokens: text`.

In the tokenizer, each control token gets another text, of the same length, that occurs in no data. A
rendering gets these texts where the template wrote a control token. So the tokenizer reads those as control
tokens, and the tokens' own texts in the data as ordinary text. Offsets stay those of the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import UserError
from .control_tokens import ControlTokens, Data
from .masking import Inconsistent

PRIVATE = 0xF0000
"""The first character of a plane of Unicode that is reserved for private use."""

MOST = 0xFFFD

FOREIGN = re.compile(f"[{chr(PRIVATE)}-{chr(PRIVATE + MOST)}]")
"""Characters that the data must not contain."""


def private_names(tokenizer: str, special: Sequence[str]) -> dict[str, str]:
    """Return another text for each control token of a tokenizer.json, as long as its own.

    Args:
        special: the texts of the tokenizer's special tokens.
    """
    entries = json.loads(tokenizer).get("added_tokens") or ()
    known = {entry["content"] for entry in entries if not entry.get("single_word")}
    return {
        token: chr(PRIVATE + i) * len(token) for i, token in enumerate(special[: MOST + 1]) if token in known
    }


def renamed(tokenizer: str, names: dict[str, str]) -> str:
    """Return a tokenizer.json in which control tokens have other texts, and the same ids.

    Raises:
        UserError: the ids do not stay the same.
    """
    from tokenizers import Tokenizer

    made = json.loads(tokenizer)
    ids: dict[str, int] = {}
    for entry in made.get("added_tokens") or ():
        if (token := entry["content"]) in names:
            ids[token], entry["content"] = entry["id"], names[token]
    model = made["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocabulary.items()}
    elif vocabulary:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):
        model["merges"] = [merge for merge in model["merges"] if not _makes(merge, names)]
    text = json.dumps(made, ensure_ascii=False)
    changed = Tokenizer.from_str(text)
    for token, index in ids.items():
        if changed.token_to_id(names[token]) != index:
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
        names: from `private_names`.
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
