"""Read the prompts of train.generations: from the rows of a file to tokens."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError, say
from ..model.partition_rules import TOKENS
from ..sections import Generations
from ..settings import DataSettings, RunSettings, Source
from .columns import strings, unread
from .control_tokens import ControlTokens, Data, Literal, as_text, special_tokens
from .encoding import added_tokens, without_added_end, without_start
from .masking import Inconsistent
from .messages import parse_messages, parse_tools
from .reasoning import VARIABLES
from .row_values import ColumnRow, Malformed, text_of, without_fillers
from .sources import records
from .stops import end_tokens, generation_config
from .template import ChatTemplate, TemplateRefusal
from .tokenizer import chat_template

if TYPE_CHECKING:
    from ..hosts.group import ProcessGroup
    from ..hosts.single import SingleProcess
    from ..weights.checkpoint import HFCheckpoint


MULTIPLE = 256
"""Prompts are padded to data.max_length, or to half, a quarter and so on of it, if that is a multiple of this
on each device: splash attention and its balancing order need such lengths."""

SHAPE = 'a line is {"messages": [...]}, or {"prompt": "..."} with a text or with messages'


@dataclass(frozen=True)
class Prompts:
    """The prompts that are answered at each evaluation.

    Attributes:
        texts: each prompt as in the file, a text or messages.
        tokens: int32[n, T], padded on the right.
        lengths: int32[n], tokens of each prompt.
        most: the maximum number of tokens of an answer.
        ends: tokens that end an answer.
        decode: turns an answer's tokens into text.
    """

    texts: Sequence[Any]
    tokens: np.ndarray
    lengths: np.ndarray
    most: int
    ends: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]

    def ending_at(self, tokens: Iterable[int]) -> Prompts:
        """Return the prompts with further tokens that end an answer."""
        return replace(self, ends=tuple(sorted({*self.ends, *tokens})))


def agreed_prompts(
    settings: RunSettings,
    base: HFCheckpoint,
    tokenizer: Any,
    data_dir: Path,
    hosts: SingleProcess | ProcessGroup,
) -> Prompts:
    """Read the prompts of a run, which has to have some; check that all its processes read the same.

    Raises:
        UserError: as for `prompts`, or if they do not.
    """
    assert settings.train.generations is not None
    generation = generation_config(base.side_files, base.side_file)
    parts = settings.mesh.axes.get(TOKENS, 1)
    prompts_read = prompts(settings.train.generations, settings.data, tokenizer, data_dir, generation, parts)
    hosts.same(
        "prompts",
        hashlib.sha256(prompts_read.tokens.tobytes()).hexdigest(),
        "reads other prompts than process 0",
        "put the same file on every host, or at an address that all of them read",
    )
    return prompts_read


def prompts(
    samples: Generations,
    data: DataSettings,
    tokenizer: Any,
    data_dir: Path,
    generation: Mapping[str, Any],
    parts: int = 1,
) -> Prompts:
    """Read and tokenize a file of prompts.

    The chat template renders messages, with the beginning of an answer after them, and with the variables of
    data.reasoning. A text is tokenized unchanged.

    Args:
        tokenizer: from `load_tokenizer`.
        generation: the checkpoint's generation_config.json, whose eos_token_id end answers as the tokenizer's
            does.
        parts: devices that the tokens of a row are split over.

    Raises:
        UserError: a row is not a prompt, or prompt and answer exceed data.max_length.
    """
    template = None
    if data.chat_template or tokenizer.chat_template:
        variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        if data.reasoning is not None:
            variables |= VARIABLES[data.reasoning]
        template = ChatTemplate(chat_template(tokenizer, data, data_dir) or "", variables)
    read = _reader(tokenizer, data)
    texts: list[Any] = []
    encoded: list[list[int]] = []
    unused: Counter[str] = Counter()
    for origin, row in records(Source(samples.prompts), data_dir):
        try:
            if isinstance(row, Malformed):
                raise row
            row = without_fillers(row) if isinstance(row, ColumnRow) else row
            prompt, tokens = _encoded(row, template, read)
        except (Malformed, TemplateRefusal, Inconsistent) as error:
            raise UserError(f"{origin}: {error}", SHAPE) from None
        if len(tokens) + samples.max_tokens > data.max_length:
            raise UserError(
                f"{origin}: {len(tokens):,} tokens and {samples.max_tokens:,} of an answer, and "
                f"data.max_length is {data.max_length:,}",
                "shorten the prompt, or train.generations.max_tokens",
            )
        texts.append(prompt)
        encoded.append(tokens)
        unused.update(_left(row))
    if not texts:
        raise UserError(f"{samples.prompts} is empty", SHAPE)
    if unused:
        counts = ", ".join(f"{name} in {count:,}" for name, count in unused.items())
        say(f"note: columns of {samples.prompts} that the prompts do not contain: {counts}")
    lengths = np.array([len(tokens) for tokens in encoded], np.int32)
    length = data.max_length
    while length % (2 * MULTIPLE * parts) == 0 and length // 2 >= lengths.max() + samples.max_tokens:
        length //= 2
    padded = np.zeros((len(texts), length), np.int32)
    for place, tokens in zip(padded, encoded, strict=True):
        place[: len(tokens)] = tokens
    return Prompts(
        texts,
        padded,
        lengths,
        samples.max_tokens,
        tuple(sorted({*end_tokens(generation), tokenizer.eos_token_id} - {None})),
        lambda answer: str(tokenizer.decode(answer, skip_special_tokens=True)),
    )


@dataclass(frozen=True)
class _Reader:
    """Tokenizes texts, and renderings.

    Attributes:
        backend: of the tokenizers library.
        begin: the tokens that it puts before every text, which a text need not have; "" if control tokens in
            texts are ordinary text.
        written: changes a rendering, of data, with a function that renders other data, for the tokenizer.
    """

    backend: Any
    begin: str
    written: Callable[[str, Data, Callable[[Data], str]], str]


def _reader(tokenizer: Any, data: DataSettings) -> _Reader:
    backend = tokenizer.backend_tokenizer
    if data.special_tokens != "text":
        return _Reader(backend, added_tokens(backend)[0], lambda text, *_: text)
    from tokenizers import Tokenizer

    special = special_tokens(tokenizer)
    text, names = as_text(backend.to_str(), special)
    return _Reader(Tokenizer.from_str(text), "", Literal(ControlTokens(special), names).written)


def _left(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that hold a part of a prompt and are not read, such as a system message."""
    name = "messages" if row.get("messages") is not None else "prompt"
    read = {"prompt": name} if isinstance(row.get(name), str) else {"prompt": name, "tools": "tools"}
    return unread("prompt_completion", row, {}, read, strings(row.get(name))).parts


def _encoded(row: Mapping[str, Any], template: ChatTemplate | None, read: _Reader) -> tuple[Any, list[int]]:
    """Return a prompt in its original form, and its tokens.

    Raises:
        Malformed: it is not a prompt.
        Inconsistent: its control tokens cannot be told from the template's.
    """
    name = "messages" if row.get("messages") is not None else "prompt"
    prompt = row.get(name)
    if isinstance(prompt, str):
        text_of(prompt, "'prompt'")
        # The answer follows the prompt, so end tokens that the tokenizer adds are removed.
        ids = without_added_end(read.backend.encode(without_start(prompt, read.begin)), least=1)
    elif template is None:
        raise Malformed("it is a conversation, and the tokenizer has no chat template")
    else:
        data = parse_messages(prompt, name, {}), parse_tools(row.get("tools"), "tools")

        def render(data: Data) -> str:
            return template.render(*data, add_generation_prompt=True)

        text = read.written(render(data), data, render)
        ids = read.backend.encode(text, add_special_tokens=False).ids
    if not ids:
        raise Malformed("it has no tokens")
    return prompt, list(ids)
