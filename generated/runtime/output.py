"""Output folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from runtime.errors import UserError


def check_vacant(target: Path) -> None:
    """Checks that a folder can be made where nothing of value is.

    Raises:
        UserError: when something is there already.
    """
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target}: is not empty", "remove it, or choose another folder with --output")
    if target.exists() and not target.is_dir():
        raise UserError(f"{target}: is a file", "remove it, or choose another folder with --output")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a hidden folder beside `target` to write into, and renames it to `target` at the end.

    When the block fails, is interrupted or terminated, the hidden folder is removed; after a kill that
    cannot be caught it stays until the next call for the same target, and `target` never exists in part.

    Raises:
        UserError: when `target` is not empty, or another process is writing it.
    """
    check_vacant(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.parent / f".{target.name}.partial"
    if partial.exists():
        with _locked(partial):
            shutil.rmtree(partial)
    partial.mkdir()
    with _locked(partial), _terminable():
        try:
            yield partial
            _sync_tree(partial)
            partial.rename(target)
            _sync(target.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{folder}: another process is writing it", "wait for that one to end") from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _terminable() -> Iterator[None]:
    """Makes SIGTERM unwind the stack as Ctrl-C does, so that clean-up runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # only the main thread may set handlers
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
