"""Read an artifact's folder for `recipe serve`: its recipe and the server it describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from recipec.compiler.artifacts.artifact import (
    LOCK,
    LOCK_VERSION,
    artifacts_in,
    digest,
    is_current,
    locked_files,
)
from recipec.compiler.artifacts.whole import complete
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import hardware
from recipec.compiler.lowering.recorded import from_record
from recipec.compiler.vllm.container import container
from recipec.spec.language import Recipe

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.vllm.container import Container
    from recipec.spec.language import Recipe

AGAIN = "build it again: recipe build RECIPE"


@dataclass(frozen=True)
class ServedArtifact:
    """An artifact that has a server.

    Attributes:
        folder: of the artifact, an absolute path.
        name: of the recipe.
        recipe: the resolved recipe, from recipe.lock.json.
        family: name of the model's family.
        accelerator: what the recipe serves on.
        container: the container that serve/ starts.
        notes: warnings for the user about the folder: edited files, or another version's runtime.
    """

    folder: Path
    name: str
    recipe: Recipe
    family: str
    accelerator: Accelerator
    container: Container
    notes: tuple[str, ...] = ()


def open_artifact(folder: Path) -> ServedArtifact:
    """Read the folder of an artifact that has a serve section.

    Raises:
        ArtifactError: when the folder is missing, is not an artifact, was built by another version, or its
            recipe has no serve section.
    """
    complete(folder.parent)
    lock = _read_lock(folder)
    recipe = _recipe(folder, lock)
    if recipe.serve is None:
        raise ArtifactError(
            f"{folder} cannot be served: its recipe has no serve section",
            "give the recipe one (`serve: {accelerator: v6e-8}`), and build it again",
        )
    family = _family(folder, lock)
    return ServedArtifact(
        folder=folder.resolve(),
        name=recipe.name,
        recipe=recipe,
        family=family,
        accelerator=_accelerator(folder, recipe.serve.accelerator),
        container=container(recipe, family),
        notes=tuple(_notes(folder, lock)),
    )


def _read_lock(folder: Path) -> Mapping[str, Any]:
    path = folder / LOCK
    if not folder.exists():
        others = artifacts_in(folder.parent)
        has = f"{folder.parent} has {', '.join(others)}" if others else "build one first: recipe build RECIPE"
        raise ArtifactError(f"there is no artifact {folder}", has)
    if not path.is_file():
        inside = artifacts_in(folder) if folder.is_dir() else []
        named = f"name one of them: {', '.join(str(folder / name) for name in inside)}"
        raise ArtifactError(
            f"{folder} is not an artifact: it has no {LOCK}",
            named if inside else "name a folder that `recipe build` wrote, for example generated/NAME",
        )
    try:
        lock = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read ({error})", AGAIN) from error
    if not isinstance(lock, dict) or "lock" not in lock:
        raise ArtifactError(f"{path} is not the lock of an artifact", AGAIN)
    if lock["lock"] != LOCK_VERSION:
        by = f"by {lock['compiler']}" if isinstance(lock.get("compiler"), str) else "by another version"
        raise ArtifactError(
            f"{path} was written {by}, with layout {lock['lock']!r}: this version reads {LOCK_VERSION}", AGAIN
        )
    return lock


def _recipe(folder: Path, lock: Mapping[str, Any]) -> Recipe:
    try:
        return Recipe.model_validate(from_record(lock.get("recipe")))
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "recipe"
        raise ArtifactError(
            f"{folder / LOCK} holds a recipe that this version does not read ({where}: {first['msg']})", AGAIN
        ) from None


def _family(folder: Path, lock: Mapping[str, Any]) -> str:
    model = lock.get("model")
    family = model.get("family") if isinstance(model, dict) else None
    if not isinstance(family, str):
        raise ArtifactError(f"{folder / LOCK} does not name the model's family", AGAIN)
    return family


def _accelerator(folder: Path, name: str) -> Accelerator:
    try:
        return hardware.from_text(name)
    except hardware.UnknownAccelerator as error:
        raise ArtifactError(f"{folder / LOCK}: {error}", error.help) from error


def _notes(folder: Path, lock: Mapping[str, Any]) -> list[str]:
    notes = []
    recorded = lock.get("files")
    for path in locked_files(folder):
        if path == LOCK or not isinstance(recorded, dict):
            continue
        if not (folder / path).is_file():
            notes.append(f"{folder / path} is missing since it was built")
        elif path.startswith("serve/") and digest((folder / path).read_bytes()) != recorded[path]:
            notes.append(f"{folder / path} was edited after it was built")
    if not is_current(lock.get("runtime")):
        notes.append(f"{folder} was built by another version of recipec: recipe build RECIPE updates it")
    return notes
