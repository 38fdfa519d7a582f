"""The model families that the compiler and the runtime support: the modules here that have a FAMILY."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pkgutil import iter_modules
from typing import Any

from .family import MOST_LAYERS, TURN_MARKERS, Architecture, Family, UnsupportedCheckpoint, text_config

ANY = "transformers"
"""The module of the family that takes any other causal model of transformers, from its tensors."""


class Families(Mapping[str, Family]):
    """The families whose modules are here, by name. A module is imported when its family is asked for.

    An artifact holds only its own family's module.
    """

    def __init__(self) -> None:
        self._modules = sorted(module.name for module in iter_modules(__path__))

    def __getitem__(self, name: str) -> Family:
        if name in self._modules:
            family = getattr(import_module(f"{__name__}.{name}"), "FAMILY", None)
            if isinstance(family, Family):
                return family
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._modules if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


FAMILIES = Families()


def foreign_markers(model_markers: Sequence[str], template: str) -> dict[str, str]:
    """Return the turn markers in a chat template that the model was not trained with, and whose they are.

    Args:
        model_markers: the model's own markers.
    """
    others = {marker: name for name, markers in TURN_MARKERS.items() for marker in markers}
    return {
        marker: name for marker, name in others.items() if marker in template and marker not in model_markers
    }


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a config.json belongs to, by its `model_type` or that of its `text_config`.

    Raises:
        UnsupportedCheckpoint: when no family has that model type, or there are more layers than any model
            has. The family of ANY, if present, accepts every type, and then checks the checkpoint itself.
    """
    model_type = config.get("model_type")
    text = text_config(config)
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        raise UnsupportedCheckpoint(f"config.json: num_hidden_layers is {layers:,}", "num_hidden_layers")
    named = str(text.get("model_type")).removesuffix("_text")  # most often the name of its module
    for name in chain(() if named not in FAMILIES else (named,), FAMILIES):
        family = FAMILIES[name]
        if isinstance(model_type, str) and model_type in family.model_types:
            return family
        if model_type in family.wrappers and text.get("model_type") in family.model_types:
            return family
    if isinstance(model_type, str) and find_spec(f"{__name__}.{ANY}"):
        any_family: Family = import_module(f"{__name__}.{ANY}").Transformers()
        return any_family
    known = ", ".join(sorted(kind for family in FAMILIES.values() for kind in family.model_types))
    raise UnsupportedCheckpoint(f"config.json: model_type is {model_type!r}; known are {known}", "model_type")


__all__ = [
    "ANY",
    "FAMILIES",
    "Architecture",
    "Family",
    "UnsupportedCheckpoint",
    "family_of",
    "foreign_markers",
]
