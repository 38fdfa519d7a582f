"""What `make e2e` says before its first test when the disk is too small for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.e2e import disk

pytestmark = pytest.mark.e2e


def test_a_disk_that_is_too_small_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"bytes": 2**30}
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free["bytes"]))
    monkeypatch.setattr(disk, "BUILD", tmp_path / "build")
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    needed = sum(disk.MADE["e2e"].values()) + disk.TEMPORARY
    assert disk.shortage("e2e") == (
        f"`make e2e` needs {needed:.1f} GiB of disk at {tmp_path / 'build'}, and 1.0 GiB are free"
    )
    free["bytes"] = int((needed + 0.1) * 2**30)
    assert disk.shortage("e2e") is None


def test_what_is_made_already_is_not_needed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=4 * 2**30))
    monkeypatch.setattr(disk, "BUILD", tmp_path / "build")
    monkeypatch.setenv("PYTEST_DEBUG_TEMPROOT", str(tmp_path))
    assert disk.shortage("nightly") is not None
    for name in disk.MADE["nightly"]:
        (tmp_path / "build" / name).mkdir()
    assert disk.shortage("nightly") is None
