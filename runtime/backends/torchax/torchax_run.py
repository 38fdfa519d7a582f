"""The run of a generated train_torchax.py: one fine-tuning of transformers' own model, from settings to the
trained adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...checkpoints.record import read_record
from ...checkpoints.trained_weights import recorded_lora
from ...model.adapters import LoraSettings
from ...model.families import ANY
from ...model.partition_rules import Rule
from ...settings import (
    CheckpointSettings,
    DataSettings,
    MeshSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from ...training.adapter_start import first_values
from ...training.objectives import keeps_copy
from ...training.session import Session, run_session
from ...training.trainer import TrainingOutcome
from ..backend_arguments import BackendArguments
from ..peft_model import start
from ..run_output import ADAPTER, MODEL, pairs, save_adapter, save_model, save_stops
from .hf_model import (
    Arrays,
    abstract_model,
    checkpoint_name,
    load_base,
    load_trained,
    place_trained,
    with_reference,
)
from .loop import Trainer, new_trace
from .torchax_checkpoints import Checkpoints
from .torchax_step import Step

if TYPE_CHECKING:
    import optax

    from ...model.initial import Start
    from ...weights.checkpoint import HFCheckpoint

SUFFIX = "-torchax"
"""Suffix of the directory of checkpoints, which keeps it apart from train.py's."""


def run(
    artifact: Path,
    arguments: BackendArguments,
    *,
    model: ModelSettings,
    mesh: MeshSettings,
    lora: LoraSettings | None = None,
    data: DataSettings,
    train: TrainSettings,
    checkpoint: CheckpointSettings,
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
    rules: Sequence[Rule] = (),
    cache: str | None = None,
) -> int:
    """Train, and print one line about the result at the end.

    Args:
        artifact: folder of the generated script and of recipe.lock.json.
        lora: None trains all weights.
        learning_rate: makes a schedule by optimizer step, from the run's number of steps.
        optimizer: makes the optimizer chain from a schedule.
        cache: folder or gs:// address, relative to --output, for results that the next run can reuse; None
            keeps nothing.

    Returns:
        The exit status: 0, or 1 after a printed error, or 128 + the signal's number after a signal.
    """
    if model.family != ANY:
        checkpoint = replace(checkpoint, directory=checkpoint.directory.rstrip("/") + SUFFIX)
    settings = RunSettings(model, mesh, lora, data, train, replace(checkpoint, local=None), tuple(rules))

    def work(session: Session) -> int:
        adapter = None if lora is None else arguments.start_from(lora)
        return _run(session, settings, adapter, learning_rate, optimizer)

    return run_session(artifact, arguments, settings, cache, work, single="train_torchax.py")


def _run(
    session: Session,
    settings: RunSettings,
    adapter: Path | str | None,
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
) -> int:
    mesh, base, prepared, train = session.mesh, session.base, session.prepared, settings.train
    settings = session.kept(settings)
    lora, to = settings.lora, session.arguments.trace
    schedule = session.schedule(learning_rate)
    done = session.resumed.step or 0
    if settings.model.family == ANY:
        recorded_lora(read_record(session.artifact), base)  # raises if the model is not the compiled one
    frozen, initial = first_values(session, settings)
    with mesh:
        model = abstract_model(base.config, settings.model, lora, mesh, settings.rules, base.architecture)
        step = Step(model, optimizer(schedule), train, prepared.accumulation, mesh)
        checkpoints = Checkpoints(session.directory, settings.checkpoint.keep, model.family.name == ANY)
        if session.resumed.imported is not None:
            live = step.start(checkpoints.restore_adapters(done, step.live[0]))
        elif session.resumed.step is not None:
            live = checkpoints.restore(session.resumed.step, step.live)
        else:
            live = step.start(
                load_trained(model, base)
                if lora is None
                else place_trained(model, initial or start(base, lora, train.seed, adapter))
            )
        session.enter(done)
        trace = None if to is None else new_trace(session.artifact.name, settings.model)
        if trace is not None and lora is not None:
            # Copies: the first step donates these arrays.
            trace.initial = {name: np.array(array, np.float32) for name, array in live[0].items()}
        rest = load_base(model, frozen)
        if keeps_copy(train, lora):
            rest = with_reference(model, rest, load_trained(model, base))
        trainer = Trainer(
            step,
            live,
            rest,
            done,
            checkpoints,
            settings.checkpoint.every_steps,
            trace,
        )
        del live
        with session.metrics(done, train, trainer.close) as metrics:
            trainer.fit(session.feed(), session.until, schedule, metrics, session.interrupts)
    trained = _saved(session, settings, initial, trainer.live[0])
    if trace is not None and to is not None:
        trace.trained = trained
        trace.gradients = _named(trace.gradients, base, lora)
        trace.write(to)
    return session.conclude(
        TrainingOutcome(trainer.done, trainer.loss, trainer.eval_loss, trainer.speed), metrics.path
    )


def _saved(
    session: Session,
    settings: RunSettings,
    initial: Start | None,
    trained: Arrays,
) -> dict[str, Any]:
    """Write what was trained for other tools, and return it by a trace's names.

    Args:
        initial: the adapters' initial values, if these are a part of the base's weights.
    """
    lora, base, output = settings.lora, session.base, session.arguments.output
    values = _named({name: np.asarray(array) for name, array in trained.items()}, base, lora)
    if lora is None:
        save_model(output / MODEL, base, values, session.prepared.ends)
    else:
        save_adapter(output / ADAPTER, base, settings.model, lora, pairs(values), initial)
        save_stops(output / ADAPTER, base, session.prepared.ends)
    return values


def _named(arrays: Mapping[str, Any], base: HFCheckpoint, lora: LoraSettings | None) -> dict[str, Any]:
    """Return the trained arrays by a trace's names; without LoRA, those are names of the checkpoint."""
    return {name if lora is not None else checkpoint_name(name, base): a for name, a in arrays.items()}
