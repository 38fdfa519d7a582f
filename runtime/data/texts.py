"""Parse and encode plain text, of rows that no chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import UserError
from .formats import ParsedSample, required
from .masking import Rendered
from .report import SplitReport
from .values import text_of


def parse_text(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse plain text; see `formats.parse_chat`."""
    name = fields.get("text", "text")
    return ParsedSample(origin, completion=text_of(required(row, name), repr(name)))


def encode_texts(
    tokenizer: Any,
    rows: Sequence[tuple[int, ParsedSample]],
    eos: str | None,
    alone: bool,
    report: SplitReport,
) -> Iterator[tuple[int, Rendered, Any, tuple[int, int]]]:
    """Encode plain text with the tokenizer's own special tokens, then the end of sequence.

    Args:
        rows: with their numbers.
        eos: the token that ends a text.
        alone: whether only completions are targets.
        report: counts the rows that cannot be used.

    Returns:
        The number, the text, the encoding and the target range of each usable row.

    Raises:
        UserError: there is no such token.
    """
    wholes: list[tuple[int, ParsedSample, str]] = []
    for i, row in rows:
        completion = row.completion or ""
        if not completion.strip():
            report.empty.add(row.origin, "no text" if row.prompt is None else "no text in the completion")
            continue
        if eos is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, with which plain text has to end",
                'add "eos_token" to tokenizer_config.json, or use data.format: chat',
            )
        end = "" if completion.endswith(eos) else eos
        wholes.append((i, row, (row.prompt or "") + completion + end))
    encodings = tokenizer.encode_batch([text for *_, text in wholes])
    prompts = tokenizer.encode_batch([row.prompt or "" for _, row, _ in wholes] if alone else [])
    for n, ((i, row, text), encoding) in enumerate(zip(wholes, encodings, strict=True)):
        ids, start = encoding.ids, 0
        if alone:
            prompt = _without_added_end(prompts[n])
            start = len(prompt)
            if ids[:start] != prompt:
                report.inconsistent.add(row.origin, _not_a_prefix(prompt, encoding, text))
                continue
        yield i, Rendered(text, ()), encoding, (start, len(ids))


def _without_added_end(encoding: Any) -> list[int]:
    """Return a prompt's token ids without the tokens that the tokenizer appends to every text."""
    ids: list[int] = encoding.ids
    added = encoding.special_tokens_mask
    end = len(ids)
    while end and added[end - 1]:
        end -= 1
    return ids[:end]


def _not_a_prefix(prompt: list[int], encoding: Any, text: str) -> str:
    same = 0
    for ours, theirs in zip(prompt, encoding.ids, strict=False):
        if ours != theirs:
            break
        same += 1
    chars = encoding.token_to_chars(same) if same < len(encoding) else None
    where = f"{text[slice(*chars)]!r}" if chars else "its end"
    return (
        f"the prompt and the completion have a token in common, {where}: the prompt has to end where a "
        "token ends"
    )
