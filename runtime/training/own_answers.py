"""The steps of a distillation that train on the student's own answers (Agarwal et al. 2024, algorithm 1).

Before such a step, the student answers the prompts of the step's samples with its current weights. Whether a
step is one of these depends on the seed and the step's number, and the noise of an answer on the seed and the
number of its row in the run. So an interrupted run takes the same steps on the same answers again.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.batches import Batch, Step, TrainingData
from ..data.samples import Samples
from ..errors import say
from ..model.decode import Completions, right_padded
from ..model.sampling import salts_of
from ..model.sharding import Rows
from ..reinforcement.asked import completion_ends
from ..sections import Rollout
from ..settings import RunSettings
from .completions_scored import SHOWN, Generates
from .objectives import Generated, generated
from .rollouts import Generator, generation_of
from .session import Session
from .trainer import Trainer

if TYPE_CHECKING:
    from ..metrics.loggers import Metrics, Nowhere


def on_own_answers(
    session: Session,
    settings: RunSettings,
    trainer: Trainer,
    rollout: Rollout,
    data: TrainingData,
    metrics: Metrics | Nowhere,
) -> TrainingData:
    """Return the data of a run, with the student's own answers in the recipe's share of its steps; `data`
    itself if that is 0.

    Args:
        data: of the run.
    """
    about = generated(settings.train, settings.data.max_length)
    if about is None:
        return data
    prepared, tokenizer = session.prepared, session.tokenizer
    assert data.rows is not None
    ends = completion_ends(session.base, tokenizer, prepared.ends, ())
    rows = prepared.schedule.rows_per_step
    generation = generation_of(about, ends)
    generator = Generator(trainer, session.mesh, rollout, generation, settings.rules, rows)
    answers = OwnAnswers(session, data.rows, generator, about, settings.train.seed, metrics)
    return replace(
        data,
        batches=lambda step: answers.batches(data.batches(step), step),
        tokens=answers.tokens_of,
        numbers=answers.numbers,
    )


class OwnAnswers:
    """The micro-batches of a run, with the student's own answers in a share of its steps.

    Args:
        session: has the samples, in rows of their own.
        rows: the rows of a micro-batch.
        generator: generates answers.
        about: their lengths, and the share of the steps.
        seed: of the run.
        metrics: get the first answers of a step.
    """

    def __init__(
        self,
        session: Session,
        rows: Rows,
        generator: Generates,
        about: Generated,
        seed: int,
        metrics: Metrics | Nowhere,
    ) -> None:
        self._schedule, self._accumulation = session.prepared.schedule, session.prepared.accumulation
        self._rows, self._generator, self._about = rows, generator, about
        self._seed, self._metrics, self._tokenizer = seed, metrics, session.tokenizer
        self._starts = answer_starts(session.prepared.samples)
        self._own: Step | None = None
        self._numbers: dict[int, dict[str, float]] = {}
        if kept := int((self._starts > about.prompt).sum()):
            say(
                f"note: {kept:,} of {len(self._starts):,} samples have prompts longer than {about.prompt:,} "
                "tokens, and always keep the data's answers: data.max_length has "
                f"{about.completion:,} more for own answers"
            )

    def batches(self, planned: Any, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of optimizer step `step`, from 0, and of all later ones.

        A step's answers are generated when its first micro-batch is asked for.

        Args:
            planned: the micro-batches of the data, from the same step on.
        """
        stream = iter(planned)
        while batches := list(itertools.islice(stream, self._accumulation)):
            self._own, self._numbers = None, {step: {"own_answers": 0.0}}
            if draws_own(self._seed, step, self._about.share):
                self._own = self._answered(step)
                first = step * self._accumulation
                batches = [
                    self._schedule.micro_batch(first + part, self._rows.here, self._own)
                    for part in range(len(batches))
                ]
            yield from batches
            step += 1

    def numbers(self, step: int) -> Mapping[str, float]:
        """Return the metrics of the answers that step `step`, from 0, trains on."""
        return self._numbers.get(step, {})

    def tokens_of(self, index: int) -> int:
        """Return the number of real tokens of a micro-batch of the current step."""
        return self._schedule.tokens_of(index, self._own)

    def _answered(self, step: int) -> Step:
        """Return the rows of a step with the student's answers, and record their metrics."""
        rows_of_data = self._schedule.step(step)
        members = [sample for row in rows_of_data.rows for sample in row]
        places = [i for i, sample in enumerate(members) if self._starts[sample] <= self._about.prompt]
        prompts = [rows_of_data.samples[members[i]].tokens[: self._starts[members[i]]] for i in places]
        began = time.perf_counter()
        done = self._generated(step, places, prompts) if places else None
        seconds = time.perf_counter() - began
        rows = [(sample.tokens, sample.targets) for sample in (rows_of_data.samples[i] for i in members)]
        for n, (place, prompt) in enumerate(zip(places, prompts, strict=True)):
            assert done is not None
            answer = done.tokens[n, : done.lengths[n]]
            targets = np.arange(len(prompt) + len(answer)) >= len(prompt)
            rows[place] = np.concatenate([prompt, answer]), targets
        numbers = {"own_answers": len(places) / len(members)}
        if done is not None:
            self._metrics.completions(step + 1, self._shown(prompts, done))
            numbers |= {
                "completion_length": float(done.lengths.mean()),
                "completion_length_min": float(done.lengths.min()),
                "completion_length_max": float(done.lengths.max()),
                "truncated_share": float((~done.ended).mean()),
                "rollout_seconds": seconds,
                "rollout_tokens_per_second": float(done.lengths.sum()) / max(seconds, 1e-9),
            }
        self._numbers = {step: numbers}
        offsets = np.cumsum([0, *(len(tokens) for tokens, _ in rows)])
        tokens, targets = map(np.concatenate, zip(*rows, strict=True))
        nowhere = np.zeros(len(rows), np.int32), np.zeros(len(rows), "S1")
        samples = Samples(tokens, targets, offsets, *nowhere)
        return Step(samples, [(number,) for number in range(len(rows))])

    def _generated(self, step: int, places: list[int], prompts: list[np.ndarray]) -> Completions:
        """Return the answers to prompts, which are at these places of a step."""
        tokens = np.zeros((len(prompts), self._about.prompt), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        numbers = step * self._schedule.rows_per_step + np.asarray(places)
        salts = salts_of(self._seed, numbers, np.zeros_like(numbers))
        return self._generator.generate(right_padded(tokens, [*map(len, prompts)], np.asarray(salts)))

    def _shown(self, prompts: list[np.ndarray], done: Completions) -> list[dict[str, Any]]:
        """Return the first answers of a step, in the form that completions.jsonl stores."""
        decode, shown = self._tokenizer.decode, []
        for n, prompt in enumerate(prompts[:SHOWN]):
            answer = done.tokens[n, : done.lengths[n]].tolist()
            shown.append(
                {
                    "prompt": str(decode(prompt.tolist())),
                    "completion": str(decode(answer, skip_special_tokens=True)),
                    "tokens": len(answer),
                    "ended": bool(done.ended[n]),
                }
            )
        return shown


def draws_own(seed: int, step: int, share: float) -> bool:
    """Return whether optimizer step `step`, from 0, trains on own answers.

    Args:
        share: of all steps.
    """
    drawn = hashlib.blake2b(f"{seed} {step} own answers".encode(), digest_size=8).digest()
    return int.from_bytes(drawn) / 2**64 < share


def answer_starts(samples: Samples) -> np.ndarray:
    """Return int64[n]: the number of tokens before the last answer of each sample.

    A sample's last answer is its last run of targets, with which its prompt ends.
    """
    targets = samples.targets
    begins = targets & ~np.concatenate([np.zeros(1, bool), targets[:-1]])
    places = np.where(begins, np.arange(len(targets)), -1)
    first = samples.offsets[:-1]
    last = np.maximum.reduceat(places, first) if len(first) else first
    return np.where(last >= first, last - first, samples.lengths)
