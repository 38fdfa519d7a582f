"""Disks that fill up, turn read-only, or vanish with the process: real ones where they can be mounted."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest


class Killed(BaseException):
    """The process is gone."""


class Disk:
    """Stands between a merge and its files: its operations are counted, and fail from one on.

    Args:
        at: the operation, from 0 on.
        how: "killed": neither this operation nor a later one is done, whatever tidies up; half of what is
            being written is. "interrupted": this one alone fails, with KeyboardInterrupt. "full": from this
            one on whatever takes room fails.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None = None, how: str = "killed") -> None:
        self.at, self.how, self.done = at, how, 0
        opened, replace, unlink = Path.open, Path.replace, Path.unlink

        def open_file(path: Path, mode: str = "r", *rest: Any, **options: Any) -> IO[Any]:
            if mode != "wb":
                return opened(path, mode, *rest, **options)
            self.step(room=True)
            return _Counted(path, self)

        def replace_file(path: Path, target: Path) -> Path:
            self.step()
            return replace(path, target)

        def unlink_file(path: Path, missing_ok: bool = False) -> None:
            if path.exists():
                self.step()
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "open", open_file)
        monkeypatch.setattr(Path, "replace", replace_file)
        monkeypatch.setattr(Path, "unlink", unlink_file)
        if how != "killed":  # which finds the same before it as after it
            monkeypatch.setattr(os, "fsync", lambda descriptor: self.step(room=True))

    def step(self, room: bool = False) -> None:
        number, self.done = self.done, self.done + 1
        if self.at is None or number < self.at:
            return
        if self.how == "killed":
            raise Killed
        if self.how == "interrupted" and number == self.at:
            raise KeyboardInterrupt
        if self.how == "full" and room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Counted(io.FileIO):
    """A file whose writes are operations; of the one that fails, half is written."""

    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, "wb")
        self.disk = disk

    def write(self, data: Any) -> int:
        try:
            self.disk.step(room=True)
        except BaseException:
            super().write(memoryview(data)[: memoryview(data).nbytes // 2])
            raise
        return super().write(data)


@contextlib.contextmanager
def mounted(folder: Path, *options: str) -> Iterator[bool]:
    """A small file system of its own in a folder; False where this process may mount none."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, *options: str) -> None:
    subprocess.run(["mount", "-o", ",".join(["remount", *options]), str(folder)], check=True)
