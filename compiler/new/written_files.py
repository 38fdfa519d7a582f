"""Write the files of `recipe new`: all of them or none, without replacing existing files unasked."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from recipec.compiler.errors import ArtifactError
from recipec.compiler.terminal import uninterrupted
from recipec.compiler.writing import umask


def refuse_existing(target: Path, help: str) -> None:
    """Refuse to write to a path that exists.

    Raises:
        ArtifactError: when it exists, or its parent is not a folder.
    """
    if target.exists() or target.is_symlink():
        raise ArtifactError(f"{target} already exists", help)
    for folder in target.parents:
        if folder.exists():
            if not folder.is_dir():
                raise ArtifactError(f"{folder} is in the way: it is not a folder", "choose another with -o")
            return


def write(files: Mapping[Path, str], replaced: Mapping[Path, str]) -> None:
    """Write files next to their targets, then move them there. After a failure or Ctrl-C, none is left.

    Args:
        files: texts by path; none of the paths exists yet.
        replaced: texts by path for existing files that were read and extended.

    Raises:
        OSError: when a file cannot be written.
    """
    created: list[Path] = []
    staged: dict[Path, str] = {}
    try:
        for target, text in {**files, **replaced}.items():
            _make_folders(target, created)
            staged[target] = _stage(target, text)
        with uninterrupted():
            for target in [*files, *replaced]:
                os.replace(staged[target], target)
                del staged[target]
                created += [target] if target in files else []
    except BaseException:
        for name in staged.values():
            Path(name).unlink(missing_ok=True)
        _remove(created)
        raise


@contextmanager
def linked(links: Mapping[Path, Path]) -> Iterator[None]:
    """Make symbolic links; remove them if the block raises.

    Args:
        links: targets by path; none of the paths exists yet.
    """
    created: list[Path] = []
    try:
        for link, target in links.items():
            _make_folders(link, created)
            link.symlink_to(target)
            created.append(link)
        yield
    except BaseException:
        _remove(created)
        raise


def _make_folders(path: Path, created: list[Path]) -> None:
    """Make the folders that a path needs, and add them to `created`."""
    for folder in reversed(path.parents):
        if not folder.is_dir():
            folder.mkdir()
            created.append(folder)


def _remove(created: Sequence[Path]) -> None:
    """Remove files, links and folders in the reverse of the order in which they were made."""
    for path in reversed(created):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def _stage(target: Path, text: str) -> str:
    """Write a temporary file next to its target; return its name."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as stream:
            stream.write(text)
        os.chmod(name, target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~umask())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return name
