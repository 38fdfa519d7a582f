"""Generate answers to prompts and read them while they are generated.

Prompts and answers are padded to powers of two, so that conversations of many lengths use few programs.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from flax import nnx

from ..errors import UserError
from ..model.decode import Decoding, Generation, Stepwise, right_padded
from ..model.sampling import GREEDY, Sampling, salts_of
from .loaded_model import LoadedModel

LEAST_ANSWER, LEAST_SLOTS = 64, 128
"""The smallest program has slots for so many tokens of an answer, and of the answer with its prompt."""

ROWS = 8
"""Rows of a program for several prompts; a single prompt has a program of its own."""

ENDS = 8
"""Least number of end tokens that a program takes."""

SHOWN_SECONDS = 0.05
"""Tokens are read about so often. A device computes several in this time, and waits for no reader."""


@dataclass(frozen=True)
class Request:
    """A prompt to complete.

    Attributes:
        prompt: its tokens.
        most: the largest number of tokens of the answer.
        sampling: how they are chosen.
        ends: tokens that end the answer, each of them as its last token.
    """

    prompt: Sequence[int]
    most: int
    sampling: Sampling = GREEDY
    ends: Sequence[int] = ()


@dataclass(frozen=True)
class Answer:
    """An answer, or its beginning.

    Attributes:
        tokens: so far, with the token that ended it.
        ended: whether one of the ends is its last token.
        complete: whether nothing follows: it has ended, or has its largest number of tokens.
        logps: for each token, log-probabilities of the likeliest tokens in its place, the likeliest first.
    """

    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    complete: bool = False
    logps: list[dict[int, float]] = field(default_factory=list)


class TextGenerator:
    """Answers prompts with one model.

    Args:
        likeliest: how many of the likeliest tokens `Answer.logps` has.
        seed: of what is drawn; None for a random one.
    """

    def __init__(self, model: LoadedModel, likeliest: int = 0, seed: int | None = None) -> None:
        self.model, self._likeliest = model, likeliest
        structure, self._adapters, self._rest = model.arrays()
        self._merge = partial(nnx.merge, structure)
        self._programs: dict[Generation, Stepwise] = {}
        self._seed, self._answered = secrets.randbits(32) if seed is None else seed, 0

    def room(self, prompt: Sequence[int]) -> int:
        """Return the tokens that an answer to a prompt may have.

        Raises:
            UserError: when there is no room for one.
        """
        room = self._limit - len(prompt)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt):,} tokens, and the model has {self._limit:,} positions for a "
                "prompt and its answer",
                "shorten the prompt",
            )
        return room

    def stream(self, requests: Sequence[Request]) -> Iterator[list[Answer]]:
        """Yield the answers to at most ROWS prompts of one sampling, again and again until all are complete.

        Raises:
            UserError: when a prompt leaves no room for an answer.
        """
        (sampling,) = {request.sampling for request in requests}
        most = [min(request.most, self.room(request.prompt)) for request in requests]
        answer = _power(max(most), LEAST_ANSWER)
        slots = _power(max(len(request.prompt) for request in requests) + answer, LEAST_SLOTS)
        generation = Generation(answer, (), sampling, min(slots, self._limit), self._likeliest)
        program = self._programs.get(generation)
        if program is None:
            program = Stepwise(self.model.built.forward, self._merge, generation)
            self._programs[generation] = program
        batch = self._batch(requests, slots - answer)
        with self.model.mesh:
            rows, state = program.begin(self._adapters, self._rest, batch)
        count = pace = 1
        while True:
            answers = [_read(state, row, limit, self._likeliest) for row, limit in enumerate(most)]
            yield answers
            if all(answer.complete for answer in answers):
                return
            started, until = time.monotonic(), min(count + pace, max(most))
            with self.model.mesh:
                state = program.advance(self._adapters, self._rest, rows, state, until)
                state.count.block_until_ready()
            seconds = time.monotonic() - started
            pace = max(1, pace // 2) if seconds > SHOWN_SECONDS else min(pace * 2, answer)
            count = until

    def answer(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the complete answers, see `stream`."""
        answers: list[Answer] = []
        for answers in self.stream(requests):  # noqa: B007 (the last one is complete)
            pass
        return answers

    @property
    def _limit(self) -> int:
        """Return the most tokens of a prompt with its answer."""
        architecture = self.model.built.forward.architecture
        limits = (self.model.positions, getattr(architecture, "longest", None))
        return min((limit for limit in limits if limit is not None), default=1 << 30)

    def _batch(self, requests: Sequence[Request], width: int) -> dict[str, Any]:
        """Return the prompts in rows of a program; rows without a prompt are empty."""
        count = 1 if len(requests) == 1 else ROWS
        tokens, lengths = np.zeros((count, width), np.int32), np.zeros(count, np.int32)
        longest = max(len(request.ends) for request in requests)
        ends = np.full((count, _power(longest, ENDS)), -1, np.int32)
        for row, request in enumerate(requests):
            lengths[row] = len(request.prompt)
            tokens[row, : lengths[row]] = request.prompt
            ends[row, : len(request.ends)] = request.ends
        numbers = np.arange(self._answered, self._answered + count, dtype=np.int32)
        self._answered += count
        salts = salts_of(self._seed, numbers, np.zeros_like(numbers))
        return {**right_padded(tokens, lengths, salts), "ends": ends}


def _read(state: Decoding, row: int, most: int, likeliest: int) -> Answer:
    """Return a row's answer so far, cut at its largest number of tokens."""
    length = int(state.lengths[row])
    tokens = np.asarray(state.tokens)[row, : min(length, most)].tolist()
    ended = bool(state.ended[row]) and length <= most
    logps = []
    if likeliest:
        numbers, values = (np.asarray(x)[row] for x in (state.likeliest, state.likeliest_logps))
        logps = [
            dict(zip(numbers[place].tolist(), values[place].tolist(), strict=True))
            for place in range(len(tokens))
        ]
    return Answer(tokens, ended, ended or length >= most, logps)


def _power(least: int, smallest: int) -> int:
    """Return the smallest power of two that is at least both numbers."""
    return 1 << (max(least, smallest) - 1).bit_length()


class TextStream:
    """Turns tokens that arrive one after the other into text, which is complete characters.

    Special tokens are left out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._start, self._told = 0, 0

    def text(self, tokens: Sequence[int], complete: bool = False) -> str:
        """Return the text of the tokens that follow those of the last call.

        Args:
            tokens: all so far.
            complete: whether nothing follows, so that incomplete characters are written too.
        """
        # The tokens before give the new ones the spaces that they have within the text.
        before = self._decoded(tokens[self._start : self._told])
        after = self._decoded(tokens[self._start :])
        if len(after) <= len(before) or (after.endswith("\N{REPLACEMENT CHARACTER}") and not complete):
            return ""
        self._start, self._told = self._told, len(tokens)
        return after[len(before) :]

    def each(self, tokens: Sequence[int], start: int = 0) -> str:
        """Return the text of the tokens from `start` on, as if they came one by one."""
        return "".join(self.text(tokens[: place + 1]) for place in range(start, len(tokens)))

    def _decoded(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
