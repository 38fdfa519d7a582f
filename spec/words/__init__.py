"""Other tools' keys and values with what a recipe has instead, and the correction of misspelled words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from recipec.spec.words.tool_keys import KEYS
from recipec.spec.words.values import VALUES

NEAR = 0.75
"""Least similarity of a word to the one that it is taken for a misspelling of, by difflib's ratio."""


def slip(word: str, known: Iterable[str], near: float = NEAR) -> str | None:
    """Return the known word that a misspelled word stands for, or None. Digits must be the same."""
    digits = re.sub(r"\D", "", word)
    same = [word for word in known if re.sub(r"\D", "", word) == digits]
    matches = get_close_matches(word, same, 1, near)
    return matches[0] if matches else None


def key(name: str, place: str = "") -> str | None:
    """Return the path of the key that corresponds to another tool's key, or a help text, or None.

    A help text contains blanks, and a path does not.

    Args:
        name: the key in small letters, with `_` for `-`.
        place: the section of the key, such as "train.optimizer". A key may have another meaning in each.
    """
    bare = name.replace("_", "")
    return KEYS.get(f"{place}.{name}") or KEYS.get(name) or _BARE.get(f"{place}.{bare}") or _BARE.get(bare)


_BARE = {
    f"{place}{dot}{name.replace('_', '')}": meant
    for word, meant in KEYS.items()
    for place, dot, name in [word.rpartition(".")]
}
"""KEYS by their words without `_`: "batchsize"."""


def value(path: str, word: object) -> str | None:
    """Return the help text for another tool's value at a path without indices, or None."""
    table = VALUES.get(path) or VALUES.get(re.sub(r"^data\.(train|eval)\.", "data.", path), {})
    return table.get(str(word).strip().lower().replace("-", "_"))
