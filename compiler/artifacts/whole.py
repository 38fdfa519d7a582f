"""Folders of which many files change at once: all of them or none, wherever a kill falls.

The new files lie in a folder beside until a journal names them. From then on the change is made: the next
command moves what a kill has left over. Files that no journal names stay where they are, however large.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from recipec.compiler.artifacts.writing import umask
from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.terminal import uninterrupted

STAGING, NEW, JOURNAL = ".recipe-build", "new", "journal.json"
"""What a change has in its folder until it is made: the new files, and what becomes of them."""


def digest(content: bytes) -> str:
    """sha256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


class Change:
    """A change of a folder's files, by paths relative to it, with forward slashes."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._staging = folder, folder / STAGING
        self._new: list[str] = []
        self._gone: dict[str, str] = {}
        (self._staging / NEW).mkdir(parents=True)

    def write(self, path: str, content: bytes) -> None:
        """Gives a file new content; it appears in the order of these calls."""
        target = self._stage(path)
        target.write_bytes(content)
        if path.endswith(".sh"):
            target.chmod(0o777 & ~umask())

    def copy(self, path: str, new: str) -> None:
        """Keeps a file, or a link, under another name too."""
        shutil.copy2(self._folder / path, self._stage(new), follow_symlinks=False)

    def remove(self, path: str) -> None:
        """Takes a file away, and the folders that hold nothing else."""
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
        """Writes the journal: from here on the change is made, by this process or by the next."""
        journal = {"folder": self._staging.stat().st_ino, "new": self._new, "gone": self._gone}
        part = self._staging / f"{JOURNAL}.part"
        part.write_text(json.dumps(journal), encoding="utf-8")
        os.replace(part, self._staging / JOURNAL)


@contextmanager
def changing(folder: Path) -> Iterator[Change]:
    """A change of a folder's files, made at the end of the block; one at a time.

    Raises:
        ArtifactError: something is in the way, or the change cannot be ended, and waits for the next.
    """
    staging = folder / STAGING
    with _alone(folder):
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
    """Makes the change that a kill cut off, or clears away what it had begun; whether one was made.

    Raises:
        ArtifactError: as for `changing`.
    """
    if not os.path.lexists(folder / STAGING):
        return False
    with _alone(folder), uninterrupted():
        return _finish(folder)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time, where the file system can tell; a kill ends its turn."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _finish(folder: Path) -> bool:
    staging = folder / STAGING
    if not os.path.lexists(staging):
        return False
    own = {NEW, JOURNAL, f"{JOURNAL}.part"}
    if staging.is_symlink() or not staging.is_dir() or not {one.name for one in staging.iterdir()} <= own:
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
            f"the build in {folder} waits for its end: {place}: {error.strerror or error}",
            f"mend that, and run the command again; or remove {staging} first, and build again",
        ) from error
    return journal is not None


def _make(folder: Path, journal: Mapping[str, Any]) -> None:
    """Moves what is not yet moved, and removes what is not yet removed."""
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
        with suppress(OSError):  # of the first that holds something
            for parent in PurePosixPath(path).parents[:-1]:
                (folder / parent).rmdir()


def _refuse_elsewhere(folder: Path, path: str) -> None:
    top, *rest = PurePosixPath(path).parts
    if not is_inside(path) or (rest and linked_folder(folder / top, "/".join(rest)) is not None):
        raise ArtifactError(f"{folder / path} lies outside of {folder}", "remove the link on its way")


def _journal(staging: Path) -> Mapping[str, Any] | None:
    """What is to be done; None where no journal was written here, but at most copied from elsewhere."""
    try:
        found = json_value((staging / JOURNAL).read_bytes())
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or found.get("folder") != staging.stat().st_ino:
        return None
    return found


def content(file: Path) -> bytes:
    """What a file holds; of a link where it leads, and not what is there."""
    return f"a link to {os.readlink(file)}\n".encode() if file.is_symlink() else file.read_bytes()


def linked_folder(folder: Path, path: str) -> Path | None:
    """The first of the folders on the way to a file that is a link, `folder` itself too."""
    parents = [folder / parent for parent in reversed(PurePosixPath(path).parents)]
    return next((parent for parent in parents if parent.is_symlink()), None)


def is_inside(path: str) -> bool:
    """Whether a relative path stays in its folder."""
    pure = PurePosixPath(path)
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in path
