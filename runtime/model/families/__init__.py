"""The model families that the compiler and the runtime know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import MOST_LAYERS, Architecture, Family, UnsupportedCheckpoint, text_config
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .gemma4 import Gemma4
from .llama3 import Llama3
from .qwen2 import Qwen2
from .qwen3 import Qwen3

FAMILIES: dict[str, Family] = {
    family.name: family for family in (Gemma2(), Gemma3(), Gemma4(), Llama3(), Qwen2(), Qwen3())
}


FOREIGN_MARKERS = {"[INST]": "mistral"}
"""Turn markers of families that are none of these."""


def foreign_markers(family: str, template: str) -> dict[str, str]:
    """Turn markers that a chat template writes and that a family was not trained with, and whose they are."""
    own = FAMILIES[family].turn_markers
    others = {marker: name for name, other in FAMILIES.items() for marker in other.turn_markers}
    return {
        marker: name
        for marker, name in (others | FOREIGN_MARKERS).items()
        if marker in template and marker not in own
    }


def family_of(config: Mapping[str, Any]) -> Family:
    """The family that a config.json belongs to, by its `model_type`.

    Raises:
        UnsupportedCheckpoint: when no family knows that model type, or it has more layers than any model.
    """
    model_type = config.get("model_type")
    layers = text_config(config).get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UnsupportedCheckpoint(f"config.json: num_hidden_layers is {layers:,}", "num_hidden_layers")
    for family in FAMILIES.values():
        if isinstance(model_type, str) and model_type in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in FAMILIES.values() for kind in family.model_types))
    raise UnsupportedCheckpoint(f"config.json: model_type is {model_type!r}; known are {known}", "model_type")


__all__ = ["FAMILIES", "Architecture", "Family", "UnsupportedCheckpoint", "family_of", "foreign_markers"]
