"""Run one fine-tuning for a generated train.py, from settings to the last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.tokenizer import numbered
from ..model.adapters import LoraSettings
from ..model.loading import build
from ..model.partition_rules import Rule
from ..model.sharding import Rows
from ..progress import Progress
from ..sections import RewardLimits, Rollout
from ..settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    Reward,
    RunSettings,
    TrainSettings,
)
from .adapter_start import first_values, start_from
from .objectives import stores
from .own_answers import on_own_answers
from .recorder import Recorder
from .reinforcement import Reinforced, scoring
from .script_arguments import Arguments, parser_of
from .session import Session, run_session
from .teacher import build_teacher, check_stored
from .teacher_writing import to_write, write_teacher
from .trainer import Checkpointing, Trainer

if TYPE_CHECKING:
    import optax


def parse_arguments(artifact: Path, argv: Sequence[str] | None = None) -> Arguments:
    """Read the command line of train.py; None for `argv` takes sys.argv's arguments."""
    return Arguments(**vars(parser_of("train.py", artifact).parse_args(argv)))


def run(
    artifact: Path,
    arguments: Arguments,
    *,
    model: ModelSettings,
    mesh: MeshSettings,
    teacher: ModelSettings | None = None,
    lora: LoraSettings | None = None,
    data: DataSettings,
    train: TrainSettings,
    checkpoint: CheckpointSettings,
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
    rules: Sequence[Rule] = (),
    cache: str | None = None,
    rewards: Sequence[Reward] = (),
    reward_limits: RewardLimits | None = None,
    rollout: Rollout | None = None,
) -> int:
    """Train, and print one line about it at the end.

    Args:
        artifact: folder of the generated script, with its recipe.lock.json.
        teacher: the model that the objective distill learns from.
        lora: None trains all weights.
        learning_rate: makes a schedule by optimizer step from the run's number of steps, of those after
            train.continue_from.
        optimizer: makes the chain from a schedule.
        cache: folder or gs:// address for results that the next run reuses, relative to --output;
            None keeps nothing.
        rewards, reward_limits: of a run that learns from rewards of its own completions.
        rollout: how completions and own answers are generated.

    Returns:
        The exit status: 0, 1 after an error that was printed, 128 + the signal's number after one.
    """
    settings = RunSettings(model, mesh, lora, data, train, checkpoint, tuple(rules), teacher)
    if arguments.write_teacher:
        settings = to_write(arguments, settings)

    def work(session: Session) -> int:
        if arguments.write_teacher:
            return write_teacher(session, settings)
        with scoring(session, train, rewards, reward_limits or RewardLimits()) as score:
            reinforced = Reinforced(rewards, score, rollout or Rollout()) if score else None
            return _run(session, settings, learning_rate, optimizer, rollout or Rollout(), reinforced)

    return run_session(artifact, arguments, settings, cache, work)


def _run(
    session: Session,
    settings: RunSettings,
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
    rollout: Rollout,
    reinforced: Reinforced | None,
) -> int:
    mesh, base, prepared, train = session.mesh, session.base, session.prepared, settings.train
    trace = session.arguments.trace
    schedule = session.schedule(learning_rate)
    if settings.lora is not None and settings.lora.trainable_tokens:
        settings = replace(settings, lora=numbered(settings.lora, base, dict(settings.model.add_tokens)))
    settings = session.kept(settings)
    frozen, initial = first_values(session, settings)
    with mesh, Progress("placing the weights", 1.0) as progress:
        built = build(
            frozen,
            settings.model,
            settings.lora,
            mesh,
            settings.rules,
            train.seed if initial is None else initial,
            lambda done, count: progress.advance(1 / count),
        )
    if settings.lora is not None and settings.lora.start_from is not None:
        start_from(session, built, settings)
    check_stored(session)
    if settings.teacher is not None and not stores(train):
        with mesh:
            built = replace(built, teacher=build_teacher(session, settings))
    rows = Rows.of(mesh, prepared.rows)
    session.hosts.log(f"holds {len(rows.here)} of the {rows.total} rows of a micro-batch")
    feed = session.feed(rows)
    with mesh:
        recorder = None
        if trace is not None:
            recorder = Recorder(built, base, settings.model, prepared.accumulation, session.artifact.name)
        trainer = Trainer(
            built,
            optimizer(schedule),
            train,
            mesh,
            prepared.accumulation,
            Checkpointing(
                session.directory,
                settings.checkpoint,
                session.resumed.step,
                session.local,
                session.resumed.evaluations,
            ),
            recorder,
        )
        restored = trainer.train_steps
        session.enter(restored)
        with session.metrics(restored, train, trainer.close) as metrics:
            if reinforced is not None:
                feed = reinforced.feed(session, settings, trainer, rows, metrics)
            else:
                feed = on_own_answers(session, settings, trainer, rollout, feed, metrics)
            outcome = trainer.fit(feed, session.until, schedule, metrics, session.interrupts, session.hosts)
    if recorder is not None and trace is not None:
        recorder.end(trainer.model).write(trace)
    return session.conclude(outcome, metrics.path)
