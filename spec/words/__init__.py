"""Words of other tools, keys and values, and what is written here in their place; and what a slip is."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

from recipec.spec.words.keys import KEYS
from recipec.spec.words.values import VALUES

NEAR = 0.75
"""Least similarity of a word to the one that it is taken for a misspelling of, by difflib's ratio."""


def slip(word: str, known: Iterable[str], near: float = NEAR) -> str | None:
    """The known word that a misspelled one surely stands for: few letters differ, and no digit."""
    digits = re.sub(r"\D", "", word)
    same = [one for one in known if re.sub(r"\D", "", one) == digits]
    found = get_close_matches(word, same, 1, near)
    return found[0] if found else None


def key(name: str, place: str = "") -> str | None:
    """What other tools' key is here: the path of a key, or a help (which holds blanks); None for neither.

    Args:
        name: in small letters, with `_` for `-`.
        place: the section that it stands in, "train.optimizer"; a key may mean another thing in each.
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
    """The help for a value of other tools', at a path without indices; None for no such word."""
    table = VALUES.get(path) or VALUES.get(re.sub(r"^data\.(train|eval)\.", "data.", path), {})
    return table.get(str(word).strip().lower().replace("-", "_"))
