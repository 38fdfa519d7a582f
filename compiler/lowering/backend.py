"""The software that a recipe can be built for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum


class Backend(str, Enum):  # noqa: UP042
    """The software that trains a recipe: Tunix in train.py (in every artifact), TRL on GPUs, or TorchAX on
    TPUs."""

    TUNIX = "tunix"
    TRL = "trl"
    TORCHAX = "torchax"


def others(names: Sequence[str]) -> tuple[Backend, ...]:
    """Return the backends besides Tunix among these names, in the order above, ignoring unknown names."""
    return tuple(backend for backend in Backend if backend.value in names and backend is not Backend.TUNIX)
