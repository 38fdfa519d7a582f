"""Turn rows into tokens and targets: the work of each tokenizing process."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..settings import DataSettings, Source
from .columns import Unread, together
from .formats import AnyRow, ParsedSample
from .masking import Blank, Inconsistent, Rendered, Renderer, special_tokens
from .report import SplitReport
from .samples import Samples
from .template import ChatTemplate, Span, TemplateRefusal

if TYPE_CHECKING:
    from .reasoning import Reasoning


@dataclass(frozen=True)
class Coding:
    """How rows become tokens, as plain values: they are sent to other processes and hashed into cache keys.

    Attributes:
        tokenizer: tokenizer.json's text, as the tokenizers library reads it.
        templates: the chat template of each source, None where there is none.
        variables: what the template gets in addition to the messages: bos_token and so on.
        special: from `masking.special_tokens`.
        eos: the token that ends plain text, None where the tokenizer has none.
        loss_on: `data.loss_on` of each source.
        max_length, overlong: of the recipe's `data` section.
        vocabulary: number of the model's embeddings; samples with larger ids are left out. None: unchecked.
        reasoning: of the recipe's `data` section.
    """

    tokenizer: str
    templates: tuple[str | None, ...]
    variables: dict[str, str]
    special: tuple[str, ...]
    eos: str | None
    loss_on: tuple[str | Sequence[str], ...]
    max_length: int
    overlong: str
    vocabulary: int | None
    reasoning: str | None = None


def coding(
    tokenizer: Any,
    templates: str | Sequence[str | None] | None,
    data: DataSettings,
    vocabulary: int | None,
    sources: Sequence[str | Source] = (),
) -> Coding:
    """Build a Coding from transformers' fast tokenizer and the settings.

    Args:
        templates: the chat template of each source, or one for all.
        sources: the sources of the rows; if empty, one source without settings of its own.
    """
    losses = tuple(data.of(source).loss_on for source in sources) or (data.loss_on,)
    return Coding(
        _with_exact_offsets(tokenizer.backend_tokenizer.to_str()),
        (templates,) * len(losses) if isinstance(templates, str | None) else tuple(templates),
        dict(tokenizer.special_tokens_map),
        special_tokens(tokenizer),
        tokenizer.eos_token,
        losses,
        data.max_length,
        data.overlong,
        vocabulary,
        data.reasoning,
    )


class Encoder:
    """Encodes rows in chunks.

    Raises:
        UserError: the chat template is not valid Jinja.
    """

    def __init__(self, coding: Coding) -> None:
        from tokenizers import Tokenizer

        self.coding = coding
        self._tokenizer = Tokenizer.from_str(coding.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        made = {text: self._compiled(text) for text in coding.templates if text is not None}
        self._reasonings = [None if text is None else made[text][1] for text in coding.templates]
        self._renderers = [
            None if text is None else Renderer(made[text][0], coding.special, loss_on)
            for text, loss_on in zip(coding.templates, coding.loss_on, strict=True)
        ]

    def _compiled(self, text: str) -> tuple[ChatTemplate, Reasoning | None]:
        coding = self.coding
        if coding.reasoning is None:
            return ChatTemplate(text, coding.variables), None
        from .reasoning import Reasoning

        reasoning = Reasoning(coding.reasoning, text, coding.variables)
        return reasoning.template, reasoning

    def encode(self, rows: Sequence[AnyRow], source: int) -> tuple[Samples, SplitReport]:
        """Encode rows of one source, in order; return their samples and what was left out.

        Both answers of a preference are kept, one after the other, or neither.

        Raises:
            UserError: a sample is too long and `overlong` is "error", or a row needs a chat template or an
                end-of-sequence token and there is none.
        """
        builder = Builder(self.coding, source)
        plain = [row for row in rows if isinstance(row, ParsedSample)]
        for i, encoded in self.encoded(plain, source, builder.report):
            builder.add(plain[i].origin, encoded)
        pairs = [(row.origin, *row.answers()) for row in rows if not isinstance(row, ParsedSample)]
        # An unusable answer is counted once for its pair.
        left = list(self.encoded([chosen for _, chosen, _ in pairs], source, builder.report))
        rejected = dict(self.encoded([pairs[i][2] for i, _ in left], source, builder.report))
        for n, (i, chosen) in enumerate(left):
            if n in rejected:
                builder.add(pairs[i][0], chosen, rejected[n])
        return builder.finish()

    def encoded(
        self, rows: Sequence[ParsedSample], source: int, report: SplitReport
    ) -> Iterator[tuple[int, Encoded]]:
        """Return the usable rows, by their number."""
        encoded: dict[int, Encoded] = {}
        chats = [(i, row) for i, row in enumerate(rows) if row.messages is not None]
        texts = [(i, row) for i, row in enumerate(rows) if row.messages is None]
        self._encode_chats(chats, source, report, encoded)
        if texts:
            from .texts import encode_texts

            alone = self.coding.loss_on[source] == "completion"
            for i, text, encoding, span in encode_texts(
                self._tokenizer, texts, self.coding.eos, alone, report
            ):
                row = rows[i]
                encoded[i] = Encoded(text, encoding, [span], row.unread, row.liked)
        return ((i, encoded[i]) for i in sorted(encoded))

    def _encode_chats(
        self,
        rows: Sequence[tuple[int, ParsedSample]],
        source: int,
        report: SplitReport,
        encoded: dict[int, Encoded],
    ) -> None:
        rendered: list[tuple[int, Rendered]] = []
        for i, row in rows:
            renderer = self._renderers[source]
            if renderer is None:
                raise UserError(
                    f"{row.origin} is a conversation, and the tokenizer has no chat template",
                    "set data.chat_template to a template's path or text",
                )
            try:
                rendered.append((i, self._render(row, renderer, self._reasonings[source])))
            except (TemplateRefusal, Inconsistent, Blank) as error:
                getattr(report, error.kind).add(row.origin, str(error))
        # The template has already written the special tokens.
        encodings = self._tokenizer.encode_batch(
            [item.text for _, item in rendered], add_special_tokens=False
        )
        origins = dict(rows)
        for (i, item), encoding in zip(rendered, encodings, strict=True):
            try:
                ranges = [token_range(encoding, span, item.text) for span in item.spans]
            except Inconsistent as error:
                report.inconsistent.add(origins[i].origin, str(error))
                continue
            row = origins[i]
            encoded[i] = Encoded(
                item, encoding, ranges, together(row.unread, Unread(item.unused, item.texts)), row.liked
            )

    def _render(self, row: ParsedSample, renderer: Renderer, reasoning: Reasoning | None) -> Rendered:
        if reasoning is not None:
            return reasoning.render(renderer, row)
        assert row.messages is not None
        return renderer.render(row.messages, row.tools, row.completion_start)


@dataclass(frozen=True)
class Encoded:
    """A row's text and tokens, its target ranges, and what of the row is not in them."""

    rendered: Rendered
    encoding: Any
    ranges: list[tuple[int, int]]
    unread: Unread
    liked: bool | None


class Builder:
    """Gathers samples and counts."""

    def __init__(self, coding: Coding, source: int) -> None:
        self.report = SplitReport()
        self._coding, self._source = coding, source
        self._tokens = array("i")
        self._ranges: list[tuple[int, int]] = []
        self._lengths: list[int] = []
        self._origins: list[bytes] = []
        self._liked: list[bool] = []

    def add(self, origin: str, *rows: Encoded) -> None:
        """Add the sample of a row, or those of a pair; count the row if one of them is unusable."""
        fitted = []
        for row in rows:
            sample = self._fit(origin, row)
            if sample is None:
                return
            fitted.append(sample)
        self.report.kept += 1
        self.report.add_unread(origin, together(*(row.unread for row in rows)))
        self.report.add_adapted(name for row in rows for name in row.rendered.adapted)
        self.report.truncated += any(cut for _, _, cut in fitted)
        self.report.substituted += any(row.rendered.substituted for row in rows)
        self.report.unended += not all(row.rendered.ended for row in rows)
        for row, (ids, ranges, _) in zip(rows, fitted, strict=True):
            base = len(self._tokens)
            self._tokens.extend(ids)
            self._ranges += [(base + start, base + end) for start, end in ranges]
            self._lengths.append(len(ids))
            self._origins.append(origin.encode("utf-8"))
            self._liked += [] if row.liked is None else [row.liked]

    def _fit(self, origin: str, row: Encoded) -> tuple[list[int], list[tuple[int, int]], bool] | None:
        """Return tokens, target ranges, and whether they were cut; None if the sample is unusable."""
        report, coding, ids = self.report, self._coding, row.encoding.ids
        if not ids:
            report.empty.add(origin, "no tokens")
            return None
        if coding.vocabulary is not None and max(ids) >= coding.vocabulary:
            report.malformed.add(
                origin, f"token id {max(ids)}, and the model has {coding.vocabulary} embeddings"
            )
            return None
        # The first token has no prediction.
        ranges = [(max(start, 1), end) for start, end in row.ranges if end > max(start, 1)]
        if not ranges:
            report.masked.add(origin, "no token is a target")
            return None
        cut = len(ids) > coding.max_length
        if cut:
            length = f"{len(ids):,} tokens, and data.max_length is {coding.max_length:,}"
            if coding.overlong == "error":
                raise UserError(
                    f"{origin} has {length}", "raise data.max_length, or set data.overlong to drop"
                )
            if coding.overlong == "drop":
                report.overlong.add(origin, length)
                return None
            ids = ids[: coding.max_length]
            ranges = [(start, min(end, len(ids))) for start, end in ranges if start < len(ids)]
            if not ranges:
                report.overlong.add(origin, f"{length}; no target is left when it is cut")
                return None
        return ids, ranges, cut

    def finish(self) -> tuple[Samples, SplitReport]:
        tokens = np.frombuffer(self._tokens, np.int32) if self._tokens else np.zeros(0, np.int32)
        targets = np.zeros(len(tokens), bool)
        for start, end in self._ranges:
            targets[start:end] = True
        self.report.tokens = len(tokens)
        self.report.targets = int(targets.sum())
        self.report.longest = max(self._lengths, default=0)
        return (
            Samples(
                tokens,
                targets,
                np.concatenate([np.zeros(1, np.int64), np.cumsum(self._lengths, dtype=np.int64)]),
                np.full(len(self._lengths), self._source, np.int32),
                np.array(self._origins, dtype=bytes) if self._origins else np.zeros(0, "S1"),
                np.array(self._liked, bool),
            ),
            self.report,
        )


def token_range(encoding: Any, span: Span, text: str) -> tuple[int, int]:
    """Return the half-open token range of a span of characters; (0, 0) if it has no tokens.

    Args:
        encoding: from the tokenizers library; its tokens are in the order of their characters.
        text: the encoded text.

    Raises:
        Inconsistent: a token crosses the span's border.
    """
    begin, end = span
    first = last = None
    while first is None and begin < end:  # white space may belong to no token
        first = encoding.char_to_token(begin)
        begin += first is None
    if first is None:
        return 0, 0
    stop = end
    while last is None:
        last = encoding.char_to_token(stop - 1)
        stop -= last is None
    # One character's bytes may be several tokens; the first one was found.
    count = len(encoding)
    while last + 1 < count and _within(encoding.token_to_chars(last + 1), begin, end):
        last += 1
    for token in (first, last):
        start, after = encoding.token_to_chars(token)
        if start < begin or after > end:
            raise Inconsistent(f"the token of {text[start:after]!r} belongs partly to a turn's targets")
    return first, last + 1


def _within(chars: tuple[int, int] | None, begin: int, end: int) -> bool:
    return chars is not None and begin <= chars[0] < end


def _with_exact_offsets(tokenizer: str) -> str:
    """Return tokenizer.json with offsets that include the white space of a token.

    Byte-level tokenizers such as GPT-2's report the range of "word" for " word". That would hide that the
    token begins before the turn begins.
    """
    if '"trim_offsets": true' not in tokenizer and '"trim_offsets":true' not in tokenizer:
        return tokenizer
    whole = json.loads(tokenizer)
    pending = [whole.get("post_processor")]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            if "trim_offsets" in node:
                node["trim_offsets"] = False
            pending += node.values()
        elif isinstance(node, list):
            pending += node
    return json.dumps(whole, ensure_ascii=False)
