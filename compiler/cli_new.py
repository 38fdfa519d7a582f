"""`recipe new`."""

from __future__ import annotations


def new() -> None:
    """Write a commented recipe for a model and an accelerator."""
    raise NotImplementedError
