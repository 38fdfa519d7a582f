"""Reduce a checkpoint's config.json to some of its layers, and find the pattern that its layers repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recipec.runtime.model.families import Architecture, family_of
from recipec.runtime.model.families.family import text_config

LISTED = ("mlp_only_layers", "moe_layers")
"""Keys that list layers by their numbers."""
FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers")
"""Keys that say how many of the first layers are of one kind."""
LAST = ("num_kv_shared_layers",)
"""Keys that say how many of the last layers are of one kind."""
EVERY = ("no_rope_layer_interval", "decoder_sparse_step", "interleave_moe_layer_step")
"""Keys that say at which interval a layer is of another kind: every second, third and so on."""
NOT_OF_LAYERS = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", *LISTED)
"""Lists that may happen to be as long as the model is deep, but have no value for each layer."""

OUTER = ("tie_word_embeddings",)
"""Keys of the text model that may stand next to its `text_config`."""

LONGEST = 16
"""The longest pattern, in layers. A longer repetition is a few stretches of one kind each, not a pattern."""


def with_layers(config: Mapping[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    """Return the text model's config.json with only some of its layers, numbered anew.

    A list that is as long as the model is deep has a value for each layer, and is cut. The kinds of layers
    are written out if they differ, because families derive them by counting from the first layer.

    Args:
        config: config.json, with or without a nested `text_config`.
        layers: the layers to keep; a layer may be kept twice.
    """
    family, text = family_of(config), text_config(config)
    architecture = family.architecture(config)
    count = architecture.num_layers
    outer = {key: config[key] for key in OUTER if key in config}
    text_type = f"{config.get('model_type')}_text"
    kind = text_type if text_type in family.model_types else family.model_types[-1]
    out = {"model_type": kind, **outer, **text, "num_hidden_layers": len(layers)}
    for key, value in text.items():
        if _is_by_layer(key, value, count):
            out[key] = [value[i] for i in layers]
        elif key in LISTED and isinstance(value, list):
            out[key] = [new for new, old in enumerate(layers) if old in value]
        elif key in FIRST and isinstance(value, int):
            out[key] = sum(i < value for i in layers)
        elif key in LAST and isinstance(value, int):
            out[key] = sum(i >= count - value for i in layers)
    if "layer_types" in text or len(set(architecture.layer_types)) > 1:
        out |= family.kinds(config, layers)
    return out


def pattern(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the first layers up to the length of the pattern that the model's layers repeat.

    If nothing repeats within LONGEST layers, return the first layer of each kind.
    """
    architecture, text = family_of(config).architecture(config), text_config(config)
    count = architecture.num_layers
    columns: list[Sequence[Any]] = list(by_layer(architecture).values())
    for key, value in text.items():
        if _is_by_layer(key, value, count):
            columns.append(value)
        elif key in LISTED and isinstance(value, list):
            columns.append([i in value for i in range(count)])
        elif key in EVERY and isinstance(value, int) and value > 0:
            columns.append([(i + 1) % value for i in range(count)])
        elif key == "first_k_dense_replace" and isinstance(value, int):
            columns.append([i < value for i in range(count)])
    kinds = list(zip(*columns, strict=True))
    length = period(kinds)
    return tuple(range(length)) if length <= LONGEST else tuple(sorted(map(kinds.index, set(kinds))))


def by_layer(architecture: Architecture) -> dict[str, tuple[Any, ...]]:
    """Return the fields of an architecture that have a value for each layer, including `layer_types`."""
    return {name: value for name in architecture.BY_LAYER if (value := getattr(architecture, name))}


def period(kinds: Sequence[Any]) -> int:
    """Return the length of the shortest run whose repetition gives the whole sequence."""
    return next(
        n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )


def _is_by_layer(key: str, value: Any, count: int) -> bool:
    return isinstance(value, list) and len(value) == count and key not in NOT_OF_LAYERS
