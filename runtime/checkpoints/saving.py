"""Save and restore the checkpoints of a run; resuming.py tells intact ones from damaged ones.

ROOT/STEP/model_params, ROOT/STEP/optimizer_state   Orbax trees, each with its checksums
ROOT/STEP/_CHECKPOINT_METADATA                      Orbax's, with the state of the data in it
ROOT/0/model_params, ROOT/0/_CHECKPOINT_METADATA    adapters that were trained elsewhere, and their origin
ROOT/corrupt-STEP                                   a damaged step that a continued run passed over

Of the optimizer, checkpoints keep the state of the recipe's chain, so that a run can continue with another
number of micro-batches per step. optax.MultiSteps wraps that state where an optimizer step has several
micro-batches. Between steps its own fields are known: no gradient, and the step's count.

Each host can also write checkpoints to its own disk, between the shared checkpoints that all hosts can read:

ROOT/KEY/process-N/STEP     a step as above, with the shards of process N

KEY identifies the run's directory. Hosts write these checkpoints without contacting each other. Those of
several processes fit only the mesh that wrote them. A run continues from one if it is newer than the shared
checkpoints, and intact on every process; otherwise the local checkpoints are ignored.

Orbax's manager for such checkpoints (orbax.checkpoint.experimental.emergency) needs two slices or more, keeps
none on the first slice, and takes one tree without checksums. This module uses only its way of writing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.sft.checkpoint_manager import CheckpointManager

from ..addresses import is_address, path_of, reached, read_by_orbax
from ..errors import PASSING, UserError, first_line
from ..hosts.watched import watch
from ..sections import LocalCheckpoint
from ..stores import failed, passing
from . import manifest
from .resuming import DATA, EVALUATIONS, OPTIMIZER, ResumePoint, examine
from .saved_steps import ITEM, saved_steps, step_folders, unfinished


class Kept(nnx.Module):
    """The part of an nnx.Optimizer's state that checkpoints keep; its variables are the optimizer's own."""

    def __init__(self, optimizer: nnx.Optimizer) -> None:
        self.opt_state = nnx.data(between_steps(optimizer.opt_state))


def between_steps(state: Any) -> Any:
    """Return the state of the recipe's chain, whether or not optax.MultiSteps wraps it."""
    return state.inner_opt_state if isinstance(state, optax.MultiStepsState) else state


def set_step(optimizer: nnx.Optimizer, step: int, accumulation: int) -> None:
    """Set the counts of an optimizer whose chain was restored from a checkpoint.

    Args:
        step: optimizer steps that are done.
        accumulation: micro-batches of each later step.
    """
    optimizer.step.set_value(jnp.asarray(step * accumulation, jnp.uint32))
    if isinstance(optimizer.opt_state, optax.MultiStepsState):
        optimizer.opt_state.gradient_step.set_value(jnp.asarray(step, jnp.int32))


@dataclass(frozen=True)
class StepArrays:
    """What a step saves, and what restoring it fills.

    Attributes:
        optimizer: its state is part of the step; None for a step without one.
        lora_only: whether the adapters are saved alone, without the base.
    """

    model: nnx.Module
    optimizer: nnx.Optimizer | None
    lora_only: bool

    def states(self) -> dict[str, nnx.State]:
        """Return the arrays by the names of their folders."""
        params = nnx.state(self.model, nnx.LoRAParam) if self.lora_only else nnx.state(self.model)
        return {ITEM: params, OPTIMIZER: nnx.state(Kept(self.optimizer), nnx.optimizer.OptState)}


class Checkpoints(CheckpointManager):
    """Tunix's manager, which also writes checksums into each step.

    Args:
        directory: local and absolute, or gs://; it is created.
        keep: newest steps that are kept.

    Attributes:
        kept: which of its steps are kept; its `best` may be set.
        on_failure: called, in another thread, when this process could not write its part of a step: the other
            processes would wait for that part forever. None for a single process.

    Raises:
        UserError: when the directory cannot be created.
    """

    def __init__(self, directory: str, keep: int) -> None:
        super().__init__(None)
        self.directory = directory
        self.on_failure: Callable[[UserError], None] | None = None
        self.kept = Preserved(keep)
        failed = self._failed if jax.process_count() > 1 else None
        self._checkpoint_manager = manager(directory, self.kept, failed)

    def write(self, step: int, arrays: StepArrays, metadata: Mapping[str, Any]) -> None:
        """Start saving a step: arrays are copied before this returns, and written in the background.

        Args:
            metadata: from `resuming.describe`.

        Raises:
            UserError: when this step, or the one before it, could not be written.
        """
        begin_save(
            self.directory,
            lambda: self.save(
                step,
                arrays.model,
                arrays.optimizer and Kept(arrays.optimizer),
                save_only_lora_params=arrays.lora_only,
                force=True,
                custom_metadata=dict(metadata),
            ),
        )

    def _failed(self, error: Exception) -> None:
        if self.on_failure is not None:
            self.on_failure(not_written(self.directory, error))

    def finish(self) -> None:
        """Wait until the current step is written.

        Raises:
            UserError: when the step could not be written.
        """
        try:
            self.close()
        except Exception as error:
            raise not_written(self.directory, error) from error

    def restore(self, step: int, arrays: StepArrays) -> None:
        """Put the arrays of a step into a model and its optimizer.

        The optimizer does not change if the step was imported.

        Raises:
            UserError: when they do not fit.
        """
        try:
            optimizer = Kept(arrays.optimizer)
            self.maybe_restore(arrays.model, optimizer, step, restore_only_lora_params=arrays.lora_only)
        except Exception as error:
            raise UserError(
                f"{self.directory}: the checkpoint of step {step} cannot be restored: {cause(error)}",
                "its parameters must be those that this artifact trains",
            ) from error


@dataclass
class Preserved:
    """Which steps are kept when another one is saved, in the form that Orbax asks for.

    Attributes:
        newest: how many of the newest steps are kept.
        best: a step that is also kept, however old; None for none.
    """

    newest: int
    best: int | None = None

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Return which of the checkpoints, the oldest first, are kept."""
        older = len(checkpoints) - self.newest
        return [
            place >= older or checkpoint.step == self.best for place, checkpoint in enumerate(checkpoints)
        ]


def manager(
    directory: str, kept: Preserved, failed: Callable[[Exception], None] | None = None
) -> ocp.CheckpointManager:
    """Make Orbax's manager of a run's checkpoints: trained arrays and optimizer state, each with checksums.

    Args:
        kept: which steps are kept.
        failed: called, in another thread, with the error if this process cannot write its part of a step.

    Raises:
        UserError: when the directory cannot be created.
    """
    # In a bucket Orbax would take every folder without a commit marker for an unfinished save, and remove it.
    bucket = read_by_orbax(directory)
    for step in unfinished(directory) if jax.process_index() == 0 else ():
        with reached(directory, "written"):
            (path_of(directory) / str(step)).rmtree()
        print(f"note: {directory}: the save of step {step} did not finish: it is removed", file=sys.stderr)
    try:
        with reached(directory, "written"):
            return ocp.CheckpointManager(
                directory,
                item_handlers={ITEM: summed(failed), OPTIMIZER: summed(failed)},
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=kept, cleanup_tmp_directories=not bucket
                ),
            )
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {cause(error)}",
            "choose another checkpoint.directory, or --output",
        ) from error


def begin_save(directory: str, save: Callable[[], object]) -> None:
    """Begin a save, which Orbax continues in the background.

    Orbax raises the previous save's error here. If a store was busy for longer than its libraries wait, that
    step is given up, with a note. Only a single process does so: other processes would not learn of it.

    Raises:
        UserError: when this step could not be written, or the previous one failed permanently.
    """
    try:
        try:
            save()
        except Exception as error:
            if not (_may_pass(directory, error) and jax.process_count() == 1):
                raise
            reason = f"{cause(error)}; {kept(directory)}"
            print(f"note: {directory}: a checkpoint could not be written: {reason}", file=sys.stderr)
            save()
    except Exception as error:  # tensorstore, Orbax and the system each raise their own kinds
        raise not_written(directory, error) from error


def not_written(directory: str, error: Exception) -> UserError:
    """Make the error for a step that could not be saved."""
    way_out: str | None = "free disk space or allow writing to the directory"
    if is_address(directory):
        way_out = failed(directory, "written", error).help
    return UserError(
        f"{directory}: a checkpoint could not be written: {cause(error)}; {kept(directory)}",
        f"{way_out}, and continue with --resume",
        PASSING if _may_pass(directory, error) else 1,
    )


def _may_pass(directory: str, error: Exception) -> bool:
    """Return whether a failed write may be repeated, because a store did not answer."""
    if not is_address(directory):
        return False
    return passing(error)


def kept(directory: str) -> str:
    """Say which checkpoint a run that ends now leaves, as part of a sentence."""
    try:
        steps: Sequence[int] = saved_steps(directory)
    except UserError:
        return "what was saved before is kept"
    return f"kept: the checkpoint of step {steps[-1]}" if steps else "no checkpoint was saved yet"


def cause(error: BaseException) -> str:
    """Return the system's own message for an error, if it has one."""
    text = str(error)
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.EIO):
        words = os.strerror(number)
        if (isinstance(error, OSError) and error.errno == number) or words in text:
            return words
    return first_line(error)[:200]


def summed(failed: Callable[[Exception], None] | None = None, **options: Any) -> ocp.PyTreeCheckpointHandler:
    """Make a handler that writes checksums when the files of its tree are complete.

    Orbax looks handlers up by their exact class, so this replaces methods of an instance.

    Args:
        failed: called with the error that keeps this process from writing its part.
        options: of Orbax's handler.
    """
    handler = ocp.PyTreeCheckpointHandler(**options)
    finalize = handler.finalize
    if failed is not None:
        watch(handler, failed)

    def finalize_and_sum(directory: epath.Path) -> None:
        finalize(directory)
        manifest.write(directory)

    handler.finalize = finalize_and_sum
    return handler


KEEP = 2
"""Newest steps that are kept: the machine may fail while one of them is being written."""
OF = "of"
"""The key in a step's metadata of the run, process and mesh that wrote it."""


class LocalCheckpoints:
    """Write and read one process's part of a run's state.

    Args:
        directory: of the run's shared checkpoints.
        record: digest of the recipe's record at the start of the run.
        begins: whether the run starts now: local checkpoints are then from an earlier run, and are removed.

    Attributes:
        chosen: the local step that the run continues from, None if it continues from none of them.

    Raises:
        UserError: when the folder cannot be created.
    """

    def __init__(
        self, settings: LocalCheckpoint, directory: str, mesh: Mesh, record: str, begins: bool
    ) -> None:
        self.every_steps = settings.every_steps
        self.chosen: int | None = None
        number, count = jax.process_index(), jax.process_count()
        key = hashlib.sha256(directory.encode()).hexdigest()[:12]
        self.directory = str(Path(settings.directory).expanduser() / key / f"process-{number}")
        self._mesh = mesh
        self._failed = False
        self._of: dict[str, Any] = {"record": record, "process": number, "processes": count}
        self._of |= {"mesh": dict(mesh.shape)} if count > 1 else {}
        try:
            if begins:
                shutil.rmtree(self.directory, ignore_errors=True)
            Path(self.directory).mkdir(parents=True, exist_ok=True)
            for unfinished in Path(self.directory).glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(unfinished)
        except OSError as error:
            raise UserError(
                f"{self.directory}: cannot be written: {error.strerror}",
                "choose another checkpoint.local.directory",
            ) from error
        self._manager = ocp.CheckpointManager(
            self.directory,
            item_handlers={ITEM: _handler(), OPTIMIZER: _handler()},
            options=ocp.CheckpointManagerOptions(
                max_to_keep=KEEP,
                create=False,
                save_root_metadata=False,
                enable_per_process_directory_creation=True,
                multiprocessing_options=_alone(),
            ),
        )

    def newer(self, point: ResumePoint) -> ResumePoint:
        """Return what a run continues from: the newest step that is intact on every process, if it is newer
        than `point`, the newest shared one. Every process calls this, and gets the same result.
        """
        shared = point.step or 0
        local = self._whole(shared)
        self.chosen = max(_on_all_processes(set(local)), default=None)
        for step in self._manager.all_steps():
            if step > (self.chosen or shared):  # it is going to be saved again
                self._manager.delete(step)
        if self.chosen is None:
            return point
        print(
            f"note: the run continues from step {self.chosen} of {self.directory}; the newest of the shared "
            f"checkpoints is of step {shared}",
            file=sys.stderr,
        )
        chosen = local[self.chosen]
        return replace(
            point,
            step=self.chosen,
            data=chosen[DATA],
            imported=None,
            evaluations=chosen.get(EVALUATIONS),
        )

    def _whole(self, after: int) -> dict[int, Mapping[str, Any]]:
        """Return the metadata of each intact step of this mesh that is newer than `after`."""
        out = {}
        for step in step_folders(self.directory):
            try:
                reason, metadata = examine(epath.Path(self.directory) / str(step))
            except OSError as error:
                reason, metadata = str(error), {}
            if reason is None and step > after and metadata.get(OF) == self._of:
                out[step] = metadata
        return out

    def write(self, step: int, arrays: StepArrays, metadata: Mapping[str, Any]) -> None:
        """Start saving a step; the shards are copied to the host before this returns.

        If this step or the one before it cannot be written, print a note and write no more steps.
        """
        if self._failed:
            return
        items = {
            name: ocp.args.PyTreeSave(item=tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), tree))
            for name, tree in arrays.states().items()
        }
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata={**metadata, OF: self._of},
                force=True,
            )
        except Exception as error:  # tensorstore, Orbax and the system each raise their own kinds
            self._give_up(error)

    def finish(self) -> None:
        """Wait until the current step is written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            print(
                f"note: {self.directory} cannot be written ({cause(error)}): this run saves no more "
                "checkpoints locally",
                file=sys.stderr,
            )
        self._failed = True

    def restore(self, step: int, arrays: StepArrays) -> None:
        """Put the shards of a step into a model and its optimizer."""
        states = arrays.states()
        items = {
            name: ocp.args.PyTreeRestore(
                item=tree,
                restore_args=ocp.checkpoint_utils.construct_restore_args(
                    tree, jax.tree.map(self._place, tree)
                ),
            )
            for name, tree in states.items()
        }
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(
                f"{self.directory}: step {step} cannot be restored: {cause(error)}",
                f"remove {self.directory}: the run then continues from the shared checkpoints",
            ) from error
        nnx.update(arrays.model, restored[ITEM])
        nnx.update(Kept(arrays.optimizer), restored[OPTIMIZER])

    def _place(self, array: jax.Array) -> NamedSharding:
        """Return an array's sharding; counts of a new optimizer lie on one device."""
        mesh = NamedSharding(self._mesh, PartitionSpec())
        return array.sharding if isinstance(array.sharding, NamedSharding) else mesh


def _alone() -> ocp.options.MultiprocessingOptions:
    """Return options that make each process the first of its own checkpoints, and wait for no other."""
    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={number}, barrier_sync_key_prefix=f"local-{number}"
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Make a handler that writes all shards of this process, even if other processes have them too."""
    types = ocp.type_handlers
    arrays = types.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
    registry = types.create_type_handler_registry((jax.Array, arrays))
    return summed(use_zarr3=True, multiprocessing_options=_alone(), type_handler_registry=registry)


def _on_all_processes(steps: set[int]) -> set[int]:
    """Return the steps that all processes have; each process has at most KEEP."""
    if jax.process_count() == 1:
        return steps
    here = np.full(KEEP, -1, np.int64)
    newest = sorted(steps)[-KEEP:]
    here[: len(newest)] = newest
    rows = multihost_utils.process_allgather(here)
    return set.intersection(*(set(map(int, row)) for row in rows)) - {-1}
