"""Write artifacts to disk, and compare them with what a recipe gives.

A folder of artifacts ("generated") holds the runtime's wheel, the page that links it, the recipes' JSON
Schema and a .gitignore once, and one folder per recipe. With --runtime source it also holds runtime/, whole,
which its scripts then use instead of the wheel. A build replaces or removes only files that it wrote: those
that an artifact's recipe.lock.json, runtime/SHA256SUMS or the page lists. With --force it also replaces other
files with the same names, and keeps a copy. A checkpoint or a note next to them stays.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.compiler.artifacts import runtime
from recipec.compiler.artifacts.runtime import PAGE, modules, package_of, runtime_files
from recipec.compiler.artifacts.whole import (
    Change,
    changing,
    content,
    digest,
    finish,
    is_inside,
    linked_folder,
)
from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.wording import listing, plural
from recipec.compiler.writing import cannot_be_written, clear
from recipec.runtime.build_check import LIST
from recipec.spec.schema import text

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
# `recipe build` writes it, with the same bytes everywhere.
/recipec_runtime-*.whl
"""
"""The .gitignore next to the artifacts: files of Python and of builds, the environment of README.md, and the
wheel."""

OLDER_IGNORED = (IGNORED.partition("# `")[0].encode(),)
"""What earlier versions wrote as the .gitignore, which is replaced unless it was edited."""
OLDER_REQUIREMENTS = "runtime.txt"
"""The file that named the wheel in 0.2."""

ANY = "any"
"""Stands for the digest of a file that a build wrote, whatever the file holds now."""

Files = Mapping[str, bytes]
"""Contents by path relative to the artifact's folder, with forward slashes."""
Part = tuple[Files, Mapping[str, str]]
"""New files of a folder, and the digests of the files that the last build wrote there."""


@functools.cache
def schema_file() -> bytes:
    """Return the content of recipe.schema.json."""
    return text().encode()


def write(
    out_dir: Path,
    artifacts: Mapping[str, Files],
    force: bool = False,
    forced: str | None = None,
    prune: Collection[str] = (),
    source: bool | None = None,
) -> list[str]:
    """Write the runtime, the schema and each artifact, all or nothing, and return notes for the user.

    Args:
        out_dir: the folder of artifacts, created if it is missing.
        artifacts: files of each artifact by its name.
        force: whether to replace files that no build wrote, with a copy of each next to it.
        forced: the command that does so, for a help; None where there is none.
        prune: other artifacts of the folder, which are removed. Their edited files and files of the user
            stay.
        source: whether to copy runtime/ too; if None, as the folder's last build did.

    Returns:
        Lines that begin with "note: ", or with "warning: " where a file of the user was replaced.

    Raises:
        ArtifactError: something is in the way.
        OSError: a file cannot be written.
    """
    finish(out_dir)
    source = has_source(out_dir) if source is None else source
    _refuse_obstacles(out_dir, artifacts, source)
    notes = []
    with _made(out_dir), changing(out_dir) as change:
        clear(out_dir)
        common = _common(out_dir, artifacts, prune, source)
        parts: dict[str, Part] = {"": (common.files, common.recorded)}
        parts |= {name: (files, _recorded(out_dir / name)) for name, files in artifacts.items()}
        notes += _keep(out_dir, parts, common.strangers if source else (), change, force, forced)
        for name, (files, recorded) in parts.items():
            for path in sorted(files, key=lambda path: (path == LOCK, path)):
                if not _is_as(out_dir / name / path, files[path]):
                    change.write(_within(name, path), files[path])
            gone = {*recorded, *(common.strangers if source and not name else ())} - {*files}
            for path in sorted(path for path in gone if _is_there(out_dir / name / path)):
                change.remove(_within(name, path))
        for name in prune:
            notes += _removed(out_dir, name, change)
        if not os.path.lexists(out_dir / IGNORE) or content(out_dir / IGNORE) in OLDER_IGNORED:
            change.write(IGNORE, IGNORED.encode())
        notes += common.notes
        notes += [line for name in artifacts for line in _others(out_dir / name, artifacts[name])]
    for name in artifacts_in(out_dir):
        built = _lock_of(out_dir / name).get("runtime")
        if name not in artifacts and built is not None and not is_current(built):
            notes.append(f"note: {out_dir / name} was built with another runtime: build it again too")
    return notes


def _within(name: str, path: str) -> str:
    return f"{name}/{path}" if name else path


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
    out_dir: Path,
    parts: Mapping[str, Part],
    strangers: Collection[str],
    change: Change,
    force: bool,
    forced: str | None,
) -> list[str]:
    """Handle files that differ from what a build wrote: return warnings, refuse, or keep copies.

    An edited file of the runtime is kept as a copy even without `force`, because runtime/ is there to be
    edited.

    Args:
        strangers: modules of the user in runtime/. They are not allowed there, because scripts would import
            them.
    """
    edited, foreign = [], []
    for name, (files, recorded) in parts.items():
        for path in sorted({*files, *recorded, *(() if name else strangers)}):
            target = out_dir / name / path
            if not _is_there(target) or (present := content(target)) == files.get(path):
                continue
            if path not in recorded:
                foreign.append(_within(name, path))
            elif recorded[path] not in (digest(present), ANY):
                edited.append(_within(name, path))
    if foreign and not force:
        first = listing([*(str(out_dir / path) for path in foreign[:3]), *_more(foreign[3:])])
        raise ArtifactError(
            f"{first} would be replaced, but no build wrote it",
            f"move it away, or {f'keep a copy next to it: {forced}' if forced else 'choose another folder'}",
        )
    notes = []
    for path in sorted([*edited, *foreign]):
        kept = _free(out_dir, path) if force or path.startswith(f"{RUNTIME}/") else None
        if kept is not None:
            change.copy(path, kept)
        why = "was edited after it was built" if path in edited else "was not written by a build"
        where = f", a copy is {out_dir / kept}" if kept else ""
        notes.append(f"warning: {out_dir / path} {why}: replaced{where}")
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


def has_source(out_dir: Path) -> bool:
    """Return whether the last build of a folder copied runtime/ with --runtime source."""
    return (out_dir / RUNTIME / LIST).is_file()


def has_notebook(folder: Path) -> bool:
    """Return whether the artifact in a folder was built with a notebook, according to its lock."""
    return NOTEBOOK in locked_files(folder)


def is_current(built: Any) -> bool:
    """Return whether a lock records the current state of the runtime."""
    return bool(built == runtime.record())


@dataclass(frozen=True)
class Common:
    """What a folder of artifacts has once.

    Attributes:
        files: what a build gives.
        recorded: the files that builds wrote, with their digests; "" for a file that was edited.
        strangers: modules in runtime/ that no build wrote.
        notes: what is removed, for the user.
    """

    files: Files
    recorded: Mapping[str, str]
    strangers: Collection[str]
    notes: Sequence[str]


def _common(
    out_dir: Path, artifacts: Collection[str], prune: Collection[str] = (), source: bool = False
) -> Common:
    """Return what a folder has once, after artifacts are written and others are removed.

    The wheels that other artifacts run on stay, and so do their links.
    """
    others = _other_locks(out_dir, {*artifacts, *prune})
    files: dict[str, bytes] = {SCHEMA: schema_file()}
    recorded: dict[str, str] = {SCHEMA: ANY}
    links = _links(out_dir)
    if links:
        recorded |= {PAGE: ANY, **links}
    for path in out_dir.glob(runtime.WHEELS):
        if path.is_file() and runtime.is_whole(path):
            recorded[path.name] = ANY
    needed = {runtime.wheel_file(package) for lock in others if (package := package_of(lock))}
    older = {}
    for name in needed - {runtime.wheel_file()}:
        if (out_dir / name).is_file():
            files[name] = content(out_dir / name)
            links.setdefault(name, digest(files[name]))
        if name in links:
            older[name] = links[name]
    files |= {PAGE: runtime.page(older), runtime.wheel_file(): runtime.wheel()}
    if _names_runtime(out_dir / OLDER_REQUIREMENTS):
        recorded[OLDER_REQUIREMENTS] = ANY
    present = {path: digest(content(out_dir / RUNTIME / path)) for path in _runtime_in(out_dir)}
    known = _known_runtime(out_dir)
    recorded |= {
        f"{RUNTIME}/{path}": ANY if sha256 in known[path] else ""
        for path, sha256 in present.items()
        if path in known
    }
    strangers = [f"{RUNTIME}/{path}" for path in present if path not in known]
    notes = []
    if source:
        files |= {f"{RUNTIME}/{path}": text for path, text in runtime_files().items()}
    elif present.keys() & known.keys():
        notes.append(
            f"note: what builds wrote in {out_dir / RUNTIME} is removed: the scripts run on "
            f"{out_dir / runtime.wheel_file()}; `--runtime source` copies {RUNTIME}/ too"
        )
        if strangers:
            stay = listing([str(out_dir / path) for path in strangers])
            notes.append(f"note: no build wrote {stay}: left unchanged")
    return Common(files, recorded, strangers, notes)


def _links(out_dir: Path) -> dict[str, str]:
    """Return the wheels that the page of a folder links, with their sha256."""
    page = out_dir / PAGE
    links = runtime.linked(content(page)) if page.is_file() else {}
    return {name: sha256 for name, sha256 in links.items() if PurePosixPath(name).match(runtime.WHEELS)}


def _names_runtime(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and runtime.NAME.encode() in path.read_bytes()


def _runtime_in(out_dir: Path) -> list[str]:
    """Return the modules and scripts in a folder's runtime/, with the list of their digests."""
    folder = out_dir / RUNTIME
    return [*modules(folder), *([LIST] if (folder / LIST).is_file() else [])]


def _known_runtime(out_dir: Path) -> dict[str, set[str]]:
    """Return the digests that files of runtime/ have had in builds: this version's, those of SHA256SUMS, and
    those in locks of 0.2."""
    known = {path: {digest(text)} for path, text in runtime_files().items()}
    recorded = [_lock_of(out_dir / name).get("runtime") for name in artifacts_in(out_dir)]
    copies = [copy for copy in recorded if isinstance(copy, dict) and "package" not in copy]
    if has_source(out_dir):
        sums = content(out_dir / RUNTIME / LIST)
        lines = [line.partition("  ") for line in sums.decode("utf-8", "replace").splitlines()]
        copies.append({LIST: digest(sums), **{path: sha256 for sha256, _, path in lines}})
    for copy in copies:
        for path, sha256 in copy.items():
            known.setdefault(path, set()).add(str(sha256))
    return known


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


def check(out_dir: Path, artifacts: Mapping[str, Files], source: bool | None = None) -> list[Stale]:
    """Return what on disk is not what the recipes give, in the order of the paths.

    Files that a build wrote but the recipes do not give count as differences. Other files in the folders do
    not, and neither does a wheel that is missing or that an earlier build wrote: git need not have wheels,
    and any build writes the one that is named.

    Args:
        source: whether runtime/ is copied too; if None, as the folder's last build did.
    """
    source = has_source(out_dir) if source is None else source
    common = _common(out_dir, artifacts, source=source)
    ours = {*common.recorded, *(common.strangers if source else ())}
    ours = {path for path in ours if not _is_wheel(path)} | common.files.keys()
    present = {path: content(out_dir / path) for path in ours if _is_there(out_dir / path)}
    wanted = {path: text for path, text in common.files.items() if path in present or not _is_wheel(path)}
    stale = _differences(out_dir / RUNTIME, *map(_in_runtime, (present, wanted)))
    stale += _differences(out_dir, *map(_besides_runtime, (present, wanted)))
    for name in sorted(artifacts):
        folder, files = out_dir / name, artifacts[name]
        on_disk = {
            path: content(folder / path)
            for path in {*files, *locked_files(folder)}
            if (folder / path).is_file()
        }
        stale += _differences(folder, on_disk, files)
    return stale


def _in_runtime(files: Files) -> Files:
    """Return the files in runtime/, by path relative to it."""
    inside = f"{RUNTIME}/"
    return {path.removeprefix(inside): text for path, text in files.items() if path.startswith(inside)}


def _besides_runtime(files: Files) -> Files:
    return {path: text for path, text in files.items() if not path.startswith(f"{RUNTIME}/")}


def _is_wheel(path: str) -> bool:
    return PurePosixPath(path).match(runtime.WHEELS)


def locked_files(folder: Path) -> list[str]:
    """Return the files of the artifact in a folder, from its lock, with the lock itself; [] without a
    lock."""
    files = _lock_of(folder).get("files")
    paths = [path for path in files if is_inside(path)] if isinstance(files, dict) else []
    # Behind a link lie files of someone else. No lock may cause their removal.
    regular = [path for path in paths if linked_folder(folder, path) is None]
    return sorted([*regular, LOCK]) if (folder / LOCK).is_file() else []


def backends_of(folder: Path) -> list[str]:
    """Return the backends besides Tunix that the artifact in a folder was built for, from its lock."""
    backends = _lock_of(folder).get("backends")
    return list(backends) if isinstance(backends, dict) else []


def difference(before: bytes | None, after: bytes | None, before_name: str, after_name: str) -> str:
    """Return a unified diff of two versions of a file, one of which may be missing."""
    if before == after:
        return ""
    names = ("/dev/null" if before is None else before_name, "/dev/null" if after is None else after_name)
    lines = unified_diff(_lines(before), _lines(after), *names)
    ended = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    # An empty file has no lines to show, so the diff would not show that it is missing or new.
    return "".join(ended) or f"--- {names[0]}\n+++ {names[1]}\n"


def _refuse_obstacles(out_dir: Path, artifacts: Mapping[str, Files], source: bool) -> None:
    if RUNTIME in artifacts:
        raise ArtifactError(
            f"a recipe cannot be named {RUNTIME}: its folder would be the runtime's", "choose another `name`"
        )
    copied = (out_dir / RUNTIME,) if source else ()
    for path in (out_dir, *copied, *(out_dir / name for name in artifacts)):
        if path.exists() and not path.is_dir():
            raise ArtifactError(f"{path} is in the way: it is not a folder", "choose another folder with -o")
    present = modules(out_dir / RUNTIME)
    ours = has_source(out_dir) or "model/families/base.py" in present  # the latter in a copy of 0.2
    if not ours and ("__init__.py" in present or (source and present)):
        raise ArtifactError(
            f"{out_dir / RUNTIME} holds other modules or scripts, where the runtime would go",
            "choose another folder with -o",
        )
    _refuse_another_schema(out_dir / SCHEMA)
    for path, is_ours in ((PAGE, bool(_links(out_dir))), (runtime.wheel_file(), True)):
        if os.path.lexists(out_dir / path) and not ((out_dir / path).is_file() and is_ours):
            raise ArtifactError(
                f"{out_dir / path} is in the way: no build wrote it", "choose another folder with -o"
            )
    for name, files in artifacts.items():
        for file in files:
            target = out_dir / name / file
            blocked = [folder for folder in target.parents if folder.is_file()]
            if blocked:
                raise ArtifactError(f"{blocked[0]} is in the way: it is not a folder", "remove it")
            if target.exists() and not target.is_file():
                raise ArtifactError(f"{target} is in the way: it is not a file", "remove it")
            _refuse_link(out_dir / name, file)
    for file in runtime_files() if source else _runtime_in(out_dir):
        _refuse_link(out_dir / RUNTIME, file)


def _other_locks(out_dir: Path, without: Collection[str]) -> list[dict[str, Any]]:
    return [_lock_of(out_dir / name) for name in artifacts_in(out_dir) if name not in without]


def _refuse_link(folder: Path, file: str) -> None:
    """Refuse to write through a link, because its target is not part of the artifact."""
    if (link := linked_folder(folder, file)) is not None:
        raise ArtifactError(f"{link} is a link to another folder, where files would be replaced", "remove it")


def _refuse_another_schema(path: Path) -> None:
    """Refuse to replace a file with the schema's name that recipec did not write."""
    if not os.path.lexists(path):
        return
    try:
        schema = json.loads(path.read_bytes())
        ours = json.loads(schema_file())
    except (OSError, ValueError):
        schema, ours = None, {}
    if not isinstance(schema, dict) or schema.get("title") != ours.get("title"):
        raise ArtifactError(
            f"{path} is in the way: it is not the schema of recipes", "choose another folder with -o"
        )


def _others(folder: Path, files: Files) -> list[str]:
    """Return a note about files that do not belong to the artifact."""
    if not folder.is_dir():
        return []
    tops = {PurePosixPath(path).parts[0] for path in (*files, *locked_files(folder))}
    others = sorted(
        f"{entry.name}/" if entry.is_dir() else entry.name
        for entry in folder.iterdir()
        if entry.name not in tops and entry.name != "__pycache__" and not entry.name.startswith(".")
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
    diff = "" if _is_wheel(path) else difference(before, after, path, f"{path} (rebuilt)")
    return Stale(path, "differs", diff)


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
