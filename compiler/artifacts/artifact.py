"""Write artifacts to disk, and compare them with what a recipe gives.

A folder of artifacts ("generated") holds runtime/, the recipes' JSON Schema and a .gitignore once, and one
folder per recipe. Its runtime/ holds the files that its artifacts need; each artifact's lock lists them. For
artifacts that install the runtime from a wheel, runtime.txt names that wheel. A build replaces or removes
only files that an artifact's recipe.lock.json lists. With --force it also replaces other files with the same
names, and keeps a copy. A checkpoint or a note next to them stays.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.compiler.artifacts import wheel
from recipec.compiler.artifacts.runtime import modules, runtime_files
from recipec.compiler.artifacts.whole import (
    Change,
    changing,
    content,
    digest,
    finish,
    is_inside,
    linked_folder,
)
from recipec.compiler.artifacts.writing import cannot_be_written, clear
from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.wording import listing, plural

LOCK = "recipe.lock.json"
LOCK_VERSION = 1
"""The version of the lock's format."""
RUNTIME = "runtime"
NOTEBOOK = "notebook.ipynb"
SCHEMA = "recipe.schema.json"
"""The language's JSON Schema, for editors that open an artifact's recipe.yaml. No lock records it, because
nothing that runs depends on it."""

IGNORE = ".gitignore"
IGNORED = """\
# Made by recipec, which does not change it again. Each artifact has its own.
__pycache__/
/.recipe-build/
/venv/
"""
"""The .gitignore next to the artifacts: files of Python and of builds, and the environment of README.md."""

ANY = "any"
"""Stands for the digest of a file that a build wrote, whatever the file holds now."""

Files = Mapping[str, bytes]
"""Contents by path relative to the artifact's folder, with forward slashes."""
Part = tuple[Files, Mapping[str, str]]
"""New files of a folder, and the digests of the files that the last build wrote there."""


@functools.cache
def runtime_digest() -> str:
    """Return the sha256 over the paths and contents of runtime/."""
    files = runtime_files()
    return digest("".join(f"{digest(files[path])}  {path}\n" for path in sorted(files)).encode())


@functools.cache
def schema_file() -> bytes:
    """Return the content of recipe.schema.json."""
    from recipec.spec.schema import text

    return text().encode()


def write(
    out_dir: Path,
    artifacts: Mapping[str, Files],
    force: bool = False,
    forced: str | None = None,
    prune: Collection[str] = (),
) -> list[str]:
    """Write runtime/, the schema and each artifact, all or nothing, and return notes for the user.

    Args:
        out_dir: the folder of artifacts, created if it is missing.
        artifacts: files of each artifact by its name.
        force: whether to replace files that no build wrote, with a copy of each next to it.
        forced: the command that does so, for a help; None where there is none.
        prune: other artifacts of the folder, which are removed. Their edited files and files of the user
            stay.

    Returns:
        Lines that begin with "note: ", or with "warning: " where a file of the user was replaced.

    Raises:
        ArtifactError: something is in the way.
        OSError: a file cannot be written.
    """
    finish(out_dir)
    _refuse_obstacles(out_dir, artifacts)
    notes = []
    with _made(out_dir), changing(out_dir) as change:
        clear(out_dir)
        parts: dict[str, Part] = {}
        copied, present = _runtime(out_dir, artifacts, prune)
        if copied != present:
            parts[RUNTIME] = (copied, _recorded_runtime(out_dir, present))
        parts |= {name: (files, _recorded(out_dir / name)) for name, files in artifacts.items()}
        notes += _keep(out_dir, parts, present, change, force, forced)
        for name, (files, recorded) in parts.items():
            for path in sorted(files, key=lambda path: (path == LOCK, path)):
                if not _is_as(out_dir / name / path, files[path]):
                    change.write(f"{name}/{path}", files[path])
            for path in sorted({*recorded, *(present if name == RUNTIME else ())} - {*files}):
                if _is_there(out_dir / name / path):
                    change.remove(f"{name}/{path}")
        for name in prune:
            notes += _removed(out_dir, name, change)
        shared = _shared(out_dir, artifacts, prune)
        for name, text in shared.items():
            if not _is_as(out_dir / name, text):
                change.write(name, text)
        if wheel.REQUIREMENTS not in shared and (out_dir / wheel.REQUIREMENTS).is_file():
            change.remove(wheel.REQUIREMENTS)
        if not os.path.lexists(out_dir / IGNORE):
            change.write(IGNORE, IGNORED.encode())
        notes += [line for name in artifacts for line in _others(out_dir / name, artifacts[name])]
    for name in artifacts_in(out_dir):
        built = _lock_of(out_dir / name).get("runtime")
        if name not in artifacts and built is not None and not is_current(built):
            notes.append(f"note: {out_dir / name} was built with another runtime/: build it again too")
    return notes


def _removed(out_dir: Path, name: str, change: Change) -> Iterator[str]:
    """Remove the files that a build wrote, and yield notes."""
    others = _others(out_dir / name, {})
    edited: list[str] = []
    for path, recorded in _recorded(out_dir / name).items():
        target = out_dir / name / path
        if not _is_there(target):
            continue
        if recorded in (digest(content(target)), ANY):
            change.remove(f"{name}/{path}")
        else:
            edited.append(f"warning: {target} was edited after it was built, and stays")
    yield from edited
    removed = f"what a build wrote in {out_dir / name}" if edited or others else out_dir / name
    yield f"note: {removed} is removed: no recipe is named {name}"
    yield from others


def _keep(
    out_dir: Path, parts: Mapping[str, Part], present: Files, change: Change, force: bool, forced: str | None
) -> list[str]:
    """Handle files that differ from what a build wrote: return warnings, refuse, or keep copies.

    Args:
        present: modules in runtime/. Files of the user are not allowed there, because scripts would import
            them.
    """
    edited, foreign = [], []
    for name, (files, recorded) in parts.items():
        for path in sorted({*files, *recorded, *(present if name == RUNTIME else ())}):
            target = out_dir / name / path
            if not _is_there(target) or (found := content(target)) == files.get(path):
                continue
            if path not in recorded:
                foreign.append(f"{name}/{path}")
            elif recorded[path] not in (digest(found), ANY):
                edited.append(f"{name}/{path}")
    if foreign and not force:
        first = listing([*(str(out_dir / path) for path in foreign[:3]), *_more(foreign[3:])])
        raise ArtifactError(
            f"{first} would be replaced, but no build wrote it",
            f"move it away, or {f'keep a copy next to it: {forced}' if forced else 'choose another folder'}",
        )
    notes = []
    for path in sorted([*edited, *foreign]):
        kept = _free(out_dir, path) if force else None
        if kept is not None:
            change.copy(path, kept)
        said = "was edited after it was built" if path in edited else "was not written by a build"
        where = f", a copy is {out_dir / kept}" if kept else ""
        notes.append(f"warning: {out_dir / path} {said}: replaced{where}")
    return notes


def _more(others: Sequence[str]) -> list[str]:
    return [plural(len(others), "other file")] if others else []


def _is_as(target: Path, wanted: bytes) -> bool:
    """Return whether a file is what a build would write."""
    if not _is_there(target) or content(target) != wanted:
        return False
    return not target.name.endswith(".sh") or os.access(target, os.X_OK)


def _is_there(target: Path) -> bool:
    return target.is_symlink() or target.is_file()


def _free(out_dir: Path, path: str) -> str:
    """Return an unused name for a copy of a file: PATH.kept, PATH.kept-2 and so on."""
    names = (f"{path}.kept{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(out_dir / name))


def _recorded(folder: Path) -> dict[str, str]:
    """Return the digests of an artifact's files when it was built, from its lock; ANY for the lock itself."""
    files = _lock_of(folder).get("files")
    if not isinstance(files, dict):
        return {}
    return {path: str(files.get(path, ANY)) for path in locked_files(folder)}


def _recorded_runtime(out_dir: Path, present: Files) -> dict[str, str]:
    """Return the same for runtime/: ANY for a file whose digest is in one of the locks, else "" (it was
    edited)."""
    built = [_lock_of(out_dir / name).get("runtime") for name in artifacts_in(out_dir)]
    known: dict[str, set[str]] = {path: {digest(found)} for path, found in runtime_files().items()}
    for files in built:
        for path, recorded in files.items() if isinstance(files, dict) else ():
            known.setdefault(path, set()).add(str(recorded))
    return {
        path: ANY if digest(found) in known[path] else "" for path, found in present.items() if path in known
    }


def needs(lock: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the files of runtime/ that an artifact needs, with their digests, from its lock."""
    files = lock.get("runtime")
    return {path: str(files[path]) for path in files if is_inside(path)} if isinstance(files, dict) else {}


def has_notebook(folder: Path) -> bool:
    """Return whether the artifact in a folder was built with a notebook, according to its lock."""
    return NOTEBOOK in locked_files(folder)


def installs_runtime(folder: Path) -> bool:
    """Return whether the artifact in a folder was built to install the runtime from its wheel, by its
    lock."""
    return _installs(_lock_of(folder))


def _installs(lock: Mapping[str, Any]) -> bool:
    return str(lock.get("runtime")).startswith(f"{wheel.NAME}==")


def is_current(built: Any) -> bool:
    """Return whether a lock records the current state of runtime/."""
    now = runtime_files()
    return built == wheel.REQUIREMENT or (
        isinstance(built, dict)
        and all(path in now and digest(now[path]) == recorded for path, recorded in built.items())
    )


def _runtime(
    out_dir: Path, artifacts: Mapping[str, Files], prune: Collection[str] = ()
) -> tuple[Files, Files]:
    """Return what runtime/ holds after the artifacts are written, and the existing files that this replaces.

    Files that only other artifacts in the folder need stay: in this version's form, or unchanged if this
    version has no such file.
    """
    locks = [json.loads(files[LOCK]) for files in artifacts.values() if LOCK in files]
    others = _other_locks(out_dir, {*artifacts, *prune})
    present = {path: content(out_dir / RUNTIME / path) for path in modules(out_dir / RUNTIME)}
    wanted = {path for lock in (*locks, *others) for path in needs(lock)}
    kept = {path for lock in others for path in needs(lock)}
    now = runtime_files()
    return (
        {path: now[path] for path in sorted(wanted) if path in now},
        {path: found for path, found in present.items() if path in now or path not in kept},
    )


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder, and remove it again if the block fails and leaves it empty."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in new:
            with suppress(OSError):
                path.rmdir()
        if isinstance(error, OSError) and error.filename is None:  # the disk is full
            raise cannot_be_written(folder, error) from error
        raise


@dataclass(frozen=True)
class Stale:
    """A file or a folder that is not what the recipes give.

    Attributes:
        path: with the folder of artifacts.
        state: "differs", "is missing", or "is left over" if the recipes do not give it.
        diff: the unified diff of a file that differs, else "".
    """

    path: str
    state: str
    diff: str = ""

    def __str__(self) -> str:
        return self.diff or f"{self.path} {self.state}\n"


def check(out_dir: Path, artifacts: Mapping[str, Files]) -> list[Stale]:
    """Return what on disk is not what the recipes give, in the order of the paths.

    Files that a lock lists but the recipe does not give, and modules in runtime/ that no artifact needs,
    count as differences. Other files in the folders do not. A folder that is missing as a whole is one item.
    """
    copied, present = _runtime(out_dir, artifacts)
    stale = _differences(out_dir / RUNTIME, present, copied)
    shared = _shared(out_dir, artifacts)
    found = [name for name in (SCHEMA, wheel.REQUIREMENTS) if (out_dir / name).is_file()]
    stale += _differences(out_dir, {name: content(out_dir / name) for name in found}, shared)
    for name in sorted(artifacts):
        folder, files = out_dir / name, artifacts[name]
        on_disk = {
            path: content(folder / path)
            for path in {*files, *locked_files(folder)}
            if (folder / path).is_file()
        }
        stale += _differences(folder, on_disk, files)
    return stale


def locked_files(folder: Path) -> list[str]:
    """Return the files of the artifact in a folder, from its lock, with the lock itself; [] without a
    lock."""
    files = _lock_of(folder).get("files")
    paths = [path for path in files if is_inside(path)] if isinstance(files, dict) else []
    # Behind a link lie files of someone else. No lock may cause their removal.
    own = [path for path in paths if linked_folder(folder, path) is None]
    return sorted([*own, LOCK]) if (folder / LOCK).is_file() else []


def backends_of(folder: Path) -> list[str]:
    """Return the backends besides Tunix that the artifact in a folder was built for, from its lock."""
    backends = _lock_of(folder).get("backends")
    return list(backends) if isinstance(backends, dict) else []


def difference(before: bytes | None, after: bytes | None, before_name: str, after_name: str) -> str:
    """Return a unified diff of two versions of a file, one of which may be missing."""
    if before == after:
        return ""
    from difflib import unified_diff

    names = ("/dev/null" if before is None else before_name, "/dev/null" if after is None else after_name)
    lines = unified_diff(_lines(before), _lines(after), *names)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    # An empty file has no lines to show, so the diff would not show that it is missing or new.
    return "".join(ended) or f"--- {names[0]}\n+++ {names[1]}\n"


def _refuse_obstacles(out_dir: Path, artifacts: Mapping[str, Files]) -> None:
    if RUNTIME in artifacts:
        raise ArtifactError(
            f"a recipe cannot be named {RUNTIME}: its folder would be the runtime's", "choose another `name`"
        )
    for path in (out_dir, out_dir / RUNTIME, *(out_dir / name for name in artifacts)):
        if path.exists() and not path.is_dir():
            raise ArtifactError(f"{path} is in the way: it is not a folder", "choose another folder with -o")
    present = modules(out_dir / RUNTIME)
    if present and "model/families/base.py" not in present:
        raise ArtifactError(
            f"{out_dir / RUNTIME} holds other modules or scripts, where the runtime would go",
            "choose another folder with -o",
        )
    _refuse_another_schema(out_dir / SCHEMA)
    _refuse_other_requirements(out_dir / wheel.REQUIREMENTS)
    for name, files in artifacts.items():
        for file in files:
            target = out_dir / name / file
            blocked = [folder for folder in target.parents if folder.is_file()]
            if blocked:
                raise ArtifactError(f"{blocked[0]} is in the way: it is not a folder", "remove it")
            if target.exists() and not target.is_file():
                raise ArtifactError(f"{target} is in the way: it is not a file", "remove it")
            _refuse_link(out_dir / name, file)
    for file in _runtime(out_dir, artifacts)[0]:
        _refuse_link(out_dir / RUNTIME, file)


def _other_locks(out_dir: Path, without: Collection[str]) -> list[dict[str, Any]]:
    return [_lock_of(out_dir / name) for name in artifacts_in(out_dir) if name not in without]


def _shared(out_dir: Path, artifacts: Mapping[str, Files], prune: Collection[str] = ()) -> Files:
    """Return the files that a folder has once, besides runtime/: the schema, and the file that names the
    wheel."""
    locks = [json.loads(files[LOCK]) for files in artifacts.values() if LOCK in files]
    locks += _other_locks(out_dir, {*artifacts, *prune})
    named = {wheel.REQUIREMENTS: wheel.requirements()} if any(map(_installs, locks)) else {}
    return {SCHEMA: schema_file(), **named}


def _refuse_link(folder: Path, file: str) -> None:
    """Refuse to write through a link, because its target is not part of the artifact."""
    if (link := linked_folder(folder, file)) is not None:
        raise ArtifactError(f"{link} is a link to another folder, where files would be replaced", "remove it")


def _refuse_another_schema(path: Path) -> None:
    """Refuse to replace a file with the schema's name that recipec did not write."""
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


def _refuse_other_requirements(path: Path) -> None:
    """Refuse to replace a file with the name of the wheel's requirements that does not name the wheel."""
    if os.path.lexists(path) and not (path.is_file() and wheel.NAME.encode() in content(path)):
        raise ArtifactError(
            f"{path} is in the way: it does not name {wheel.NAME}", "choose another folder with -o"
        )


def _others(folder: Path, files: Files) -> list[str]:
    """Return a note about files that do not belong to the artifact."""
    if not folder.is_dir():
        return []
    own = {PurePosixPath(path).parts[0] for path in (*files, *locked_files(folder))}
    others = sorted(
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in folder.iterdir()
        if entry.name not in own and entry.name != "__pycache__" and not entry.name.startswith(".")
    )
    return (
        [f"note: not part of the artifact in {folder}, and left unchanged: {', '.join(others)}"]
        if others
        else []
    )


def _differences(folder: Path, before: Files, after: Files) -> list[Stale]:
    if after and not before and not folder.exists():
        return [Stale(folder.as_posix(), "is missing")]
    return [
        _stale((folder / path).as_posix(), before.get(path), after.get(path))
        for path in sorted({*before, *after})
        if before.get(path) != after.get(path)
    ]


def _stale(path: str, before: bytes | None, after: bytes | None) -> Stale:
    if before is None or after is None:
        return Stale(path, "is missing" if before is None else "is left over")
    return Stale(path, "differs", difference(before, after, path, f"{path} (rebuilt)"))


def _lines(content: bytes | None) -> list[str]:
    text = (content or b"").decode("utf-8", "replace")
    lines = [f"{line}\n" for line in text.split("\n")]
    # The text after the last line break is a line without a line break, or empty.
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def artifacts_in(out_dir: Path) -> list[str]:
    """Return the names of the artifacts in a folder."""
    return sorted(path.parent.name for path in out_dir.glob(f"*/{LOCK}")) if out_dir.is_dir() else []


def _lock_of(folder: Path) -> dict[str, Any]:
    if not (folder / LOCK).is_file():  # opening a pipe would block
        return {}
    try:
        lock = json_value((folder / LOCK).read_bytes())
    except OSError:
        return {}
    return lock if isinstance(lock, dict) else {}
