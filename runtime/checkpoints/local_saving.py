"""Checkpoints on each host's own disk, between those that all hosts reach.

ROOT/KEY/process-N/STEP     as runtime.checkpoints.saving has a step, of the shards that process N holds

KEY is that of the run's directory. They are written without a word between the hosts; those of several
processes are good for the mesh that wrote them alone. A run goes on from one when it is newer than the shared
checkpoints, and whole on every process; else it is as if there were none.

Orbax's manager for such checkpoints (orbax.checkpoint.experimental.emergency) is for two slices or more, the
first of which keeps none locally, and takes one tree without checksums. Its way of writing them is used here.
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
from ..settings import LocalCheckpointSettings
from ..training.elastic import Kept
from .adapter_reader import ITEM, step_folders
from .resuming import DATA, EVALUATIONS, OPTIMIZER, ResumePoint, examine
from .saving import cause, first_line, summed

KEEP = 2
"""Newest steps that are kept: one may be in the middle of being written when the machine goes."""
OF = "of"
"""In a step's metadata: what it is of."""


class LocalCheckpoints:
    """Writes and reads a process's part of a run's state.

    Args:
        settings: the recipe's.
        directory: of the run's shared checkpoints.
        mesh: of the run.
        record: digest of the recipe's record that the run began with.
        begins: whether it begins now: what lies here is then of an earlier one, and is removed.

    Attributes:
        every_steps: as the recipe has it.
        chosen: the step that the run goes on from, None where that is none of these.

    Raises:
        UserError: when the folder cannot be made.
    """

    def __init__(
        self, settings: LocalCheckpointSettings, directory: str, mesh: Mesh, record: str, begins: bool
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
        """What a run goes on from: the newest step that is whole on every process, where it is newer than
        what was found among the shared ones. Every process calls it, and gets the same.
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
            f"note: the run goes on from step {self.chosen} of {self.directory}; the newest of the shared "
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
        """The metadata of each whole step of this mesh that is newer than another."""
        out = {}
        for step in step_folders(self.directory):
            reason, metadata = examine(epath.Path(self.directory) / str(step))
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
        """Starts saving a step; the shards are copied to the host before this returns.

        Where it, or the one before it, cannot be written, a note says so, and no more are.
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
        """Waits for what is being written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            print(
                f"note: {self.directory} cannot be written ({cause(error)}): no more are saved locally",
                file=sys.stderr,
            )
        self._failed = True

    def restore(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> None:
        """Puts the shards of a step into a model and its optimizer."""
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
                f"{self.directory}: step {step} cannot be restored: {first_line(error)}",
                f"remove {self.directory}: the run then goes on from the shared checkpoints",
            ) from error
        nnx.update(model, restored[ITEM])
        nnx.update(Kept(optimizer), restored[OPTIMIZER])

    def _place(self, array: jax.Array) -> NamedSharding:
        """Counts of a new optimizer lie on one device."""
        placed = array.sharding
        return placed if isinstance(placed, NamedSharding) else NamedSharding(self._mesh, PartitionSpec())


def _alone() -> ocp.options.MultiprocessingOptions:
    """Each process is the first of its own checkpoints, and waits for none."""
    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=None, active_processes={number}, barrier_sync_key_prefix=f"local-{number}"
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    """Writes all shards that this process has, whether or not another one has them too."""
    types = ocp.type_handlers
    arrays = types.ArrayHandler(primary_host=None, replica_id=None, use_replica_parallel=False)
    registry = types.create_type_handler_registry((jax.Array, arrays))
    return summed(use_zarr3=True, multiprocessing_options=_alone(), type_handler_registry=registry)


def _states(model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> dict[str, nnx.State]:
    """What is kept of both, as the shared checkpoints have it."""
    params = nnx.state(model, nnx.LoRAParam) if lora_only else nnx.state(model)
    return {ITEM: params, OPTIMIZER: nnx.state(Kept(optimizer), nnx.optimizer.OptState)}


def _on_all_processes(steps: set[int]) -> set[int]:
    """The steps that all processes have; each has KEEP of them at most."""
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return steps
    own = np.full(KEEP, -1, np.int64)
    newest = sorted(steps)[-KEEP:]
    own[: len(newest)] = newest
    rows = multihost_utils.process_allgather(own)
    return set.intersection(*(set(map(int, row)) for row in rows)) - {-1}
