"""Fixture with a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watch.watching import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a run of 400 steps after its step 120, with a checkpoint of step 100."""
    return write_run(tmp_path / "checkpoints")
