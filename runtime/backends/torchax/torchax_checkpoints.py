"""The checkpoints of a run: what is trained, the optimizer's state, and the position in the data.

They have the layout of train.py's (runtime.checkpoints.saving), with Hugging Face's names for the arrays.
Adapters of a model without a family are stored as merge.py reads them, A [in, rank] and B [rank, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from ...checkpoints.resuming import OPTIMIZER, describe
from ...checkpoints.saved_steps import ITEM
from ...checkpoints.saving import Preserved, begin_save, between_steps, cause, manager, not_written
from ...checkpoints.trained_weights import restore_tree
from ...errors import UserError
from ...training.step import TrainState

Arrays = dict[str, Any]
"""The trained arrays by a trace's names: jax arrays, or jax.ShapeDtypeStruct with shardings."""


class Checkpoints:
    """Writes and reads a run's checkpoints; a checkpoint is complete or does not exist.

    Args:
        directory: an absolute local path, or gs://; it is created.
        keep: number of newest steps to keep.
        for_merge: store adapters as merge.py reads them.

    Raises:
        UserError: the directory cannot be created.
    """

    def __init__(self, directory: str, keep: int, for_merge: bool = False) -> None:
        self.directory = directory
        self._for_merge = for_merge
        self._manager = manager(directory, Preserved(keep))

    @property
    def newest(self) -> int | None:
        """Return the newest step that was saved, or is being saved."""
        return self._manager.latest_step()

    def write(self, step: int, live: TrainState, data: Mapping[str, Any]) -> None:
        """Start saving a step. The arrays are copied before this returns, and written in the background.

        Args:
            data: the position in the data, as JSON values.

        Raises:
            UserError: this step, or the one before it, could not be written.
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
        """Wait until the current checkpoint is written.

        Raises:
            UserError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise not_written(self.directory, error) from error

    def restore(self, step: int, shapes: TrainState) -> TrainState:
        """Return the arrays of a step, on their devices.

        Args:
            shapes: jax.ShapeDtypeStruct with shardings.

        Raises:
            UserError: the stored arrays do not match.
        """
        wanted = {ITEM: self._stored(shapes[0]), OPTIMIZER: between_steps(shapes[1])}
        restored = self._read(step, wanted)
        trained = self._live(restored[ITEM], shapes[0])
        return trained, after_step(shapes[1], restored[OPTIMIZER], step)

    def restore_adapters(self, step: int, shapes: Arrays) -> Arrays:
        """Return the adapters of a step that merge.py imported, on their devices.

        Raises:
            UserError: the stored arrays do not match.
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
                f"{self.directory}: the checkpoint of step {step} cannot be restored: {cause(error)}",
                "its parameters must be those that this artifact trains",
            ) from error
        return restored

    def _stored(self, trained: Arrays) -> Arrays:
        """Convert arrays, or their shapes, to the stored form."""
        if not self._for_merge:
            return trained
        return {_path(name): _transposed(array) for name, array in trained.items()}

    def _live(self, stored: Arrays, shapes: Arrays) -> Arrays:
        """Convert the stored form of arrays back, the inverse of `_stored`."""
        if not self._for_merge:
            return stored
        return {
            name: jax.device_put(stored[_path(name)].T, wanted.sharding) for name, wanted in shapes.items()
        }


def _path(name: str) -> str:
    """Return an array's path in model.adapters, "....q_proj.weight_lora_a", from its name in a trace."""
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


def after_step(shapes: Any, kept: Any, step: int) -> Any:
    """Rebuild a state, with or without optax.MultiSteps, from the part that a checkpoint kept.

    Args:
        shapes: of the state wanted, jax.ShapeDtypeStruct with shardings.
        kept: arrays of `between_steps(shapes)`.
        step: optimizer steps that are done.
    """
    if not isinstance(shapes, optax.MultiStepsState):
        return kept

    def start() -> tuple[Any, ...]:
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.acc_grads)
        return jnp.zeros([], jnp.int32), jnp.asarray(step, jnp.int32), zeros

    wanted = (shapes.mini_step, shapes.gradient_step, shapes.acc_grads)
    places = jax.tree.map(lambda leaf: leaf.sharding, wanted)
    mini_step, gradient_step, zeros = jax.jit(start, out_shardings=places)()
    return shapes._replace(
        mini_step=mini_step, gradient_step=gradient_step, acc_grads=zeros, inner_opt_state=kept
    )
