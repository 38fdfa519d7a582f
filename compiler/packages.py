"""Whether packages of the extras are installed, found without importing them, and how to install them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

from recipec import ROOT
from recipec.compiler.errors import ArtifactError
from recipec.compiler.wording import as_typed

PACKAGES = ("jax", "tunix", "qwix", "orbax", "grain", "safetensors", "tokenizers", "transformers")
"""What the scripts import, and the miniature is written with."""


def require_packages(what: str, names: Iterable[str] = PACKAGES, extras: Sequence[str] = ("train",)) -> None:
    """Checks that packages are installed, by default what trains and merges, without importing them.

    Args:
        what: for which they are needed.
        extras: all that it takes, as the help names them.

    Raises:
        ArtifactError: naming what is missing.
    """
    missing = missing_packages(names)
    if missing:
        raise ArtifactError(
            f"{what} needs the packages that train: {', '.join(missing)} cannot be imported",
            install(*extras),
        )


def install(*extras: str) -> str:
    """The command that adds extras to the environment which this process runs in.

    recipec is on no package index. Where it is installed, its name with extras adds what they list; in a
    clone, the clone has to be named.
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
    """Those that cannot be imported, found without importing them."""
    return [name for name in names if find_spec(name) is None]
