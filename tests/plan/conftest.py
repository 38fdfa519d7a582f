"""A compiler that compiles nothing, for what is around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from compiler.plan import pool

FAKE = Path(__file__).parent / "fake_worker.py"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts it in place, with a cache of the test's own; returns the folder that shows its starts."""
    log = tmp_path / "starts"
    log.mkdir()
    monkeypatch.setattr(pool, "WORKER", (str(FAKE),))
    monkeypatch.setattr(pool, "require_compiler", lambda: None)
    monkeypatch.setenv("FAKE_WORKER_LOG", str(log))
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    return log
