"""Conversations to tokens and targets."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from runtime.data.masking import Inconsistent, Refused, Rendered, Renderer, Span
from runtime.data.reading import Row
from runtime.data.report import SplitReport
from runtime.errors import UserError
from runtime.progress import Progress

CHUNK = 512
"""Conversations that are tokenised in one call; the tokenizer spreads a call over the cores."""


@dataclass(frozen=True)
class Sample:
    """One conversation, tokenised.

    Attributes:
        tokens: int32[n].
        targets: bool[n]; True where the loss is taken. Never the first token: nothing predicts it.
    """

    tokens: np.ndarray
    targets: np.ndarray


def make_samples(
    rows: Sequence[Row],
    renderer: Renderer,
    tokenizer: Any,
    max_length: int,
    overlong: str,
    report: SplitReport,
    vocabulary: int | None = None,
) -> list[Sample]:
    """Tokenises rows, in order, and leaves out what cannot be used.

    Args:
        max_length: tokens that a sample may have.
        overlong: what happens to a longer one: "drop", "truncate" or "error".
        report: is told of everything left out, and of the kept samples' tokens.
        vocabulary: embeddings of the model; a sample with another token id is left out.

    Raises:
        UserError: a sample is too long and `overlong` is "error".
    """
    tokenizer = _with_exact_offsets(tokenizer)
    samples: list[Sample] = []
    with Progress("tokenising", len(rows)) as progress:
        for start in range(0, len(rows), CHUNK):
            chunk: list[tuple[Row, Rendered]] = []
            for row in rows[start : start + CHUNK]:
                try:
                    chunk.append((row, renderer.render(row.messages)))
                except Refused as error:
                    report.malformed.add(row.origin, str(error))
                except Inconsistent as error:
                    report.inconsistent.add(row.origin, str(error))
            if chunk:
                encoded = tokenizer(
                    [rendered.text for _, rendered in chunk],
                    add_special_tokens=False,  # the template has written them
                    return_offsets_mapping=True,
                    return_attention_mask=False,
                    verbose=False,
                )
                for (row, rendered), ids, offsets in zip(
                    chunk, encoded["input_ids"], encoded["offset_mapping"], strict=True
                ):
                    sample = _sample(
                        row.origin, rendered, ids, offsets, max_length, overlong, report, vocabulary
                    )
                    if sample is not None:
                        samples.append(sample)
            progress.advance(min(CHUNK, len(rows) - start))
    report.kept = len(samples)
    report.tokens = sum(len(sample.tokens) for sample in samples)
    report.targets = sum(int(sample.targets.sum()) for sample in samples)
    report.longest = max((len(sample.tokens) for sample in samples), default=0)
    return samples


def target_mask(text: str, spans: Sequence[Span], offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens lie within the spans: bool[n].

    Args:
        offsets: each token's first character and the one after its last.

    Raises:
        Inconsistent: a token lies partly in a span.
    """
    covered = np.zeros(len(text) + 1, dtype=np.int64)
    for start, end in spans:
        covered[start + 1 : end + 1] = 1
    before = np.cumsum(covered)  # before[i]: covered characters among the first i
    edges = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    inside = before[edges[:, 1]] - before[edges[:, 0]]
    straddles = (inside > 0) & (inside < edges[:, 1] - edges[:, 0])
    if straddles.any():
        start, end = edges[int(straddles.argmax())]
        raise Inconsistent(f"the token of {text[start:end]!r} belongs partly to a turn's targets")
    return np.asarray(inside > 0)


def _sample(
    origin: str,
    rendered: Rendered,
    ids: list[int],
    offsets: list[tuple[int, int]],
    max_length: int,
    overlong: str,
    report: SplitReport,
    vocabulary: int | None,
) -> Sample | None:
    try:
        targets = target_mask(rendered.text, rendered.spans, offsets)
    except Inconsistent as error:
        report.inconsistent.add(origin, str(error))
        return None
    tokens = np.asarray(ids, dtype=np.int32)
    targets[:1] = False
    if vocabulary is not None and len(tokens) and tokens.max() >= vocabulary:
        report.malformed.add(origin, f"token id {tokens.max()}, and the model has {vocabulary} embeddings")
        return None
    cut = len(tokens) > max_length
    if cut:
        length = f"{len(tokens):,} tokens, and data.max_length is {max_length:,}"
        if overlong == "error":
            raise UserError(f"{origin} has {length}", "raise data.max_length, or set data.overlong to drop")
        if overlong == "drop":
            report.overlong.add(origin, length)
            return None
        tokens, targets = tokens[:max_length], targets[:max_length]
        if not targets.any():
            report.overlong.add(origin, f"{length}; no target is left when it is cut")
            return None
    if not targets.any():
        report.inconsistent.add(origin, "no token is a target")
        return None
    report.truncated += cut
    report.substituted += rendered.substituted
    report.unended += not rendered.ended
    return Sample(tokens, targets)


def _with_exact_offsets(tokenizer: Any) -> Any:
    """The tokenizer, or a copy whose offsets count the white space in a token.

    Byte-level tokenizers such as GPT-2's report " word" as the range of "word", which would hide that the
    token begins before the turn does.
    """
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or b'"trim_offsets":true' not in processor.__getstate__():
        return tokenizer
    from tokenizers import processors

    exact = copy.deepcopy(tokenizer)
    exact.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return exact
