"""Vision towers with their projectors: from the patches of pictures to features, by a description
(families/vision.py)."""

from __future__ import annotations

from ..layers import Config
from .tower import Tower


def tower(config: Config) -> Tower:
    """Return the module of the model's tower and projector."""
    vision = config.architecture.vision
    assert vision is not None
    return Tower(vision, config.dtype)
