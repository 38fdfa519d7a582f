"""Change many files of a folder at once: all of them or none, even if the process is killed.

The new files are staged in a subfolder until a journal names them. From then on the change counts as made:
the next command moves the files that a kill left in the subfolder. Files that no journal names stay
untouched, however large they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.terminal import uninterrupted
from recipec.compiler.writing import umask
from recipec.runtime.locks import alone

STAGING, NEW, JOURNAL = ".recipe-build", "new", "journal.json"
"""The contents of the staging folder: the new files, and the journal of what to do with them."""


def digest(content: bytes) -> str:
    """Return the sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Change:
    """A change of a folder's files, by paths relative to it, with forward slashes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._staging = folder, folder / STAGING
        self._new: list[str] = []
        self._gone: dict[str, str] = {}
        (self._staging / NEW).mkdir(parents=True)

    def write(self, path: str, content: bytes) -> None:
        """Give a file new content. Files appear in the order of these calls."""
        target = self._stage(path)
        target.write_bytes(content)
        if path.endswith(".sh"):
            target.chmod(0o777 & ~umask())

    def copy(self, path: str, new: str) -> None:
        """Keep a file, or a link, under a second name."""
        shutil.copy2(self._folder / path, self._stage(new), follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Remove a file, and the folders that it leaves empty."""
        self._gone[path] = digest(content(self._folder / path))

    def _stage(self, path: str) -> Path:
        place = self._folder / path
        _refuse_elsewhere(self._folder, path)
        there = next(parent for parent in place.parents if parent.is_dir())
        if not os.access(there, os.W_OK | os.X_OK):
            raise ArtifactError(f"{place} cannot be written: Permission denied", "check its permissions")
        if there.stat().st_dev != self._folder.stat().st_dev:
            raise ArtifactError(
                f"{there} is on another disk than {self._folder}", "choose another folder with -o"
            )
        target = self._staging / NEW / path
        target.parent.mkdir(parents=True, exist_ok=True)
        self._new.append(path)
        return target

    def commit(self) -> None:
        """Write the journal. From here on the change counts as made; this process or the next completes
        it."""
        journal = {"folder": self._staging.stat().st_ino, "new": self._new, "gone": self._gone}
        part = self._staging / f"{JOURNAL}.part"
        part.write_text(json.dumps(journal), encoding="utf-8")
        os.replace(part, self._staging / JOURNAL)


@contextmanager
def changing(folder: Path) -> Iterator[Change]:
    """Yield a change of a folder's files and make it at the end of the block. Only one change runs at a time.

    Raises:
        ArtifactError: something is in the way, or the change could not be completed; the next command
            completes it.
    """
    staging = folder / STAGING
    with alone(folder):
        _finish(folder)
        try:
            change = Change(folder)
            yield change
            with uninterrupted():
                change.commit()
                _finish(folder)
        except BaseException:
            if not (staging / JOURNAL).exists():
                shutil.rmtree(staging, ignore_errors=True)
            raise


def finish(folder: Path) -> bool:
    """Complete a change that a kill interrupted, or clear what it had staged; return whether one was
    completed.

    Raises:
        ArtifactError: as for `changing`.
    """
    if not os.path.lexists(folder / STAGING):
        return False
    with alone(folder), uninterrupted():
        return _finish(folder)


def complete(folder: Path) -> bool:
    """Complete a change that a kill interrupted, before the folder is read; return whether one was completed.

    Raises:
        ArtifactError: as for `changing`, or the folder is a copy of one in which a change was interrupted:
            the copy has files of two builds.
    """
    if _is_copied(folder):
        raise ArtifactError(
            f"a build in {folder} was cut short before the folder was copied: files may be of two builds",
            "build its recipes again: recipe build RECIPE",
        )
    return finish(folder)


def interrupted(folder: Path) -> bool:
    """Return whether a change was interrupted after it began to replace files."""
    return (folder / STAGING / JOURNAL).is_file()


def _is_copied(folder: Path) -> bool:
    """Return whether a folder has the journal of a change that was interrupted in another folder."""
    return interrupted(folder) and _journal(folder / STAGING) is None


def _finish(folder: Path) -> bool:
    staging = folder / STAGING
    if not os.path.lexists(staging):
        return False
    staged = {NEW, JOURNAL, f"{JOURNAL}.part"}
    if (
        staging.is_symlink()
        or not staging.is_dir()
        or not {entry.name for entry in staging.iterdir()} <= staged
    ):
        raise ArtifactError(
            f"{staging} is in the way: it is not what a build leaves", "remove it, or choose another with -o"
        )
    try:
        journal = _journal(staging)
        if journal is not None:
            _make(folder, journal)
        shutil.rmtree(staging)
    except OSError as error:
        place = error.filename or staging
        raise ArtifactError(
            f"the build in {folder} is not complete: {place}: {error.strerror or error}",
            f"correct that, and run the command again; or remove {staging} first, and build again",
        ) from error
    return journal is not None


def _make(folder: Path, journal: Mapping[str, Any]) -> None:
    """Move and remove the files of a journal that have not been moved or removed yet."""
    for path in (*journal["new"], *journal["gone"]):
        _refuse_elsewhere(folder, path)
    for path in journal["new"]:
        if os.path.lexists(staged := folder / STAGING / NEW / path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staged, folder / path)
    for path, sha256 in journal["gone"].items():
        target = folder / path
        if os.path.lexists(target) and digest(content(target)) == sha256:
            target.unlink()
        with suppress(OSError):  # at the first folder that is not empty
            for parent in PurePosixPath(path).parents[:-1]:
                (folder / parent).rmdir()


def _refuse_elsewhere(folder: Path, path: str) -> None:
    top, *rest = PurePosixPath(path).parts
    if not is_inside(path) or (rest and linked_folder(folder / top, "/".join(rest)) is not None):
        raise ArtifactError(f"{folder / path} is outside of {folder}", "remove the link in its path")


def _journal(staging: Path) -> Mapping[str, Any] | None:
    """Read the journal; None if it was not written in this folder, but for example copied from elsewhere."""
    try:
        journal = json_value((staging / JOURNAL).read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(journal, dict) or journal.get("folder") != staging.stat().st_ino:
        return None
    return journal


def content(file: Path) -> bytes:
    """Return a file's content; for a link, its target path instead of the target's content."""
    return f"a link to {os.readlink(file)}\n".encode() if file.is_symlink() else file.read_bytes()


def linked_folder(folder: Path, path: str) -> Path | None:
    """Return the first folder on the path to a file that is a link, including `folder` itself."""
    parents = [folder / parent for parent in reversed(PurePosixPath(path).parents)]
    return next((parent for parent in parents if parent.is_symlink()), None)


def is_inside(path: str) -> bool:
    """Return whether a relative path stays in its folder."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return bool(parts) and not path.startswith("/") and ".." not in parts and "\0" not in path
