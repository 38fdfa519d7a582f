"""Fixtures with a benchmark of a fake vLLM, whose client measures nothing and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.benching import Bench
from tests.serving.fake_vllm import FakeVllm, Start
from tests.waiting import gone


@pytest.fixture
def server(fake: Start) -> FakeVllm:
    return fake(["tuned"])


@pytest.fixture
def bench(tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, server.url)
    monkeypatch.setenv("PATH", made.path)
    yield made
    assert all(gone(call["pid"]) for call in made.calls())
    assert not [folder for folder in made.folders if Path(folder).exists()]
