"""A run's folder, and how it is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watch.watching import write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 400 steps after its step 120, with a checkpoint of step 100."""
    return write_run(tmp_path / "checkpoints")
