"""Disks that fill up, or vanish with the process."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import IO, Any

import pytest


class Killed(BaseException):
    """A fake death of the process."""


class Disk:
    """A disk that counts the operations of a merge on its files, and that fails from one operation on.

    Args:
        at: the operation, counted from 0.
        how: "killed": no operation from this one on happens, not even a cleanup; half of a write happens.
            "interrupted": only this operation fails, with KeyboardInterrupt. "full": from this operation on,
            whatever needs space fails.
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
        if how != "killed":  # a kill before it and a kill after it leave the same files
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
    """A file whose writes are counted operations. The failing write writes half of its bytes."""

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
