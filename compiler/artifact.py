"""Artifacts on disk: writing them, and holding them against what a recipe gives.

A folder of artifacts ("generated") holds runtime/ and the recipes' JSON Schema once, and one folder per
recipe. Only files that an
artifact's recipe.lock.json lists are ever replaced or removed: a checkpoint or a note beside them stays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

import runtime
from compiler.errors import ArtifactError
from compiler.json_value import json_value
from compiler.terminal import uninterrupted
from compiler.writing import umask

LOCK = "recipe.lock.json"
LOCK_VERSION = 1
"""Of the lock's own layout."""
RUNTIME = "runtime"
SCHEMA = "recipe.schema.json"
"""The language's JSON Schema, for the editors of those who read an artifact's recipe.yaml. No lock records
it: nothing that runs depends on it."""

Files = Mapping[str, bytes]
"""Contents by path relative to the artifact's folder, with forward slashes."""


@functools.cache
def runtime_files() -> Files:
    """The modules and scripts of runtime/ by path relative to it."""
    folder = Path(runtime.__file__).parent
    return {path: (folder / path).read_bytes() for path in modules(folder)}


@functools.cache
def runtime_digest() -> str:
    """sha256 over the paths and contents of runtime/."""
    return tree_digest(runtime_files())


@functools.cache
def schema_file() -> bytes:
    """The content of recipe.schema.json."""
    from spec.schema import text

    return text().encode()


def tree_digest(files: Files) -> str:
    """sha256 over paths and contents, independent of order."""
    return digest("".join(f"{digest(files[path])}  {path}\n" for path in sorted(files)).encode())


def digest(content: bytes) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def write(out_dir: Path, artifacts: Mapping[str, Files]) -> list[str]:
    """Writes runtime/, the schema and each artifact; returns what the user should know about.

    Everything is first written beside its place, so that a full disk or a crash leaves what was there.

    Args:
        out_dir: the folder of artifacts, made when it is missing.
        artifacts: files of each artifact by its name.

    Raises:
        ArtifactError: when something is in the way.
        OSError: when a file cannot be written.
    """
    _refuse_obstacles(out_dir, artifacts)
    notes = []
    with (
        _made(out_dir),
        tempfile.TemporaryDirectory(prefix=".recipe-", dir=out_dir) as temporary,
        ExitStack() as moving,
    ):
        old_runtime = _runtime_on_disk(out_dir)
        staging = Path(temporary)
        runtime_is_there = old_runtime == runtime_files()
        if not runtime_is_there:
            _stage(staging / RUNTIME, runtime_files())
        (staging / SCHEMA).write_bytes(schema_file())
        for name, files in artifacts.items():
            _stage(staging / name, files)
        moving.enter_context(uninterrupted())
        if not runtime_is_there:
            _install(staging / RUNTIME, out_dir / RUNTIME, runtime_files(), set(old_runtime))
        os.replace(staging / SCHEMA, out_dir / SCHEMA)
        for name, files in artifacts.items():
            notes += _describe_leftovers(out_dir / name, files)
            _install(staging / name, out_dir / name, files, set(locked_files(out_dir / name)))
    for name in artifacts_in(out_dir):
        recorded = _lock_of(out_dir / name).get("runtime")
        if name not in artifacts and recorded not in (None, runtime_digest()):
            notes.append(f"{out_dir / name} was built with another runtime/: build it again too")
    return notes


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder that is there; where it is not and nothing comes to lie in it, it goes again."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError) and error.filename is None:  # the disk is full
            from compiler.writing import cannot_be_written

            raise cannot_be_written(folder, error) from error
        raise


def check(out_dir: Path, artifacts: Mapping[str, Files]) -> str:
    """A unified diff from what is on disk to what the recipes give; empty when they agree.

    Files that a lock lists but the recipe does not give, and modules that runtime/ does not have, count
    as differences; other files in the folders do not.
    """
    parts = list(_differences(out_dir / RUNTIME, _runtime_on_disk(out_dir), runtime_files()))
    schema = {SCHEMA: _content(out_dir, SCHEMA)} if (out_dir / SCHEMA).is_file() else {}
    parts += _differences(out_dir, schema, {SCHEMA: schema_file()})
    for name in sorted(artifacts):
        folder, files = out_dir / name, artifacts[name]
        on_disk = {
            path: _content(folder, path)
            for path in {*files, *locked_files(folder)}
            if (folder / path).is_file()
        }
        parts += _differences(folder, on_disk, files)
    return "".join(parts)


def locked_files(folder: Path) -> list[str]:
    """The files of the artifact in a folder, by its lock, the lock included; none when there is no lock."""
    files = _lock_of(folder).get("files")
    paths = [path for path in files if _is_inside(path)] if isinstance(files, dict) else []
    # Behind a link lie files of somebody else's, which no lock may have removed.
    own = [path for path in paths if _linked_folder(folder, path) is None]
    return sorted([*own, LOCK]) if (folder / LOCK).is_file() else []


def _content(folder: Path, path: str) -> bytes:
    """What a file of an artifact holds; of a link where it leads, and not what is there."""
    link = _linked_folder(folder, path) or (folder / path)
    return f"a link to {os.readlink(link)}\n".encode() if link.is_symlink() else link.read_bytes()


def _linked_folder(folder: Path, path: str) -> Path | None:
    """The first of the folders on the way to a file of an artifact that is a link, the artifact's own too."""
    parents = [folder / parent for parent in reversed(PurePosixPath(path).parents)]
    return next((parent for parent in parents if parent.is_symlink()), None)


def backends_of(folder: Path) -> list[str]:
    """Names of the backends that the artifact in a folder was built for beside Tunix, by its lock."""
    backends = _lock_of(folder).get("backends")
    return list(backends) if isinstance(backends, dict) else []


def difference(before: bytes | None, after: bytes | None, before_name: str, after_name: str) -> str:
    """A unified diff of two versions of a file, of which one may be missing."""
    if before == after:
        return ""
    from difflib import unified_diff

    names = ("/dev/null" if before is None else before_name, "/dev/null" if after is None else after_name)
    lines = unified_diff(_lines(before), _lines(after), *names)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    # An empty file has no lines to show, so that it is missing or new would go unsaid.
    return "".join(ended) or f"--- {names[0]}\n+++ {names[1]}\n"


def modules(folder: Path) -> list[str]:
    """Python modules and shell scripts below a folder, relative to it, sorted."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        within = PurePosixPath(Path(place).relative_to(folder).as_posix())
        found += [str(within / name) for name in names if name.endswith((".py", ".sh"))]
    return sorted(found)


def _runtime_on_disk(out_dir: Path) -> dict[str, bytes]:
    folder = out_dir / RUNTIME
    return {path: _content(folder, path) for path in modules(folder)}


def _refuse_obstacles(out_dir: Path, artifacts: Mapping[str, Files]) -> None:
    if RUNTIME in artifacts:
        raise ArtifactError(
            f"a recipe cannot be named {RUNTIME}: its folder would be the runtime's", "choose another `name`"
        )
    for path in (out_dir, out_dir / RUNTIME, *(out_dir / name for name in artifacts)):
        if path.exists() and not path.is_dir():
            raise ArtifactError(f"{path} is in the way: it is not a folder", "choose another folder with -o")
    present = modules(out_dir / RUNTIME)
    if present and "families/base.py" not in present:
        raise ArtifactError(
            f"{out_dir / RUNTIME} holds other modules or scripts, where the runtime would go",
            "choose another folder with -o",
        )
    _refuse_another_schema(out_dir / SCHEMA)
    for name, files in artifacts.items():
        for file in files:
            target = out_dir / name / file
            blocked = [folder for folder in target.parents if folder.is_file()]
            if blocked:
                raise ArtifactError(f"{blocked[0]} is in the way: it is not a folder", "remove it")
            if target.is_dir():
                raise ArtifactError(f"{target} is in the way: it is a folder", "remove it")
            _refuse_link(out_dir / name, file)
    for file in runtime_files():
        _refuse_link(out_dir / RUNTIME, file)


def _refuse_link(folder: Path, file: str) -> None:
    """Nothing is written through a link: what it leads to is no part of the artifact."""
    if (link := _linked_folder(folder, file)) is not None:
        raise ArtifactError(f"{link} is a link to another folder, where files would be replaced", "remove it")


def _refuse_another_schema(path: Path) -> None:
    """A file of the schema's name that is not recipec's is the user's own."""
    if not os.path.lexists(path):
        return
    try:
        found = json.loads(path.read_bytes())
        own = json.loads(schema_file())
    except (OSError, ValueError):
        found, own = None, {}
    if not isinstance(found, dict) or found.get("title") != own.get("title"):
        raise ArtifactError(
            f"{path} is in the way: it is not the schema of recipes", "choose another folder with -o"
        )


def _stage(folder: Path, files: Files) -> None:
    folder.mkdir()
    for path, content in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        if path.endswith(".sh"):
            target.chmod(0o777 & ~umask())


def _install(staged: Path, folder: Path, files: Files, previous: set[str]) -> None:
    """Moves staged files to their place, the lock last, and removes those of the previous build."""
    if not folder.exists():
        os.rename(staged, folder)
        return
    for path in sorted(files, key=lambda path: (path == LOCK, path)):
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(staged / path, target)
    for path in previous - set(files):
        (folder / path).unlink(missing_ok=True)
        for parent in (folder / path).parents:
            if parent == folder or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()


def _describe_leftovers(folder: Path, files: Files) -> list[str]:
    """Notes about edited files that are replaced and about files that are none of the artifact's."""
    if not folder.is_dir():
        return []
    recorded = _lock_of(folder).get("files")
    recorded = recorded if isinstance(recorded, dict) else {}
    notes = []
    for path in sorted(files):
        if path in recorded and (folder / path).is_file():
            content = (folder / path).read_bytes()
            if digest(content) != recorded[path] and content != files[path]:
                notes.append(f"{folder / path} had been edited since it was built: replaced")
    own = {PurePosixPath(path).parts[0] for path in (*files, *locked_files(folder))}
    others = sorted(
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in folder.iterdir()
        if entry.name not in own and entry.name != "__pycache__" and not entry.name.startswith(".")
    )
    if others:
        notes.append(f"left alone in {folder}, not of the artifact: {', '.join(others)}")
    return notes


def _differences(folder: Path, before: Files, after: Files) -> Iterator[str]:
    for path in sorted({*before, *after}):
        name = (folder / path).as_posix()
        yield difference(before.get(path), after.get(path), name, f"{name} (rebuilt)")


def _lines(content: bytes | None) -> list[str]:
    text = (content or b"").decode("utf-8", "replace")
    lines = [f"{line}\n" for line in text.split("\n")]
    # What follows the last line break is a line without one, or nothing.
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def artifacts_in(out_dir: Path) -> list[str]:
    """Names of the artifacts in a folder."""
    return sorted(path.parent.name for path in out_dir.glob(f"*/{LOCK}")) if out_dir.is_dir() else []


def _lock_of(folder: Path) -> dict[str, Any]:
    if not (folder / LOCK).is_file():  # a pipe would be waited for
        return {}
    try:
        lock = json_value((folder / LOCK).read_bytes())
    except OSError:
        return {}
    return lock if isinstance(lock, dict) else {}


def _is_inside(path: str) -> bool:
    """Whether a path that a lock names stays in the artifact's folder."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in path
