"""A PEFT adapter (peft 0.21) as step 0 of a run, so that train.py --resume goes on where GPUs left off.

The artifact's recipe says which adapters the run trains; the PEFT adapter must be just those, with the same
ranks and alphas. Its A and B then lie in Tunix's arrays as if train.py had saved them, beside the record of
the recipe. There is no optimizer's state, nor a place in the data: the step's metadata says whence it came
(`resuming.IMPORTED`), and training begins with a new optimizer. An adapter that is more than A and B beside
the base's weights, by its adapter_config.json or its tensors, is refused with the way out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoints.adapter_reader import MATCH_SECONDS, absolute, recorded_lora, step_folders
from ..checkpoints.record import LOCK, read_record, write_record
from ..errors import UserError
from ..limit import TooLong, limit
from ..model.adapters import Adapter, LoraSettings, Matrices, Value, build_adapters, by_pattern, means
from ..weights.checkpoint import HFCheckpoint
from ..weights.checkpoint_files import Files, files_of
from ..weights.headers import Tensor
from ..weights.safetensors_files import DTYPES, read_header
from .exporting import (
    ADAPTER_CONFIG,
    WEIGHTS,
    WRAPPER,
    keys_as_values,
    parameter_names,
    plain,
    wrapped_parameters,
)

_BUILD = "build the recipe with {}, and import the adapter into that artifact"


def import_adapter(adapter: Path | str, base: HFCheckpoint, artifact: Path, directory: Path | str) -> int:
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
    if settings.train_also:
        raise UserError(
            f"{artifact / LOCK}: the recipe trains {', '.join(settings.train_also)} whole, and an import "
            "brings adapters alone",
            _BUILD.format("lora.train_also: []") + "; or " + MERGE,
        )
    found = without_copies(unwrapped(found, base), base)
    wanted, initial = _wanted(found, settings), None
    adapters = build_adapters(base.family, base.architecture, wanted)
    check_modules(found, adapters, base, wanted)
    check_scales(found, adapters, wanted)
    check_shapes(found, adapters)
    arrays, change = _join(found, adapters, np.dtype(settings.dtype))
    if settings.principal:
        from ..model.principal import halved

        values = {
            name: parts
            for a in adapters
            for name, parts in a.split(*(arrays[path] for path, *_ in a.arrays)).items()
        }
        trained, initial = halved(values)
        arrays = {
            path: array
            for a in build_adapters(base.family, base.architecture, settings)
            for (path, *_), array in zip(a.arrays, a.join(trained), strict=True)
        }
    for note in _notes(found, settings, record, base, change):
        print(f"note: {note}")

    from ..checkpoints.saving import Checkpoints

    write_record(target, artifact)
    if initial is not None:
        from ..model.principal import write_initial

        write_initial(target, initial)
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


def _wanted(found: PeftAdapter, settings: LoraSettings) -> LoraSettings:
    """The settings of the adapter that a recipe's run exports, which an import takes.

    Raises:
        UserError: when the recipe's adapters start from the base's weights, and it has not twice their rank.
    """
    if not settings.principal:
        return settings
    from ..model.principal import plain

    wanted = plain(settings)
    if found.config.rank != wanted.rank:
        raise UserError(
            f"{found.path}: has rank {found.config.rank}; with lora.init: {settings.init} a run's adapter of "
            f"rank {settings.rank} is exported, and imported, with twice that",
            _BUILD.format(f"lora.init: peft, lora.rank: {found.config.rank}"),
        )
    return wanted


def check_modules(
    found: PeftAdapter, adapters: Sequence[Adapter], base: HFCheckpoint, settings: LoraSettings
) -> None:
    """Checks that the adapter has the modules that the recipe trains, and no others.

    Raises:
        UserError: naming one that is on one side alone, and the lines of a recipe that trains the adapter's.
    """
    layers = base.architecture.num_layers
    known = {module for target in base.family.all_targets(base.architecture) for module in target.modules}
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
                "train an adapter whose target_modules are projections of attention and the dense blocks, "
                "with experts as target_parameters; or " + MERGE,
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
            f"{found.files.path(ADAPTER_CONFIG)}: its patterns have not been matched within "
            f"{MATCH_SECONDS:g} s",
            AGAIN,
        ) from None
    experts = {part.name: adapter.target.experts for adapter in adapters for part in adapter.projections}
    for module, rank in ranks.items():
        stored = found.tensors[module][0].shape[:1]
        if stored != (rank * max(1, experts[module]),):
            raise UserError(
                f"{found.path}: A of {module} has shape {list(found.tensors[module][0].shape)}; "
                f"{ADAPTER_CONFIG} gives it rank {rank}",
                "both files must be of one adapter, saved whole (with ZeRO-3 or FSDP: gathered first)",
            )
    parts: list[str] = []
    lines: list[str] = []
    if config.dora != (settings.kind == "dora"):
        kind = "dora" if config.dora else "lora"
        parts.append(f"use_dora is {_yaml(config.dora)}, and lora.kind {settings.kind}")
        lines.append(f"lora.kind: {kind}")
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
            for which, tensor, shape in zip(
                WHICH[: len(adapter.arrays)], found.tensors[part.name], adapter.shapes(part), strict=True
            ):
                if tensor.shape != shape:
                    raise UserError(
                        f"{found.path}: {which} of {part.name} has shape {list(tensor.shape)}; "
                        f"the base's weight asks for {list(shape)}",
                        _own_base(found.config),
                    )


def _join(
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
        parts: dict[str, Matrices] = {}
        for part in adapter.projections:
            pair: list[np.ndarray] = []
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
            parts[part.name] = tuple(pair)
        try:
            joined = adapter.join(parts)
        except ValueError as error:
            raise UserError(
                f"{found.path}: {error}, and lora.kv: shared has one for both",
                _BUILD.format("lora.kv: independent"),
            ) from error
        arrays |= {path: array for (path, *_), array in zip(adapter.arrays, joined, strict=True)}
    return arrays, largest


def _notes(
    found: PeftAdapter,
    settings: LoraSettings,
    record: Mapping[str, Any],
    base: HFCheckpoint,
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


def _targets(present: Collection[str], base: HFCheckpoint, settings: LoraSettings) -> list[str]:
    """The lines of a recipe that trains the given modules and no others."""
    called = {
        module: target.words[0]
        for target in base.family.expert_targets(base.architecture)
        for module in target.modules
    }
    names = sorted({called.get(module) or module.rpartition(".")[2] for module in present})
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


MERGE = "merge it into its base with PEFT's merge_and_unload, and begin a run from the merged model"
AGAIN = "download or save the adapter again"

REFUSED: Mapping[str, tuple[str, str]] = {
    "modules_to_save": (
        "whole modules were trained beside the adapters",
        "train an adapter without modules_to_save; or " + MERGE,
    ),
    "lora_bias": ("B has biases", MERGE),
    "fan_in_fan_out": (
        "its weights are stored as [in, out], which no model that is trained here does",
        "see that the adapter is one of this base",
    ),
    "trainable_token_indices": ("rows of the embedding were trained beside the adapters", MERGE),
    "layer_replication": ("its model has layers of the base more than once", MERGE),
    "alora_invocation_tokens": (
        "activated LoRA applies to the tokens after its invocation alone",
        "train an adapter without alora_invocation_tokens",
    ),
    "megatron_config": ("its layers are Megatron's", "save it for transformers' model of the base"),
    "use_qalora": ("QALoRA's A takes pooled inputs", MERGE),
    "use_bdlora": ("BD-LoRA's A and B are block-diagonal", MERGE),
    "arrow_config": ("Arrow routes between several adapters", "import one adapter that is LoRA alone"),
    "kasa_config": ("KaSA changes the base's weights", MERGE),
    "monteclora_config": ("MonteCLoRA samples beside A and B", MERGE),
}
"""Keys that mean something other than LoRA's A and B when they are set, the reason, and the way out."""

PASSIVE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
        *("revision", "runtime_config", "task_type"),
        # The tensors of the file tell which modules are adapted.
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        "target_parameters",
        # How it was trained, or initialised: init_lora_weights tells which of these count.
        *("corda_config", "ensure_weight_tying", "eva_config", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "velora_config"),
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "r", "rank_pattern", "use_dora"),
        "use_rslora",
    }
)
"""Keys that are read here, or that do not bear on what A and B mean."""

KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base's weights as they are."""
CONVERT = (
    "save it converted, with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER of "
    "the untrained adapter); or " + MERGE
)
INITS: Mapping[str, tuple[str, str]] = {
    **{
        name: ("it changed the base's weights too, so that A and B do not belong to the base", CONVERT)
        for name in ("pissa", "olora", "corda")
    },
    "lora_ga": ("it changed the base's weights too, so that A and B do not belong to the base", MERGE),
    "loftq": ("A and B make good what its own quantised base had lost", MERGE),
    "mica": ("B is frozen while A is trained, and train.py trains both", MERGE),
}
"""Other ones by what they begin with: the reason, and the way out."""


@dataclass(frozen=True)
class PeftConfig:
    """What an adapter_config.json says; modules go by the names of transformers' model.

    Attributes:
        rank, alpha: where no pattern says otherwise.
        base, revision: of the model that it was trained on, None when it says nothing.
        parameters: `target_parameters`: what is adapted that is no linear layer, by the end of its name.
        dora: whether there are magnitudes.
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    dropout: float
    base: str | None
    revision: str | None
    parameters: tuple[str, ...] = ()
    dora: bool = False

    def rank_of(self, module: str) -> int:
        """The rank of a module ("model.layers.7.self_attn.q_proj")."""
        return next((v for key, v in self.rank_pattern.items() if means(key, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module."""
        return next((v for key, v in self.alpha_pattern.items() if means(key, module)), self.alpha)


def _parse_config(content: bytes, path: str) -> PeftConfig:
    """Reads an adapter_config.json.

    Args:
        path: as messages call it.

    Raises:
        UserError: when it is none, or the adapter is more than A and B beside the base's weights.
    """
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})", AGAIN) from error
    if not isinstance(fields, dict):
        raise UserError(f"{path}: not a JSON object", AGAIN)
    _check_kind(fields, path)
    _check_init(fields.get("init_lora_weights", True), path)
    return PeftConfig(
        rank=_rank(fields.get("r", 8), "r", path),
        alpha=_number(fields.get("lora_alpha", 8), "lora_alpha", path),
        rslora=bool(fields.get("use_rslora")),
        rank_pattern={
            key: _rank(value, f"rank_pattern.{key}", path)
            for key, value in _mapping(fields, "rank_pattern", path).items()
        },
        alpha_pattern={
            key: _number(value, f"alpha_pattern.{key}", path)
            for key, value in _mapping(fields, "alpha_pattern", path).items()
        },
        dropout=_number(fields.get("lora_dropout", 0.0), "lora_dropout", path),
        base=fields.get("base_model_name_or_path") or None,
        revision=fields.get("revision") or None,
        parameters=_names(fields, "target_parameters", path),
        dora=bool(fields.get("use_dora")),
    )


def _check_kind(fields: Mapping[str, Any], path: str) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{path}: peft_type is {json.dumps(kind)}, not LORA",
            "train.py goes on with LoRA adapters alone" if kind is None else MERGE,
        )
    bias = fields.get("bias", "none")
    if bias != "none":
        raise UserError(
            f"{path}: bias is {json.dumps(bias)}: biases of the base were trained beside the adapters", MERGE
        )
    for key, value in fields.items():
        if not value or (key == "target_parameters" and _of_linear_layers(value)):
            continue
        if key in REFUSED:
            reason, help = REFUSED[key]
            raise UserError(f"{path}: {key} is set: {reason}", help)
        if key not in PASSIVE:
            raise UserError(
                f"{path}: {key} is set, and is not among what peft 0.21 writes",
                f"if it does not change what A and B mean, remove {key} from {ADAPTER_CONFIG}",
            )


def _of_linear_layers(parameters: Any) -> bool:
    """Whether parameters are weights of linear layers, on which A and B are as on the layers themselves."""
    return isinstance(parameters, list) and all(str(name).endswith("_proj.weight") for name in parameters)


def _check_init(init: Any, path: str) -> None:
    if any(init is known or (isinstance(known, str) and init == known) for known in KEEP_BASE):
        return
    name = str(init).lower()
    reason, help = next(
        (why for kind, why in INITS.items() if name.startswith(kind)),
        ("it is not known whether it changed the base's weights", MERGE),
    )
    raise UserError(f"{path}: init_lora_weights is {json.dumps(init)}: {reason}", help)


def _mapping(fields: Mapping[str, Any], key: str, path: str) -> dict[str, Any]:
    value = fields.get(key) or {}
    if not isinstance(value, dict):
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not an object", AGAIN)
    return value


def _names(fields: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    value = fields.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not a list of names", AGAIN)
    return tuple(value)


def _rank(value: Any, key: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not a rank", AGAIN)
    return value


def _number(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not a number", AGAIN)
    return float(value)


PICKLED = "adapter_model.bin"
PREFIXES = ("model.language_model.", "language_model.model.", "model.")
"""What stands before the decoder layers of transformers' models, of today and of 2025."""
READ = ("F16", "BF16", "F32")
"""Element types of an adapter."""
WHICH = ("A", "B", "magnitude_vector")
_LORA = re.compile(
    r"(?P<module>.+)\.lora_((?P<which>[AB])(?:\.[^.]+)?\.weight|(?P<length>magnitude_vector)(?:\..+)?)"
)
LAYER = re.compile(r"layers\.(\d{1,9})\..+")
_ELSE: Mapping[str, tuple[str, str]] = {
    r"\.lora_embedding_[AB]": ("an adapter on an embedding", MERGE),
    r"\.lora_[AB](\.[^.]+)?\.bias$": ("a bias of an adapter (lora_bias)", MERGE),
    r"\.modules_to_save\.|\.original_module\.": ("a module that was trained whole", MERGE),
    r"\.(embed_tokens|lm_head)\.(base_layer\.)?weight$": (
        "the base's own embedding",
        "save the adapter with save_embedding_layers=False, unless the embedding was trained or resized",
    ),
}
"""Other tensors of an adapter by their names: what they are, and the way out."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read; modules go by their names within the decoder ("layers.0.self_attn.q_proj").

    Attributes:
        path: of its weights, as messages call it.
        config: what its adapter_config.json says.
        full_names: of the modules, in transformers' model.
        tensors: where A, B and, with DoRA, the magnitudes lie in the file.
        files: its folder.
        sha256: of both files, in hexadecimal digits.
    """

    path: str
    config: PeftConfig
    full_names: Mapping[str, str]
    tensors: Mapping[str, tuple[Tensor, ...]]
    files: Files
    sha256: Mapping[str, str]

    def read(self, tensor: Tensor) -> np.ndarray:
        """A or B, as the file has it."""
        data = self.files.view(tensor.file, tensor.start, tensor.end)
        return np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)


def open_adapter(address: Path | str) -> PeftAdapter:
    """Reads an adapter's configuration, and which tensors it has.

    Raises:
        UserError: when it is not an adapter, or has more than A and B of decoder layers' projections.
    """
    files = files_of(address)
    if ADAPTER_CONFIG not in files.sizes:
        raise UserError(
            f"{files.name}: no {ADAPTER_CONFIG}" if files.exists else f"{files.name}: no such folder",
            "give the folder that PEFT's save_pretrained wrote (of a Trainer, one of its checkpoint-N)",
        )
    content = files.read(ADAPTER_CONFIG)
    config = _parse_config(content, files.path(ADAPTER_CONFIG))
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
    wanted = WHICH if config.dora else WHICH[:2]
    for module, pair in pairs.items():
        for which in WHICH:
            if (which in wanted) != (which in pair):
                has = "has no" if which in wanted else "has, without use_dora, a"
                raise UserError(f"{path}: {module} {has} {which}", AGAIN)
    if not pairs:
        raise UserError(f"{path}: holds no adapter", AGAIN)
    digests = {
        ADAPTER_CONFIG: hashlib.sha256(content).hexdigest(),
        WEIGHTS: hashlib.sha256(files.view(WEIGHTS, 0, header.size)).hexdigest(),
    }
    tensors = {module: tuple(pair[which] for which in wanted) for module, pair in pairs.items()}
    return PeftAdapter(path, config, full_names, tensors, files, digests)


def unwrapped(found: PeftAdapter, base: HFCheckpoint) -> PeftAdapter:
    """The adapter with parameters' own names in the place of the modules that PEFT wraps for them."""
    ends = found.config.parameters
    known = parameter_names(base)
    chosen = [
        name
        for name, parameter in known.items()
        if any(f".{parameter}".endswith(f".{end}") or end.endswith(f".{parameter}") for end in ends)
    ]
    own = {wrapper: name for name, wrapper in wrapped_parameters(base, chosen).items()}

    def full(module: str) -> str:
        prefix = found.full_names[module].removesuffix(module)
        return prefix + known[own[module]] if module in own else found.full_names[module]

    return replace(
        found,
        full_names={own.get(module, module): full(module) for module in found.full_names},
        tensors={own.get(module, module): pair for module, pair in found.tensors.items()},
    )


def without_copies(found: PeftAdapter, base: HFCheckpoint) -> PeftAdapter:
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


def _parse_name(name: str, path: str) -> tuple[str, str]:
    """The module of a tensor in transformers' model, and which of WHICH it is."""
    match = _LORA.fullmatch(name)
    if match is None or not name.startswith(WRAPPER):
        what, help = next(
            (why for pattern, why in _ELSE.items() if re.search(pattern, name)),
            ("not a name of A or B", "save the adapter with PEFT's save_pretrained"),
        )
        raise UserError(f"{path}: holds {name}: {what}", help)
    return match["module"].removeprefix(WRAPPER), match["which"] or match["length"]


def _decoder_module(full: str) -> str | None:
    """A module's name within the decoder, None when it lies elsewhere."""
    for prefix in PREFIXES:
        rest = full.removeprefix(prefix)
        if full.startswith(prefix) and LAYER.fullmatch(rest):
            return rest
    return None
