"""Whether packages of the extras are installed, found without importing them."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from compiler.errors import ArtifactError

PACKAGES = ("jax", "tunix", "qwix", "orbax", "grain", "safetensors", "tokenizers", "transformers")
"""What the scripts import, and the miniature is written with."""


def require_packages(what: str) -> None:
    """Checks that what trains and merges is installed, without importing it.

    Raises:
        ArtifactError: naming what is missing.
    """
    missing = missing_packages(PACKAGES)
    if missing:
        raise ArtifactError(
            f"{what} needs the packages that train: {', '.join(missing)} cannot be imported",
            "pip install 'recipec[train]'",
        )


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those that cannot be imported, found without importing them."""
    return [name for name in names if find_spec(name) is None]
