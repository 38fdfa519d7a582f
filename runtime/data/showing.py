"""Show samples as they are trained on, for `recipe preview`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .encoding import Builder, Encoder
from .formats import ParsedSample


@dataclass(frozen=True)
class Shown:
    """A sample for people to read.

    Attributes:
        origin: the origin of its row.
        pieces: stretches of its text, each with whether its tokens are targets.
        tokens, targets: their numbers.
        truncated: whether it was cut to max_length.
    """

    origin: str
    pieces: list[tuple[str, bool]]
    tokens: int
    targets: int
    truncated: bool


def show(encoder: Encoder, row: ParsedSample, source: int = 0) -> Shown | None:
    """Return a row of a source in the form in which it is trained on; None if it is left out.

    Raises:
        UserError: as `Encoder.encode`.
    """
    builder = Builder(encoder.coding, source)
    for _, encoded in encoder.encoded([row], source, builder.report):
        builder.add(row.origin, encoded)
        (samples, report) = builder.finish()
        if report.kept:
            targets = samples[0].targets.tolist()
            pieces = _pieces(encoded.encoding, encoded.rendered.text, targets)
            return Shown(row.origin, pieces, report.tokens, report.targets, bool(report.truncated))
    return None


def _pieces(encoding: Any, text: str, targets: Sequence[bool]) -> list[tuple[str, bool]]:
    """Split the text of tokens into stretches of targets and of others; added tokens show their name."""
    out: list[tuple[str, bool]] = []
    shown = 0  # characters
    names, added = encoding.tokens, encoding.special_tokens_mask
    for token, target in enumerate(targets):
        chars = encoding.token_to_chars(token)
        if added[token] or chars is None:
            piece = names[token]
        else:
            # Includes characters that no token covers; the later bytes of one character give nothing.
            piece, shown = text[shown : max(shown, chars[1])], max(shown, chars[1])
        if out and out[-1][1] == target:
            out[-1] = (out[-1][0] + piece, target)
        elif piece:
            out.append((piece, target))
    return out
