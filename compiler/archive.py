"""`recipe pack`: an artifact, the runtime and the recipe's local data in one archive that runs by itself."""

from __future__ import annotations

import gzip
import json
import os
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiler.artifact import (
    LOCK,
    RUNTIME,
    ArtifactError,
    artifacts_in,
    backends_of,
    digest,
    locked_files,
    modules,
    runtime_digest,
    tree_digest,
    umask,
)


def pack(name: str, out_dir: Path, recipe: Path | None = None, archive: Path | None = None) -> Path:
    """Makes NAME.tar.gz: NAME/ with its data, and runtime/. The same contents give the same bytes.

    Args:
        name: of an artifact in `out_dir`.
        recipe: the recipe that it was built from, beside which its data lies; looked for in recipes/
            beside `out_dir`, in recipes/ and in the working folder when None.
        archive: the file to write; NAME.tar.gz in the working folder when None.

    Raises:
        ArtifactError: when the artifact is missing, edited or stale, or a data file is missing.
    """
    folder = out_dir / name
    lock = _read_lock(name, out_dir)
    _refuse_edited(folder, out_dir, lock)
    recipe = recipe or _find_recipe(name, out_dir)
    if recipe is not None:
        _refuse_stale(folder, recipe)
    members = {f"{name}/{path}": folder / path for path in locked_files(folder)}
    members |= {f"{RUNTIME}/{path}": out_dir / RUNTIME / path for path in modules(out_dir / RUNTIME)}
    for path in _data_files(lock):
        found = _find_data(path, folder, recipe)
        for file in sorted(found.rglob("*")) if found.is_dir() else [found]:
            if file.is_file():
                inside = "" if file == found else f"/{file.relative_to(found).as_posix()}"
                members.setdefault(f"{name}/{path.rstrip('/')}{inside}", file)
    target = archive or Path(f"{name}.tar.gz")
    _write(target, members)
    return target


def _read_lock(name: str, out_dir: Path) -> Mapping[str, Any]:
    path = out_dir / name / LOCK
    built = artifacts_in(out_dir)
    if name not in built:
        has = f"it has {', '.join(built)}" if built else "build one first: recipe build RECIPE"
        raise ArtifactError(f"there is no artifact `{name}` in {out_dir}", has)
    try:
        lock = json.loads(path.read_bytes())
        recipe, files = lock["recipe"], lock["files"]
        if not isinstance(recipe, dict) or not isinstance(files, dict):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError):
        raise ArtifactError(f"{path} cannot be read", f"build {name} again") from None
    return dict(lock)


def _refuse_edited(folder: Path, out_dir: Path, lock: Mapping[str, Any]) -> None:
    """The files are those that were built, and by this compiler's runtime."""
    again = "build it again: recipe build RECIPE"
    for path in locked_files(folder):
        if path == LOCK:
            continue
        if not (folder / path).is_file():
            raise ArtifactError(f"{folder / path} is missing", again)
        if digest((folder / path).read_bytes()) != lock["files"][path]:
            raise ArtifactError(f"{folder / path} was edited after it was built", again)
    present = {path: (out_dir / RUNTIME / path).read_bytes() for path in modules(out_dir / RUNTIME)}
    if tree_digest(present) != lock.get("runtime"):
        raise ArtifactError(f"{out_dir / RUNTIME} is not the runtime that {folder} was built with", again)
    if lock.get("runtime") != runtime_digest():
        raise ArtifactError(f"{folder} is stale: it was built with another version's runtime", again)


def _find_recipe(name: str, out_dir: Path) -> Path | None:
    for folder in (out_dir.resolve().parent / "recipes", Path("recipes"), Path()):
        for path in (folder / f"{name}.yaml", folder / f"{name}.yml"):
            if path.is_file():
                return path
    return None


def _refuse_stale(folder: Path, recipe: Path) -> None:
    """The recipe still gives this artifact."""
    from compiler.backends import others
    from compiler.emit import emit
    from compiler.lower import lower
    from spec.load import load

    program = lower(load(recipe)).program
    if program is None:
        raise ArtifactError(f"{recipe} has errors", f"see them with: recipe check {recipe}")
    if program.name != folder.name:
        raise ArtifactError(f"{recipe} is the recipe of `{program.name}`, not of `{folder.name}`")
    for path, content in emit(program, others(backends_of(folder))).items():
        if not (folder / path).is_file() or (folder / path).read_bytes() != content:
            raise ArtifactError(
                f"{folder} is stale: {recipe} gives another {path}",
                f"build it again: recipe build {recipe}; if it was built with --set, name its own recipe: "
                f"--recipe {folder / 'recipe.yaml'}",
            )


def _data_files(lock: Mapping[str, Any]) -> list[str]:
    """The local data files, and data sets' folders, that the recipe names."""
    data = lock["recipe"].get("data", {})
    sources = [*data.get("train", []), *data.get("eval", [])]
    return sorted({source["path"] for source in sources if "://" not in source["path"]})


def _find_data(path: str, folder: Path, recipe: Path | None) -> Path:
    places = [folder] if recipe is None else [recipe.parent, folder]
    for place in places:
        if (place / path).exists():
            return place / path
    where = " nor in ".join(str(place) for place in places)
    raise ArtifactError(
        f"the data file {path} is not in {where}",
        "put it there, or name the recipe that it lies beside with --recipe",
    )


def _write(target: Path, members: Mapping[str, Path]) -> None:
    """A tar archive without times, owners or the machine's order, compressed, whole or not at all."""
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with (
            os.fdopen(handle, "wb") as file,
            gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as compressed,
            tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name in sorted(members):
                _add(tar, name, members[name])
        os.chmod(temporary, 0o666 & ~umask())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _add(tar: tarfile.TarFile, name: str, path: Path) -> None:
    info = tarfile.TarInfo(name)
    info.size = path.stat().st_size
    info.mode = 0o755 if name.endswith(".sh") else 0o644
    with path.open("rb") as source:
        tar.addfile(info, source)
