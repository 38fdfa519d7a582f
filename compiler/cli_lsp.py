"""`recipe lsp`."""

from __future__ import annotations


def lsp() -> None:
    """Serve recipes to an editor, by the Language Server Protocol over stdio."""
    raise NotImplementedError
