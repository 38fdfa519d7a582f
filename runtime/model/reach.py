"""The share of a model's parameters that adapters reach, for both the compiler and the model card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .adapters import Adapter
from .families.family import EXPERTS, Parameter


@dataclass(frozen=True)
class Reach:
    """What adapters reach in a model.

    Attributes:
        reached: parameters of the weights that carry an adapter.
        total: parameters of the model that the checkpoint fills.
        expert_layers: layers whose experts carry no adapter.
    """

    reached: int
    total: int
    expert_layers: int

    def __str__(self) -> str:
        """Return "1.65 of 25.2 billion parameters (6.5%): the experts of 30 layers carry no adapter"."""
        sizes = ((1e12, "trillion "), (1e9, "billion "), (1e6, "million "), (1, ""))
        size, word = next((size, word) for size, word in sizes if self.total >= size * 0.9995)
        text = f"{self.reached / size:.3g} of {self.total / size:.3g} {word}parameters"
        text += f" ({self.reached / self.total:.1%})"
        if self.expert_layers:
            layers = f"{self.expert_layers} layer{'' if self.expert_layers == 1 else 's'}"
            text += f": the experts of {layers} carry no adapter"
        return text


def reach(parameters: Sequence[Parameter], adapters: Iterable[Adapter]) -> Reach:
    """Return what the adapters of a run reach.

    Args:
        parameters: of the model, as its family lists them.
    """
    sizes = {p.path: math.prod(p.shape) for p in parameters if p.sources}
    adapters = list(adapters)
    adapted = {f"layers.{adapter.target.layer}" for adapter in adapters if adapter.target.experts}
    return Reach(
        reached=sum(sizes[adapter.target.weight] for adapter in adapters),
        total=sum(sizes.values()),
        expert_layers=len({layer for p in parameters if (layer := expert_layer(p)) is not None} - adapted),
    )


def expert_layer(parameter: Parameter) -> str | None:
    """Return the layer whose experts a parameter belongs to ("layers.7"); None for other parameters."""
    return ".".join(parameter.path.split(".")[:2]) if EXPERTS.search(parameter.path) else None
