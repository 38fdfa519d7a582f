"""The lines of a file that grows, of which only what is new is read."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.watch.places import Place, Status

PIECE = 1 << 22
"""Bytes that are read at a time."""
REMEMBERED = 256
"""Bytes before the place that was read to: other ones there mean that the file was written anew."""


class Tail:
    """A file that lines are appended to; a run that is resumed cuts it, and goes on.

    Args:
        file: its name in the place; it may appear later.

    Attributes:
        status: of the file when it was last looked at, None where there was none.
    """

    def __init__(self, place: Place, file: str) -> None:
        self.status: Status | None = None
        self._place, self._file = place, file
        self._identity: tuple[int, int] | None = None
        self._offset = 0
        self._rest = b""  # of a line that is not whole yet
        self._before = b""

    def look(self) -> bool:
        """Looks at the file; whether it has to be read from its beginning, for it is another one."""
        self.status = self._place.status(self._file)
        if self.status is None:
            return self._forget()
        other = self._identity not in (None, self.status.identity) or self.status.size < self._offset
        self._identity = self.status.identity
        if not other and self._before and self.status.size > self._offset:
            start = self._offset - len(self._before)
            other = self._place.read(self._file, start, self._offset) != self._before
        return self._forget() if other else False

    def lines(self) -> Iterator[bytes]:
        """The whole lines from where the last reading ended, up to the size that was looked at."""
        size = self.status.size if self.status is not None else 0
        while self._offset < size:
            piece = self._place.read(self._file, self._offset, min(size, self._offset + PIECE))
            if not piece:
                return
            self._offset += len(piece)
            self._before = (self._before + piece)[-REMEMBERED:]
            *whole, self._rest = (self._rest + piece).split(b"\n")
            yield from whole

    def _forget(self) -> bool:
        seen = self._offset > 0
        self._offset, self._rest, self._before = 0, b"", b""
        return seen
