"""Read trained adapters back as numpy arrays, from Orbax checkpoints and the record next to them.

This needs neither the devices nor the mesh of the training run.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..addresses import is_address, path_of, reached, read_by_orbax
from ..errors import UserError
from ..limit import MATCH_SECONDS, TooLong, limit
from ..metrics.loggers import FILE as METRICS
from ..metrics.loggers import read_entries
from ..model.adapters import Adapter, ExpertAdapter, LoraSettings, Matrices, build_adapters, lora_settings
from ..model.families.base import Parameter, parameter_path
from ..weights.checkpoint import CONFIG, HFCheckpoint
from . import manifest
from .record import EARLIER, LOCK, OTHER_RUN, read_record, short, unreadable

if TYPE_CHECKING:
    from .full import ReplacedTensor, TrainedWeights

LATEST = "latest"
BEST = "best"
ITEM = "model_params"
"""Name under which Tunix's CheckpointManager stores the parameters of a step."""


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
class TrainedAdapters:
    """The adapters of one training step.

    Attributes:
        step: the optimizer step at which they were saved.
        record: the recipe.lock.json of the run.
        lock: its bytes.
        settings: the recipe's `lora` section; if the adapters started from the base's weights, the settings
            of plain adapters that make the same change (`runtime.model.initial.plain`).
        adapters: their layout.
        arrays: each adapter's Tunix arrays by its weight's path, in the order of Adapter.arrays.
        parameters: the parameters that were trained whole, and the embedding's trained rows.
        whole: their Tunix arrays by path.
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
                scale = adapter.projections[0].scale
                for source, a, b in adapter.tensors(parameter, *self.arrays[parameter.path]):
                    out[source.full_name(base.prefix)] = Delta(a, b, scale)
                continue
            for part in adapter.projections:
                source = parameter.sources[part.slot if adapter.target.fused else 0]
                out[source.full_name(base.prefix)] = deltas[part.name]
        if self.parameters:
            from .full import replaced, with_copies

            out |= replaced(self.parameters, self.read, base, self.numbers)
            out = with_copies(out, base)
        return out

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return which rows of the embedding were trained."""
        return tuple(int(number) for number in self.settings.train_tokens)

    def saved(self, base: HFCheckpoint) -> dict[str, np.ndarray]:
        """Return the tensors that PEFT saves in addition to the adapters', by their full names."""
        if not self.parameters:
            return {}
        from .full import replaced

        return {name: one.read() for name, one in replaced(self.parameters, self.read, base).items()}

    def deltas(self) -> dict[str, Delta]:
        """Return A, B and scale of each trained projection as in PEFT (Adapter.split), by its module's name
        ("layers.0.self_attn.q_proj")."""
        out = {}
        for adapter in self.adapters:
            scale = {part.name: part.scale for part in adapter.projections}
            for name, (low, high, *m) in adapter.split(*self.arrays[adapter.target.weight]).items():
                out[name] = Delta(low, high, scale[name], *m)
        return out

    @property
    def no_op(self) -> bool:
        """Return whether all deltas are zero, as LoRA's are before the first step."""
        if self.parameters or self.settings.kind != "lora":
            return False
        return all(not delta.a.any() or not delta.b.any() for delta in self.deltas().values())


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
    _check_whole(directory, step)
    if settings is None:
        from .full import load_weights

        lock = (path_of(directory) / LOCK).read_bytes()
        return load_weights(directory, step, ITEM, record, lock, base)
    adapters = _recorded_adapters(base, settings)
    where = f"{directory}, step {step}"
    expected = {path: shape for adapter in adapters for path, shape, _ in adapter.arrays}
    whole: tuple[Parameter, ...] = ()
    if settings.trains_whole:
        from ..model.selection import trained_whole

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
        from ..model.initial import joined, plain, read_initial

        found = {name: parts for a in adapters for name, parts in a.split(*arrays[a.target.weight]).items()}
        values = joined(found, read_initial(directory))
        settings = plain(settings)
        adapters = build_adapters(base.family, base.architecture, settings)
        arrays = {a.target.weight: a.join(values) for a in adapters}
    lock = (path_of(directory) / LOCK).read_bytes()
    others = {parameter.path: leaves[parameter.path] for parameter in whole}
    return TrainedAdapters(step, record, lock, settings, tuple(adapters), arrays, whole, others)


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
    if not settings.train_tokens:
        return settings
    from ..data.tokenizer import numbered

    return numbered(settings, base, record["recipe"].get("model", {}).get("add_tokens") or {})


def check_model(record: Mapping[str, Any], base: HFCheckpoint) -> None:
    """Check that a checkpoint has the architecture of the model that a recipe was compiled for.

    Raises:
        UserError: naming the first difference.
    """
    model = record.get("model") or {}
    if model.get("family", base.family.name) != base.family.name:
        raise UserError(
            f"{base.name}: is of the family {base.family.name}; the run trained one of {model['family']}",
            "give the base checkpoint of the run with --model",
        )
    trained = _without_layout(model.get("architecture") or {})
    found = _without_layout(json.loads(json.dumps(asdict(base.architecture))))
    if trained.get("tied") is True and base.own_head is not None:
        raise UserError(
            f"{base.name}: {base.own_head} has other values than the embedding; the recipe was compiled for "
            f"a model whose head is its embedding, as tie_word_embeddings of {CONFIG} says",
            "transformers does not tie the two either: set tie_word_embeddings to false in "
            f"{base.name}/{CONFIG}, and build the recipe with that folder as model.id",
        )
    for key in sorted(trained.keys() & found.keys()):
        if trained[key] != found[key]:
            raise UserError(
                f"{base.name}: its {key} is {short(found[key])}; the run trained a model with "
                f"{short(trained[key])}",
                "give the base checkpoint of the run with --model",
            )


def _without_layout(architecture: dict[str, Any]) -> dict[str, Any]:
    """Return an architecture without the layout of its experts, in which copies of the same model differ."""
    experts = architecture.get("experts")
    if not isinstance(experts, dict):
        return architecture
    return architecture | {"experts": {key: value for key, value in experts.items() if key != "tensors"}}


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


def absolute(directory: str | Path) -> str:
    """Return a local folder's absolute path, which Orbax requires; return an address unchanged."""
    return str(directory) if is_address(directory) else str(Path(directory).expanduser().resolve())


def step_folders(directory: str | Path) -> list[int]:
    """Return the steps that have a folder, whatever its content, ascending.

    In a bucket these are the steps whose save has ended; `unfinished` returns the others.

    Raises:
        UserError: when it cannot be read, or an address's bucket does not exist.
    """
    try:
        with reached(directory):
            steps = _numbered(directory)
            if read_by_orbax(directory):
                from .bucket import ended

                steps = ended(directory, steps)
            return steps
    except OSError as error:  # of this machine's file systems
        raise UserError(
            f"{directory}: cannot be read: {error.strerror or error}", "allow this process to read it"
        ) from error


def unfinished(directory: str | Path) -> list[int]:
    """Return the steps in a bucket whose save is still running or was killed, ascending.

    On a disk there are none, because Orbax names a step's folder when its save ends.
    """
    if not read_by_orbax(directory):
        return []
    from .bucket import unfinished

    with reached(directory):
        return unfinished(directory, _numbered(directory))


def _numbered(directory: str | Path) -> list[int]:
    """Return the folders whose names are numbers, ascending; [] if the directory does not exist."""
    root = path_of(directory)
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir())


def saved_steps(directory: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending.

    Raises:
        UserError: when an address cannot be read, or its bucket does not exist.
    """
    root = path_of(directory)
    with reached(directory):
        return [step for step in step_folders(directory) if (root / str(step) / ITEM).is_dir()]


def choose_step(directory: str | Path, which: str) -> int:
    """Return the step that "latest", "best" or a number selects.

    Raises:
        UserError: when there is no such step.
    """
    steps = saved_steps(directory)
    if not steps:
        begun = unfinished(directory)
        raise UserError(
            f"{directory}: no checkpoint"
            + (f"; the save of step {begun[-1]} has not ended" if begun else ""),
            "--checkpoint DIR says where train.py saved them",
        )
    if which == LATEST:
        return steps[-1]
    if which == BEST:
        return _best_step(directory, steps)
    if not which.isdecimal():
        raise UserError(f"--step {which}: is neither latest, best nor a number", "--step latest")
    if int(which) not in steps:
        raise UserError(
            f"{directory}: no checkpoint of step {which}", f"there are {', '.join(map(str, steps))}"
        )
    return int(which)


def _check_whole(directory: str, step: int) -> None:
    """Check that the files of a step are those that were saved; name the newest intact step before it."""
    reason = _damage(directory, step)
    if reason is None:
        return
    earlier = (s for s in reversed(step_folders(directory)) if s < step and _damage(directory, s) is None)
    whole = next(earlier, None)
    raise UserError(
        f"{directory}: the checkpoint of step {step} is damaged ({reason})",
        "no earlier one is complete"
        if whole is None
        else f"--step {whole} is the newest complete one before it",
    )


def _damage(directory: str, step: int) -> str | None:
    """Return what is wrong with a step's parameters; trees saved by other programs have no checksums."""
    tree = path_of(directory) / str(step) / ITEM
    if tree.is_dir() and not (tree / manifest.SUMS).exists():
        return None
    try:
        return manifest.damage(tree)
    except OSError as error:
        return error.strerror or str(error)


def step_losses(directory: str | Path, step: int) -> dict[str, float]:
    """Return "loss" and "eval_loss" of a step, if the run logged them."""
    out: dict[str, float] = {}
    for entry in _logged(directory):
        if entry["step"] == step:
            out |= {key: float(entry[key]) for key in ("loss", "eval_loss") if entry.get(key) is not None}
    return out


def _best_step(directory: str | Path, steps: list[int]) -> int:
    losses = {
        entry["step"]: float(entry["eval_loss"])
        for entry in _logged(directory)
        if entry.get("eval_loss") is not None and entry["step"] in steps
    }
    losses = {step: loss for step, loss in losses.items() if not math.isnan(loss)}
    if not losses:
        raise UserError(
            f"{directory}/{METRICS}: no evaluation loss for any of the kept checkpoints "
            f"({', '.join(map(str, steps))})",
            "evaluate at the steps that are saved (data.eval, train.eval_every), or give --step N",
        )
    return min(losses, key=lambda step: (losses[step], step))


def _logged(directory: str | Path) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl. Losses that are not finite are texts, which float() reads."""
    with reached(directory):
        return [entry for _, entry in read_entries(path_of(directory) / METRICS)]


def restore_tree(
    path: str, check: Callable[[Mapping[str, tuple[int, ...]]], None] = lambda shapes: None
) -> dict[str, np.ndarray]:
    """Return all leaves of a saved tree, by their paths in the Tunix model.

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
            found, _ = jax.tree_util.tree_flatten_with_path(tree)
            check({parameter_path(keys): tuple(leaf.shape) for keys, leaf in found})
            arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
            restored = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=arguments))
    except UserError:
        raise
    except Exception as error:
        raise unreadable(path, error) from error
    leaves, _ = jax.tree_util.tree_flatten_with_path(restored)
    return {parameter_path(keys): np.asarray(leaf) for keys, leaf in leaves}
