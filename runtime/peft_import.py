"""A PEFT adapter (peft 0.21) as step 0 of a run, so that train.py --resume goes on where GPUs left off.

The artifact's recipe says which adapters the run trains; the PEFT adapter must be just those, with the same
ranks and alphas. Its A and B then lie in Tunix's arrays as if train.py had saved them, beside the record of
the recipe. There is no optimizer's state, nor a place in the data: the step's metadata says whence it came
(`resuming.IMPORTED`), and training begins with a new optimizer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.adapters import Adapter, LoraSettings, Value, build_adapters, by_pattern
from runtime.checkpoint import BaseCheckpoint
from runtime.errors import UserError
from runtime.limit import TooLong, limit
from runtime.peft_adapter import LAYER, PeftAdapter, open_adapter, without_copies
from runtime.peft_config import AGAIN, CONFIG, MERGE, PeftConfig
from runtime.peft_export import plain
from runtime.record import LOCK, read_record, write_record
from runtime.trained import MATCH_SECONDS, absolute, recorded_lora, step_folders

_BUILD = "build the recipe with {}, and import the adapter into that artifact"


def import_adapter(adapter: Path | str, base: BaseCheckpoint, artifact: Path, directory: Path | str) -> int:
    """Writes a PEFT adapter as step 0 of a run, and prints what came of it.

    Args:
        adapter: a folder of adapter_config.json and adapter_model.safetensors, or an address of fsspec.
        base: the checkpoint that the artifact trains.
        artifact: folder of the generated scripts, with its recipe.lock.json.
        directory: of the run's checkpoints: local, or gs://; it is created.

    Returns:
        The exit status, 0.

    Raises:
        UserError: when the adapter is not one that the recipe trains, or cannot be read or written.
    """
    # Before jax is first imported: an import needs no accelerator, and must not occupy one.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    target = absolute(directory)
    steps = step_folders(target)
    if steps:
        raise UserError(
            f"{target} already holds checkpoints, the newest of step {steps[-1]}",
            "an adapter is imported into an empty directory: choose another with --output or --checkpoint",
        )
    if not (artifact / LOCK).is_file():
        raise UserError(
            f"{artifact / LOCK}: no such file", "the artifact is incomplete; build the recipe again"
        )
    record = read_record(artifact)
    settings = recorded_lora(record, base)
    found = open_adapter(adapter)
    if settings is None:
        raise UserError(
            f"{artifact / LOCK}: the recipe trains all weights, and has no place for an adapter",
            _BUILD.format(f"lora: {{rank: {found.config.rank}, alpha: {plain(found.config.alpha)}}}"),
        )
    found = without_copies(found, base)
    adapters = build_adapters(base.family, base.architecture, settings)
    check_modules(found, adapters, base, settings)
    check_scales(found, adapters, settings)
    check_shapes(found, adapters)
    arrays, change = join(found, adapters, np.dtype(settings.dtype))
    for note in notes(found, settings, record, base, change):
        print(f"note: {note}")

    from runtime.saving import Checkpoints

    write_record(target, artifact)
    checkpoints = Checkpoints(target, keep=1)
    checkpoints.write_imported(
        arrays,
        {
            "adapter": found.files.name,
            "sha256": dict(found.sha256),
            "base_model_name_or_path": found.config.base,
            "revision": found.config.revision,
        },
    )
    print(
        f"imported: {target}/0 adapters={len(found.tensors)} dtype={settings.dtype}; "
        "train.py --resume trains on from it"
    )
    return 0


def check_modules(
    found: PeftAdapter, adapters: Sequence[Adapter], base: BaseCheckpoint, settings: LoraSettings
) -> None:
    """Checks that the adapter has the modules that the recipe trains, and no others.

    Raises:
        UserError: naming one that is on one side alone, and the lines of a recipe that trains the adapter's.
    """
    layers = base.architecture.num_layers
    known = {
        f"layers.{site.layer}.{slot}" for site in base.family.sites(base.architecture) for slot in site.slots
    }
    for module in found.tensors:
        layer = LAYER.fullmatch(module)
        if layer and int(layer[1]) >= layers:
            raise UserError(
                f"{found.path}: {module} carries an adapter; the base has {layers} layers",
                _own_base(found.config),
            )
        if module not in known:
            raise UserError(
                f"{found.path}: {module} carries an adapter, and is no projection that train.py trains",
                "train an adapter whose target_modules are projections of attention and the dense blocks; or "
                + MERGE,
            )
    wanted = {part.name for adapter in adapters for part in adapter.projections}
    present = set(found.tensors)
    parts = []
    for names, words in (
        (wanted - present, "the recipe trains {}, which the adapter has not"),
        (present - wanted, "the adapter has {}, which the recipe does not train"),
    ):
        if names:
            parts.append(words.format(_some(names)))
    if parts:
        lines = ", ".join(_targets(present, base, settings))
        raise UserError(f"{found.path}: {'; '.join(parts)}", _BUILD.format(lines))


def check_scales(found: PeftAdapter, adapters: Sequence[Adapter], settings: LoraSettings) -> None:
    """Checks that each module has the rank and the alpha that the recipe gives it.

    Raises:
        UserError: naming both values, and the lines of a recipe that has the adapter's.
    """
    config = found.config
    modules = [part.name for adapter in adapters for part in adapter.projections]
    try:
        with limit(MATCH_SECONDS):
            ranks = {module: config.rank_of(found.full_names[module]) for module in modules}
            alphas = {module: config.alpha_of(found.full_names[module]) for module in modules}
    except TooLong:
        raise UserError(
            f"{found.files.path(CONFIG)}: its patterns have not been matched within {MATCH_SECONDS:g} s",
            AGAIN,
        ) from None
    for module, rank in ranks.items():
        stored = found.tensors[module][0].shape[:1]
        if stored != (rank,):
            raise UserError(
                f"{found.path}: A of {module} has shape {list(found.tensors[module][0].shape)}; "
                f"{CONFIG} gives it rank {rank}",
                "both files must be of one adapter, saved whole (with ZeRO-3 or FSDP: gathered first)",
            )
    parts: list[str] = []
    lines: list[str] = []
    if config.rslora != settings.rslora:
        parts.append(f"use_rslora is {_yaml(config.rslora)}, and lora.rslora {_yaml(settings.rslora)}")
        lines.append(f"lora.rslora: {_yaml(config.rslora)}")
    _compare("rank", ranks, settings.rank_of, config.rank, config.rank_pattern, parts, lines)
    _compare("alpha", alphas, settings.alpha_of, config.alpha, config.alpha_pattern, parts, lines)
    if parts:
        raise UserError(
            f"{found.path}: does not fit the recipe: {'; '.join(parts)}", _BUILD.format(", ".join(lines))
        )


def check_shapes(found: PeftAdapter, adapters: Sequence[Adapter]) -> None:
    """Checks that A and B fit the base's weights.

    Raises:
        UserError: naming the tensor, its shape and the expected one.
    """
    for adapter in adapters:
        for part in adapter.projections:
            both = zip("AB", found.tensors[part.name], adapter.shapes(part), strict=True)
            for which, tensor, shape in both:
                if tensor.shape != shape:
                    raise UserError(
                        f"{found.path}: {which} of {part.name} has shape {list(tensor.shape)}; "
                        f"the base's weight asks for {list(shape)}",
                        _own_base(found.config),
                    )


def join(
    found: PeftAdapter, adapters: Sequence[Adapter], dtype: np.dtype
) -> tuple[dict[str, np.ndarray], tuple[float, str]]:
    """The arrays of each adapter by their paths in Tunix's model.

    Returns:
        The arrays, and the largest change that the conversion to `dtype` made to a number, with its module.

    Raises:
        UserError: when a number is not finite, or modules that share A under lora.kv have different ones.
    """
    arrays: dict[str, np.ndarray] = {}
    largest = (0.0, "")
    for adapter in adapters:
        parts = {}
        for part in adapter.projections:
            pair = []
            for tensor in found.tensors[part.name]:
                values = found.read(tensor)
                given = values.astype(np.float32, copy=False)
                if not np.isfinite(given).all():
                    raise UserError(
                        f"{found.path}: {part.name} holds values that are not finite",
                        "import an earlier checkpoint of its training",
                    )
                pair.append(values.astype(dtype, copy=False))
                change = float(np.abs(pair[-1].astype(np.float32, copy=False) - given).max(initial=0.0))
                largest = max(largest, (change, part.name))
            parts[part.name] = (pair[0], pair[1])
        try:
            arrays[adapter.a_path], arrays[adapter.b_path] = adapter.join(parts)
        except ValueError as error:
            raise UserError(
                f"{found.path}: {error}, and lora.kv: shared has one for both",
                _BUILD.format("lora.kv: independent"),
            ) from error
    return arrays, largest


def notes(
    found: PeftAdapter,
    settings: LoraSettings,
    record: Mapping[str, Any],
    base: BaseCheckpoint,
    change: tuple[float, str],
) -> Iterable[str]:
    """What the user should know of an import that is no error."""
    model = record["recipe"].get("model") or {}
    config = found.config
    if config.base is not None and config.base not in (model.get("id"), base.name):
        yield f"the adapter was trained on {config.base}; the recipe's model is {model.get('id', base.name)}"
    elif config.revision is not None and config.revision != model.get("revision"):
        other = model.get("revision") or "the newest"
        yield f"the adapter was trained on revision {config.revision} of the model; the recipe's is {other}"
    if config.dropout != settings.dropout:
        yield f"the adapter was trained with dropout {config.dropout:g}; the recipe's is {settings.dropout:g}"
    largest, module = change
    if largest:
        yield f"A and B are rounded to {settings.dtype}: the largest change is {largest:.1e}, in {module}"


def _own_base(config: PeftConfig) -> str:
    name = config.base or "its model card names it"
    return f"give the adapter's own base with --model ({name})"


def _compare(
    what: str,
    given: Mapping[str, Value],
    ours: Callable[[str], Value],
    default: Value,
    pattern: Mapping[str, Value],
    parts: list[str],
    lines: list[str],
) -> None:
    """Adds how ranks or alphas differ from the recipe's, and the lines that would make them the same.

    Args:
        given: the adapter's, by module.
        ours: the recipe's, of a module.
        default, pattern: as the adapter's configuration has them.
    """
    other = [module for module in given if given[module] != ours(module)]
    if not other:
        return
    first = other[0]
    more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
    parts.append(f"{first}{more} has {what} {plain(given[first])}, in the recipe {plain(ours(first))}")
    lines.append(f"lora.{what}: {plain(default)}")
    if any(by_pattern(pattern, module, default) != value for module, value in given.items()):
        pattern = {re.escape(module): value for module, value in given.items() if value != default}
    lines.append(f"lora.{what}_pattern: {_yaml({key: plain(value) for key, value in pattern.items()})}")


def _targets(present: Collection[str], base: BaseCheckpoint, settings: LoraSettings) -> list[str]:
    """The lines of a recipe that trains the given modules and no others."""
    names = sorted({module.rpartition(".")[2] for module in present})
    layers = sorted({int(module.split(".")[1]) for module in present})
    free = replace(settings, kv="independent")
    for chosen, words in ((None, "all"), (tuple(layers), _yaml(layers))):
        adapters = build_adapters(
            base.family, base.architecture, replace(free, targets=tuple(names), layers=chosen)
        )
        if {part.name for adapter in adapters for part in adapter.projections} == set(present):
            return [f"lora.targets: {_yaml(names)}", f"lora.layers: {words}"]
    return [f"lora.targets: {_yaml(sorted(present))}", "lora.layers: all"]


def _some(names: Collection[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")


def _yaml(value: Any) -> str:
    """A value as a recipe may have it on one line; strings stay bare where YAML allows it."""
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w.]*", value):
        return value
    return json.dumps(value)
