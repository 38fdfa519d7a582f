"""PEFT's names: of an adapter's files, of the model that it wraps, and of what our exports have twice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from ..errors import UserError
from ..model.adapters import TOKEN_ROWS, LoraSettings
from ..model.families import Architecture, Family
from ..model.families.base import Source, arrays

WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
WRAPPER = "base_model.model."
"""PEFT's prefix for the names of the model that it wraps."""

UNCHANGED_BASE = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Texts of init_lora_weights with which PEFT leaves the base's weights unchanged."""

REFUSED_KEYS = (
    *("use_dora", "lora_bias", "alora_invocation_tokens", "layer_replication", "use_bdlora", "use_qalora"),
    *("modules_to_save", "trainable_token_indices"),
)
"""Keys of adapter_config.json with which vLLM 0.32 refuses a language model's adapter, if they are set."""

REMAPPED = (
    *("qwen3_moe", "qwen3_next", "glm4_moe", "olmoe", "mixtral"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm_moe_dsa"),
    *("afmoe", "ernie4_5_moe", "minimax_m2"),
)
"""Families for which peft 0.21 mistakes a linear layer among `target_modules` for experts or the router, if
its name is one that these had before transformers 5."""


class Described(Protocol):
    """A model of a family: a checkpoint, the compiler's model of a recipe, or a program."""

    @property
    def family(self) -> Family: ...
    @property
    def architecture(self) -> Architecture: ...


class Known(Described, Protocol):
    """A model whose trainable weights are known: a checkpoint, or the compiler's model of a recipe."""

    @property
    def own_head(self) -> str | None: ...


def has_parameters(base: Described) -> bool:
    """Return whether PEFT has to adapt any weight as a parameter, not as a linear layer (parameters.py)."""
    return base.architecture.routing[0] > 0 or base.family.name in REMAPPED


def whole_sources(base: Known, settings: LoraSettings, rows: bool = False) -> list[Source]:
    """Return the tensors that a recipe trains whole, in addition to the adapters.

    Args:
        rows: whether to include the trained rows of the embedding.
    """
    if not settings.trains_whole:
        return []
    from ..model.selection import trained_whole

    whole = trained_whole(base.family.parameters(base.architecture), settings)
    return [source for p in whole for source in p.sources if rows or p.path != TOKEN_ROWS]


def is_tied(base: Known) -> bool:
    """Return whether a model's output head is its embedding."""
    own = (source for one in arrays(base.family, base.architecture) for source in one.sources)
    return all(source.module != base.family.names.head for source in own)


def refuse_rows(base: Known, name: str, settings: LoraSettings) -> None:
    """Raise UserError if PEFT would use trained rows of the embedding in a head of other values.

    Args:
        name: of the base, for the message.
    """
    if base.own_head is not None and settings.train_tokens:
        raise UserError(
            f"{name}: PEFT puts the rows of train_tokens into {base.own_head} too, because "
            "tie_word_embeddings of config.json says that it is the embedding; its values are others",
            "set tie_word_embeddings to false in config.json of the base; or train_also: [embed_tokens]",
        )


def tied_embedding(base: Known, settings: LoraSettings) -> Source | None:
    """Return the embedding if it is the output head too and is trained whole, else None."""
    if not settings.train_also or not is_tied(base):
        return None
    names = base.family.names.of_embedding
    return next((source for source in whole_sources(base, settings) if source.module in names), None)


def keys_as_values(base: Known, modules: Iterable[str]) -> list[tuple[str, str]]:
    """Return the k_proj modules without a v_proj, each with the v_proj's name."""
    pairs = ((name, f"{name.removesuffix('k_proj')}v_proj") for name in modules if name.endswith(".k_proj"))
    known = {module for target in base.family.all_targets(base.architecture) for module in target.modules}
    return [(keys, values) for keys, values in pairs if values not in known]


def plain(value: float) -> float:
    """Format a number as in PEFT's own files: without a fraction if it is whole."""
    return int(value) if value == int(value) else value


def refused_parts(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of an adapter_config.json with which vLLM refuses the adapter, each with its value."""
    found = [key for key in REFUSED_KEYS if config.get(key)]
    if config.get("bias", "none") != "none":
        found.append("bias")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in UNCHANGED_BASE:
        found.append("init_lora_weights")
    return [f"{key}: {json.dumps(config[key])}" for key in found]
