"""A container's log as text: decoded, in whole lines, with secrets hidden."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

LONGEST = 1 << 16
"""Most characters of an incomplete line that are held back until its end arrives."""


class Hider:
    """Replace secrets in a text with ***.

    Args:
        secrets: the secret values; empty ones are ignored.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        # Longer secrets first, because one secret may contain another.
        self._secrets = sorted({secret for secret in secrets if secret}, key=len, reverse=True)
        self.longest = max(map(len, self._secrets), default=0)

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


class Lines:
    """The text of one output stream of a container, decoded from pieces of any length."""

    def __init__(self, hide: Hider) -> None:
        self._hide = hide
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    def feed(self, data: bytes) -> str:
        """Return the lines that are complete after `data`, with their line ends; "" if there are none."""
        text = self._rest + self._decoder.decode(data)
        # Progress bars end a line with a carriage return. A trailing one may be the first half of CR LF.
        end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
        if len(text) - end > LONGEST:
            # If only part of a secret has arrived, it is in the text that is kept for later.
            text = self._hide(text)
            end = len(text) - self._hide.longest
        self._rest = text[end:]
        return self._hide(text[:end])

    def end(self) -> str:
        """Return the remaining text at the end of the stream, with a line end."""
        text = self._rest + self._decoder.decode(b"", final=True)
        self._rest = ""
        return self._hide(text) + ("\n" if text and not text.endswith(("\n", "\r")) else "")
