"""Read trained weights back as numpy arrays, from Orbax checkpoints and the record next to them: adapters, or
all weights in Hugging Face's layout.

This needs neither the devices nor the mesh of the training run. Of full fine-tuning, one parameter is in
memory at a time: a checkpoint may be larger than the host's memory.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..addresses import path_of, reached
from ..data.tokenizer import numbered
from ..errors import Spoiled, UserError
from ..model.adapters import (
    EMBEDDING,
    PROJECTOR,
    TOKEN_ROWS,
    Adapter,
    ExpertAdapter,
    LoraSettings,
    Matrices,
    build_adapters,
    lora_settings,
)
from ..model.families.family import Parameter, Source, parameter_path
from ..model.initial import joined, plain
from ..model.older_names import of_older_version, older_run
from ..model.selection import train_only, trained_whole
from ..untrusted import MATCH_SECONDS, TooLong, limit
from ..weights.checkpoint import CONFIG, HFCheckpoint
from .first_adapters import read_initial
from .record import EARLIER, LOCK, OTHER_RUN, read_record, short, unreadable
from .saved_steps import ITEM, LATEST, absolute, check_whole, choose_step, step_folders, unfinished


@dataclass(frozen=True)
class Delta:
    """The change of one tensor: scale * b @ a; in a tensor of all experts, one such change per expert.

    Attributes:
        a: [rank, in], or [experts, rank, in].
        b: [out, rank], or [experts, out, rank].
        magnitude: [out], the length that DoRA scales each row of the changed tensor to; None for LoRA.
    """

    a: np.ndarray
    b: np.ndarray
    scale: float
    magnitude: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return *self.b.shape[:-1], self.a.shape[-1]


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
class TrainedAdapters:
    """The adapters of one training step.

    Attributes:
        step: the optimizer step at which they were saved.
        record: the recipe.lock.json of the run.
        lock: its bytes.
        settings: the recipe's `lora` section; if the adapters started from the base's weights, the settings
            of plain adapters that make the same change (`runtime.model.initial.plain`).
        adapters: their layout.
        arrays: each adapter's arrays by its weight's path, in the order of Adapter.arrays.
        parameters: the parameters that were trained whole, and the embedding's trained rows.
        whole: their arrays by path.
    """

    step: int
    record: Mapping[str, Any]
    lock: bytes
    settings: LoraSettings
    adapters: tuple[Adapter, ...]
    arrays: Mapping[str, Matrices]
    parameters: tuple[Parameter, ...] = ()
    whole: Mapping[str, np.ndarray] = field(default_factory=dict)

    def read(self, path: str) -> np.ndarray:
        """Return a parameter that was trained whole."""
        return self.whole[path]

    def changes(self, base: HFCheckpoint) -> dict[str, Delta | ReplacedTensor]:
        """Return the change of each of the base's tensors, by the tensor's full name."""
        parameters = {p.path: p for p in base.family.parameters(base.architecture)}
        deltas = self.deltas()
        out: dict[str, Delta | ReplacedTensor] = {}
        for adapter in self.adapters:
            parameter = parameters[adapter.target.weight]
            if isinstance(adapter, ExpertAdapter):
                for source, a, b in adapter.tensors(parameter, *self.arrays[parameter.path]):
                    out[source.full_name(base.prefix)] = Delta(a, b, adapter.scale)
                continue
            (source,) = parameter.sources
            out[source.full_name(base.prefix)] = deltas[adapter.name]
        if self.parameters:
            out |= replaced(self.parameters, self.read, base, self.numbers)
            out = with_copies(out, base)
        return out

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return which rows of the embedding were trained."""
        return tuple(int(number) for number in self.settings.trainable_tokens)

    def saved(self, base: HFCheckpoint) -> dict[str, np.ndarray]:
        """Return the tensors that PEFT saves in addition to the adapters', by their full names."""
        if not self.parameters:
            return {}
        return {name: tensor.read() for name, tensor in replaced(self.parameters, self.read, base).items()}

    def deltas(self) -> dict[str, Delta]:
        """Return A, B and scale of each trained projection as in PEFT, by its name
        ("layers.0.self_attn.q_proj")."""
        out = {}
        for adapter in self.adapters:
            low, high, *m = adapter.to_peft(*self.arrays[adapter.target.weight])
            out[adapter.name] = Delta(low, high, adapter.scale, *m)
        return out

    @property
    def no_op(self) -> bool:
        """Return whether all deltas are zero, as LoRA's are before the first step."""
        if self.parameters or self.settings.kind != "lora":
            return False
        return all(not delta.a.any() or not delta.b.any() for delta in self.deltas().values())


@dataclass(frozen=True)
class TrainedWeights:
    """The parameters of one step of a run without LoRA.

    Attributes:
        step: the optimizer step at which they were saved.
        record: the recipe.lock.json of the run.
        lock: its bytes.
        parameters: the parameters that were trained.
        read: returns a parameter's array by its path.
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


Change = TypeVar("Change")


def replaced(
    parameters: Sequence[Parameter],
    read: Callable[[str], np.ndarray],
    base: HFCheckpoint,
    numbers: tuple[int, ...] = (),
) -> dict[str, ReplacedTensor]:
    """Return the trained value of each tensor that the parameters are made of, by its full name.

    Args:
        read: returns a parameter's array by its path.
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
    embeddings = (
        parameter for parameter in base.family.parameters(base.architecture) if parameter.path == EMBEDDING
    )
    (source,) = next(embeddings).sources
    return source


def hugging_face(array: np.ndarray, source: Source) -> np.ndarray:
    """Convert a tensor from the model's layout to Hugging Face's: the inverse of `source`'s conversion."""
    return array.transpose(np.argsort(source.transpose)).reshape(source.shape)


def with_trained_tower(directory: str | Path, base: HFCheckpoint) -> HFCheckpoint:
    """Return a run's base, with its vision tower if the run trained any of it.

    Args:
        directory: of the run's checkpoints: local, or gs://.

    Raises:
        UserError: when the record is missing or damaged, or the base has no tower.
    """
    directory = absolute(directory)
    with reached(directory):
        lora = read_record(directory)["recipe"].get("lora")
    return base.seeing() if trains_tower(lora) else base


def trains_tower(lora: Any) -> bool:
    """Return whether a recorded `lora` section trains any of the vision tower or its projector."""
    saved = lora.get("modules_to_save") if isinstance(lora, dict) else None
    return isinstance(lora, dict) and (lora.get("vision") is True or PROJECTOR in (saved or ()))


def load_trained(directory: str | Path, which: str, base: HFCheckpoint) -> TrainedAdapters | TrainedWeights:
    """Load the adapters of a run's checkpoint, or all its weights if it had no LoRA.

    Args:
        directory: of the run's checkpoints: local, or gs://.
        which: "latest", "best" (lowest evaluation loss) or a step.
        base: the checkpoint that the run started from.

    Raises:
        UserError: when the step, the record or an adapter is missing or damaged, or is not the base's.
    """
    directory = absolute(directory)
    with reached(directory):
        return _load(directory, which, base)


def _load(directory: str, which: str, base: HFCheckpoint) -> TrainedAdapters | TrainedWeights:
    record = read_record(directory)
    settings = recorded_lora(record, base)
    step = choose_step(directory, which)
    if which == LATEST:
        folders = sorted({*step_folders(directory), *unfinished(directory)})
        for empty in (later for later in folders if later > step):
            print(f"note: {directory}/{empty} holds no checkpoint; step {step} is used", file=sys.stderr)
    check_whole(directory, step)
    if settings is None:
        lock = (path_of(directory) / LOCK).read_bytes()
        return load_weights(directory, step, ITEM, record, lock, base)
    adapters = _recorded_adapters(base, settings)
    where = f"{directory}, step {step}"
    expected = {path: shape for adapter in adapters for path, shape, _ in adapter.arrays}
    whole: tuple[Parameter, ...] = ()
    if settings.trains_whole:
        whole = trained_whole(base.family.parameters(base.architecture), settings)
    expected |= {parameter.path: parameter.shape for parameter in whole}

    def check(shapes: Mapping[str, tuple[int, ...]]) -> None:
        for path in sorted(expected.keys() | shapes.keys()):
            if path not in shapes:
                raise UserError(f"{where}: no {path}, which the run's record lists", OTHER_RUN)
            if path not in expected:
                raise UserError(f"{where}: holds {path}, which the run's record does not list", OTHER_RUN)
            if shapes[path] != expected[path]:
                raise UserError(
                    f"{where}: {path} has shape {list(shapes[path])}, expected {list(expected[path])} "
                    "from the run's record",
                    OTHER_RUN,
                )

    leaves = restore_tree(f"{directory}/{step}/{ITEM}", check)
    for path in sorted(leaves):
        if not np.isfinite(leaves[path].astype(np.float32, copy=False)).all():
            raise UserError(f"{where}: {path} holds values that are not finite", EARLIER)
    arrays = {a.target.weight: tuple(leaves[path] for path, *_ in a.arrays) for a in adapters}
    if settings.principal:
        trained = {a.name: a.to_peft(*arrays[a.target.weight]) for a in adapters}
        values = joined(trained, read_initial(directory))
        settings = plain(settings)
        adapters = build_adapters(base.family, base.architecture, settings)
        arrays = {a.target.weight: a.from_peft(values[a.name]) for a in adapters}
    lock = (path_of(directory) / LOCK).read_bytes()
    others = {parameter.path: leaves[parameter.path] for parameter in whole}
    return TrainedAdapters(step, record, lock, settings, tuple(adapters), arrays, whole, others)


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
    only = (record["recipe"].get("train") or {}).get("trainable_modules") or ()
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


def recorded_lora(record: Mapping[str, Any], base: HFCheckpoint) -> LoraSettings | None:
    """Return the LoRA settings of a run, None if it had none; check that `base` has the run's architecture.

    Raises:
        UserError: when the run's model had other sizes, or the section is incomplete.
    """
    check_model(record, base)
    section = record["recipe"].get("lora")
    if section is None:
        return None
    try:
        settings = lora_settings(section, base.architecture.num_layers)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"the lora section of the run's record is incomplete ({error})", OTHER_RUN) from error
    if not settings.trainable_tokens:
        return settings
    return numbered(settings, base, record["recipe"].get("model", {}).get("add_tokens") or {})


def check_model(record: Mapping[str, Any], base: HFCheckpoint, option: str = "--model") -> None:
    """Check that a checkpoint has the architecture of the model that a recipe was compiled for.

    Args:
        option: the script's argument that gives the checkpoint's folder.

    Raises:
        UserError: naming the first difference.
    """
    if of_older_version(record):
        raise older_run("the checkpoint directory")
    model = record.get("model") or {}
    if model.get("family", base.family.name) != base.family.name:
        raise UserError(
            f"{base.name}: is of the family {base.family.name}; the run trained one of {model['family']}",
            f"give the checkpoint of the run with {option}",
        )
    trained = _without_layout(model.get("architecture") or {})
    opened = _without_layout(json.loads(json.dumps(asdict(base.architecture))))
    if trained.get("tied") is True and base.own_head is not None:
        raise UserError(
            f"{base.name}: {base.own_head} has other values than the embedding; the recipe was compiled for "
            f"a model whose head is its embedding, as tie_word_embeddings of {CONFIG} says",
            "transformers does not tie the two either: set tie_word_embeddings to false in "
            f"{base.name}/{CONFIG}, and build the recipe with that folder as model.id",
        )
    if base.architecture.vision is None:
        # Only the language model was opened: a merge copies the tower's tensors.
        opened.pop("vision")
    for key in sorted(trained.keys() & opened.keys()):
        if trained[key] != opened[key]:
            raise UserError(
                f"{base.name}: its {key} is {short(opened[key])}; the run trained a model with "
                f"{short(trained[key])}",
                f"give the checkpoint of the run with {option}",
            )


def _without_layout(architecture: dict[str, Any]) -> dict[str, Any]:
    """Return an architecture without the names of its experts' and its tower's tensors, in which copies of
    the same model differ."""
    apart = {"experts": "tensors", "vision": "prefixes"}
    parts = {
        part: {key: value for key, value in section.items() if key != name}
        for part, name in apart.items()
        if isinstance(section := architecture.get(part), dict)
    }
    return architecture | parts


def _recorded_adapters(base: HFCheckpoint, settings: LoraSettings) -> list[Adapter]:
    """Return the layout of a run's adapters from its record, which may contain anything."""
    try:
        with limit(MATCH_SECONDS):
            return build_adapters(base.family, base.architecture, settings)
    except TooLong:
        raise UserError(
            f"the targets of the run's record were not matched within {MATCH_SECONDS:g} s", OTHER_RUN
        ) from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"the lora section of the run's record is incomplete ({error})", OTHER_RUN) from error


def restore_tree(
    path: str, check: Callable[[Mapping[str, tuple[int, ...]]], None] = lambda shapes: None
) -> dict[str, np.ndarray]:
    """Return all leaves of a saved tree, by their paths in the model.

    Args:
        check: gets the leaves' shapes before arrays are read: a few bytes in a damaged file can give a shape
            whose array would fill the memory.
    """
    import jax
    import orbax.checkpoint as ocp

    # Tunix does not save the kind of metadata that Orbax looks for first, and warns about.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            tree = checkpointer.metadata(path).item_metadata.tree
            saved, _ = jax.tree_util.tree_flatten_with_path(tree)
            check({parameter_path(keys): tuple(leaf.shape) for keys, leaf in saved})
            arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))
    except UserError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {parameter_path(keys): np.asarray(leaf) for keys, leaf in leaves}


class Leaves:
    """The arrays of an Orbax tree, read one at a time without a mesh.

    Args:
        path: of the tree.

    Attributes:
        shapes: by the arrays' paths in the model.

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
        leaves, self._structure = jax.tree_util.tree_flatten_with_path(tree)
        self._index = {parameter_path(keys): number for number, (keys, _) in enumerate(leaves)}
        self.shapes = {parameter_path(keys): tuple(leaf.shape) for keys, leaf in leaves}

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
