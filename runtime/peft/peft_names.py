"""PEFT's names: of an adapter's files, of the model that it wraps, of what our exports have twice, and of
what PEFT adapts as parameters instead of linear layers (experts, routers, and layers that it takes for
them).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import UserError
from ..model.adapters import TOKEN_ROWS, LoraSettings
from ..model.families import Architecture, Family
from ..model.families.family import Source, arrays
from ..model.families.towers import HOLDER
from ..model.selection import trained_whole

if TYPE_CHECKING:
    from .adapter import PeftAdapter

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
    whole = trained_whole(base.family.parameters(base.architecture), settings)
    return [source for p in whole for source in p.sources if rows or p.path != TOKEN_ROWS]


def tower_names(base: Described) -> dict[str, str]:
    """Return the names of the vision tower's tensors in transformers' model, by those in the checkpoint.

    There are none if it was opened without its tower.
    """
    vision = base.architecture.vision
    if vision is None:
        return {}
    both = zip(vision.parameters(), vision.in_transformers().parameters(), strict=True)
    return {
        stored.name: loaded.name
        for array, renamed in both
        for stored, loaded in zip(array.sources, renamed.sources, strict=True)
    }


def own_name(base: Described, source: Source) -> str:
    """Return the name of a tensor that was trained whole: within the decoder, or that of a vision tower's
    within the model."""
    return tower_names(base)[source.name].removeprefix(HOLDER) if source.outside else source.name


def is_tied(base: Known) -> bool:
    """Return whether a model's output head is its embedding."""
    used = (source for array in arrays(base.family, base.architecture) for source in array.sources)
    return all(source.module != base.family.names.head for source in used)


def refuse_rows(base: Known, name: str, settings: LoraSettings) -> None:
    """Raise UserError if PEFT would use trained rows of the embedding in a head of other values.

    Args:
        name: of the base, for the message.
    """
    if base.own_head is not None and settings.trainable_tokens:
        raise UserError(
            f"{name}: PEFT puts the rows of trainable_tokens into {base.own_head} too, because "
            "tie_word_embeddings of config.json says that it is the embedding; its values are others",
            "set tie_word_embeddings to false in config.json of the base; or modules_to_save: [embed_tokens]",
        )


def tied_embedding(base: Known, settings: LoraSettings) -> Source | None:
    """Return the embedding if it is the output head too and is trained whole, else None."""
    if not settings.modules_to_save or not is_tied(base):
        return None
    names = base.family.names.of_embedding
    return next((source for source in whole_sources(base, settings) if source.module in names), None)


def keys_as_values(base: Known, modules: Iterable[str]) -> list[tuple[str, str]]:
    """Return the k_proj modules without a v_proj, each with the v_proj's name."""
    pairs = ((name, f"{name.removesuffix('k_proj')}v_proj") for name in modules if name.endswith(".k_proj"))
    known = {target.name for target in base.family.all_targets(base.architecture)}
    return [(keys, values) for keys, values in pairs if values not in known]


def plain(value: float) -> float:
    """Format a number as in PEFT's own files: without a fraction if it is whole."""
    return int(value) if value == int(value) else value


def refused_parts(config: Mapping[str, Any]) -> list[str]:
    """Return the keys of an adapter_config.json with which vLLM refuses the adapter, each with its value."""
    refused = [key for key in REFUSED_KEYS if config.get(key)]
    if config.get("bias", "none") != "none":
        refused.append("bias")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower() not in UNCHANGED_BASE:
        refused.append("init_lora_weights")
    return [f"{key}: {json.dumps(config[key])}" for key in refused]


OLD_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The names before transformers 5."""


def unwrapped(adapter: PeftAdapter, base: Known) -> PeftAdapter:
    """Return the adapter with parameters' own names instead of the modules that PEFT wraps for them."""
    ends = adapter.config.parameters
    known = parameter_names(base)
    chosen = [
        name
        for name, parameter in known.items()
        if any(f".{parameter}".endswith(f".{end}") or end.endswith(f".{parameter}") for end in ends)
    ]
    unwrapping = {wrapper: name for name, wrapper in wrapped_parameters(base, chosen).items()}

    def full(module: str) -> str:
        prefix = adapter.full_names[module].removesuffix(module)
        return prefix + known[unwrapping[module]] if module in unwrapping else adapter.full_names[module]

    return replace(
        adapter,
        full_names={unwrapping.get(module, module): full(module) for module in adapter.full_names},
        tensors={unwrapping.get(module, module): pair for module, pair in adapter.tensors.items()},
    )


def parameter_names(base: Known) -> dict[str, str]:
    """Return what PEFT has to adapt as parameters of the model, not as linear layers, in transformers' order:
    our names ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.gate") and the parameters' names.

    Linear layers are included if PEFT would mistake their names for those of experts.
    """
    out = {}
    for target in base.family.all_targets(base.architecture):
        if target.parameter:
            out[target.name] = f"layers.{target.layer}.{target.parameter}"
        elif base.family.name in REMAPPED and target.name.rpartition(".")[2] in OLD_NAMES:
            out[target.name] = f"{target.name}.weight"
    return out


def wrapped_parameters(base: Known, modules: Iterable[str]) -> dict[str, str]:
    """Return the modules under which PEFT stores the adapters of parameters, by our names.

    PEFT wraps a parameter's module once for each of its parameters, in transformers' order. The last wrapper
    has the module's name; the inner ones are its `base_layer`.
    """
    chosen, holders = set(modules), defaultdict(list)
    for name, parameter in parameter_names(base).items():
        if name in chosen:
            holders[parameter.rpartition(".")[0]].append(name)
    return {
        name: holder + ".base_layer" * within
        for holder, names in holders.items()
        for within, name in enumerate(reversed(names))
    }


def select_parameters(chosen: Iterable[str], known: Iterable[str], prefix: str) -> list[str]:
    """Return the simplest `target_parameters` that select exactly `chosen` among the known ones: names within
    a layer, or whole names. PEFT matches the end of a name, and supports no layer numbers here."""
    chosen = set(chosen)
    names = {name.split(".", 2)[2] for name in chosen}
    reached = {name for name in known if name.split(".", 2)[2] in names}
    return sorted(names) if reached == chosen else sorted(prefix + name for name in chosen)
