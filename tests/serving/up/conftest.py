"""Fixtures with a servable artifact, and a fake engine without containers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.fake_docker import FakeDocker
from tests.serving.up_artifact import PORT, build


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return build(tmp_path, f"serve.port={PORT}")


@pytest.fixture(autouse=True)
def asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask a server more often whether it is ready."""
    monkeypatch.setattr("recipec.compiler.serving.up.ASK_SECONDS", 0.02)


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[FakeDocker]:
    with FakeDocker(tmp_path) as engine:
        yield engine
