"""`recipe report`."""

from __future__ import annotations


def report() -> None:
    """Make one HTML page of a run, or of a serving sweep."""
    raise NotImplementedError
