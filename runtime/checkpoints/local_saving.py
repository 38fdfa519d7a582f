"""Checkpoints on each host's own disk, written between the shared checkpoints that all hosts can read.

ROOT/KEY/process-N/STEP     a step as in runtime.checkpoints.saving, with the shards of process N

KEY identifies the run's directory. Hosts write these checkpoints without contacting each other. Those of
several processes fit only the mesh that wrote them. A run continues from one if it is newer than the shared
checkpoints, and intact on every process; otherwise the local checkpoints are ignored.

Orbax's manager for such checkpoints (orbax.checkpoint.experimental.emergency) needs two slices or more, keeps
none on the first slice, and takes one tree without checksums. This module uses only its way of writing.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import UserError
from ..sections import LocalCheckpoint
from ..training.elastic import Kept
from .adapter_reader import ITEM, step_folders
from .resuming import DATA, EVALUATIONS, OPTIMIZER, ResumePoint, examine
from .saving import cause, summed

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

    def newer(self, found: ResumePoint) -> ResumePoint:
        """Return what a run continues from: the newest step that is intact on every process, if it is newer
        than `found`, the newest shared one. Every process calls this, and gets the same result.
        """
        shared = found.step or 0
        own = self._whole(shared)
        self.chosen = max(_on_all_processes(set(own)), default=None)
        for step in self._manager.all_steps():
            if step > (self.chosen or shared):  # it is going to be saved again
                self._manager.delete(step)
        if self.chosen is None:
            return found
        print(
            f"note: the run continues from step {self.chosen} of {self.directory}; the newest of the shared "
            f"checkpoints is of step {shared}",
            file=sys.stderr,
        )
        chosen = own[self.chosen]
        return replace(
            found,
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

    def write(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        lora_only: bool,
        metadata: Mapping[str, Any],
    ) -> None:
        """Start saving a step; the shards are copied to the host before this returns.

        If this step or the one before it cannot be written, print a note and write no more steps.
        """
        if self._failed:
            return
        items = {
            name: ocp.args.PyTreeSave(item=tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), tree))
            for name, tree in _states(model, optimizer, lora_only).items()
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

    def restore(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> None:
        """Put the shards of a step into a model and its optimizer."""
        states = _states(model, optimizer, lora_only)
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
        nnx.update(model, restored[ITEM])
        nnx.update(Kept(optimizer), restored[OPTIMIZER])

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


def _states(model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> dict[str, nnx.State]:
    """Return the parts of both that are saved, as in the shared checkpoints."""
    params = nnx.state(model, nnx.LoRAParam) if lora_only else nnx.state(model)
    return {ITEM: params, OPTIMIZER: nnx.state(Kept(optimizer), nnx.optimizer.OptState)}


def _on_all_processes(steps: set[int]) -> set[int]:
    """Return the steps that all processes have; each process has at most KEEP."""
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return steps
    own = np.full(KEEP, -1, np.int64)
    newest = sorted(steps)[-KEEP:]
    own[: len(newest)] = newest
    rows = multihost_utils.process_allgather(own)
    return set.intersection(*(set(map(int, row)) for row in rows)) - {-1}
