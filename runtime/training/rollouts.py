"""The batches of a run that learns from its own completions: generate, score, compare, and train on them.

A batch is `prompts` groups of `num_generations` completions, which `iterations` optimizer steps train on. It
depends on its number, the data, the seed and the weights before it. So an interrupted run gets the same
batches again. With several iterations, the weights have changed when a step within a batch is saved. The
batch is then stored next to the checkpoints. A server that generates draws other completions the second time.
So its batches are stored before their first step, and used again.
"""

from __future__ import annotations

import io
import json
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..addresses import path_of, reached, write_whole
from ..checkpoints.saved_steps import saved_steps
from ..data.batches import Batch
from ..data.prompt_order import PromptSchedule
from ..errors import UserError, say
from ..hosts.single import SINGLE, SingleProcess
from ..model.decode import Completions, Generation
from ..model.loading import Built
from ..model.partition_rules import Rule, rows_at_once
from ..model.sampling import Sampling
from ..model.sharding import Rows
from ..reinforcement.advantages import (
    group_advantages,
    kl_penalty,
    leave_one_out_advantages,
    without_difference,
)
from ..reinforcement.asked import Prompts
from ..reinforcement.correction import check_mismatch, importance_weights, mismatch
from ..reinforcement.loss_types import LOSS_TYPES
from ..reinforcement.token_weights import token_weights, trained_mask
from ..sections import Grpo, Rollout
from ..settings import Reward
from .completions_scored import SHOWN, Generates, Scored, Scorer, by_function, mean, spreads
from .losses import tempered_logps
from .objective_losses import reference_of
from .objectives import Generated, corrects
from .rollout_layout import RolloutLayout
from .step import Step

if TYPE_CHECKING:
    from ..hosts.group import ProcessGroup
    from ..metrics.loggers import Metrics, Nowhere

STORED = "rollouts-{}.npz"
"""The file of a batch, by its number, next to the checkpoints within it."""


FLAT = 4
"""Batches without a difference in any group, one after another, of which a run warns."""


@dataclass
class FlatBatches:
    """Count the batches, one after another, whose groups have no difference."""

    count: int = 0

    def add(self, rewards: np.ndarray) -> str | None:
        """Count a batch, and return a warning when the count reaches FLAT.

        Args:
            rewards: float64[P, G], NaN where a completion was not scored.
        """
        self.count = self.count + 1 if without_difference(rewards).all() else 0
        if self.count != FLAT:
            return None
        return (
            f"warning: in {FLAT} batches one after another, all completions of a prompt got the same reward, "
            "and the model learned nothing from them (frac_reward_zero_std 1): completions.jsonl has some of "
            "them; give partial rewards, or prompts that the model solves sometimes"
        )


class Current(Protocol):
    """A trainer between two steps."""

    def current(self) -> tuple[Built, Step, Any]:
        """Return the model of the next step, the functions of steps, and the newest trained arrays."""


class Generator:
    """Generate completions with the arrays that a trainer trains.

    Args:
        trainer: whose arrays are used.
        mesh: of the training step.
        rollout: the mesh for generation, and the number of rows at once.
        generation: the lengths, ends and sampling of completions.
        rules: sharding rules of that mesh.
        rows: the number of completions of a batch.
    """

    def __init__(
        self,
        trainer: Current,
        mesh: Mesh,
        rollout: Rollout,
        generation: Generation,
        rules: Sequence[Rule],
        rows: int,
    ) -> None:
        self._trainer, self._mesh, self._rules, self._generation = trainer, mesh, rules, generation
        self._axes = dict(rollout.axes or mesh.shape)
        self._rows = rows_at_once(rows, rollout.rows, self._axes)
        self._layouts: dict[int, RolloutLayout] = {}
        self._programs: dict[tuple[int, Sampling], Callable[..., Completions]] = {}
        self._base: Any = None

    def identity(self) -> None:
        """Return None: the same weights draw the same completions."""

    def generate(self, prompts: Mapping[str, np.ndarray], sampling: Sampling | None = None) -> Completions:
        """Return the completions of prompts, as numpy arrays that are whole on every host.

        Args:
            prompts: as for `decode.generate`, any number of rows.
            sampling: how tokens are chosen; None takes that of training.
        """
        built, step, trained = self._trainer.current()
        sampling = self._generation.sampling if sampling is None else sampling
        layout = self._layouts.get(id(built))
        if layout is None:
            layout = RolloutLayout(built, self._mesh, self._axes, self._rules)
            self._layouts[id(built)] = layout
            if self._base is None:
                self._base = layout.place(step.base[0])
        run = self._programs.get((id(built), sampling))
        if run is None:
            run = layout.jit_generate(
                lambda trained, base: step.merged(trained, (base, None)),
                replace(self._generation, sampling=sampling),
            )
            self._programs[id(built), sampling] = run
        placed = layout.place(trained)
        total = len(prompts["tokens"])
        parts = []
        for start in range(0, total, self._rows):
            part = {name: array[start : start + self._rows] for name, array in prompts.items()}
            short = self._rows - len(part["tokens"])
            padded = {
                name: np.pad(array, ((0, short), *((0, 0),) * (array.ndim - 1)))
                for name, array in part.items()
            }
            parts.append([np.asarray(array) for array in run(placed, self._base, padded)])
        return Completions(*(np.concatenate(arrays)[:total] for arrays in zip(*parts, strict=True)))


@dataclass
class Rolled:
    """A batch of completions that is ready to train on, R rows of T tokens.

    Attributes:
        tokens: int32[R, T], prompt and completion, padded on the right.
        prompt_lengths, lengths: int32[R], tokens of the prompt, and of both.
        trained: bool[R], whether the completion is trained.
        advantages, weights: float32[R], of the completion's tokens in the loss of the step.
        old: float32[R, T], log-probabilities before the batch's first step; float32[0, 0] for one iteration.
        taken: int64[], the number of prompts that are taken until the end of this batch.
        correction: float32[R, T], factors of the loss at the places of `old`; float32[0, 0] for none.
        record: str[], in JSON the identity of the weights that generated, the metrics and the shown
            completions; empty if the batch can be generated again.
    """

    tokens: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    trained: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    old: np.ndarray
    taken: np.ndarray
    correction: np.ndarray
    record: np.ndarray

    @property
    def loss_mask(self) -> np.ndarray:
        """Return bool[R, T], the trained tokens."""
        places = np.arange(self.tokens.shape[1])
        inside = (places >= self.prompt_lengths[:, None]) & (places < self.lengths[:, None])
        return inside & self.trained[:, None]


class Rollouts:
    """The micro-batches of a run that learns from its own completions.

    Args:
        schedule: the order of the prompts.
        grpo: of the recipe.
        generator: generates completions; its lengths are those of `grpo`.
        rewards: the functions of the rewards, and what scores completions with them (`Rewards.score`); only
            the first host calls it.
        decode: turns tokens into text.
        rows: the rows of a micro-batch.
        run: what else the run has.

    Attributes:
        scorer: generates and scores completions.
    """

    def __init__(
        self,
        schedule: PromptSchedule,
        grpo: Grpo,
        generator: Generates,
        rewards: tuple[Sequence[Reward], Callable[..., list[Any]]],
        decode: Callable[[Sequence[int]], str],
        rows: Rows,
        run: Run,
    ) -> None:
        self._schedule, self._grpo, self._generator = schedule, grpo, generator
        self._rows, self._run = rows, run
        self.scorer = Scorer(grpo, generator, *rewards, decode, run.seed, run.hosts)
        self._prompts = Prompts(schedule.samples)
        self._accumulation = schedule.rows_per_step // rows.total
        self._batch: tuple[int, Rolled] | None = None
        self._numbers: dict[int, dict[str, float]] = {}
        self._logps: dict[tuple[int, bool], Any] = {}
        self._compared_once = False
        self._flat = FlatBatches()

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield the micro-batches of optimizer step `step`, from 0, and of all later ones.

        The next step's completions are generated when its first micro-batch is asked for.

        Raises:
            UserError: a reward fails, or a stored batch is missing.
        """
        while True:
            number, iteration = divmod(step, self._grpo.iterations)
            self._numbers = {step: {}}
            if self._batch is None or self._batch[0] != number:
                stored = self._loaded(number) if iteration else self._replayed(number, step)
                rolled = self._rolled(number, step) if stored is None else stored
                self._batch = number, rolled
            for part in range(self._accumulation):
                yield self._micro_batch(step, part, self._rows.here)
            step += 1

    def numbers(self, step: int) -> Mapping[str, float]:
        """Return the metrics of the batch that step `step`, from 0, has begun; {} for the later ones."""
        return self._numbers.get(step, {})

    def state(self, step: int) -> Mapping[str, Any]:
        """Return the data's state after a step, for its checkpoint; store a batch that goes on after it."""
        if step % self._grpo.iterations and self._batch is not None and not self._batch[1].record:
            self._store(*self._batch)
        return self._run.state(step)

    def tokens_of(self, index: int) -> int:
        """Return the number of real tokens of a micro-batch of the current step."""
        assert self._batch is not None
        part = index % self._accumulation
        return int(self._batch[1].lengths[part * self._rows.total : (part + 1) * self._rows.total].sum())

    def origins(self, index: int) -> list[str]:
        """Return the places of a micro-batch's prompts in their sources."""
        batch = index // self._accumulation // self._grpo.iterations
        first, count = self._schedule.taken(batch), self._schedule.prompts
        return self._schedule.origins_of(range(first, first + count))

    def _micro_batch(self, step: int, part: int, here: Sequence[int]) -> Batch:
        assert self._batch is not None
        rolled, size = self._batch[1], self._rows.total
        chosen = part * size + np.asarray(here)
        places = np.arange(rolled.tokens.shape[1], dtype=np.int32)
        real = places < rolled.lengths[chosen, None]
        mask = rolled.loss_mask
        batch = {
            "tokens": rolled.tokens[chosen],
            "positions": np.where(real, places, 0).astype(np.int32),
            "segment_ids": real.astype(np.int32),
            "loss_mask": mask[chosen],
            "norm": np.asarray(mask.sum() / self._accumulation, np.float32),
            "index": np.asarray(step * self._accumulation + part, np.int32),
            "advantages": rolled.advantages[chosen],
            "weights": (rolled.weights[chosen] * np.float32(self._accumulation)).astype(np.float32),
        }
        if rolled.old.size:
            batch["old"] = rolled.old[chosen]
        if rolled.correction.size:
            batch["correction"] = rolled.correction[chosen]
        return batch

    def _rolled(self, number: int, step: int) -> Rolled:
        """Generate and score a batch, and record its metrics."""
        grpo, schedule = self._grpo, self._schedule
        taken = schedule.taken(number)
        spent = {"rollout_seconds": 0.0, "reward_seconds": 0.0, "generated": 0.0}
        scored = self._scored(np.arange(taken, taken + schedule.prompts), f"{number}.0", spent)
        taken += schedule.prompts
        again = 0
        for attempt in range(1, grpo.dynamic_sampling + 1):
            flat = np.flatnonzero(without_difference(scored.rewards))
            if not len(flat):
                break
            new = self._scored(np.arange(taken, taken + len(flat)), f"{number}.{attempt}", spent)
            taken, again = taken + len(flat), again + len(flat)
            scored = scored.replaced(flat, new)
        schedule.take(number, taken)
        if (warning := self._flat.add(scored.rewards)) is not None and self._run.hosts.first:
            say(warning)
        rolled = self._packed(scored, taken)
        self._batch = number, rolled
        corrected = corrects(self._run.rollout)
        penalized = bool(grpo.beta) and LOSS_TYPES[grpo.loss].penalizes_reward
        began, rewards, more = time.perf_counter(), scored.rewards, {"groups_drawn_again": float(again)}
        if grpo.iterations > 1 or corrected or penalized:
            logps = self._policy_logps(step)
            if corrected:
                more |= self._correct(rolled, logps, scored.completions)
            if penalized:
                mask = np.pad(rolled.loss_mask[:, 1:], ((0, 0), (0, 1)))  # of the place before a token
                divergence = kl_penalty(logps, self._policy_logps(step, reference=True), mask)
                rewards = rewards - grpo.beta * divergence.reshape(rewards.shape)
                more["kl"] = float(divergence.sum() / max(mask.sum(), 1))
            if grpo.iterations > 1:
                rolled.old = logps
        spent["rollout_seconds"] += time.perf_counter() - began
        advantages = self._advantages(rewards)
        rolled.advantages = advantages.reshape(-1)
        numbers = {**self._measured(scored, spent), **more}
        shown = self._shown(scored, advantages)
        if (identity := self._generator.identity()) is not None:
            record = {"identity": identity, "numbers": numbers, "shown": shown}
            rolled.record = np.asarray(json.dumps(record))
            self._store(number, rolled)
        self._numbers = {step: numbers}
        self._run.metrics.completions(step + 1, shown)
        return rolled

    def _correct(self, rolled: Rolled, logps: np.ndarray, done: Completions) -> dict[str, float]:
        """Set a batch's correction for the server's log-probabilities, and return its metrics.

        Args:
            logps: float32[R, T], of the training step, at the token before.

        Raises:
            UserError: the server computes another model.
        """
        served = np.zeros_like(logps)
        for row, (start, size) in enumerate(zip(rolled.prompt_lengths, done.lengths, strict=True)):
            served[row, start - 1 : start - 1 + size] = done.logps[row, :size]
        mask = np.zeros_like(rolled.loss_mask)
        mask[:, :-1] = rolled.loss_mask[:, 1:]
        rolled.correction = importance_weights(logps, served, mask, self._run.rollout)
        numbers = mismatch(logps, served, mask, rolled.correction, self._run.rollout)
        if not self._compared_once:
            check_mismatch(numbers)
            self._compared_once = True
        return numbers

    def _replayed(self, number: int, step: int) -> Rolled | None:
        """Return the stored batch that the weights of this step have generated, with its metrics; None if it
        is not stored."""
        identity = self._generator.identity()
        if identity is None or not (path_of(self._run.directory) / STORED.format(number)).exists():
            return None
        rolled = self._loaded(number)
        record = json.loads(str(rolled.record) or "{}")
        if record.get("identity") != identity:
            say(f"note: the stored completions of step {step + 1} are of other weights: generating others")
            return None
        timeless = {name: value for name, value in record["numbers"].items() if "_per_second" not in name}
        self._numbers = {step: {**timeless, "rollout_seconds": 0.0, "reward_seconds": 0.0}}
        self._run.metrics.completions(step + 1, record["shown"])
        return rolled

    def _scored(self, numbers: np.ndarray, name: str, spent: dict[str, float]) -> Scored:
        """Generate and score the completions of prompts, by their numbers in the run."""
        indices = [self._schedule.prompt(int(number)) for number in numbers]
        return self.scorer.scored(self._prompts, numbers, indices, name, spent)

    def _advantages(self, rewards: np.ndarray) -> np.ndarray:
        """Return float32[P, G]."""
        grpo = self._grpo
        if grpo.loss == "rloo" and grpo.scale_rewards != "group":
            return leave_one_out_advantages(rewards, grpo.scale_rewards == "batch")
        return group_advantages(rewards, grpo.scale_rewards)

    def _packed(self, scored: Scored, taken: int) -> Rolled:
        """Return a batch without `advantages` and `old`."""
        grpo, samples = self._grpo, self._schedule.samples
        group, done = grpo.num_generations, scored.completions
        count = len(done.tokens)
        tokens = np.zeros((count, grpo.max_prompt_length + grpo.max_completion_length), np.int32)
        prompt_lengths = np.zeros(count, np.int32)
        for row in range(count):
            ids = samples[self._schedule.prompt(int(scored.numbers[row // group]))].tokens
            prompt_lengths[row] = len(ids)
            tokens[row, : len(ids)] = ids
            tokens[row, len(ids) : len(ids) + done.lengths[row]] = done.tokens[row, : done.lengths[row]]
        inside = np.arange(grpo.max_completion_length) < done.lengths[:, None]
        mask = trained_mask(inside, ~done.ended if grpo.mask_truncated else None)
        weights = token_weights(mask, grpo.loss, grpo.max_completion_length).max(1, initial=0.0)
        return Rolled(
            tokens=tokens,
            prompt_lengths=prompt_lengths,
            lengths=(prompt_lengths + done.lengths).astype(np.int32),
            trained=np.asarray(mask.any(1)),
            advantages=np.zeros(count, np.float32),
            weights=weights.astype(np.float32),
            old=np.zeros((0, 0), np.float32),
            taken=np.asarray(taken, np.int64),
            correction=np.zeros((0, 0), np.float32),
            record=np.asarray(""),
        )

    def _policy_logps(self, step: int, reference: bool = False) -> np.ndarray:
        """Return float32[R, T], the log-probabilities of the batch under the arrays before its first step, or
        under the model that training starts from."""
        built, functions, trained = self._run.trainer.current()
        key = id(built), reference
        if key not in self._logps:
            self._logps[key] = jit_logps(built, functions, self._rows.mesh, self._grpo, reference)
        logps, out = self._logps[key], []
        for part in range(self._accumulation):
            batch = self._rows.place(self._micro_batch(step, part, self._rows.here))
            out.append(np.asarray(logps(trained, functions.base, batch)))
        return np.concatenate(out)

    def _measured(self, scored: Scored, spent: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a batch."""
        done, rewards = scored.completions, scored.rewards
        numbers = {
            "reward": mean(rewards),
            "reward_std": mean(spreads(rewards)),
            **by_function(self.scorer.names, scored.scores),
            "frac_reward_zero_std": float(without_difference(rewards).mean()),
            "completion_length": float(done.lengths.mean()),
            "completion_length_min": float(done.lengths.min()),
            "completion_length_max": float(done.lengths.max()),
            "truncated_share": float((~done.ended).mean()),
            "rollout_seconds": spent["rollout_seconds"],
            "reward_seconds": spent["reward_seconds"],
            "rollout_tokens_per_second": spent["generated"] / max(spent["rollout_seconds"], 1e-9),
        }
        return {name: value for name, value in numbers.items() if np.isfinite(value)}

    def _shown(self, scored: Scored, advantages: np.ndarray) -> list[dict[str, Any]]:
        """Return the first completions of a batch, in the form that completions.jsonl stores."""
        schedule, group = self._schedule, self._grpo.num_generations
        return [
            {
                "prompt": schedule.samples.prompt(schedule.prompt(int(scored.numbers[row // group])))[0],
                "completion": scored.texts[row],
                **scored.shown(row, self.scorer.names),
                "advantage": float(advantages[divmod(row, group)]),
            }
            for row in range(min(SHOWN, len(scored.texts)))
        ]

    def _store(self, number: int, rolled: Rolled) -> None:
        """Write a batch next to the checkpoints, and remove those that no checkpoint needs."""
        if not self._run.hosts.first:
            return
        content = io.BytesIO()
        np.savez(content, **{field.name: getattr(rolled, field.name) for field in fields(Rolled)})
        directory = self._run.directory
        try:
            with reached(directory, "written"):
                write_whole(directory, STORED.format(number), content.getvalue())
        except OSError as error:
            raise UserError(
                f"{directory}: the completions of a batch cannot be written: {error.strerror or error}",
                "free disk space or allow writing to the directory, and continue with --resume",
            ) from error
        first = min(saved_steps(directory), default=0) // self._grpo.iterations
        before, after = STORED.split("{}")
        with suppress(OSError, UserError), reached(directory, "written"):
            for file in path_of(directory).glob(f"{before}*{after}"):
                batch = file.name.removeprefix(before).removesuffix(after)
                if batch.isdigit() and int(batch) < first:
                    file.unlink()

    def _loaded(self, number: int) -> Rolled:
        """Return a batch that was stored."""
        directory, name = self._run.directory, STORED.format(number)
        try:
            with reached(directory):
                content = (path_of(directory) / name).read_bytes()
            with np.load(io.BytesIO(content)) as stored:
                rolled = Rolled(**{field.name: stored[field.name] for field in fields(Rolled)})
        except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
            raise UserError(
                f"{directory}/{name}: the completions that the next step trains on cannot be read: {error}",
                f"put the file back, or remove the checkpoints after step {number * self._grpo.iterations}",
            ) from error
        self._schedule.take(number, int(rolled.taken))
        return rolled


@dataclass(frozen=True)
class Run:
    """What a run's rollouts need besides its recipe.

    Attributes:
        seed: of the run.
        trainer: whose arrays are used.
        directory: of the checkpoints.
        state: the data's state after an optimizer step.
        metrics: get the completions.
        hosts: the processes of the run.
        rollout: how completions are generated.
    """

    seed: int
    trainer: Current
    directory: str
    state: Callable[[int], Mapping[str, Any]]
    metrics: Metrics | Nowhere
    hosts: SingleProcess | ProcessGroup = SINGLE
    rollout: Rollout = field(default_factory=Rollout)


def generation_of(about: Generated, ends: Sequence[int]) -> Generation:
    """Return how completions are generated.

    Args:
        ends: the tokens that end a completion.
    """
    sampling = Sampling(about.temperature, about.top_k, about.top_p, about.min_p)
    return Generation(about.completion, tuple(ends), sampling, about.prompt + about.completion)


def jit_logps(built: Built, functions: Step, mesh: Mesh, grpo: Grpo, reference: bool = False) -> Any:
    """Compile (trained, base, batch) -> float32[B, T], log-probabilities at the temperature of the rollout,
    whole on every device.

    Args:
        reference: take the model that training starts from.
    """

    def logps(trained: nnx.State, base: Any, batch: Mapping[str, jax.Array]) -> jax.Array:
        rows = [batch[name] for name in ("tokens", "positions", "segment_ids")]

        def ask(forward: Any, model: Any) -> jax.Array:
            return tempered_logps(forward, model, rows, grpo.temperature)[0]

        if not reference:
            return ask(built.forward, functions.merged(trained, (base[0], None)))
        computed: jax.Array = reference_of(built, built.forward, *functions.models(trained, base))(ask)
        return computed

    return jax.jit(logps, out_shardings=NamedSharding(mesh, PartitionSpec()))
