"""Turn parsed samples into tokens and targets: the work of each tokenizing process."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..settings import DataSettings, Source
from .columns import Unread, marked, together
from .control_tokens import (
    ControlTokens,
    Data,
    Literal,
    as_text,
    check_foreign,
    special_tokens,
)
from .formats import COLUMNS, AnySample, ParsedSample, PreferencePair
from .image_processor import ImageSettings, Placed, image_processor
from .masking import Blank, Inconsistent, Rendered, Renderer, after_answer
from .messages import Messages, parted
from .pictures import stamps_of
from .reasoning import Reasoning
from .row_counts import SplitReport
from .row_values import Malformed
from .samples import Samples
from .template import ChatTemplate, Span, TemplateRefusal


@dataclass(frozen=True)
class Coding:
    """How samples become tokens, as plain values, which other processes and cache keys get.

    Attributes:
        tokenizer: tokenizer.json's text, as the tokenizers library reads it.
        templates: the chat template of each source, None where there is none.
        variables: what the template gets in addition to the messages: bos_token and so on.
        special: from `masking.special_tokens`.
        eos: the token that ends plain text, None where the tokenizer has none.
        loss_on, overlong: `data.loss_on` and `data.overlong` of each source.
        max_length: of the recipe's `data` section.
        vocabulary: number of the model's embeddings; samples with larger ids are left out. None: unchecked.
        reasoning: of the recipe's `data` section.
        limit: the key that sets max_length.
        images: how pictures become tokens; None for data without pictures.
        names: the texts that control tokens have in `tokenizer` if their own are ordinary text; empty if they
            are not.
    """

    tokenizer: str
    templates: tuple[str | None, ...]
    variables: dict[str, str]
    special: tuple[str, ...]
    eos: str | None
    loss_on: tuple[str | Sequence[str], ...]
    overlong: tuple[str, ...]
    max_length: int
    vocabulary: int | None
    reasoning: str | None = None
    names: dict[str, str] = field(default_factory=dict)
    limit: str = "data.max_length"
    images: ImageSettings | None = None


def of_prompts(how: Coding, train: Any) -> Coding:
    """Return the coding of a run's samples: with objective grpo they are prompts, with a length of their own.

    Args:
        train: of the recipe, or of the run's settings.
    """
    if train.objective != "grpo" or train.grpo is None:
        return how
    return replace(how, max_length=train.grpo.max_prompt_length, limit="train.grpo.max_prompt_length")


def coding(
    tokenizer: Any,
    templates: str | Sequence[str | None] | None,
    data: DataSettings,
    vocabulary: int | None,
    sources: Sequence[str | Source] = (),
    images: ImageSettings | None = None,
) -> Coding:
    """Build a Coding from transformers' fast tokenizer and the settings.

    Args:
        templates: the chat template of each source, or one for all.
        sources: the sources of the rows; if empty, one source without settings of its own.
        images: how pictures become tokens, None for data without pictures.
    """
    kinds = [data.of(source) for source in sources] or [data]
    text, special = _with_exact_offsets(tokenizer.backend_tokenizer.to_str()), special_tokens(tokenizer)
    names: dict[str, str] = {}
    if data.special_tokens == "text":
        text, names = as_text(text, special)
    return Coding(
        text,
        (templates,) * len(kinds) if isinstance(templates, str | None) else tuple(templates),
        dict(tokenizer.special_tokens_map),
        special,
        tokenizer.eos_token,
        tuple(kind.loss_on for kind in kinds),
        tuple(kind.overlong for kind in kinds),
        data.max_length,
        vocabulary,
        data.reasoning,
        names,
        images=images,
    )


class Encoder:
    """Encode parsed samples in chunks.

    Raises:
        UserError: the chat template is not valid Jinja.
    """

    def __init__(self, coding: Coding) -> None:
        from tokenizers import Tokenizer

        self.coding = coding
        self._tokenizer = Tokenizer.from_str(coding.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._control = ControlTokens(coding.special)
        self._literal = Literal(self._control, coding.names) if coding.names else None
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._images = None if coding.images is None else image_processor(coding.images)
        compiled = {text: self._compiled(text) for text in coding.templates if text is not None}
        self._chats = [
            None
            if text is None
            else _Chats(Renderer(compiled[text][0], coding.special, loss_on), *compiled[text])
            for text, loss_on in zip(coding.templates, coding.loss_on, strict=True)
        ]

    def _compiled(self, text: str) -> tuple[ChatTemplate, Reasoning | None]:
        coding = self.coding
        if coding.reasoning is None:
            return ChatTemplate(text, coding.variables), None
        reasoning = Reasoning(coding.reasoning, text, coding.variables)
        return reasoning.template, reasoning

    def encode(self, samples: Sequence[AnySample], source: int) -> tuple[Samples, SplitReport]:
        """Encode samples of one source, in order; return them and what was left out.

        Both answers of a preference are kept, one after the other, or neither.

        Raises:
            UserError: a sample is too long and `overlong` is "error", or needs a chat template or an
                end-of-sequence token and there is none.
        """
        builder = Builder(self.coding, source)
        plain = [sample for sample in samples if isinstance(sample, ParsedSample)]
        for i, encoded in self.encoded(plain, source, builder.report):
            builder.add(plain[i].origin, encoded, columns=plain[i].columns)
        pairs = [
            (sample.origin, *sample.answers()) for sample in samples if isinstance(sample, PreferencePair)
        ]
        # An unusable answer is counted once for its pair.
        left = list(self.encoded([chosen for _, chosen, _ in pairs], source, builder.report))
        rejected = dict(self.encoded([pairs[i][2] for i, _ in left], source, builder.report))
        for n, (i, chosen) in enumerate(left):
            if n in rejected:
                builder.add(pairs[i][0], chosen, rejected[n])
        return builder.finish()

    def encoded(
        self, samples: Sequence[ParsedSample], source: int, report: SplitReport
    ) -> Iterator[tuple[int, Encoded]]:
        """Return the usable samples of a source, by their number."""
        prompts = [(i, sample) for i, sample in enumerate(samples) if sample.columns is not None]
        if prompts:
            return self._encoded_prompts(prompts, source, report)
        encoded = dict(self._encoded_chats(samples, source, report))
        texts = [(i, sample) for i, sample in enumerate(samples) if sample.messages is None]
        if texts:
            encoded |= self._encoded_texts(texts, source, report)
        return ((i, encoded[i]) for i in sorted(encoded))

    def _encoded_texts(
        self, texts: Sequence[tuple[int, ParsedSample]], source: int, report: SplitReport
    ) -> Iterator[tuple[int, Encoded]]:
        samples = {i: sample for i, sample in texts if self._is_readable(sample, report)}
        eos, alone = self.coding.eos, self.coding.loss_on[source] == "completion"
        ends = None if eos is None else (eos, self.coding.names.get(eos, eos))
        for i, text, encoding, span in encode_texts(self._tokenizer, [*samples.items()], ends, alone, report):
            control = [] if self._literal else self._control.held(text.text.removesuffix(eos or ""))
            end = encoding.ids[-1] if encoding.ids[-1] in self._added else ""
            unread = marked(samples[i].unread)
            yield i, Encoded(text, encoding, [span], unread, samples[i].liked, tuple(control), end)

    def _encoded_prompts(
        self, prompts: Sequence[tuple[int, ParsedSample]], source: int, report: SplitReport
    ) -> Iterator[tuple[int, Encoded]]:
        """Encode prompts, which end where an answer begins. A text is tokenized unchanged."""
        chats = self._chats[source]
        begin = "" if self._literal else added_tokens(self._tokenizer)[0]
        for i, sample in prompts:
            if sample.messages is None:
                if not self._is_readable(sample, report):
                    continue
                text = without_start(sample.prompt or "", begin)
                encoding = self._tokenizer.encode(text)
                encoding.truncate(len(without_added_end(encoding, least=1)))
                held = () if self._literal else tuple(self._control.held(text))
                yield i, Encoded(Rendered(text, ()), encoding, [], Unread(), None, held, self._eos)
                continue
            if chats is None:
                raise _without_template(sample)
            try:
                rendering = Rendered(chats.asked(sample), ())
                written = self._written(sample, rendering, replace(chats, generates=True))
            except (TemplateRefusal, Inconsistent) as error:
                getattr(report, error.kind).add(sample.origin, str(error))
                continue
            encoding = self._tokenizer.encode(written.text, add_special_tokens=False)
            end = self._after(chats.after_answer)
            yield i, Encoded(rendering, encoding, [], Unread(), None, written.control, end)

    @cached_property
    def _eos(self) -> int | str:
        return self._after(self.coding.eos or "")

    def _after(self, text: str) -> int | str:
        """Return the token that a text after an answer is, or the text."""
        ids = self._tokenizer.encode(self.coding.names.get(text, text), add_special_tokens=False).ids
        return int(ids[0]) if ids and ids[0] in self._added else text

    def _is_readable(self, sample: ParsedSample, report: SplitReport) -> bool:
        """Return whether the tokenizer reads no part of a plain text as a control token; count it if not."""
        if self._literal is not None:
            try:
                check_foreign(f"{sample.prompt or ''}{sample.completion or ''}")
            except Inconsistent as error:
                report.inconsistent.add(sample.origin, str(error))
                return False
        return True

    def _encoded_chats(
        self, samples: Sequence[ParsedSample], source: int, report: SplitReport
    ) -> Iterator[tuple[int, Encoded]]:
        chats, rendered = self._chats[source], []
        for i, sample in enumerate(samples):
            if sample.messages is None:
                continue
            if chats is None:
                raise _without_template(sample)
            try:
                rendering = chats.render(sample)
                seen = self._seen(sample, rendering, self._written(sample, rendering, chats))
                rendered.append((i, *seen))
            except (TemplateRefusal, Inconsistent, Blank) as error:
                getattr(report, error.kind).add(sample.origin, str(error))
            except Malformed as error:
                report.malformed.add(sample.origin, str(error))
        # The template has already written the special tokens.
        encodings = self._tokenizer.encode_batch(
            [written.text for _, _, written, _ in rendered], add_special_tokens=False
        )
        for (i, rendering, written, placed), encoding in zip(rendered, encodings, strict=True):
            sample = samples[i]
            try:
                ranges = [token_range(encoding, span, rendering.text) for span in rendering.spans]
                ranges = self._without_features(encoding.ids, ranges, placed)
            except Inconsistent as error:
                report.inconsistent.add(sample.origin, str(error))
                continue
            except Malformed as error:
                report.malformed.add(sample.origin, str(error))
                continue
            unread = together(marked(sample.unread), Unread(rendering.unused, rendering.texts))
            end = self._end(rendering, encoding, chats)
            yield i, Encoded(rendering, encoding, ranges, unread, sample.liked, written.control, end, placed)

    def pictures(self, encoded: Encoded) -> tuple[ShownPicture, ...]:
        """Return the pictures of a sample, for people."""
        if self._images is None:
            return ()
        images = self._images
        return tuple(
            ShownPicture(
                number,
                picture.place,
                picture.size,
                images.size(*images.limits.of(picture.size)),
                picture.grid,
                picture.tokens,
            )
            for number, picture in enumerate(encoded.pictures, 1)
        )

    def described(
        self, pieces: list[tuple[str, bool]], pictures: Sequence[ShownPicture]
    ) -> list[tuple[str, bool]]:
        """Return stretches of a sample's text with a description in place of each picture's tokens."""
        if self._images is None or not pictures:
            return pieces
        tokens = self._images.settings.tokens
        within = [re.escape(text) for role, text in tokens.items() if role in ("feature", "break")]
        pattern = re.compile(f"(?:{'|'.join(within)})+")
        rest = iter(pictures)
        return [
            (pattern.sub(lambda match: str(next(rest, "")), text), target)
            if tokens["feature"] in text
            else (text, target)
            for text, target in pieces
        ]

    def _seen(
        self, sample: ParsedSample, rendering: Rendered, written: Written
    ) -> tuple[Rendered, Written, tuple[Placed, ...]]:
        """Return a rendering in which each picture has all its tokens, and the pictures.

        Raises:
            Malformed: a picture cannot be used, or the rendering has another number of places for them.
        """
        if self._images is None:
            return rendering, written, ()
        names, texts = self.coding.names, self._images.settings.tokens
        placeholder = names.get(self._images.placeholder, self._images.placeholder)
        count = written.text.count(placeholder)
        if count != len(sample.images):
            reason = f"the chat template writes {self._images.placeholder} {count} times, for "
            raise Malformed(f"{reason}{len(sample.images)} pictures")
        if not sample.images:
            return rendering, written, ()
        placed = tuple(self._images.place(picture, what) for what, picture in sample.images)
        at, moves = 0, []
        for picture in placed:
            at = written.text.index(placeholder, at)
            moves.append((at, at + len(placeholder), picture.text))
            at += len(placeholder)
        spans = tuple((_moved(begin, moves), _moved(end, moves)) for begin, end in rendering.spans)
        whole = replace(rendering, text=_with_texts(rendering.text, moves), spans=spans)
        if names:
            tokens = {text: names.get(text, text) for text in texts.values()}
            moves = [(begin, end, _renamed(text, tokens)) for begin, end, text in moves]
        return whole, replace(written, text=_with_texts(written.text, moves)), placed

    def _without_features(
        self, ids: Sequence[int], ranges: list[tuple[int, int]], placed: Sequence[Placed]
    ) -> list[tuple[int, int]]:
        """Return the ranges of targets without the tokens of pictures.

        Raises:
            Malformed: the text holds such a token itself.
        """
        if self._images is None:
            return ranges
        feature = self._images.settings.feature
        places = np.flatnonzero(np.asarray(ids) == feature)
        expected = sum(picture.tokens for picture in placed)
        if len(places) != expected:
            token = self._images.settings.tokens["feature"]
            raise Malformed(f"{len(places)} tokens {token}, and its pictures have {expected}")
        if not len(places):
            return ranges
        out: list[tuple[int, int]] = []
        for begin, end in ranges:
            inside = places[(places >= begin) & (places < end)]
            cuts = [begin - 1, *inside.tolist(), end]
            out += [(a + 1, b) for a, b in pairwise(cuts) if a + 1 < b]
        return out

    def _written(self, sample: ParsedSample, rendering: Rendered, chats: _Chats) -> Written:
        """Return a rendering as the tokenizer reads it, and the control tokens that come from the data.

        Raises:
            Inconsistent: control tokens of the data have to be text, and cannot be told from the template's.
        """
        sample = sample if chats.reasoning is None else chats.reasoning.prepared(sample)
        data = sample.messages, sample.tools

        def render(data: Data) -> str:
            messages, tools = data
            try:
                changed = replace(sample, messages=messages, tools=tools)
                return chats.asked(changed) if chats.generates else chats.render(changed).text
            except (TemplateRefusal, Inconsistent, Blank):
                return ""

        if self._literal is not None:
            return Written(self._literal.written(rendering.text, data, render), ())
        held = self._control.held([_without_marks(sample.messages or []), sample.tools])
        if held and (places := self._control.places(rendering.text, data, render)) is not None:
            outside = {*self._control.find(rendering.text)} - {*places}
            of_data = {rendering.text[slice(*span)] for span in outside}
            held = [token for token in held if token in of_data]
        return Written(rendering.text, tuple(held))

    def _end(self, rendering: Rendered, encoding: Any, chats: _Chats | None) -> int | str:
        """Return what ends the last target of a conversation, as `Encoded.end`."""
        begin, end = rendering.spans[-1] if rendering.spans else (0, 0)
        written = rendering.text[begin:end].rstrip()
        token = encoding.char_to_token(begin + len(written) - 1) if written else None
        number = None if token is None else int(encoding.ids[token])
        added = None if number is None else self._added.get(number)
        if number is not None and added is not None and added.special:
            return number
        after = "" if chats is None else chats.after_answer
        if not after or not written.endswith(after):
            return ""
        return after if number is None or added is None else number


@dataclass(frozen=True)
class _Chats:
    """How the conversations of a source are rendered.

    Attributes:
        generates: whether the beginning of an answer follows them.
    """

    renderer: Renderer
    template: ChatTemplate
    reasoning: Reasoning | None
    generates: bool = False

    @cached_property
    def after_answer(self) -> str:
        """Return the text that the template writes after an answer, "" for none."""
        return after_answer(self.template)

    def render(self, sample: ParsedSample) -> Rendered:
        if self.reasoning is not None:
            return self.reasoning.render(self.renderer, sample)
        assert sample.messages is not None
        return self.renderer.render(sample.messages, sample.tools, sample.completion_start)

    def asked(self, sample: ParsedSample) -> str:
        """Return a conversation as text, with the beginning of an answer after it."""
        sample = sample if self.reasoning is None else self.reasoning.prepared(sample)
        return self.template.render(sample.messages or [], sample.tools, add_generation_prompt=True)


def _without_template(sample: ParsedSample) -> UserError:
    return UserError(
        f"{sample.origin} is a conversation, and the tokenizer has no chat template",
        "set data.chat_template to a template's path or text",
    )


def _without_marks(messages: Messages) -> list[Any]:
    """Return messages without the marks of reasoning at the beginning of a content: these are meant."""
    return [parted(message) if message["role"] == "assistant" else message for message in messages]


@dataclass(frozen=True)
class Written:
    """A rendering as the tokenizer reads it, and the control tokens that come from the data."""

    text: str
    control: tuple[str, ...]


@dataclass(frozen=True)
class Encoded:
    """A sample's text and tokens.

    Attributes:
        ranges: half-open ranges of its target tokens.
        unread: what of the sample is not in its text.
        control: the control tokens that come from the data.
        end: the token that ends its last target; or the text of several tokens that does, "" for none.
        pictures: its pictures, in order.
    """

    rendered: Rendered
    encoding: Any
    ranges: list[tuple[int, int]]
    unread: Unread
    liked: bool | None
    control: tuple[str, ...] = ()
    end: int | str = ""
    pictures: tuple[Placed, ...] = ()


class Builder:
    """Gather tokenized samples, and count them. A text that is split is several samples, in order."""

    def __init__(self, coding: Coding, source: int) -> None:
        self.report = SplitReport()
        self._coding, self._source = coding, source
        self._overlong = coding.overlong[source]
        self._tokens = array("i")
        self._ranges: list[tuple[int, int]] = []
        self._lengths: list[int] = []
        self._origins: list[bytes] = []
        self._liked: list[bool] = []
        self._columns = bytearray()
        self._column_ends: list[int] = []
        self._pictures: list[Placed] = []
        self._picture_ends: list[int] = []

    def add(self, origin: str, *answers: Encoded, columns: str | None = None) -> None:
        """Add a sample, or the two answers of a pair; count it as left out if one of them is unusable.

        Args:
            columns: of a prompt, as in ParsedSample.
        """
        fitted = []
        for answer in answers:
            pieces = self._fit(origin, answer, columns is not None)
            if not pieces:
                return
            fitted.append(pieces)
        self.report.kept += 1
        if columns is not None:
            self._columns += columns.encode("utf-8", "surrogatepass")
            self._column_ends.append(len(self._columns))
        self.report.add_unread(origin, together(*(answer.unread for answer in answers)))
        self.report.add_control(origin, (token for answer in answers for token in answer.control))
        self.report.add_adapted(name for answer in answers for name in answer.rendered.adapted)
        for answer, pieces in zip(answers, fitted, strict=True):
            count = len(pieces)
            for number, (ids, ranges) in enumerate(pieces, 1):
                base = len(self._tokens)
                self._tokens.extend(ids)
                self._ranges += [(base + start, base + end) for start, end in ranges]
                self._lengths.append(len(ids))
                place = piece_origin(origin, number, count)
                self._origins.append(place.encode("utf-8"))
                self._liked += [] if answer.liked is None else [answer.liked]
                self._pictures += answer.pictures
                self._picture_ends.append(len(self._pictures))
            self.report.pictures += len(answer.pictures)
            self.report.picture_tokens += sum(picture.tokens for picture in answer.pictures)
        cut = any(len(answer.encoding) > self._coding.max_length for answer in answers)
        if cut and self._overlong == "split":
            self.report.split += 1
            self.report.pieces += len(fitted[0])
        else:
            self.report.truncated += cut
        self.report.substituted += any(answer.rendered.substituted for answer in answers)
        splits, most = self._overlong == "split", self._coding.max_length
        self.report.add_ends(answer.end for answer in answers if splits or len(answer.encoding) <= most)
        self.report.unended += not all(
            answer.rendered.ended or isinstance(answer.end, int) for answer in answers
        )

    def _fit(
        self, origin: str, answer: Encoded, prompt: bool
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return the tokens and target ranges of each piece of a text; none if it is unusable.

        Args:
            prompt: whether it has no targets, and has to stay whole.
        """
        report, coding, ids = self.report, self._coding, answer.encoding.ids
        if not ids:
            report.empty.add(origin, "no tokens")
            return []
        if coding.vocabulary is not None and max(ids) >= coding.vocabulary:
            report.malformed.add(
                origin, f"token id {max(ids)}, and the model has {coding.vocabulary} embeddings"
            )
            return []
        most = coding.max_length
        whole = _part(ids, answer.ranges, 0, len(ids))
        if not whole[1] and not prompt:
            report.masked.add(origin, "no token is a target")
            return []
        if len(ids) <= most:
            return [whole]
        if self._overlong == "split" and not prompt:
            pieces = [_part(ids, answer.ranges, start, start + most) for start in range(0, len(ids), most)]
            # A single token at the end has no token before it, so it is no target.
            report.lone_ends += not pieces[-1][1]
            return [piece for piece in pieces if piece[1]]
        length = f"{len(ids):,} tokens, and {coding.limit} is {most:,}"
        if self._overlong == "error":
            raise UserError(f"{origin} has {length}", f"raise {coding.limit}, or set data.overlong to drop")
        if self._overlong == "drop" or prompt:
            report.overlong.add(origin, length)
            return []
        if answer.pictures and coding.images is not None and coding.images.feature in ids[most:]:
            report.overlong.add(origin, f"{length}; the cut would go through a picture")
            return []
        first = _part(ids, answer.ranges, 0, most)
        if not first[1]:
            report.overlong.add(origin, f"{length}; no target is left when it is cut")
            return []
        return [first]

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
                np.frombuffer(bytes(self._columns), np.uint8),
                np.array([0, *self._column_ends] if self._column_ends else [], np.int64),
                **self._of_pictures(),
            ),
            self.report,
        )

    def _of_pictures(self) -> dict[str, Any]:
        """Return the fields of Samples that describe pictures; none for data without pictures."""
        if self._coding.images is None:
            return {}
        pictures = self._pictures
        places = [picture.place for picture in pictures]
        return {
            "picture_offsets": np.array([0, *self._picture_ends], np.int64),
            "places": np.array([place.encode("utf-8") for place in places] or [], bytes),
            "digests": np.array([picture.digest for picture in pictures], np.uint64),
            "stamps": np.array(stamps_of(places, Path(self._coding.images.kept)), np.uint64),
            "grids": np.array([picture.grid for picture in pictures], np.int32).reshape(-1, 2),
            "patches": np.array([picture.patches for picture in pictures], np.int32),
            "picture_tokens": np.array([picture.tokens for picture in pictures], np.int32),
        }


def _moved(place: int, moves: Sequence[tuple[int, int, str]]) -> int:
    """Return where a place of a text is after parts of the text have become others."""
    return place + sum(len(text) - (end - begin) for begin, end, text in moves if end <= place)


def _with_texts(text: str, moves: Sequence[tuple[int, int, str]]) -> str:
    """Return a text with others in place of some parts, each given by its begin and its end."""
    out, at = [], 0
    for begin, end, other in moves:
        out += [text[at:begin], other]
        at = end
    return "".join([*out, text[at:]])


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return a text with other names of tokens."""
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.sub(pattern, lambda match: names[match[0]], text)


def piece_origin(origin: str, number: int, count: int) -> str:
    """Return the place of a sample: that of its row, with the piece's number where the row is split."""
    return origin if count == 1 else f"{origin} piece {number} of {count}"


def _part(
    ids: list[int], ranges: list[tuple[int, int]], first: int, stop: int
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return some tokens of a row, and the ranges of targets among them. The first token is never a target,
    because nothing predicts it."""
    ids = ids[first:stop]
    within = [(max(start - first, 1), min(end - first, len(ids))) for start, end in ranges]
    return ids, [(start, end) for start, end in within if start < end]


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


def encode_texts(
    tokenizer: Any,
    samples: Sequence[tuple[int, ParsedSample]],
    ends: tuple[str, str] | None,
    alone: bool,
    report: SplitReport,
) -> Iterator[tuple[int, Rendered, Any, tuple[int, int]]]:
    """Encode plain text with the tokenizer's own special tokens, then the end of sequence.

    A text that already begins or ends with a token that the tokenizer adds gets no second one.

    Args:
        samples: with their numbers.
        ends: the token that ends a text, and its text in the tokenizer; None if there is none. If the texts
            differ, control tokens in the data are ordinary text.
        alone: whether only completions are targets.
        report: counts the samples that cannot be used.

    Returns:
        The number, the text, the encoding and the target range of each usable sample.

    Raises:
        UserError: there is no such token.
    """
    begin, added_end = added_tokens(tokenizer)
    wholes: list[tuple[int, ParsedSample, str, str, str]] = []
    for i, sample in samples:
        completion = sample.completion or ""
        if not completion.strip():
            report.empty.add(
                sample.origin, "no text" if sample.prompt is None else "no text in the completion"
            )
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
        prompt = sample.prompt or ""
        if not literal:
            prompt = without_start(prompt, begin)
        whole = prompt + completion if literal else without_start(prompt + completion, begin)
        wholes.append((i, sample, prompt, whole + end[0], whole + end[1]))
    encodings = tokenizer.encode_batch([text for *_, text in wholes])
    prompts = tokenizer.encode_batch([prompt for *_, prompt, _, _ in wholes] if alone else [])
    for n, ((i, sample, _, text, _), encoding) in enumerate(zip(wholes, encodings, strict=True)):
        ids, start = encoding.ids, 0
        if alone:
            prompt_ids = without_added_end(prompts[n])
            start = len(prompt_ids)
            if ids[:start] != prompt_ids:
                report.inconsistent.add(sample.origin, _not_a_prefix(prompt_ids, encoding, text))
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


def without_added_end(encoding: Any, least: int = 0) -> list[int]:
    """Return a text's token ids without the tokens that the tokenizer appends to every text.

    Args:
        least: the number of tokens to keep in any case.
    """
    ids, added = list(encoding.ids), encoding.special_tokens_mask
    while len(ids) > least and added[len(ids) - 1]:
        ids.pop()
    return ids


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


@dataclass(frozen=True)
class Shown:
    """A sample for people to read.

    Attributes:
        origin: its origin.
        pieces: stretches of its text, each with whether its tokens are targets.
        tokens, targets: their numbers.
        truncated: whether it was cut to max_length.
        pictures: its pictures; in the pieces, each has its description in place of its tokens.
        columns: of a prompt: those that rewards can read, with their values.
    """

    origin: str
    pieces: list[tuple[str, bool]]
    tokens: int
    targets: int
    truncated: bool
    pictures: tuple[ShownPicture, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShownPicture:
    """A picture of a sample, for people.

    Attributes:
        number: of the picture in its sample, from 1.
        place: of its file.
        size, seen: height and width in pixels, of its file and as the model sees it.
        grid: as in `image_processor.Placed`.
        tokens: how many stand for it.
    """

    number: int
    place: str
    size: tuple[int, int]
    seen: tuple[int, int]
    grid: tuple[int, int]
    tokens: int

    def __str__(self) -> str:
        (height, width), (rows, columns) = self.size, self.seen
        sizes = f"{width} x {height} pixels, seen as {columns} x {rows}"
        return f"[picture {self.number}: {sizes}, {self.tokens:,} tokens]"


def show(encoder: Encoder, sample: ParsedSample, source: int = 0) -> list[Shown]:
    """Return a sample of a source as it is trained on: several for a text that is split, none if it is left
    out.

    Raises:
        UserError: as `Encoder.encode`.
    """
    builder = Builder(encoder.coding, source)
    for _, encoded in encoder.encoded([sample], source, builder.report):
        builder.add(sample.origin, encoded, columns=sample.columns)
        samples, report = builder.finish()
        pictures = encoder.pictures(encoded)
        return [
            Shown(
                samples.origin(number),
                encoder.described(
                    _pieces(encoded.encoding, encoded.rendered.text, first, piece.targets.tolist()), pictures
                ),
                len(piece.tokens),
                int(piece.targets.sum()),
                bool(report.truncated),
                pictures[: len(samples.pictures(number))],
                json.loads(sample.columns)[COLUMNS] if sample.columns is not None else {},
            )
            for number, (first, piece) in enumerate(zip(samples.offsets.tolist(), samples, strict=False))
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
