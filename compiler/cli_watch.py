"""`recipe watch`."""

from __future__ import annotations


def watch() -> None:
    """Show a run as it goes."""
    raise NotImplementedError
