"""The checkpoints of a run: what is trained, the optimizer's state and the place in the data.

They lie as train.py's do (runtime.checkpoints.saving), with Hugging Face's names for the arrays. Adapters of
a model that no family describes lie as merge.py reads them, A [in, rank] and B [rank, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from ...checkpoints.adapter_reader import ITEM, restore_tree
from ...checkpoints.resuming import OPTIMIZER, describe
from ...checkpoints.saving import Preserved, begin_save, first_line, manager, not_written
from ...errors import UserError
from ...training.elastic import after_step, between_steps
from ...training.step import TrainState

Arrays = dict[str, Any]
"""What is trained, by a trace's names; jax arrays, or jax.ShapeDtypeStruct with shardings."""


class Checkpoints:
    """Writes and reads a run's checkpoints, whole or not at all.

    Args:
        directory: local and absolute, or gs://; it is created.
        keep: newest steps that are kept.
        for_merge: whether adapters lie as merge.py reads them.

    Raises:
        UserError: when the directory cannot be created.
    """

    def __init__(self, directory: str, keep: int, for_merge: bool = False) -> None:
        self.directory = directory
        self._for_merge = for_merge
        self._manager = manager(directory, Preserved(keep))

    @property
    def newest(self) -> int | None:
        """The newest step that was saved, or is being saved."""
        return self._manager.latest_step()

    def write(self, step: int, live: TrainState, data: Mapping[str, Any]) -> None:
        """Starts saving a step: the arrays are copied before this returns, and written behind it.

        Args:
            data: the state of the data, of JSON values.

        Raises:
            UserError: when this step, or the one before it, could not be written.
        """
        items = {
            name: ocp.args.PyTreeSave(item=tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), tree))
            for name, tree in ((ITEM, self._stored(live[0])), (OPTIMIZER, between_steps(live[1])))
        }
        begin_save(
            self.directory,
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata=describe(data),
                force=True,
            ),
        )

    def finish(self) -> None:
        """Waits for what is being written.

        Raises:
            UserError: when it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise not_written(self.directory, error) from error

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """The arrays of a step, in their places.

        Args:
            shapes: of jax.ShapeDtypeStruct with shardings.

        Raises:
            UserError: when they are others.
        """
        wanted = {ITEM: self._stored(shapes[0]), OPTIMIZER: between_steps(shapes[1])}
        restored = self._read(step, wanted)
        trained = self._live(restored[ITEM], shapes[0])
        return trained, after_step(shapes[1], restored[OPTIMIZER], step)

    def restore_adapters(self, step: int, shapes: Arrays) -> Arrays:
        """The adapters of a step that merge.py imported, in their places.

        Raises:
            UserError: when they are others.
        """
        leaves = restore_tree(f"{self.directory}/{step}/{ITEM}")
        wanted = {_path(name): array.shape[::-1] for name, array in shapes.items()}
        if {name: array.shape for name, array in leaves.items()} != wanted:
            raise UserError(
                f"{self.directory}: step {step} holds other adapters than this artifact trains",
                "import the adapter again",
            )
        return self._live(leaves, shapes)

    def _read(self, step: int, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        items = {
            name: ocp.args.PyTreeRestore(
                item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            for name, tree in wanted.items()
        }
        try:
            restored: Mapping[str, Any] = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(
                f"{self.directory}: the checkpoint of step {step} cannot be restored: {first_line(error)}",
                "its parameters must be those that this artifact trains",
            ) from error
        return restored

    def _stored(self, trained: Arrays) -> Arrays:
        """Arrays, or their shapes, as they are written."""
        if not self._for_merge:
            return trained
        return {_path(name): _transposed(array) for name, array in trained.items()}

    def _live(self, stored: Arrays, shapes: Arrays) -> Arrays:
        """The inverse of `_stored`."""
        if not self._for_merge:
            return stored
        return {
            name: jax.device_put(stored[_path(name)].T, wanted.sharding) for name, wanted in shapes.items()
        }


def _path(name: str) -> str:
    """model.adapters' path of an array, from a trace's name: "....q_proj.weight_lora_a"."""
    module, letter = name.rsplit(".lora_", 1)
    return f"{module}.weight_lora_{letter.lower()}"


def _transposed(array: Any) -> Any:
    if not isinstance(array, jax.ShapeDtypeStruct):
        return array.T
    place: Any = array.sharding
    spec = (*place.spec, None, None)[:2]
    return jax.ShapeDtypeStruct(
        array.shape[::-1], array.dtype, sharding=NamedSharding(place.mesh, PartitionSpec(*spec[::-1]))
    )
