"""Vision towers with their projectors: from the patches of pictures to features, by a description
(families/vision.py)."""

from __future__ import annotations

from .tower import Tower, is_trained

__all__ = ["Tower", "is_trained"]
