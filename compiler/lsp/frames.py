"""The messages on the server's stdin, of which pygls sees only those whose length is known."""

from __future__ import annotations

import re
from typing import BinaryIO

from recipec.compiler.terminal import say

LARGEST = 1 << 26
"""Bytes of a message; a recipe has at most 256 KiB, though an editor may send any YAML file."""
PIECE = 1 << 16
"""Bytes of a line that are looked at together."""

# A message has no line break at its end: the next head can stand behind a body of unknown length.
_LENGTH = re.compile(rb"(?i)(?<![\w-])Content-Length:[ \t]*([0-9]{1,18})[ \t]*\r?\n\Z")
_OVERLAP = 64


class Frames:
    """A stream of messages, without those that cannot be told apart from what follows them.

    A length that is missing, is no number, or is more than LARGEST costs the messages up to the next length;
    a sentence on stderr says so.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []

    def readline(self) -> bytes:
        """The next line of a head, in the form that pygls takes; b"" at the end."""
        if not self._lines and (length := self._next()):
            self._lines = [b"\r\n", b"Content-Length: %d\r\n" % length]
        return self._lines.pop() if self._lines else b""

    def read(self, size: int) -> bytes:
        """A message; b"" where the stream ends within it."""
        body = self._stream.read(size)
        return body if len(body) == size else b""

    def _next(self) -> int | None:
        """Passes over a head; the length that it gives, or None at the end of the stream."""
        length, said, rest = 0, False, b""
        while piece := self._stream.readline(PIECE):
            line = rest + piece
            rest = b"" if piece.endswith(b"\n") else line[-_OVERLAP:]
            if found := _LENGTH.search(line):
                length = int(found[1])
            elif not rest and not line.strip():
                if 0 < length <= LARGEST:
                    return length
                if not said:
                    say("error: a message whose length is missing or cannot be taken is skipped")
                length, said = 0, True
        return None
