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
        origin: its origin.
        pieces: stretches of its text, each with whether its tokens are targets.
        tokens, targets: their numbers.
        truncated: whether it was cut to max_length.
    """

    origin: str
    pieces: list[tuple[str, bool]]
    tokens: int
    targets: int
    truncated: bool


def show(encoder: Encoder, row: ParsedSample, source: int = 0) -> list[Shown]:
    """Return the samples of a row of a source as they are trained on: several for a text that is split, none
    if the row is left out.

    Raises:
        UserError: as `Encoder.encode`.
    """
    builder = Builder(encoder.coding, source)
    for _, encoded in encoder.encoded([row], source, builder.report):
        builder.add(row.origin, encoded)
        (samples, report) = builder.finish()
        return [
            Shown(
                samples.origin(number),
                _pieces(encoded.encoding, encoded.rendered.text, first, sample.targets.tolist()),
                len(sample.tokens),
                int(sample.targets.sum()),
                bool(report.truncated),
            )
            for number, (first, sample) in enumerate(zip(samples.offsets.tolist(), samples, strict=False))
        ]
    return []


def _pieces(encoding: Any, text: str, first: int, targets: Sequence[bool]) -> list[tuple[str, bool]]:
    """Split the text of tokens, from the token `first` on, into stretches of targets and of others; added
    tokens show their name."""
    out: list[tuple[str, bool]] = []
    before = encoding.token_to_chars(first - 1) if first else None
    shown = before[1] if before else 0  # characters
    names, added = encoding.tokens, encoding.special_tokens_mask
    for token, target in enumerate(targets, first):
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
