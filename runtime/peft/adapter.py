"""Read a PEFT adapter (peft 0.21) from disk or an address: its configuration, and its list of tensors.

An adapter may have A, B, DoRA's magnitudes and whole modules. Any other content is refused, with advice.
Nothing here imports numpy, because the compiler also reads adapters.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..addresses import is_address
from ..errors import UserError
from ..model.adapters import means
from ..model.families.family import LAYERS, PREFIXES
from ..model.families.towers import HOLDER, is_of_tower
from ..weights.files import Files, json_object
from ..weights.headers import Tensor, files_of, numpy_type, read_header
from .peft_names import ADAPTER_CONFIG, WEIGHTS, WRAPPER

if TYPE_CHECKING:
    import numpy as np

MERGE = "merge it into its base with PEFT's merge_and_unload, and begin a run from the merged model"
AGAIN = "download or save the adapter again"

REFUSED = frozenset(
    {
        *("lora_bias", "fan_in_fan_out", "layer_replication", "alora_invocation_tokens", "megatron_config"),
        *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config"),
    }
)
"""Keys that, if set, mean something other than LoRA's A and B."""

PASSIVE = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version"),
        *("modules_to_save", "revision", "runtime_config", "task_type", "trainable_token_indices"),
        # The tensors of the file show which modules are adapted.
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules"),
        "target_parameters",
        # How it was trained or initialized; init_lora_weights says which of these matter.
        *("corda_config", "ensure_weight_tying", "eva_config", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "velora_config"),
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "r", "rank_pattern", "use_dora"),
        "use_rslora",
    }
)
"""Keys that are read here, or that do not affect the meaning of A and B."""

KEEP_BASE = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the base's weights unchanged."""
CONVERT = (
    "save it converted, with PEFT's save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER of "
    "the untrained adapter); or " + MERGE
)


@dataclass(frozen=True)
class PeftConfig:
    """The content of an adapter_config.json; modules have transformers' names.

    Attributes:
        rank, alpha: the defaults of modules that no pattern matches.
        base, revision: the model that it was trained on, None if not stated.
        parameters: `target_parameters`: adapted parameters of no linear layer, by the end of their name.
        dora: whether it has DoRA's magnitudes.
        saved: `modules_to_save`: modules that were trained whole, by the end of their name.
        tokens: `trainable_token_indices`: the trained rows of the embedding, in the order of their tensor.
        tied: `ensure_weight_tying`: whether a head that is the embedding was trained with it.
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
    saved: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    tied: bool = False

    def rank_of(self, module: str) -> int:
        """Return the rank of a module ("model.layers.7.self_attn.q_proj")."""
        return next((v for key, v in self.rank_pattern.items() if means(key, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        """Return the alpha of a module."""
        return next((v for key, v in self.alpha_pattern.items() if means(key, module)), self.alpha)


def _parse_config(content: bytes, path: str) -> PeftConfig:
    """Parse an adapter_config.json; `path` is its name in messages."""
    fields = json_object(content, path, AGAIN)
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
        saved=_names(fields, "modules_to_save", path),
        tokens=_tokens(fields, path),
        tied=fields.get("ensure_weight_tying") is True,
    )


def _check_kind(fields: Mapping[str, Any], path: str) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"{path}: peft_type is {json.dumps(kind)}, not LORA",
            "train.py starts only from LoRA adapters" if kind is None else MERGE,
        )
    bias = fields.get("bias", "none")
    if bias != "none":
        raise UserError(
            f"{path}: bias is {json.dumps(bias)}: the base's biases were trained in addition to the adapters",
            MERGE,
        )
    for key, value in fields.items():
        if not value:
            continue
        if key in REFUSED:
            raise UserError(f"{path}: {key} is set: it means more than LoRA's A and B", MERGE)
        if key not in PASSIVE:
            raise UserError(
                f"{path}: {key} is set, and is not among what peft 0.21 writes",
                f"if it does not change what A and B mean, remove {key} from {ADAPTER_CONFIG}",
            )


def _check_init(init: Any, path: str) -> None:
    if any(init is known or (isinstance(known, str) and init == known) for known in KEEP_BASE):
        return
    raise UserError(
        f"{path}: init_lora_weights is {json.dumps(init)}: it may have changed the base's weights too",
        CONVERT,
    )


def _valid(valid: bool, value: Any, key: str, path: str, what: str) -> Any:
    """Return a value of adapter_config.json, if it is valid."""
    if not valid:
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not {what}", AGAIN)
    return value


def _mapping(fields: Mapping[str, Any], key: str, path: str) -> dict[str, Any]:
    value = fields.get(key) or {}
    mapping: dict[str, Any] = _valid(isinstance(value, dict), value, key, path, "an object")
    return mapping


def _names(fields: Mapping[str, Any], key: str, path: str) -> tuple[str, ...]:
    value = fields.get(key) or []
    valid = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return tuple(_valid(valid, value, key, path, "a list of names"))


def _tokens(fields: Mapping[str, Any], path: str) -> tuple[int, ...]:
    """Return trainable_token_indices, which PEFT also writes by the name of an embedding."""
    value = fields.get("trainable_token_indices") or []
    if isinstance(value, dict):
        if [name.rpartition(".")[2] in EMBEDDED for name in value] != [True]:
            raise UserError(
                f"{path}: trainable_token_indices names {', '.join(value)}: rows of another module than the "
                "embedding were trained",
                MERGE,
            )
        (value,) = value.values()
    whole = isinstance(value, list) and all(type(number) is int and number >= 0 for number in value)
    valid = whole and len(set(value)) == len(value)
    return tuple(_valid(valid, value, "trainable_token_indices", path, "a list of different tokens"))


def _rank(value: Any, key: str, path: str) -> int:
    return int(_valid(type(value) is int and value > 0, value, key, path, "a rank"))


def _number(value: Any, key: str, path: str) -> float:
    valid = type(value) in (int, float) and math.isfinite(value)
    return float(_valid(valid, value, key, path, "a number"))


PICKLED = "adapter_model.bin"
READ = ("F16", "BF16", "F32")
"""Element types of an adapter."""
WHICH = ("A", "B", "magnitude_vector")
EMBEDDED = ("embed_tokens", "embed_in", "word_embeddings", "wte")
"""transformers' names of a token embedding."""
EMBEDDINGS = ("embed_tokens", "lm_head", "embed_in", "embed_out", "word_embeddings")
_LORA = re.compile(
    r"(?P<module>.+)\.lora_((?P<which>[AB])(?:\.[^.]+)?\.weight|(?P<length>magnitude_vector)(?:\..+)?)"
)
_WHOLE = re.compile(r"\.modules_to_save(\.default)?\.")
OLDER = "vision_tower.vision_model.", "vision_tower."
"""How transformers named a tower's modules before version 5, and how it names them now."""
ROWS = ".token_adapter.trainable_tokens_delta"
LAYER = re.compile(rf"{LAYERS}\.(\d{{1,9}})\..+")
_ELSE: Mapping[str, tuple[str, str]] = {
    r"\.lora_embedding_[AB]": ("an adapter on an embedding", MERGE),
    r"\.modules_to_save\.|\.original_module\.": ("a module that was trained whole", MERGE),
    rf"\.({'|'.join(EMBEDDINGS)})\.(base_layer\.)?weight$": (
        "the base's own embedding",
        "save the adapter with save_embedding_layers=False, unless the embedding was trained or resized",
    ),
}
"""Other tensors of an adapter by their names: what they are, and the advice."""


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter that was read; modules have their names within the decoder ("layers.0.self_attn.q_proj").

    Attributes:
        path: path of its weights, for messages.
        config: its adapter_config.json.
        full_names: the modules' names in transformers' model.
        tensors: the places of A, B and, with DoRA, the magnitudes in the file.
        whole: tensors that were trained whole, by their names within the decoder ("embed_tokens.weight"), and
            the trained rows of the embedding.
        files: the files of its folder.
        sha256: of both files, in hexadecimal digits.
    """

    path: str
    config: PeftConfig
    full_names: Mapping[str, str]
    tensors: Mapping[str, tuple[Tensor, ...]]
    whole: Mapping[str, Tensor]
    files: Files
    sha256: Mapping[str, str]

    def read(self, tensor: Tensor) -> np.ndarray:
        """Read A, B or another tensor in the file's type."""
        import numpy as np

        data = self.files.view(tensor.file, tensor.start, tensor.end)
        return np.frombuffer(data, numpy_type(tensor.dtype)).reshape(tensor.shape)

    def same(self, first: Tensor, second: Tensor) -> bool:
        """Return whether two tensors hold the same values, byte for byte."""
        alike = (first.dtype, first.shape) == (second.dtype, second.shape)
        return alike and self.read(first).tobytes() == self.read(second).tobytes()


def open_adapter(address: Path | str) -> PeftAdapter:
    """Open an adapter in a folder or at an address: read its configuration and its list of tensors.

    Raises:
        UserError: when it is not an adapter, or has anything except A, B and magnitudes of decoder layers'
            projections, and whole modules.
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
                f"{files.path(PICKLED)}: is a pickle, which can run any code when it is read",
                "if you trust it, load it with PEFT and save it again: save_pretrained writes safetensors",
            )
        raise UserError(f"{files.name}: no {WEIGHTS}", AGAIN)
    header = read_header(files, WEIGHTS)
    path = files.path(WEIGHTS)
    full_names: dict[str, str] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in header.tensors.items():
        if tensor.dtype not in READ:
            raise UserError(
                f"{path}: {name} has type {tensor.dtype}", "save it in float32, bfloat16 or float16"
            )
        if saved := _saved(name, config):
            if saved in whole:
                raise UserError(f"{path}: {saved} occurs more than once", "save a single adapter")
            whole[saved] = tensor
            continue
        full, which = _parse_name(name, path)
        module = _decoder_module(full)
        if module is None:
            raise UserError(
                f"{path}: {full} carries an adapter, but is not part of a decoder layer or a vision tower",
                "train.py trains only their projections; train an adapter whose target_modules are those, or "
                + MERGE,
            )
        if full_names.setdefault(module, full) != full or which in pairs.setdefault(module, {}):
            raise UserError(f"{path}: {module} has more than one {which}", "save a single adapter")
        pairs[module][which] = tensor
    wanted = WHICH if config.dora else WHICH[:2]
    for module, pair in pairs.items():
        for which in WHICH:
            if (which in wanted) != (which in pair):
                has = "has no" if which in wanted else "has, without use_dora, a"
                raise UserError(f"{path}: {module} {has} {which}", AGAIN)
    if not pairs:
        raise UserError(f"{path}: holds no adapter", AGAIN)
    if config.tokens and not any(name.endswith(ROWS) for name in whole):
        raise UserError(f"{path}: has no rows of the embedding for trainable_token_indices", AGAIN)
    digests = {
        ADAPTER_CONFIG: hashlib.sha256(content).hexdigest(),
        WEIGHTS: hashlib.sha256(files.view(WEIGHTS, 0, header.size)).hexdigest(),
    }
    tensors = {module: tuple(pair[which] for which in wanted) for module, pair in pairs.items()}
    return PeftAdapter(path, config, full_names, tensors, whole, files, digests)


def _saved(name: str, config: PeftConfig) -> str | None:
    """Return the decoder's name of a tensor of modules_to_save or of trained rows; None for any other tensor.

    PEFT matches a name at the end of a module's: "norm" also selects "input_layernorm". In addition to
    modules_to_save, PEFT writes the embedding and the head if it believes that the vocabulary
    was changed, or the head if it believes that it is tied.
    """
    path = _WHOLE.sub(".", name.removeprefix(WRAPPER))
    module = path.rpartition(".")[0]
    ends = (*config.saved, *(f".{embedding}" for embedding in EMBEDDINGS)) if config.saved else ()
    rows = bool(config.tokens) and name.endswith(ROWS)
    saved = any(f".{module}".endswith(end) or f".{end}." in f".{module}." for end in ends)
    if not name.startswith(WRAPPER) or not (rows or saved):
        return None
    prefix = next((prefix for prefix in (*PREFIXES, "language_model.") if path.startswith(prefix)), "")
    return path.removeprefix(prefix)


def _parse_name(name: str, path: str) -> tuple[str, str]:
    """Return the module of a tensor in transformers' model, and its kind: one of WHICH."""
    match = _LORA.fullmatch(name)
    if match is None or not name.startswith(WRAPPER):
        what, help = next(
            (why for pattern, why in _ELSE.items() if re.search(pattern, name)),
            ("not a name of A or B", "save the adapter with PEFT's save_pretrained"),
        )
        raise UserError(f"{path}: holds {name}: {what}", help)
    return match["module"].removeprefix(WRAPPER), match["which"] or match["length"]


def _decoder_module(full: str) -> str | None:
    """Return a module's name within the decoder, or that of a vision tower's within the model; None if it is
    elsewhere."""
    held = full.removeprefix(HOLDER).replace(*OLDER)
    if is_of_tower(held):
        return held
    for prefix in PREFIXES:
        rest = full.removeprefix(prefix)
        if full.startswith(prefix) and LAYER.fullmatch(rest):
            return rest
    return None


def located(address: str, data_dir: Path) -> Path | str:
    """Return an adapter's folder or address as in lora.start_from; a relative one is in `data_dir`."""
    return address if is_address(address) else data_dir / Path(address).expanduser()
