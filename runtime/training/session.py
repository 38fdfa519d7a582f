"""The parts that all scripts that train with jax share around their loops, whichever model they train."""

from __future__ import annotations

import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from etils import epath

from ..addresses import check_uploads
from ..build_check import demand_whole
from ..checkpoints import resuming
from ..checkpoints.new_length import Longer, check_length
from ..checkpoints.record import (
    LOCK,
    check_record,
    first_record,
    placement,
    read_record,
    record_digest,
    renew_record,
    write_record,
)
from ..checkpoints.saved_steps import step_folders
from ..checkpoints.saving import LocalCheckpoints
from ..checkpoints.trained_weights import check_model
from ..compilation_cache import cache_directory, keep_compiled
from ..data.batches import TrainingData
from ..data.prepare import PreparedData, Tokenizing, prepare
from ..data.prompts import Prompts, agreed_prompts
from ..data.tokenizer import load_tokenizer
from ..errors import UserError
from ..hosts.single import SINGLE, SingleProcess
from ..interrupts import Interrupted, Interrupts
from ..metrics import run_facts
from ..metrics.loggers import (
    COMPLETIONS,
    FILE,
    GENERATIONS,
    LOSS,
    REWARD,
    Metrics,
    Nowhere,
    done_line,
    download,
    last,
    nowhere,
    publisher,
    upload,
)
from ..metrics.run_report import peak_memory
from ..metrics.run_state import recorded
from ..metrics.services import RunFiles, open_services
from ..model.partition_rules import Placement
from ..model.sharding import Rows, start_mesh
from ..settings import CheckpointSettings, RunSettings, TrainSettings
from ..weights.checkpoint import HFCheckpoint
from ..weights.locate import locate_model
from ..weights.quantized_formats import sentence
from .ending import attended, farewell, out_of_memory, watching
from .script_arguments import Arguments
from .trace import check_writable

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ..checkpoints.resuming import ResumePoint
    from ..hosts.group import ProcessGroup
    from .trainer import TrainingOutcome


@dataclass(frozen=True)
class Session:
    """A run that has begun: its devices, its base, its data, and the checkpoint that it continues from.

    Attributes:
        artifact: folder of the generated script, with its recipe.lock.json.
        arguments: its command line.
        directory: of the checkpoints: an absolute local path, or a gs:// address.
        mesh: of the devices.
        base: the checkpoint that is trained.
        resumed: the checkpoint that --resume continues from; None without it.
        prepared: the data.
        prompts: the prompts that are answered at each evaluation, None for none.
        tokenizer: from `load_tokenizer`.
        continue_from: the step after which the recipe's schedule begins.
        longer: the change of the run's length or schedule since its record; None on hosts after the first.
        interrupts: the signals that end the run after a step.
        hosts: the processes of the run; usually only this one.
        local: checkpoints on this machine's own disk, None for none.
        began: the mesh and the sharding rules that the run began with, by its record.
    """

    artifact: Path
    arguments: Arguments
    directory: str
    mesh: Mesh
    base: HFCheckpoint
    resumed: ResumePoint
    prepared: PreparedData
    interrupts: Interrupts
    hosts: SingleProcess | ProcessGroup = SINGLE
    local: LocalCheckpoints | None = None
    prompts: Prompts | None = None
    tokenizer: Any = None
    continue_from: int = 0
    longer: Longer | None = None
    began: Placement | None = None

    def schedule(self, learning_rate: Callable[[int], Callable[[Any], Any]]) -> Callable[[Any], Any]:
        """Return the learning rate by optimizer step of the run, from 0.

        Args:
            learning_rate: makes the recipe's schedule for a number of steps; it begins after continue_from.
        """
        first = self.continue_from
        rates = learning_rate(self.total - first)
        return (lambda step: rates(step - first)) if first else rates

    @property
    def total(self) -> int:
        """Return the number of optimizer steps of the whole run."""
        return self.prepared.total_steps

    @property
    def until(self) -> int:
        """Return the optimizer step to stop after."""
        return min(self.total, self.arguments.steps or self.total)

    def kept(self, settings: RunSettings) -> RunSettings:
        """Return the settings, with the mesh whose blocks of nf4 the run keeps."""
        return replace(settings, model=replace(settings.model, began=self.began))

    def feed(self, rows: Rows | None = None) -> TrainingData:
        """Return the data of the run's loop.

        Args:
            rows: the rows of each micro-batch that this process's devices hold; None for all.
        """
        here, prepared = None if rows is None else rows.here, self.prepared
        return TrainingData(
            batches=lambda step: prepared.batches(self.total, step, here),
            evaluation=prepared.evaluation(here),
            state=prepared.state,
            origins=prepared.origins,
            tokens=prepared.tokens_of,
            rows=rows,
            eval_parts=prepared.eval_parts,
            prompts=self.prompts,
        )

    def enter(self, restored: int) -> None:
        """Print the step that the run continues after, and write the files that describe the run, with the
        recipe's record at the beginning."""
        if restored:
            print(f"continuing after step {restored} of {self.total}", file=sys.stderr)
        if restored == self.total or (self.arguments.steps or 0) > self.total:
            print(f"note: {FINISHED.format(self.total)}", file=sys.stderr)
        if not self.hosts.first:
            return
        if not restored:
            write_record(self.directory, self.artifact)
        elif self.longer is not None:
            renew_record(self.directory, self.artifact, restored)
            run_facts.copy_recipe(self.directory, self.artifact)
        run_facts.begin(
            self.directory,
            self.artifact,
            Path(sys.argv[0]).name,
            self.prepared,
            run_facts.jax_devices(),
            restored,
            self.until,
        )

    @contextmanager
    def metrics(
        self, restored: int, train: TrainSettings, close: Callable[[], None]
    ) -> Iterator[Metrics | Nowhere]:
        """Yield the writer of the loop's metrics; then close it, and copy its file to a remote directory.

        Args:
            restored: the step that the run continues after, 0 at the beginning.
            close: waits for checkpoints that are being saved; called after errors too.

        Raises:
            UserError: when the devices run out of memory.
        """
        remote = "://" in self.directory
        folder = self.arguments.output.resolve() if remote else Path(self.directory)
        if not self.hosts.first:
            with out_of_memory():
                yield Nowhere(folder / FILE)
            close()
            return
        publish: Callable[[Path], None] = nowhere
        if remote:
            if restored:
                for name in (FILE, GENERATIONS, COMPLETIONS):
                    download(folder / name, self.directory)
            publish = publisher(self.directory)
        files = RunFiles(folder, self.directory, self.artifact, self.arguments.resume, restored)
        services = open_services(train, files)
        with recorded(folder, self.total, self.until, publish) as ending:
            if not isinstance(self.hosts, SingleProcess):
                self.hosts.at_loss.append(ending.failed)
            metrics = Metrics(folder, restored or None, train.log.tensorboard, services, publish)
            # After an error here the other processes do not reach the point where they would wait for saves.
            waits = self.hosts.count == 1
            try:
                with out_of_memory():
                    yield metrics
                metrics.ends(0)
                waits, ending.early = True, metrics.early
            except Interrupted as interrupted:
                metrics.ends(128 + interrupted.signum, stopped=True)
                raise
            finally:
                try:
                    if waits:
                        close()
                finally:
                    metrics.close()
                if remote:
                    upload(metrics.path, self.directory)

    def conclude(self, outcome: TrainingOutcome, metrics: Path) -> int:
        """Print the last line of the run, and return its exit status.

        Args:
            outcome: of this process; losses that it did not compute are read from the file of metrics.
        """
        loss = last(metrics, "loss") if outcome.loss is None else outcome.loss
        eval_loss = last(metrics, LOSS.name) if outcome.eval_loss is None else outcome.eval_loss
        reward = last(metrics, REWARD.name) if outcome.eval_reward is None else outcome.eval_reward
        if outcome.early is not None:
            print(
                f"{outcome.early}; --resume continues from there if the recipe has more patience, or no "
                "train.early_stopping",
                file=sys.stderr,
            )
        elif self.until < self.total:
            print(
                f"stopped after step {outcome.step} of {self.total}, as --steps says; "
                "--resume continues from there",
                file=sys.stderr,
            )
        speed = outcome.tokens_per_second
        line = done_line(outcome.step, speed, loss, eval_loss, peak_memory(), outcome.early, reward)
        print(line, flush=True)
        return 0


def run_session(
    artifact: Path,
    arguments: Arguments,
    settings: RunSettings,
    cache: str | None,
    train: Callable[[Session], int],
    single: str = "",
) -> int:
    """Begin a run and train it.

    Args:
        cache: as for `begin`.
        train: trains, and returns the exit status.
        single: the script's name, if it trains in one process alone.

    Returns:
        The exit status: 0, 1 after an error that was printed, or 128 + the signal's number after one.
    """
    directory = checkpoint_directory(settings.checkpoint, arguments.output)

    def work(interrupts: Interrupts, hosts: SingleProcess | ProcessGroup) -> int:
        if single and hosts.count > 1:
            raise UserError(f"{single} trains on one host", "run train.py on several")
        with watching(interrupts, settings.mesh.platform):
            session = begin(artifact, arguments, directory, settings, cache, interrupts, hosts)
            with closing(session.prepared):
                return train(session)

    return attended(functools.partial(farewell, directory=directory), settings.mesh.hosts, work)


def begin(
    artifact: Path,
    arguments: Arguments,
    directory: str,
    settings: RunSettings,
    cache: str | None,
    interrupts: Interrupts,
    hosts: SingleProcess | ProcessGroup = SINGLE,
) -> Session:
    """Start the devices, open the base, prepare the data, and find the checkpoint to continue from.

    Args:
        hosts: the processes of the run. Process 0 reads the directory for all.
        cache: folder or gs:// address for results that the next run reuses, relative to --output;
            None keeps nothing.

    Raises:
        UserError: when a part of these is not as the recipe needs it.
    """
    demand_whole(artifact)
    caches = cache_directory(cache, arguments.output)
    check_uploads(directory, caches)
    hosts.keep_log(arguments.output)
    longer = check_directory(directory, artifact, arguments.resume) if hosts.first else None
    if arguments.trace is not None:
        if hosts.count > 1:
            raise UserError("--trace is for a run of one process", "leave it out, or run on one host")
        check_writable(arguments.trace)
    quiet()
    keep_compiled(caches)

    mesh = start_mesh(settings.mesh, hosts.count)
    if jax.process_index() != hosts.number:
        raise UserError(
            f"this is process {hosts.number} of the run, and process {jax.process_index()} to its TPU",
            "number the processes as the TPU's workers are, or set no JAX_PROCESS_ID",
        )
    if settings.model.dtype == "float32":
        # A TPU multiplies float32 matrices in bfloat16 by default.
        jax.config.update("jax_default_matmul_precision", "highest")
    base_folder = locate_model(settings.model, arguments.model)
    base = HFCheckpoint.open(base_folder).grown(settings.model.vocab_size)
    if settings.data.images is not None:
        base = base.seeing()
    base.verify()
    check_model(read_record(artifact), base)
    if base.dequantized:
        print(f"note: {sentence(base)}", file=sys.stderr)
    point = resuming.ResumePoint(
        **hosts.agree(
            "found", lambda: asdict(resuming.find(directory) if arguments.resume else resuming.ResumePoint())
        )
    )
    local = None
    if settings.checkpoint.local is not None:
        record = hosts.agree(
            "record",
            lambda: record_digest(directory if longer is None else artifact) if arguments.resume else None,
        )
        begun_with = record or record_digest(artifact) or ""
        local = LocalCheckpoints(settings.checkpoint.local, directory, mesh, begun_with, record is None)
        point = local.newer(point)
    began = None
    if settings.model.quantization == "nf4":
        began = hosts.agree(
            "began",
            lambda: placement(read_record(artifact) if point.step is None else first_record(directory)),
        )
    tokenizer = load_tokenizer(base_folder, settings.model, settings.data, arguments.data_dir)
    prompts = None
    if settings.train.generations is not None:
        prompts = agreed_prompts(settings, base, tokenizer, arguments.data_dir, hosts)
    prepared = prepare(
        settings.data,
        settings.train,
        settings.train.micro_batch_size * settings.mesh.data_parallel,
        tokenizer,
        arguments.data_dir,
        base.architecture.vocab_size,
        Tokenizing(
            None if caches is None or "://" in caches else Path(caches),
            after=point.data,
            model_dir=base_folder,
        ),
    )
    print(replace(prepared.report, chooses=choosing(settings)).text(), file=sys.stderr)
    if prompts is not None:
        prompts = prompts.ending_at(prepared.ends)
    if point.imported is not None:
        print(
            f"note: step 0 holds the adapter of {point.imported['adapter']}: training begins with it, with a "
            "new optimizer, at the first step of the schedule and at the beginning of the data",
            file=sys.stderr,
        )
    elif point.step is not None:
        resuming.check_data(directory, point, prepared.state(point.step))
    if hosts.first:
        per_epoch, first = prepared.steps_per_epoch, settings.train.continue_from
        note = check_length(directory, point.step, prepared.total_steps, per_epoch, first, longer)
        if note is not None:
            print(f"note: {note}", file=sys.stderr)
    data = f"{prepared.fingerprint} {prepared.samples.digest}"  # of a stream, what was read of it until now
    hosts.same_inputs(artifact / LOCK, data, arguments.steps)
    if hosts.first:
        resuming.set_aside(directory, point)
    hosts.barrier("begin")
    return Session(
        *(artifact, arguments, directory, mesh, base, point, prepared, interrupts, hosts, local, prompts),
        tokenizer,
        settings.train.continue_from or 0,
        longer,
        None if began is None else Placement.of(began),
    )


def checkpoint_directory(checkpoint: CheckpointSettings, output: Path) -> str:
    """Return where the checkpoints are written: an absolute local path, or a gs:// address."""
    if "://" in checkpoint.directory:
        return checkpoint.directory
    return str((output / checkpoint.directory).expanduser().resolve())


def choosing(settings: RunSettings) -> list[str]:
    """Return the keys of the recipe that choose a step by the evaluation loss."""
    keys = {
        "train.early_stopping": settings.train.early_stopping is not None,
        "checkpoint.keep_best": settings.checkpoint.keep_best,
    }
    return [key for key, on in keys.items() if on]


FINISHED = (
    "the recipe's run ends at step {}; to train longer, raise train.steps or train.epochs in the recipe, "
    "build it again, and continue with --resume"
)


def check_directory(directory: str, artifact: Path, resume: bool) -> Longer | None:
    """Raise an error where two runs would mix in one checkpoint directory; return how a run's length or
    schedule changes."""
    steps = step_folders(directory)
    if steps and not resume:
        raise UserError(
            f"{directory} already holds checkpoints, the newest of step {steps[-1]}",
            "--resume continues that run; for a new one choose another checkpoint.directory, or --output",
        )
    longer = None
    if resume and (steps or (epath.Path(directory) / LOCK).exists()):
        longer = check_record(directory, artifact, steps[-1] if steps else None)
    if resume and not steps:
        print(f"{directory} holds no checkpoint yet: starting from the beginning", file=sys.stderr)
    return longer


def quiet() -> None:
    """Keep the libraries' messages for developers off the terminal."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="(tunix|qwix|flax|orbax|jax).*")
    # Orbax logs a failed save with its traceback, and asyncio logs each later write that failed;
    # the run reports the failure once, as its own error.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.unraisablehook = _unraisable
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _unraisable(event: sys.UnraisableHookArgs) -> None:
    """Print an exception that nothing could catch, except those of a save that has failed already.

    When one of tensorstore's writes fails, the others still report to an event loop that is already closed.
    """
    if not (event.exc_type is RuntimeError and str(event.exc_value) == "Event loop is closed"):
        sys.__unraisablehook__(event)
