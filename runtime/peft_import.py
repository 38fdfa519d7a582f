"""A PEFT adapter (peft 0.21) as step 0 of a run, so that train.py --resume goes on where GPUs left off.

The artifact's recipe says which adapters the run trains; the PEFT adapter must be just those, with the same
ranks and alphas. Its A and B then lie in Tunix's arrays as if train.py had saved them, beside the record of
the recipe. There is no optimizer's state, nor a place in the data: the step's metadata says whence it came
(`saving.IMPORTED`), and training begins with a new optimizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from runtime.adapters import Adapter, LoraSettings, Value, build_adapters, by_pattern
from runtime.checkpoint import BaseCheckpoint
from runtime.checkpoint_files import Files, files_of
from runtime.errors import UserError
from runtime.peft_config import AGAIN, CONFIG, MERGE, PeftConfig, parse_config
from runtime.peft_export import WEIGHTS, WRAPPER, keys_as_values, plain
from runtime.record import LOCK, read_record, write_record
from runtime.safetensors_reader import DTYPES, Tensor, read_header
from runtime.trained import absolute, recorded_lora, step_folders

PICKLED = "adapter_model.bin"
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What stands before the decoder layers of transformers' models, of today and of 2025."""
READ = ("F16", "BF16", "F32")
"""Element types of an adapter."""

_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight")
_LAYER = re.compile(r"layers\.(\d+)\..+")
_ELSE: Mapping[str, tuple[str, str]] = {
    r"\.lora_embedding_[AB]": ("an adapter on an embedding", MERGE),
    r"\.lora_magnitude_vector": ("a magnitude of DoRA", MERGE),
    r"\.lora_[AB](\.[^.]+)?\.bias$": ("a bias of an adapter (lora_bias)", MERGE),
    r"\.modules_to_save\.|\.original_module\.": ("a module that was trained whole", MERGE),
    r"\.(embed_tokens|lm_head)\.(base_layer\.)?weight$": (
        "the base's own embedding",
        "save the adapter with save_embedding_layers=False, unless the embedding was trained or resized",
    ),
}
"""Other tensors of an adapter by their names: what they are, and the way out."""
_BUILD = "build the recipe with {}, and import the adapter into that artifact"


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read; modules go by their names within the decoder ("layers.0.self_attn.q_proj").

    Attributes:
        path: of its weights, as messages call it.
        config: what its adapter_config.json says.
        full_names: of the modules, in transformers' model.
        tensors: where A and B lie in the file.
        files: its folder.
        sha256: of both files, in hexadecimal digits.
    """

    path: str
    config: PeftConfig
    full_names: Mapping[str, str]
    tensors: Mapping[str, tuple[Tensor, Tensor]]
    files: Files
    sha256: Mapping[str, str]

    def read(self, tensor: Tensor) -> np.ndarray:
        """A or B, as the file has it."""
        data = self.files.view(tensor.file, tensor.start, tensor.end)
        return np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)


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


def open_adapter(address: Path | str) -> PeftAdapter:
    """Reads an adapter's configuration, and which tensors it has.

    Raises:
        UserError: when it is not an adapter, or has more than A and B of decoder layers' projections.
    """
    files = files_of(address)
    if CONFIG not in files.sizes:
        raise UserError(
            f"{files.name}: no {CONFIG}" if files.exists else f"{files.name}: no such folder",
            "give the folder that PEFT's save_pretrained wrote (of a Trainer, one of its checkpoint-N)",
        )
    content = files.read(CONFIG)
    config = parse_config(content, files.path(CONFIG))
    if WEIGHTS not in files.sizes:
        if PICKLED in files.sizes:
            raise UserError(
                f"{files.path(PICKLED)}: a pickle, which runs what code it likes when it is read",
                "load it with PEFT where you trust it, and save it again: save_pretrained writes safetensors",
            )
        raise UserError(f"{files.name}: no {WEIGHTS}", AGAIN)
    header = read_header(files, WEIGHTS)
    path = files.path(WEIGHTS)
    full_names: dict[str, str] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in header.tensors.items():
        full, which = _parse_name(name, path)
        module = _decoder_module(full)
        if module is None:
            raise UserError(
                f"{path}: {full} carries an adapter, and is no part of a decoder layer",
                "train.py trains the text decoder's projections alone; train an adapter whose target_modules "
                "are those, or " + MERGE,
            )
        if full_names.setdefault(module, full) != full or which in pairs.setdefault(module, {}):
            raise UserError(f"{path}: {module} has more than one {which}", "save one adapter, by itself")
        if tensor.dtype not in READ:
            raise UserError(
                f"{path}: {name} has type {tensor.dtype}", "save it in float32, bfloat16 or float16"
            )
        pairs[module][which] = tensor
    for module, pair in pairs.items():
        missing = {"A", "B"} - pair.keys()
        if missing:
            raise UserError(f"{path}: {module} has no {missing.pop()}", AGAIN)
    if not pairs:
        raise UserError(f"{path}: holds no adapter", AGAIN)
    digests = {
        CONFIG: hashlib.sha256(content).hexdigest(),
        WEIGHTS: hashlib.sha256(files.view(WEIGHTS, 0, header.size)).hexdigest(),
    }
    tensors = {module: (pair["A"], pair["B"]) for module, pair in pairs.items()}
    return PeftAdapter(path, config, full_names, tensors, files, digests)


def without_copies(found: PeftAdapter, base: BaseCheckpoint) -> PeftAdapter:
    """The adapter without what our export writes twice for vLLM: k_proj's A and B under v_proj's name.

    Only where the base has no such v_proj, and where they are the same: anything else stays, to be refused.
    """
    copies = {
        values
        for keys, values in keys_as_values(base, found.tensors)
        if values in found.tensors
        and all(
            np.array_equal(found.read(ours), found.read(copy))
            for ours, copy in zip(found.tensors[keys], found.tensors[values], strict=True)
        )
    }
    return replace(found, tensors={name: pair for name, pair in found.tensors.items() if name not in copies})


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
        layer = _LAYER.fullmatch(module)
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
    ranks = {module: config.rank_of(found.full_names[module]) for module in modules}
    alphas = {module: config.alpha_of(found.full_names[module]) for module in modules}
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


def _parse_name(name: str, path: str) -> tuple[str, str]:
    """The module of a tensor in transformers' model, and which of A and B it is."""
    match = _LORA.fullmatch(name)
    if match is None or not name.startswith(WRAPPER):
        what, help = next(
            (why for pattern, why in _ELSE.items() if re.search(pattern, name)),
            ("not a name of A or B", "save the adapter with PEFT's save_pretrained"),
        )
        raise UserError(f"{path}: holds {name}: {what}", help)
    return match["module"].removeprefix(WRAPPER), match["which"]


def _decoder_module(full: str) -> str | None:
    """A module's name within the decoder, None when it lies elsewhere."""
    for prefix in PREFIXES:
        rest = full.removeprefix(prefix)
        if full.startswith(prefix) and _LAYER.fullmatch(rest):
            return rest
    return None


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
