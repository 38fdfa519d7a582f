"""Choose the parser of a `data.format`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .formats import AnyRow, parse_chat

Parser: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, str]], AnyRow]
"""(the row's origin, its columns by their names in the source, name used here -> name in the source) -> the
sample. Raises Malformed if the row does not match the format."""


def parser_of(format: str) -> Parser:
    """Return the parser of a format."""
    if format == "chat":
        return parse_chat
    if format == "text":
        from .texts import parse_text

        return parse_text
    if format == "preference":
        from .preferences import parse_preference

        return parse_preference
    if format == "instruction":
        from .instructions import parse_instruction

        return parse_instruction
    from .prompted import PARSERS

    return PARSERS[format]
