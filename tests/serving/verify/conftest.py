"""Fixture with a checkpoint that is made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.verify.verifying import made


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("verify") / "merged")
