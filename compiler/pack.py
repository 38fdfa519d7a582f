"""`recipe pack`: put an artifact, the runtime, the recipes' schema and the recipe's local data in one archive
that runs without other files."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

from recipec.compiler.artifacts import runtime
from recipec.compiler.artifacts.artifact import (
    LOCK,
    RUNTIME,
    SCHEMA,
    artifacts_in,
    backends_of,
    digest,
    has_notebook,
    has_source,
    is_current,
    locked_files,
    schema_file,
)
from recipec.compiler.artifacts.runtime import PAGE, modules
from recipec.compiler.artifacts.whole import complete
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import others
from recipec.compiler.lowering.references import IMPORTABLE, escapes, leads_out
from recipec.compiler.writing import demand_writable, replacing
from recipec.runtime.build_check import LIST
from recipec.runtime.progress import Progress
from recipec.spec.load import load

GZIP = b"\x1f\x8b"
"""The first bytes of an archive."""


NAMING = (".json", ".jsonl", ".csv")
"""Endings of files whose rows can only name pictures, or hold them as text."""


def pack(name: str, out_dir: Path, recipe: Path | None = None, archive: Path | None = None) -> Path:
    """Write NAME.tar.gz: NAME/ with its data, the runtime's wheel with its page, and the schema.

    The same contents give the same bytes. runtime/ is packed too if it was copied, as it is now: people edit
    it.

    Args:
        name: of an artifact in `out_dir`.
        recipe: the recipe that it was built from; its data is next to it. If None, it is looked for in
            recipes/ next to `out_dir`, in recipes/ and in the working folder.
        archive: the file to write; if None, NAME.tar.gz in the working folder.

    Raises:
        ArtifactError: the artifact is missing, edited or outdated, or a data file is missing.
    """
    complete(out_dir)
    folder = out_dir / name
    lock = _read_lock(name, out_dir)
    target = archive or Path(f"{name}.tar.gz")
    _refuse_other(target)
    _refuse_edited(folder, out_dir, lock)
    recipe = recipe or _find_recipe(name, out_dir)
    if recipe is not None:
        _refuse_stale(folder, recipe)
    members: dict[str, Path | bytes] = {f"{name}/{path}": folder / path for path in locked_files(folder)}
    members |= {PAGE: runtime.page(), runtime.wheel_file(): runtime.wheel()}
    if has_source(out_dir):
        source = out_dir / RUNTIME
        members |= {f"{RUNTIME}/{path}": source / path for path in (*modules(source), LIST)}
    members[SCHEMA] = out_dir / SCHEMA
    for path in _data_files(lock):
        data = _find_data(path, folder, recipe)
        if lock["recipe"].get("data", {}).get("images") is not None and {*data.suffixes} & {*NAMING}:
            raise ArtifactError(
                f"the rows of {path} name pictures by their paths, and pack does not bring these",
                "give the folder that has the rows and their pictures as data.train, or rows in Parquet with "
                "the pictures in them",
            )
        for file in sorted(data.rglob("*")) if data.is_dir() else [data]:
            if file.is_file():
                inside = "" if file == data else f"/{file.relative_to(data).as_posix()}"
                members.setdefault(f"{name}/{path.rstrip('/')}{inside}", file)
    _write(target, members)
    return target


def _refuse_other(target: Path) -> None:
    """Refuse to replace anything but an earlier archive."""
    demand_writable(target)
    try:
        with target.open("rb") as file:
            start = file.read(len(GZIP))
    except OSError:  # there is no file, or its kind cannot be determined
        return
    if start and start != GZIP:
        raise ArtifactError(f"{target} already exists, and is not an archive", "name another file with -o")


def _read_lock(name: str, out_dir: Path) -> Mapping[str, Any]:
    path = out_dir / name / LOCK
    built = artifacts_in(out_dir)
    if name not in built:
        has = f"it has {', '.join(built)}" if built else "build one first: recipe build RECIPE"
        raise ArtifactError(f"there is no artifact `{name}` in {out_dir}", has)
    try:
        lock = json.loads(path.read_bytes())
        if not isinstance(lock["files"], dict):
            raise TypeError
        _data_files(lock)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ArtifactError(f"{path} cannot be read", f"build {name} again") from None
    return dict(lock)


def _refuse_edited(folder: Path, out_dir: Path, lock: Mapping[str, Any]) -> None:
    """Refuse files that were edited, and an artifact that was built with another version's runtime."""
    again = "build it again: recipe build RECIPE"
    for path in locked_files(folder):
        if path == LOCK:
            continue
        if not (folder / path).is_file():
            raise ArtifactError(f"{folder / path} is missing", again)
        if digest((folder / path).read_bytes()) != lock["files"][path]:
            raise ArtifactError(f"{folder / path} was edited after it was built", again)
    if not is_current(lock.get("runtime")):
        raise ArtifactError(f"{folder} is stale: it was built with another version's runtime", again)
    if not (out_dir / SCHEMA).is_file():
        raise ArtifactError(f"{out_dir / SCHEMA} is missing", again)
    if (out_dir / SCHEMA).read_bytes() != schema_file():
        raise ArtifactError(f"{out_dir / SCHEMA} is stale: it is another version's", again)


def _find_recipe(name: str, out_dir: Path) -> Path | None:
    for folder in (out_dir.resolve().parent / "recipes", Path("recipes"), Path()):
        for path in (folder / f"{name}.yaml", folder / f"{name}.yml"):
            if path.is_file():
                return path
    return None


def _refuse_stale(folder: Path, recipe: Path) -> None:
    """Refuse an artifact that differs from what its recipe gives now."""
    program = lower(load(recipe)).program
    if program is None:
        raise ArtifactError(f"{recipe} has errors", f"see them with: recipe check {recipe}")
    program = replace(program, notebook=has_notebook(folder))
    if program.name != folder.name:
        raise ArtifactError(
            f"{recipe} is the recipe of `{program.name}`, not of `{folder.name}`",
            f"build it again: recipe build {recipe}",
        )
    for path, content in emit(program, others(backends_of(folder))).items():
        if not (folder / path).is_file() or (folder / path).read_bytes() != content:
            raise ArtifactError(
                f"{folder} is stale: {recipe} gives another {path}",
                f"build it again: recipe build {recipe}; if it was built with --set, name its own recipe: "
                f"--recipe {folder / 'recipe.yaml'}",
            )


def _data_files(lock: Mapping[str, Any]) -> list[str]:
    """Return the local files and folders that a run reads: data, prompts to answer, an adapter to start
    from, and a tokenizer that is next to the recipe."""
    data = lock["recipe"].get("data", {})
    sources = [*data.get("train", []), *data.get("eval", [])]
    paths = {source["path"] for source in sources}
    paths.add((lock["recipe"].get("train", {}).get("generations") or {}).get("prompts"))
    paths.add((lock["recipe"].get("lora") or {}).get("start_from"))
    if (tokenizer := lock["recipe"].get("model", {}).get("tokenizer") or "").startswith("./"):
        paths.add(tokenizer.removeprefix("./"))
    return sorted(path for path in paths if path and "://" not in path)


def _find_data(path: str, folder: Path, recipe: Path | None) -> Path:
    places = [folder] if recipe is None else [recipe.parent, folder]
    for place in places:
        if (place / path).exists():
            _refuse_elsewhere(place, path)
            return place / path
    where = " nor in ".join(str(place) for place in places)
    raise ArtifactError(
        f"the data file {path} is not in {where}",
        "put it there, or name with --recipe the recipe that is next to it",
    )


def _refuse_elsewhere(place: Path, path: str) -> None:
    """Refuse data that does not lie below the recipe, or that contains code which the scripts would import.

    The target of a link may belong to someone else, and an archive is passed on to others.
    """
    top = place / path
    files = [file for file in top.rglob("*") if not file.is_dir()] if top.is_dir() else [top]
    for file in [top, *files]:
        inside = file.relative_to(place).as_posix()
        if escapes(path) or leads_out(place, inside):
            help = f"put a copy of it into {place}"
            below = [folder for folder in reversed(file.parents) if place in folder.parents]
            if link := next((path for path in (*below, file) if path.is_symlink()), None):
                copied = f"cp -rL {quote(str(link.resolve()))} {quote(str(link))}"
                help = f"replace the link with a copy: rm {quote(str(link))} && {copied}"
            raise ArtifactError(f"{file} is outside of {place}, and would be packed", help)
        if inside.lower().endswith(IMPORTABLE):
            raise ArtifactError(
                f"{file} is code, which would be next to train.py", "keep it out of the data's folder"
            )


def _write(target: Path, members: Mapping[str, Path | bytes]) -> None:
    """Write a compressed tar archive, completely or not at all. Times, owners and file order of this machine
    are left out."""
    with (
        replacing(target) as file,
        gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        size = sum(map(_size, members.values()))
        with Progress("packing", size, unit="B") as progress:
            for name in sorted(members):
                _add(tar, name, members[name], progress)


def _size(member: Path | bytes) -> int:
    return len(member) if isinstance(member, bytes) else member.stat().st_size


def _add(tar: tarfile.TarFile, name: str, member: Path | bytes, progress: Progress) -> None:
    info = tarfile.TarInfo(name)
    info.size = _size(member)
    info.mode = 0o755 if name.endswith(".sh") else 0o644
    with io.BytesIO(member) if isinstance(member, bytes) else member.open("rb") as source:
        tar.addfile(info, _Counted(source, progress))


class _Counted(io.BufferedIOBase):
    """A file that reports its bytes as progress when they are read."""

    def __init__(self, source: BinaryIO, progress: Progress) -> None:
        self._source = source
        self._progress = progress

    def read(self, size: int | None = -1) -> bytes:
        data = self._source.read(-1 if size is None else size)
        self._progress.advance(len(data))
        return data
