"""A container's log as text: decoded, in whole lines, with secrets hidden."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

LONGEST = 1 << 16
"""Characters of a line that are kept back until its end comes."""


class Hider:
    """Puts *** in the place of secrets.

    Args:
        secrets: values; empty ones are passed over.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        # The longer first: one may hold another.
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self.longest = max(map(len, self._secrets), default=0)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class Lines:
    """The text of one stream of a container, of which bytes come in pieces of any length."""

    def __init__(self, hide: Hider) -> None:
        self._hide = hide
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> str:
        """The lines that are whole with `data`, with their ends; "" when there is none."""
        text = self._rest + self._decoder.decode(data)
        # A carriage return ends a line, too, as progress bars have it; the last may be half of CR LF.
        end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        if len(text) - end > LONGEST:
            # A secret of which the end is still to come lies in what is kept.
            text = self._hide(text)
            end = len(text) - self._hide.longest
        self._rest = text[end:]
        return self._hide(text[:end])

    def end(self) -> str:
        """What is left when the stream has ended, with a line's end."""
        text = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        return self._hide(text) + ("\n" if text and not text.endswith(("\n", "\r")) else "")
