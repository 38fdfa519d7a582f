"""Import a PEFT adapter (peft 0.21) as step 0 of a run, so that train.py --resume continues a GPU run.

The artifact's recipe says which adapters the run trains. The PEFT adapter must have exactly those, with the
same ranks and alphas. Its arrays are saved in the model's layout as if by train.py, next to the record of the
recipe. There is no optimizer state and no data position: the step's metadata holds its origin
(`resuming.IMPORTED`), and training begins with a new optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from ..checkpoints.first_adapters import write_initial
from ..checkpoints.record import LOCK, read_record, write_record
from ..checkpoints.resuming import CHECK, IMPORTED, digest
from ..checkpoints.saved_steps import ITEM, absolute, step_folders
from ..checkpoints.saving import Preserved, cause, manager
from ..checkpoints.trained_weights import recorded_lora, trains_tower
from ..errors import UserError
from ..merging.arithmetic import use_host_only
from ..model.adapters import TOKEN_ROWS, LoraSettings, build_adapters
from ..model.initial import halved
from ..model.initial import plain as exported
from ..model.selection import trained_whole
from ..weights.checkpoint import HFCheckpoint
from ..weights.headers import Tensor
from .adapter import PeftAdapter, open_adapter
from .fitting import BUILD, fitting
from .peft_names import own_name, plain


def import_adapter(adapter: Path | str, base: HFCheckpoint, artifact: Path, directory: Path | str) -> int:
    """Write a PEFT adapter as step 0 of a run, and print the result.

    Args:
        adapter: a folder of adapter_config.json and adapter_model.safetensors, or an address of fsspec.
        base: the checkpoint that the artifact trains.
        artifact: folder of the generated scripts, with recipe.lock.json.
        directory: the run's checkpoint directory, local or gs://; it is created.

    Returns:
        The exit status, 0.

    Raises:
        UserError: when the adapter is not one that the recipe trains, or cannot be read or written.
    """
    use_host_only()
    target = absolute(directory)
    steps = step_folders(target)
    if steps:
        raise UserError(
            f"{target} already holds checkpoints, the newest of step {steps[-1]}",
            "an adapter is imported into an empty directory: choose another with --output or --checkpoint",
        )
    record = read_record(artifact)
    if trains_tower(record["recipe"].get("lora")):
        base = base.seeing()
    settings = recorded_lora(record, base)
    opened = open_adapter(adapter)
    if settings is None:
        raise UserError(
            f"{artifact / LOCK}: the recipe trains all weights, so it cannot start from an adapter",
            BUILD.format(f"lora: {{rank: {opened.config.rank}, alpha: {plain(opened.config.alpha)}}}"),
        )
    wanted, initial = _wanted(opened, settings), None
    opened = fitting(opened, base, wanted)
    arrays = arrays_of(opened, base, wanted)
    if settings.principal:
        values = {
            a.name: a.to_peft(*(arrays[path] for path, *_ in a.arrays))
            for a in build_adapters(base.family, base.architecture, wanted)
        }
        halves, initial = halved(values)
        for a in build_adapters(base.family, base.architecture, settings):
            restored = a.from_peft(halves[a.name])
            arrays |= {path: array for (path, *_), array in zip(a.arrays, restored, strict=True)}
    model = record["recipe"].get("model") or {}
    trained = model.get("id", base.name), model.get("revision")
    for note in notes(opened, base, wanted, trained):
        print(f"note: {note}")

    write_record(target, artifact)
    if initial is not None:
        write_initial(target, initial)
    _save(target, arrays, origin(opened))
    print(
        f"imported: {target}/0 adapters={len(opened.tensors)} dtype={settings.dtype}; "
        "train.py --resume continues from it"
    )
    return 0


def _save(directory: str, arrays: Mapping[str, np.ndarray], origin: Mapping[str, Any]) -> None:
    """Save adapters, by their paths in the model, as step 0."""
    leaves = {
        tuple(int(part) if part.isdigit() else part for part in path.split(".")): nnx.LoRAParam(
            jax.numpy.asarray(array)
        )
        for path, array in arrays.items()
    }
    params = nnx.State.from_flat_path(leaves)
    save = ocp.args.PyTreeSave(item=params, save_args=jax.tree.map(lambda _: ocp.SaveArgs(), params))
    mark = json.loads(json.dumps(dict(origin)))
    try:
        with manager(directory, Preserved(1)) as checkpoints:
            checkpoints.save(
                0,
                args=ocp.args.Composite(**{ITEM: save}),
                custom_metadata={IMPORTED: mark, CHECK: digest(mark)},
                force=True,
            )
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{directory}: the adapters could not be written: {cause(error)}",
            "free disk space or allow writing to the directory, and import them again",
        ) from error


def _wanted(adapter: PeftAdapter, settings: LoraSettings) -> LoraSettings:
    """Return the settings of the adapter that a recipe's run exports; an import expects the same."""
    if not settings.principal:
        return settings
    wanted = exported(settings)
    if adapter.config.rank != wanted.rank:
        raise UserError(
            f"{adapter.path}: has rank {adapter.config.rank}; with lora.init: {settings.init} a run's "
            f"adapter of rank {settings.rank} is exported, and imported, with twice that",
            BUILD.format(f"lora.init: peft, lora.rank: {adapter.config.rank}"),
        )
    return wanted


def origin(adapter: PeftAdapter) -> dict[str, Any]:
    """Return where an adapter came from, as JSON values."""
    return {
        "adapter": adapter.files.name,
        "sha256": dict(adapter.sha256),
        "base_model_name_or_path": adapter.config.base,
        "revision": adapter.config.revision,
    }


def arrays_of(peft_adapter: PeftAdapter, base: HFCheckpoint, settings: LoraSettings) -> dict[str, np.ndarray]:
    """Return an adapter's arrays in lora.dtype, by the paths of the model.

    Args:
        peft_adapter: the result of `fitting`.

    Raises:
        UserError: when a number is not finite, or modules that share A under lora.kv have different ones.
    """

    def read(name: str, tensor: Tensor) -> np.ndarray:
        values = peft_adapter.read(tensor)
        if not np.isfinite(values.astype(np.float32, copy=False)).all():
            raise UserError(
                f"{peft_adapter.path}: {name} holds values that are not finite",
                "use an earlier checkpoint of its training",
            )
        return values.astype(settings.dtype, copy=False)

    arrays: dict[str, np.ndarray] = {}
    for adapter in build_adapters(base.family, base.architecture, settings):
        tensors = peft_adapter.tensors[adapter.name]
        values = adapter.from_peft(tuple(read(adapter.name, tensor) for tensor in tensors))
        if adapter.lender is not None and not np.array_equal(values[0], arrays[adapter.a_path]):
            names = f"{adapter.lender.name} and {adapter.name}"
            raise UserError(
                f"{peft_adapter.path}: {names} have different A, and lora.kv: shared has one for both",
                BUILD.format("lora.kv: independent"),
            )
        arrays |= {path: array for (path, *_), array in zip(adapter.arrays, values, strict=True)}
    if settings.trains_whole:
        for parameter in trained_whole(base.family.parameters(base.architecture), settings):
            out = arrays[parameter.path] = np.zeros(parameter.shape, settings.dtype)
            for number, source in enumerate(parameter.sources):
                tensor = read(source.module, peft_adapter.whole[own_name(base, source)])
                out[parameter.place(number)] = tensor.reshape(source.reshape).transpose(source.transpose)
    if settings.trainable_tokens:
        order = [peft_adapter.config.tokens.index(int(token)) for token in settings.trainable_tokens]
        arrays[TOKEN_ROWS] = arrays[TOKEN_ROWS][order]
    return arrays


def notes(
    adapter: PeftAdapter,
    base: HFCheckpoint,
    settings: LoraSettings,
    model: tuple[str, str | None],
) -> Iterable[str]:
    """Return notes for the user on an adapter that fits.

    Args:
        model: the recipe's, with its revision.
    """
    config = adapter.config
    if config.base is not None and config.base not in (model[0], base.name):
        yield f"the adapter was trained on {config.base}; the recipe's model is {model[0]}"
    elif config.revision is not None and config.revision != model[1]:
        other = model[1] or "the newest"
        yield f"the adapter was trained on revision {config.revision} of the model; the recipe's is {other}"
    if config.dropout != settings.dropout:
        yield f"the adapter was trained with dropout {config.dropout:g}; the recipe's is {settings.dropout:g}"
