"""Tables whose entries hold for several words each."""

from __future__ import annotations

from collections.abc import Mapping


def apart(table: Mapping[str, str]) -> dict[str, str]:
    """A table whose keys are several words each, and whose values hold for every one of them."""
    return {word: meant for words, meant in table.items() for word in words.split()}


def named(table: Mapping[str, str]) -> dict[str, str]:
    """Paths by each of the words that stand for them."""
    return {word: path for path, words in table.items() for word in words.split()}
