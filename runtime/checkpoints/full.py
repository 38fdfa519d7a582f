"""Read the results of full fine-tuning back from its checkpoint, in Hugging Face's layout.

One parameter is in memory at a time: a checkpoint may be larger than the host's memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ..errors import Spoiled, UserError
from ..model.adapters import EMBEDDING, TOKEN_ROWS
from ..model.families.base import Parameter, Source, parameter_path
from ..model.selection import train_only
from ..weights.checkpoint import HFCheckpoint
from .record import EARLIER, OTHER_RUN, unreadable

Change = TypeVar("Change")


@dataclass(frozen=True)
class ReplacedTensor:
    """A tensor of the base that training replaced.

    Attributes:
        shape: Hugging Face's.
        read: returns the trained values, in the dtype that they were trained in.
        rows: the rows that were replaced, in the order of the values; None for the whole tensor.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    rows: tuple[int, ...] | None = None

    def changer(self, dtype: np.dtype) -> Callable[[Callable[[slice], np.ndarray], slice], np.ndarray]:
        """Return a function that computes rows of the tensor, as `runtime.merging.arithmetic.changer`."""
        trained, numbers = self.read(), self.rows

        def changed(base: Callable[[slice], np.ndarray], rows: slice) -> np.ndarray:
            if numbers is None:
                return np.ascontiguousarray(trained[rows].astype(dtype, copy=False))
            out = base(rows).astype(dtype)
            for number, values in zip(numbers, trained, strict=True):
                if rows.start <= number < rows.stop:
                    out[number - rows.start] = values.astype(dtype, copy=False)
            return out

        return changed


@dataclass(frozen=True)
class TrainedWeights:
    """The parameters of one step of a run without LoRA.

    Attributes:
        step: the optimizer step at which they were saved.
        record: the recipe.lock.json of the run.
        lock: its bytes.
        parameters: the parameters that were trained.
        read: returns a parameter's Tunix array by its path.
    """

    step: int
    record: Mapping[str, Any]
    lock: bytes
    parameters: tuple[Parameter, ...]
    read: Callable[[str], np.ndarray]

    no_op = False
    """Whether nothing was trained; this is not known without comparing every tensor."""

    def put(self, variables: Mapping[str, Any]) -> None:
        """Give a model's variables, by their paths, the trained values, in their own dtype and sharding."""
        import jax

        for parameter in self.parameters:
            variable = variables[parameter.path]
            old = variable.get_raw_value()
            value = self.read(parameter.path).astype(old.dtype)
            variable.set_raw_value(jax.device_put(value, old.sharding))

    def changes(self, base: HFCheckpoint) -> dict[str, ReplacedTensor]:
        """Return the trained value of each of the base's tensors, by its full name."""
        return with_copies(replaced(self.parameters, self.read, base), base)


def replaced(
    parameters: Sequence[Parameter],
    read: Callable[[str], np.ndarray],
    base: HFCheckpoint,
    numbers: tuple[int, ...] = (),
) -> dict[str, ReplacedTensor]:
    """Return the trained value of each tensor that the parameters are made of, by its full name.

    Args:
        read: returns a parameter's Tunix array by its path.
        numbers: the embedding's rows that TOKEN_ROWS among the parameters replaces; if empty, those rows are
            a tensor of their own, as in PEFT.
    """

    def tensor(parameter: Parameter, index: int) -> np.ndarray:
        return hugging_face(read(parameter.path)[parameter.place(index)], parameter.sources[index])

    out = {
        source.full_name(base.prefix): ReplacedTensor(
            source.shape, functools.partial(tensor, parameter, index)
        )
        for parameter in parameters
        for index, source in enumerate(parameter.sources)
        if not numbers or parameter.path != TOKEN_ROWS
    }
    if numbers:
        source = embedding_of(base)
        rows = functools.partial(read, TOKEN_ROWS)
        out[source.full_name(base.prefix)] = ReplacedTensor(source.shape, rows, numbers)
    return out


def with_copies(changes: Mapping[str, Change], base: HFCheckpoint) -> dict[str, Change]:
    """Return changes by full names, with those of the base's tensors that repeat a changed one."""
    copied = {name: changes[other] for name, other in base.copies.items() if other in changes}
    return {**changes, **copied}


def embedding_of(base: HFCheckpoint) -> Source:
    """Return the tensor of the token embedding."""
    found = (one for one in base.family.parameters(base.architecture) if one.path == EMBEDDING)
    (source,) = next(found).sources
    return source


def hugging_face(array: np.ndarray, source: Source) -> np.ndarray:
    """Convert a tensor from Tunix's layout to Hugging Face's: the inverse of the conversion in `source`."""
    return array.transpose(np.argsort(source.transpose)).reshape(source.shape)


def load_weights(
    directory: str, step: int, item: str, record: Mapping[str, Any], lock: bytes, base: HFCheckpoint
) -> TrainedWeights:
    """Load the parameters of a step whose files are intact.

    Args:
        directory: of the run's checkpoints, absolute or gs://.
        item: the folder of the parameters within a step's folder.

    Raises:
        UserError: when a parameter is missing or is not the base's.
    """
    where = f"{directory}, step {step}"
    leaves = Leaves(f"{directory}/{step}/{item}")
    only = (record["recipe"].get("train") or {}).get("only") or ()
    parameters = train_only(base.family.parameters(base.architecture), only)
    trained = tuple(parameter for parameter in parameters if parameter.trainable)
    for parameter in trained:
        shape = leaves.shapes.get(parameter.path)
        if shape is None:
            raise UserError(f"{where}: no {parameter.path}, which the run's record lists", OTHER_RUN)
        if shape != parameter.shape:
            raise UserError(
                f"{where}: {parameter.path} has shape {list(shape)}, expected {list(parameter.shape)} "
                "from the base",
                OTHER_RUN,
            )

    # A fused projection is read once for all its tensors, which are adjacent in most files.
    @functools.lru_cache(maxsize=1)
    def read(path: str) -> np.ndarray:
        array = leaves.read(path)
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise Spoiled(f"{where}: {path} holds values that are not finite", EARLIER)
        return array

    return TrainedWeights(step, record, lock, trained, read)


class Leaves:
    """The arrays of an Orbax tree, read one at a time without a mesh.

    Args:
        path: of the tree.

    Attributes:
        shapes: by the arrays' paths in the Tunix model.

    Raises:
        UserError: when the tree cannot be read.
    """

    def __init__(self, path: str) -> None:
        import jax
        import orbax.checkpoint as ocp

        # Tunix does not save the kind of metadata that Orbax looks for first, and warns about.
        logging.getLogger("absl").setLevel(logging.ERROR)
        self._path = path
        self._checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
        tree = self._guarded(lambda: self._checkpointer.metadata(path).item_metadata.tree)
        found, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._index = {parameter_path(keys): number for number, (keys, _) in enumerate(found)}
        self.shapes = {parameter_path(keys): tuple(leaf.shape) for keys, leaf in found}

    def read(self, path: str) -> np.ndarray:
        """Read one array.

        Raises:
            UserError: when its files are damaged.
        """
        import jax
        import orbax.checkpoint as ocp

        wanted: list[Any] = [ocp.PLACEHOLDER] * len(self._index)
        wanted[self._index[path]] = np.zeros((), np.float32)
        arguments = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(wanted)
        restored = self._guarded(
            lambda: self._checkpointer.restore(
                self._path,
                args=ocp.args.PyTreeRestore(
                    item=jax.tree.unflatten(self._structure, wanted),
                    restore_args=jax.tree.unflatten(self._structure, arguments),
                ),
            )
        )
        return np.asarray(
            jax.tree.leaves(restored, is_leaf=lambda x: x is ocp.PLACEHOLDER)[self._index[path]]
        )

    def _guarded(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            raise unreadable(self._path, error) from error
