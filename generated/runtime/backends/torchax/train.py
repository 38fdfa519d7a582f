"""What a generated train_torchax.py runs: one fine-tuning of transformers' own model, from settings to the
trained adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.adapters import LoraSettings
from runtime.backends.arguments import Arguments
from runtime.cache import cache_directory, keep_compiled
from runtime.errors import UserError, guarded
from runtime.interrupts import Interrupted, Interrupts
from runtime.settings import CheckpointSettings, DataSettings, MeshSettings, ModelSettings, TrainSettings
from runtime.specs import Rule
from runtime.train import check_directory, checkpoint_directory, copy_metrics, farewell, quiet, summary

if TYPE_CHECKING:
    import optax

    from runtime.backends.torchax.model import Arrays
    from runtime.checkpoint import BaseCheckpoint

SUFFIX = "-torchax"
"""Of the directory of checkpoints, so that it is not train.py's."""


def run(
    artifact: Path,
    arguments: Arguments,
    model: ModelSettings,
    mesh: MeshSettings,
    lora: LoraSettings | None,
    data: DataSettings,
    train: TrainSettings,
    checkpoint: CheckpointSettings,
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
    rules: Sequence[Rule] = (),
    cache: str | None = None,
) -> int:
    """Trains, and prints one line about it at the end.

    Args:
        artifact: folder of the generated script, with its recipe.lock.json.
        learning_rate: a schedule by optimizer step, from the number of steps of the run.
        optimizer: the chain, from a schedule.
        cache: folder or gs:// address for what the next run need not compute again, relative to --output;
            None keeps nothing.

    Returns:
        The exit status: 0, 1 after an error that was printed, 128 + the signal's number after one.
    """
    settings = (model, mesh, lora, data, train, checkpoint)
    directory = checkpoint_directory(
        replace(checkpoint, directory=checkpoint.directory.rstrip("/") + SUFFIX), arguments.output
    )
    with Interrupts(lambda signum: farewell(signum, directory)) as interrupts:
        try:
            return guarded(
                lambda: _run(
                    artifact,
                    arguments,
                    directory,
                    interrupts,
                    settings,
                    learning_rate,
                    optimizer,
                    rules,
                    cache_directory(cache, arguments.output),
                )
            )
        except Interrupted as interrupted:
            print(f"\n{farewell(interrupted.signum, directory)}", file=sys.stderr)
            return 128 + interrupted.signum


def _run(
    artifact: Path,
    arguments: Arguments,
    directory: str,
    interrupts: Interrupts,
    settings: tuple[
        ModelSettings, MeshSettings, LoraSettings | None, DataSettings, TrainSettings, CheckpointSettings
    ],
    learning_rate: Callable[[int], Callable[[int], Any]],
    optimizer: Callable[[Any], optax.GradientTransformation],
    rules: Sequence[Rule],
    caches: str | None,
) -> int:
    model_settings, mesh_settings, lora, data, train, checkpoint = settings
    check_directory(directory, artifact, arguments.resume)
    if arguments.trace is not None:
        from runtime.trace import check_writable

        check_writable(arguments.trace)
    quiet()
    keep_compiled(caches)

    import jax

    from runtime import mesh as meshes
    from runtime import saving
    from runtime.backends.model import start
    from runtime.backends.torchax.checkpoints import Checkpoints
    from runtime.backends.torchax.model import abstract_model, load_base, load_trained, place_trained
    from runtime.backends.torchax.step import Step
    from runtime.backends.torchax.trainer import Trainer, new_trace
    from runtime.checkpoint import BaseCheckpoint
    from runtime.data import load_tokenizer, prepare
    from runtime.locate import locate_model
    from runtime.metrics import Metrics
    from runtime.metrics import last as last_metric
    from runtime.record import write_record
    from runtime.run_report import peak_memory
    from runtime.trainer import Outcome

    mesh = meshes.start(mesh_settings)
    if model_settings.dtype == "float32":
        # A TPU multiplies float32 matrices in bfloat16 unless it is told otherwise.
        jax.config.update("jax_default_matmul_precision", "highest")
    base_folder = locate_model(model_settings, arguments.model)
    base = BaseCheckpoint.open(base_folder)
    base.verify()
    found = saving.find(directory) if arguments.resume else saving.Found()
    prepared = prepare(
        data,
        train,
        train.micro_batch_size * mesh_settings.data_parallel,
        load_tokenizer(base_folder, model_settings, data, arguments.data_dir),
        arguments.data_dir,
        base.architecture.vocab_size,
        None if caches is None or "://" in caches else Path(caches),
    )
    print(prepared.report.text(), file=sys.stderr)
    total = prepared.total_steps
    until = min(total, arguments.steps or total)
    if found.step is not None:
        saving.check_data(directory, found, prepared.state(found.step))
    saving.set_aside(directory, found)
    schedule = learning_rate(total)
    with mesh:
        model = abstract_model(base.config, model_settings, lora, mesh, rules)
        step = Step(model, optimizer(schedule), train, prepared.accumulation, mesh)
        checkpoints = Checkpoints(directory, checkpoint.keep)
        if found.step is not None:
            live = checkpoints.restore(found.step, step.live)
            print(f"continuing after step {found.step} of {total}", file=sys.stderr)
        else:
            live = step.start(
                load_trained(model, base)
                if lora is None
                else place_trained(model, start(base, lora, train.seed, arguments.adapter))
            )
            write_record(directory, artifact)
        done = found.step or 0
        trace = None if arguments.trace is None else new_trace(artifact.name, model_settings)
        remote = "://" in directory
        folder = arguments.output.resolve() if remote else Path(directory)
        metrics = Metrics(folder, done or None, train.tensorboard)
        trainer = Trainer(
            step,
            live,
            load_base(model, base),
            done,
            train,
            prepared.accumulation,
            checkpoints,
            checkpoint.every_steps,
            mesh,
            trace,
        )
        del live
        try:
            trainer.fit(
                prepared.batches(total, done),
                prepared.eval_batches,
                until,
                schedule,
                metrics,
                interrupts,
                prepared.state,
                prepared.origins,
            )
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise UserError(
                f"the devices' memory does not suffice: {str(error).splitlines()[0][:200]}",
                "lower train.micro_batch_size or data.max_length, or set remat.policy to decoder",
            ) from error
        finally:
            metrics.close()
            trainer.close()
            if remote:
                copy_metrics(metrics.path, directory)
    trained = _saved(arguments.output, base, model_settings, lora, trainer.live[0])
    if trace is not None and arguments.trace is not None:
        trace.trained = trained
        trace.gradients = _named(trace.gradients, base, lora)
        trace.write(arguments.trace)
    if until < total:
        print(
            f"stopped after step {until} of {total}, as --steps says; --resume goes on from there",
            file=sys.stderr,
        )
    outcome = Outcome(
        trainer.done,
        trainer.loss if trainer.loss is not None else last_metric(metrics.path, "loss"),
        trainer.eval_loss if trainer.eval_loss is not None else last_metric(metrics.path, "eval_loss"),
        trainer.speed,
    )
    print(summary(outcome, peak_memory()), flush=True)
    return 0


def _saved(
    output: Path,
    base: BaseCheckpoint,
    settings: ModelSettings,
    lora: LoraSettings | None,
    trained: Arrays,
) -> dict[str, Any]:
    """Writes what was trained for other tools, and returns it by a trace's names."""
    import numpy as np

    from runtime.backends.saving import ADAPTER, MODEL, pairs, save_adapter, save_model

    values = _named({name: np.asarray(array) for name, array in trained.items()}, base, lora)
    if lora is None:
        save_model(output / MODEL, base, values)
    else:
        save_adapter(output / ADAPTER, base, settings, lora, pairs(values))
    return values


def _named(arrays: Mapping[str, Any], base: BaseCheckpoint, lora: LoraSettings | None) -> dict[str, Any]:
    """Arrays of what is trained by a trace's names: without LoRA, those of the checkpoint's tensors."""
    from runtime.backends.torchax.model import checkpoint_name

    return {name if lora is not None else checkpoint_name(name, base): a for name, a in arrays.items()}
