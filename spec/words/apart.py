"""Tables in which an entry has several words."""

from __future__ import annotations

from collections.abc import Mapping


def apart(table: Mapping[str, str]) -> dict[str, str]:
    """Split each key of a table into its words, each with the key's value."""
    return {word: meant for words, meant in table.items() for word in words.split()}


def named(table: Mapping[str, str]) -> dict[str, str]:
    """Invert a table of paths and their words: return the path of each word."""
    return {word: path for path, words in table.items() for word in words.split()}
