"""Parse and encode plain text, of rows that no chat template renders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import UserError
from .columns import unread
from .formats import ParsedSample, required
from .masking import Rendered
from .report import SplitReport
from .values import text_of


def parse_text(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse plain text; see `formats.parse_chat`."""
    name = fields.get("text", "text")
    text = text_of(required(row, name), repr(name))
    return ParsedSample(origin, completion=text, unread=unread("text", row, fields, {"text": name}, (text,)))


def encode_texts(
    tokenizer: Any,
    rows: Sequence[tuple[int, ParsedSample]],
    ends: tuple[str, str] | None,
    alone: bool,
    report: SplitReport,
) -> Iterator[tuple[int, Rendered, Any, tuple[int, int]]]:
    """Encode plain text with the tokenizer's own special tokens, then the end of sequence.

    A text that already begins or ends with a token that the tokenizer adds gets no second one.

    Args:
        rows: with their numbers.
        ends: the token that ends a text, and its text in the tokenizer; None if there is none. If the texts
            differ, control tokens in the data are ordinary text.
        alone: whether only completions are targets.
        report: counts the rows that cannot be used.

    Returns:
        The number, the text, the encoding and the target range of each usable row.

    Raises:
        UserError: there is no such token.
    """
    begin, added_end = added_tokens(tokenizer)
    wholes: list[tuple[int, ParsedSample, str, str, str]] = []
    for i, row in rows:
        completion = row.completion or ""
        if not completion.strip():
            report.empty.add(row.origin, "no text" if row.prompt is None else "no text in the completion")
            continue
        if ends is None:
            raise UserError(
                "the tokenizer has no end-of-sequence token, with which plain text has to end",
                'add "eos_token" to tokenizer_config.json, or use data.format: chat',
            )
        eos, name = ends
        literal = eos != name  # the text of a control token in the data is not that token
        end = ("", "")
        if not added_end.endswith(eos):
            end = ("", "") if completion.endswith(eos) and not literal else ends
        elif not literal:
            completion = completion.removesuffix(eos)
        prompt = row.prompt or ""
        if not literal:
            prompt = without_start(prompt, begin)
        whole = prompt + completion if literal else without_start(prompt + completion, begin)
        wholes.append((i, row, prompt, whole + end[0], whole + end[1]))
    encodings = tokenizer.encode_batch([text for *_, text in wholes])
    prompts = tokenizer.encode_batch([prompt for *_, prompt, _, _ in wholes] if alone else [])
    for n, ((i, row, _, text, _), encoding) in enumerate(zip(wholes, encodings, strict=True)):
        ids, start = encoding.ids, 0
        if alone:
            asked = _without_added_end(prompts[n])
            start = len(asked)
            if ids[:start] != asked:
                report.inconsistent.add(row.origin, _not_a_prefix(asked, encoding, text))
                continue
        yield i, Rendered(text, ()), encoding, (start, len(ids))


def added_tokens(tokenizer: Any) -> tuple[str, str]:
    """Return the texts of the tokens that a tokenizer puts before and after every text."""
    encoding = tokenizer.encode("a")
    tokens, added = encoding.tokens, [bool(mark) for mark in encoding.special_tokens_mask]
    if False not in added:
        return "", ""
    start, end = added.index(False), len(added) - added[::-1].index(False)
    return "".join(tokens[:start]), "".join(tokens[end:])


def without_start(text: str, begin: str) -> str:
    """Return a text without the tokens that the tokenizer puts before it."""
    while begin and text.startswith(begin):
        text = text[len(begin) :]
    return text


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
