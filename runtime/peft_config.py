"""adapter_config.json (peft 0.21): what it says of an adapter, and what of it train.py cannot go on with."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.adapters import means
from runtime.errors import UserError

CONFIG = "adapter_config.json"
MERGE = "merge it into its base with PEFT's merge_and_unload, and begin a run from the merged model"
AGAIN = "download or save the adapter again"

REFUSED: Mapping[str, tuple[str, str]] = {
    "use_dora": ("DoRA's magnitudes have no place in LoRA's A and B", MERGE),
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
    "target_parameters": (
        "parameters that are no linear layers (experts) carry adapters",
        "train an adapter on target_modules alone; or " + MERGE,
    ),
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
        # How it was trained, or initialised: init_lora_weights tells which of these count.
        *("corda_config", "ensure_weight_tying", "eva_config", "loftq_config", "lora_dropout"),
        *("lora_ga_config", "megatron_core", "qalora_group_size", "velora_config"),
        *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "r", "rank_pattern", "use_rslora"),
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
    """

    rank: int
    alpha: float
    rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    dropout: float
    base: str | None
    revision: str | None

    def rank_of(self, module: str) -> int:
        """The rank of a module ("model.layers.7.self_attn.q_proj")."""
        return next((v for key, v in self.rank_pattern.items() if means(key, module)), self.rank)

    def alpha_of(self, module: str) -> float:
        """The alpha of a module."""
        return next((v for key, v in self.alpha_pattern.items() if means(key, module)), self.alpha)


def parse_config(content: bytes, path: str) -> PeftConfig:
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
        if not value:
            continue
        if key in REFUSED:
            reason, help = REFUSED[key]
            raise UserError(f"{path}: {key} is set: {reason}", help)
        if key not in PASSIVE:
            raise UserError(
                f"{path}: {key} is set, and is not among what peft 0.21 writes",
                f"if it does not change what A and B mean, remove {key} from {CONFIG}",
            )


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


def _rank(value: Any, key: str, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not a rank", AGAIN)
    return value


def _number(value: Any, key: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise UserError(f"{path}: {key} is {json.dumps(value)}, not a number", AGAIN)
    return float(value)
