"""Check whether the packages of the extras are installed, without importing them, and say how to install
them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from recipec import ROOT
from recipec.compiler.errors import ArtifactError
from recipec.compiler.wording import as_typed

PACKAGES = ("jax", "tunix", "qwix", "orbax", "grain", "safetensors", "tokenizers", "transformers")
"""Packages that the generated scripts import, and that are needed to write the miniature."""


def require_packages(what: str, names: Iterable[str] = PACKAGES, extras: Sequence[str] = ("train",)) -> None:
    """Check that packages are installed, without importing them.

    Args:
        what: the task that needs the packages, for the message.
        names: the packages, by default those that training and merging need.
        extras: all extras that the task needs, for the help.

    Raises:
        ArtifactError: a package is missing; the message names it.
    """
    missing = missing_packages(names)
    if missing:
        raise ArtifactError(
            f"{what} needs the packages that train: {', '.join(missing)} cannot be imported",
            install(*extras),
        )


def install(*extras: str) -> str:
    """Return the command that adds extras to the environment of this process.

    recipec is not on a package index. Where it is installed as a package, "recipec[EXTRA]" adds what the
    extra lists. In a clone, the command has to name the clone.
    """
    listed, prefix = f"[{','.join(extras)}]", Path(sys.prefix)
    python = quote(str(as_typed(Path(sys.executable))))
    if (prefix / "pipx_metadata.json").is_file():
        return f"pipx runpip {prefix.name} install 'recipec{listed}'"
    if (ROOT / "pyproject.toml").is_file():
        return f"{python} -m pip install -e {quote(f'{as_typed(ROOT)}{listed}')}"
    if (prefix / "uv-receipt.toml").is_file():
        return f"uv pip install --python {python} 'recipec{listed}'"
    return f"{python} -m pip install 'recipec{listed}'"


def missing_packages(names: Iterable[str]) -> list[str]:
    """Return the packages that cannot be imported. Nothing is imported to find out."""
    return [name for name in names if find_spec(name) is None]


def version_of(package: str) -> str:
    """Return the version of an installed package, "" of another."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
