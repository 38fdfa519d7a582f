"""A run that learns from rewards of its own completions: what train.py needs in addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..data.batches import TrainingData
from ..data.prompt_order import PromptSchedule
from ..errors import UserError
from ..model.decode import Generation
from ..model.sharding import Rows
from ..reinforcement.asked import completion_ends
from ..reinforcement.comparable import check_answers
from ..reinforcement.rewards import Rewards
from ..sections import RewardLimits, Rollout
from ..settings import Reward, RunSettings, TrainSettings
from .completions_scored import Generates, HeldOut
from .objectives import generated
from .rollouts import Generator, Rollouts, Run, generation_of
from .server_rollouts import Exported, server_generator
from .session import Session
from .trainer import Trainer

if TYPE_CHECKING:
    from ..metrics.loggers import Metrics, Nowhere

Score = Callable[..., list[Any]]
"""`Rewards.score`."""


@contextmanager
def scoring(
    session: Session, train: TrainSettings, rewards: Sequence[Reward], limits: RewardLimits
) -> Iterator[Score | None]:
    """Yield the function that scores completions, with its processes started; None if nothing is scored.

    Only the first host starts processes.

    Raises:
        UserError: a function cannot be imported.
    """
    if train.grpo is None:
        yield None
        return
    with Rewards(rewards, limits.seconds, limits.memory_mebibytes * 2**20) as processes:
        if session.hosts.first:
            processes.start()
        yield processes.score


@dataclass(frozen=True)
class Reinforced:
    """The rewards of a run, the function that scores with them, and how completions are generated."""

    rewards: Sequence[Reward]
    score: Score
    rollout: Rollout

    def feed(
        self,
        session: Session,
        settings: RunSettings,
        trainer: Trainer,
        rows: Rows,
        metrics: Metrics | Nowhere,
    ) -> TrainingData:
        """Return what the trainer reads.

        Raises:
            UserError: train.grpo.stop has a text that is not one token, or a prompt has no answer that a
                ready reward can compare with.
        """
        prepared, base, tokenizer, grpo = (
            session.prepared,
            session.base,
            session.tokenizer,
            settings.train.grpo,
        )
        assert grpo is not None and isinstance(prepared.schedule, PromptSchedule)
        for samples in (prepared.samples, prepared.held_out):
            if samples is not None:
                check_answers(self.rewards, samples)
        ends = completion_ends(base, tokenizer, prepared.ends, grpo.stop)
        about = generated(settings.train, settings.data.max_length)
        assert about is not None
        generator = self._generator(session, settings, trainer, generation_of(about, ends))

        def decode(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(ids, skip_special_tokens=True))

        run = Run(
            settings.train.seed,
            trainer,
            session.directory,
            prepared.state,
            metrics,
            session.hosts,
            self.rollout,
        )
        rollouts = Rollouts(
            prepared.schedule,
            grpo,
            generator,
            (self.rewards, self.score),
            decode,
            rows,
            run,
        )
        held_out = None
        if prepared.held_out is not None:
            held_out = HeldOut(
                prepared.held_out,
                prepared.held_out_parts,
                grpo.num_generations_eval,
                rollouts.scorer,
                metrics,
            )
        return TrainingData(
            batches=rollouts.batches,
            state=rollouts.state,
            origins=rollouts.origins,
            tokens=rollouts.tokens_of,
            rows=rows,
            numbers=rollouts.numbers,
            prompts=session.prompts,
            evaluate=None if held_out is None else held_out.evaluate,
        )

    def _generator(
        self, session: Session, settings: RunSettings, trainer: Trainer, generation: Generation
    ) -> Generates:
        """Return what generates completions: the run's own devices, or a server.

        Raises:
            UserError: the recipe or the run has something that a server cannot be given.
        """
        schedule, grpo = session.prepared.schedule, settings.train.grpo
        assert grpo is not None and isinstance(schedule, PromptSchedule)
        rows = schedule.rows_per_step
        if self.rollout.engine == "mesh":
            return Generator(trainer, session.mesh, self.rollout, generation, settings.rules, rows)
        if settings.lora is None or session.hosts.count > 1:
            raise UserError(
                "rollout.engine vllm needs "
                + ("adapters, and all weights are trained" if settings.lora is None else "a run of one host"),
                "engine: mesh",
            )
        exported = Exported.of(session.base, settings.model, settings.lora, session.directory, self.rollout)
        interrupts = session.interrupts
        return server_generator(
            trainer,
            exported,
            self.rollout,
            generation,
            grpo.num_generations,
            rows,
            lambda: interrupts.requested,
        )
