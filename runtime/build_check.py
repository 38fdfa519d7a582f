"""Check that a generated script's folder is one build of a recipe, and that it runs on the runtime of that
build."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import UserError, say

JOURNAL = ".recipe-build/journal.json"
"""What a build that was cut short leaves next to the artifacts, while files still have to be replaced."""

LIST = "SHA256SUMS"
"""The sha256 of each of the runtime's files, in the format of sha256sum. A checkout has none."""


def demand_whole(artifact: Path) -> None:
    """Refuse an artifact that may have files of two builds, and another runtime than that of the build.

    Raises:
        UserError: a build was killed while it replaced files, or the installed runtime is another one.
    """
    if (artifact.parent / JOURNAL).is_file():
        raise UserError(
            f"a build in {artifact.parent} was cut short, so {artifact.name} may have files of two builds",
            "complete it where recipec is installed: recipe build RECIPE",
        )
    _demand_runtime(artifact, Path(__file__).resolve().parent)


def _demand_runtime(artifact: Path, runtime: Path) -> None:
    """Compare the runtime with the one that an artifact was built for; tell of its edited files.

    Args:
        runtime: the folder of this process' runtime.
    """
    built = _recorded(artifact)
    try:
        sums = (runtime / LIST).read_bytes()
    except OSError:  # a checkout, or a wheel that was not installed
        return
    if built is not None and hashlib.sha256(sums).hexdigest() != built.get("sha256"):
        if (artifact.parent / "runtime").resolve() == runtime:
            help = "build it again where recipec is installed: recipe build RECIPE"
        else:
            help = f"install it: pip install -r {artifact / 'requirements-train.txt'}"
        package = built.get("package")
        raise UserError(f"{artifact.name} was built for {package}, not for {_name(runtime)}", help)
    for line in sums.decode("utf-8", "replace").splitlines():
        sha256, _, path = line.partition("  ")
        file = runtime / path
        if not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != sha256:
            state = "was edited after it was built" if file.is_file() else "is missing"
            say(f"warning: {file} {state}; recipe.lock.json does not say so")


def _recorded(artifact: Path) -> dict[str, Any] | None:
    """Return what an artifact's lock says of its runtime; None for a lock that does not name a package."""
    try:
        built = json.loads((artifact / "recipe.lock.json").read_bytes())["runtime"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return built if isinstance(built, dict) and "package" in built else None


def _name(runtime: Path) -> str:
    """Return the name of an installed runtime, or its folder."""
    try:
        distribution = metadata.distribution("recipec-runtime")
    except metadata.PackageNotFoundError:
        return str(runtime)
    here = Path(str(distribution.locate_file("runtime"))).resolve() == runtime
    return f"recipec-runtime=={distribution.version}" if here else str(runtime)
