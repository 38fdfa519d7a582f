"""Fixtures with an exported adapter that tests only read, and a copy of it for one test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime.peft_import.adapters import Small


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    return Small(tmp_path_factory.mktemp("small"))


@pytest.fixture
def copy(small: Small, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small.adapter, tmp_path / "adapter"))
