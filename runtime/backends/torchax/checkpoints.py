"""The checkpoints of a run: what is trained, the optimizer's state and the place in the data.

They lie as train.py's do (runtime.checkpoints.saving), with Hugging Face's names for the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp

from ...checkpoints.adapter_reader import ITEM
from ...checkpoints.resuming import CHECK, DATA, OPTIMIZER, digest
from ...checkpoints.saving import begin_save, first_line, manager, not_written
from ...errors import UserError
from ...training.elastic import after_step, between_steps
from ...training.step import TrainState


class Checkpoints:
    """Writes and reads a run's checkpoints, whole or not at all.

    Args:
        directory: local and absolute, or gs://; it is created.
        keep: newest steps that are kept.

    Raises:
        UserError: when the directory cannot be created.
    """

    def __init__(self, directory: str, keep: int) -> None:
        self.directory = directory
        self._manager = manager(directory, keep)

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
        state = json.loads(json.dumps(dict(data)))
        items = {
            name: ocp.args.PyTreeSave(item=tree, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), tree))
            for name, tree in zip((ITEM, OPTIMIZER), (live[0], between_steps(live[1])), strict=True)
        }
        begin_save(
            self.directory,
            lambda: self._manager.save(
                step,
                args=ocp.args.Composite(**items),
                custom_metadata={DATA: state, CHECK: digest(state)},
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
        items = {
            name: ocp.args.PyTreeRestore(
                item=tree, restore_args=ocp.checkpoint_utils.construct_restore_args(tree)
            )
            for name, tree in zip((ITEM, OPTIMIZER), (shapes[0], between_steps(shapes[1])), strict=True)
        }
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:
            raise UserError(
                f"{self.directory}: the checkpoint of step {step} cannot be restored: {first_line(error)}",
                "its parameters must be those that this artifact trains",
            ) from error
        return restored[ITEM], after_step(shapes[1], restored[OPTIMIZER], step)
