"""Choose the parser of a `data.format`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from .formats import ParsedSample, parse_chat, parse_text

Parser: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, str]], ParsedSample]
"""(the row's origin, its columns by their names in the source, name used here -> name in the source) -> the
sample. Raises Malformed if the row does not match the format."""


def parser_of(format: str) -> Parser:
    """Return the parser of any format except preference."""
    if format == "chat":
        return parse_chat
    if format == "text":
        return parse_text
    if format == "instruction":
        from .instructions import parse_instruction

        return parse_instruction
    from .prompted import PARSERS

    return PARSERS[format]
