"""Save and restore the checkpoints of a run; resuming.py tells intact ones from damaged ones.

ROOT/STEP/model_params, ROOT/STEP/optimizer_state   Orbax trees, each with its checksums; of the optimizer
                                                    what runtime.training.elastic.between_steps gives
ROOT/STEP/_CHECKPOINT_METADATA                      Orbax's, with the state of the data in it
ROOT/0/model_params, ROOT/0/_CHECKPOINT_METADATA    adapters that were trained elsewhere, and their origin
ROOT/corrupt-STEP                                   a damaged step that a continued run passed over
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from tunix.sft.checkpoint_manager import CheckpointManager

from ..addresses import is_address, path_of, reached, read_by_orbax
from ..errors import PASSING, UserError, first_line
from ..training.elastic import Kept
from . import manifest
from .adapter_reader import ITEM, saved_steps, unfinished
from .resuming import OPTIMIZER


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

    def write(
        self,
        step: int,
        model: nnx.Module,
        optimizer: nnx.Optimizer,
        lora_only: bool,
        metadata: Mapping[str, Any],
    ) -> None:
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
                model,
                optimizer and Kept(optimizer),
                save_only_lora_params=lora_only,
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

    def restore(self, step: int, model: nnx.Module, optimizer: nnx.Optimizer, lora_only: bool) -> None:
        """Put the arrays of a step into a model and its optimizer.

        The optimizer does not change if the step was imported.

        Raises:
            UserError: when they do not fit.
        """
        try:
            self.maybe_restore(model, Kept(optimizer), step, restore_only_lora_params=lora_only)
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
        return [place >= older or one.step == self.best for place, one in enumerate(checkpoints)]


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
        from ..stores import failed

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
    from ..stores import passing

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
        from ..hosts.watched import watch

        watch(handler, failed)

    def finalize_and_sum(directory: epath.Path) -> None:
        finalize(directory)
        manifest.write(directory)

    handler.finalize = finalize_and_sum
    return handler
