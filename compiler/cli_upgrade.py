"""`recipe upgrade`."""

from __future__ import annotations


def upgrade() -> None:
    """Rewrite recipes of an older language version, or show the diff."""
    raise NotImplementedError
