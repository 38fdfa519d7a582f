"""Checkpoints on each host's own disk, between those that all hosts reach.

ROOT/KEY/process-N/STEP     as runtime.saving has a step, of the shards that process N holds: of each array
                            its distinct shards, one after the other

KEY is that of the run's directory. They are written without a word between the hosts, and are good for the
mesh that wrote them alone. A run goes on from one when it is newer than the shared checkpoints, and whole on
every process; else it is as if there were none.
"""

from __future__ import annotations

import hashlib
import json
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
from jax.sharding import Mesh

from runtime.elastic import Kept
from runtime.errors import UserError
from runtime.saving import CHECK, DATA, OPTIMIZER, Found, digest, examine, not_written, summed
from runtime.settings import LocalCheckpointSettings
from runtime.trained import ITEM, step_folders

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
        record: the recipe's record beside the shared checkpoints, None where a run begins: what lies here is
            then of an earlier one, and is removed.

    Raises:
        UserError: when the folder cannot be made.
    """

    def __init__(
        self, settings: LocalCheckpointSettings, directory: str, mesh: Mesh, record: bytes | None
    ) -> None:
        self.every_steps = settings.every_steps
        number, count = jax.process_index(), jax.process_count()
        key = hashlib.sha256(directory.encode()).hexdigest()[:12]
        self.directory = str(Path(settings.directory).expanduser() / key / f"process-{number}")
        self._of = {"mesh": dict(mesh.shape), "process": number, "processes": count}
        try:
            if record is None:
                shutil.rmtree(self.directory, ignore_errors=True)
            Path(self.directory).mkdir(parents=True, exist_ok=True)
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
                cleanup_tmp_directories=True,
                multiprocessing_options=_alone(),
            ),
        )

    def newer(self, found: Found) -> Found:
        """What a run goes on from: the newest step that is whole here on every process, where it is newer than
        what was found among the shared ones. Every process calls it, and gets the same.
        """
        own = self._whole(found.step or 0)
        steps = _on_all_processes(set(own))
        if not steps:
            return found
        step = max(steps)
        print(
            f"note: {self.directory} holds step {step}, which is newer than the shared checkpoints",
            file=sys.stderr,
        )
        return replace(found, step=step, data=own[step], imported=None)

    def _whole(self, after: int) -> dict[int, Mapping[str, Any]]:
        """The state of the data of each whole step of this mesh that is newer than another."""
        out = {}
        for step in step_folders(self.directory):
            reason, metadata = examine(epath.Path(self.directory) / str(step))
            if reason is None and step > after and metadata.get(OF) == self._of:
                out[step] = metadata[DATA]
        return out

    def has(self, step: int) -> bool:
        """Whether a step is here."""
        return step in self._manager.all_steps()

    def write(
        self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool, data: Mapping[str, Any]
    ) -> None:
        """Starts saving a step; the shards are copied to the host before this returns.

        Raises:
            UserError: when this step, or the one before it, could not be written.
        """
        state = json.loads(json.dumps(dict(data)))
        # On a device of this process alone: of numpy's arrays, Orbax writes those of process 0.
        (host, *_) = jax.local_devices(backend="cpu")
        items = {
            name: ocp.args.PyTreeSave(
                {path: jax.device_put(parts(array), host) for path, array in _arrays(state).items()}
            )
            for name, state in _states(model, optimizer, lora_only).items()
        }
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata={DATA: state, CHECK: digest(state), OF: self._of},
                force=True,
            )
        except Exception as error:  # tensorstore, Orbax and the system each raise their own kinds
            raise not_written(self.directory, error) from error

    def finish(self) -> None:
        """Waits for what is being written.

        Raises:
            UserError: when it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise not_written(self.directory, error) from error

    def restore(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> None:
        """Puts the shards of a step into a model and its optimizer."""
        states = _states(model, optimizer, lora_only)
        as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
        items = {
            name: ocp.args.PyTreeRestore(restore_args=dict.fromkeys(_arrays(state), as_numpy))
            for name, state in states.items()
        }
        restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        for name, owner in ((ITEM, model), (OPTIMIZER, Kept(optimizer))):
            held = restored[name]
            made = [
                (path, variable.replace(assembled(variable.get_raw_value(), held[_name(path)])))
                for path, variable in states[name].flat_state()
            ]
            nnx.update(owner, nnx.State.from_flat_path(made))

    def forget(self, step: int) -> None:
        """Removes steps that are newer than the one that the run goes on from."""
        for newer in [one for one in self._manager.all_steps() if one > step]:
            self._manager.delete(newer)


def _alone() -> ocp.options.MultiprocessingOptions:
    """A manager, or a handler, of this process alone."""
    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=number, active_processes={number}, barrier_sync_key_prefix=f"local-{number}"
    )


def _handler() -> ocp.PyTreeCheckpointHandler:
    types = ocp.type_handlers
    arrays = types.ArrayHandler(primary_host=jax.process_index(), use_replica_parallel=False)
    registry = types.create_type_handler_registry((jax.Array, arrays), (np.ndarray, types.NumpyHandler()))
    return summed(multiprocessing_options=_alone(), type_handler_registry=registry)


def _states(model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> dict[str, nnx.State]:
    """What is kept of both, as the shared checkpoints have it."""
    params = nnx.state(model, nnx.LoRAParam) if lora_only else nnx.state(model)
    return {ITEM: params, OPTIMIZER: nnx.state(Kept(optimizer), nnx.optimizer.OptState)}


def _arrays(state: nnx.State) -> dict[str, jax.Array]:
    return {_name(path): variable.get_raw_value() for path, variable in state.flat_state()}


def _name(path: tuple[Any, ...]) -> str:
    return ".".join(map(str, path))


def parts(array: jax.Array) -> np.ndarray:
    """[n, ...]: the n distinct shards of an array that this process holds, in the order of their places."""
    shards = {_place(shard.index): shard for shard in array.addressable_shards}
    return np.stack([np.asarray(shards[place].data) for place in sorted(shards)])


def assembled(like: jax.Array, held: np.ndarray) -> jax.Array:
    """The array that `parts` gave, with the sharding of another one of its shape."""
    devices = like.sharding.addressable_devices_indices_map(like.shape)
    places = sorted({_place(index) for index in devices.values()})
    pieces = [jax.device_put(held[places.index(_place(index))], device) for device, index in devices.items()]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, pieces)


def _place(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


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
