"""What a generated train.py runs: one fine-tuning, from settings to the last checkpoint."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.adapters import LoraSettings
from runtime.cache import cache_directory, keep_compiled
from runtime.errors import UserError, guarded
from runtime.interrupts import Interrupted, Interrupts, name_of
from runtime.settings import CheckpointSettings, DataSettings, MeshSettings, ModelSettings, TrainSettings
from runtime.specs import Rule

if TYPE_CHECKING:
    import optax

    from runtime.trainer import Outcome


@dataclass(frozen=True)
class Arguments:
    """The command line of a generated train.py.

    Attributes:
        resume: continue from the newest checkpoint.
        steps: stop after this optimizer step; None for the recipe's own.
        model: folder of the checkpoint to start from, None to find the recipe's model.id.
        data_dir: what relative paths of data are relative to.
        output: what a relative checkpoint.directory is relative to.
        trace: file for what `recipe parity` compares, None to write none.
    """

    resume: bool
    steps: int | None
    model: Path | None
    data_dir: Path
    output: Path
    trace: Path | None = None


def parse_arguments(artifact: Path, argv: Sequence[str] | None = None) -> Arguments:
    """Reads the command line; wrong usage ends the process with status 2.

    Args:
        artifact: folder of the generated script.
        argv: sys.argv's arguments when None.
    """
    parser = argparse.ArgumentParser(
        prog="train.py",
        description=f"Fine-tunes as the recipe of {artifact.name} says. Hyperparameters are the recipe's.",
        allow_abbrev=False,
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--steps", type=_positive, metavar="N", help="stop after optimizer step N")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder of the base checkpoint")
    parser.add_argument(
        "--data-dir", type=Path, metavar="DIR", default=artifact, help="where the data files lie"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", default=artifact, help="where checkpoints and metrics go"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write losses, first gradients and what was trained"
    )
    given = parser.parse_args(argv)
    return Arguments(given.resume, given.steps, given.model, given.data_dir, given.output, given.trace)


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
    directory = checkpoint_directory(checkpoint, arguments.output)
    with Interrupts(lambda signum: farewell(signum, directory)) as interrupts:
        try:
            return guarded(
                lambda: _run(
                    artifact,
                    arguments,
                    directory,
                    interrupts,
                    (model, mesh, lora, data, train, checkpoint),
                    learning_rate,
                    optimizer,
                    rules,
                    cache_directory(cache, arguments.output),
                )
            )
        except Interrupted as interrupted:
            print(f"\n{farewell(interrupted.signum, directory)}", file=sys.stderr)
            return 128 + interrupted.signum


def checkpoint_directory(checkpoint: CheckpointSettings, output: Path) -> str:
    """Where the checkpoints go: an absolute local path, or a gs:// address."""
    if "://" in checkpoint.directory:
        return checkpoint.directory
    return str((output / checkpoint.directory).expanduser().resolve())


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
    from runtime.checkpoint import BaseCheckpoint
    from runtime.data import load_tokenizer, prepare
    from runtime.locate import locate_model
    from runtime.metrics import Metrics
    from runtime.metrics import last as last_metric
    from runtime.model import build
    from runtime.progress import Progress
    from runtime.record import write_record
    from runtime.recorder import Recorder
    from runtime.run_report import peak_memory
    from runtime.trainer import Trainer

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
    if found.imported is not None:
        print(
            f"note: step 0 holds the adapter of {found.imported['adapter']}: training begins with it, with a "
            "new optimizer, at the first step of the schedule and at the beginning of the data",
            file=sys.stderr,
        )
    elif found.step is not None:
        saving.check_data(directory, found, prepared.state(found.step))
    saving.set_aside(directory, found)
    schedule = learning_rate(total)

    with mesh, Progress("placing the weights", 1.0) as progress:
        built = build(
            base,
            model_settings,
            lora,
            mesh,
            rules,
            train.seed,
            lambda done, count: progress.advance(1 / count),
        )
    with mesh:
        recorder = None
        if arguments.trace is not None:
            recorder = Recorder(built, base, model_settings, prepared.accumulation, artifact.name)
        trainer = Trainer(
            built,
            optimizer(schedule),
            train,
            checkpoint,
            mesh,
            directory,
            prepared.accumulation,
            found.step,
            recorder,
        )
        restored = trainer.train_steps
        if restored:
            print(f"continuing after step {restored} of {total}", file=sys.stderr)
        else:
            write_record(directory, artifact)
        remote = "://" in directory
        folder = arguments.output.resolve() if remote else Path(directory)
        metrics = Metrics(folder, restored or None, train.tensorboard)
        try:
            outcome = trainer.fit(
                lambda step: prepared.batches(total, step),
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
    if recorder is not None and arguments.trace is not None:
        recorder.end(trainer.model).write(arguments.trace)
    if outcome.loss is None:
        outcome.loss = last_metric(metrics.path, "loss")
    if outcome.eval_loss is None:
        outcome.eval_loss = last_metric(metrics.path, "eval_loss")
    if until < total:
        print(
            f"stopped after step {until} of {total}, as --steps says; --resume goes on from there",
            file=sys.stderr,
        )
    print(summary(outcome, peak_memory()), flush=True)
    return 0


def summary(outcome: Outcome, peak: int) -> str:
    """The last line of a run.

    Args:
        peak: bytes of memory.
    """
    parts = [f"steps={outcome.step}"]
    if outcome.tokens_per_second is not None:
        parts.append(f"tokens/s={outcome.tokens_per_second:.0f}")
    if outcome.loss is not None:
        parts.append(f"loss={outcome.loss:.4f}")
    if outcome.eval_loss is not None:
        parts.append(f"eval_loss={outcome.eval_loss:.4f}")
    parts.append(f"peak_memory={peak / 2**30:.1f}GiB")
    return "done: " + " ".join(parts)


def check_directory(directory: str, artifact: Path, resume: bool) -> None:
    """Refuses to mix runs in one checkpoint directory."""
    from etils import epath

    from runtime.record import LOCK, check_record
    from runtime.trained import step_folders

    steps = step_folders(directory)
    if steps and not resume:
        raise UserError(
            f"{directory} already holds checkpoints, the newest of step {steps[-1]}",
            "--resume continues that run; for a new one choose another checkpoint.directory, or --output",
        )
    if resume and (steps or (epath.Path(directory) / LOCK).exists()):
        check_record(directory, artifact)
    if resume and not steps:
        print(f"{directory} holds no checkpoint yet: starting from the beginning", file=sys.stderr)


def farewell(signum: int, directory: str) -> str:
    """What to say of a run that a signal ends, and of what it leaves."""
    from runtime.trained import saved_steps

    steps = saved_steps(directory)
    if not steps:
        return f"stopped by {name_of(signum)}; no checkpoint was saved yet"
    return (
        f"stopped by {name_of(signum)}; kept: the checkpoint of step {steps[-1]} in {directory}; "
        "--resume continues from it"
    )


def quiet() -> None:
    """Keeps what libraries say to their developers off the terminal."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="(tunix|qwix|flax|orbax|jax).*")
    # Orbax logs a failed save with its traceback, asyncio each of its writes that failed after the first;
    # what failed is reported once, as an error of the run.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _unraisable
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _unraisable(event: sys.UnraisableHookArgs) -> None:
    """Prints an exception that nothing could catch, but not those of a save that has failed already.

    When one of tensorstore's writes fails, the others still report to an event loop that is closed by then.
    """
    if not (event.exc_type is RuntimeError and str(event.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(event)


def copy_metrics(path: Path, directory: str) -> None:
    """Puts the metrics beside checkpoints that are not local."""
    from etils import epath

    if path.exists():
        (epath.Path(directory) / path.name).write_bytes(path.read_bytes())


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of steps")
    return int(text)
