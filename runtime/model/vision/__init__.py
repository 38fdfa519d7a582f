"""Vision towers with their projectors: from the patches of pictures to features.

A tower's module takes the patches of a micro-batch's rows, as layers.Images has them, and returns features
[1 + S, B, R, D] in the order of the patches: first those that take the place of embeddings, then S that are
added to the first S layers' outputs. It is constructed from the model's Config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flax import nnx

from ..layers import Config
from .siglip import SiglipTower

TOWERS: Mapping[str, Callable[[Config], nnx.Module]] = {"siglip": SiglipTower}
"""The tower of each `VisionArchitecture.kind`."""


def tower(config: Config) -> Any:
    """Return the module of the model's tower and projector."""
    vision = config.architecture.vision
    assert vision is not None
    return TOWERS[vision.kind](config)
