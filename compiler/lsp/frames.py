"""The messages on the server's stdin. pygls receives only messages of known length."""

from __future__ import annotations

import re
from typing import BinaryIO

from recipec.compiler.terminal import say

LARGEST = 1 << 26
"""Most bytes of a message. A recipe has at most 256 KiB, but an editor may send any YAML file."""
PIECE = 1 << 16
"""Most bytes of a line that are examined at once."""

# A message does not end with a line break, so the next header can follow a body of unknown length directly.
_LENGTH = re.compile(rb"(?i)(?<![\w-])Content-Length:[ \t]*([0-9]{1,18})[ \t]*\r?\n\Z")
_OVERLAP = 64


class Frames:
    """A stream of messages, without those whose end is unknown.

    If a length is missing, is not a number, or exceeds LARGEST, the messages up to the next valid length are
    lost, and a sentence on stderr says so.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lines: list[bytes] = []

    def readline(self) -> bytes:
        """Return the next line of a header, in the form that pygls expects; b"" at the end."""
        if not self._lines and (length := self._next()):
            self._lines = [b"\r\n", b"Content-Length: %d\r\n" % length]
        return self._lines.pop() if self._lines else b""

    def read(self, size: int) -> bytes:
        """Return a message; b"" if the stream ends within it."""
        body = self._stream.read(size)
        return body if len(body) == size else b""

    def _next(self) -> int | None:
        """Read a header; return the length it gives, or None at the end of the stream."""
        length, has_length, rest = 0, False, b""
        while piece := self._stream.readline(PIECE):
            line = rest + piece
            rest = b"" if piece.endswith(b"\n") else line[-_OVERLAP:]
            if match := _LENGTH.search(line):
                length = int(match[1])
            elif not rest and not line.strip():
                if 0 < length <= LARGEST:
                    return length
                if not has_length:
                    say("error: a message whose length is missing or cannot be taken is skipped")
                length, has_length = 0, True
        return None
