"""A small artifact and processes that run it, one of each for the tests that need them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runtime import artifacts
from tests.runtime.lives import Lives


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data and an artifact."""
    place = tmp_path_factory.mktemp("run")
    artifacts.write_place(place)
    return place


@pytest.fixture(scope="session")
def whole(place: Path) -> subprocess.CompletedProcess[str]:
    """A run that nothing interrupts, started from a shell."""
    return subprocess.run(
        [sys.executable, *artifacts.script(place, "whole")],
        env=dict(artifacts.environment(place)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="session")
def lives(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """Starts processes that run a train.py."""
    lives = Lives(artifacts.environment(place), tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()
