"""The length of a row whose tokens are dealt to devices (context.py)."""

from __future__ import annotations

PIECE = 128
"""A piece of a dealt row is a multiple of this many tokens: the smallest block of splash attention."""


def dealt_length(length: int, count: int) -> int:
    """Return the tokens of a row that is dealt to `count` devices (context.py): two whole pieces for each."""
    return length if count == 1 else length + -length % (2 * count * PIECE)
