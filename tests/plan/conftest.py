"""A compiler that compiles nothing, a recipe with a server, and pages without Plotly's five megabytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import pool, rates
from recipec.compiler.plan.timeline import Reached
from tests.plan.serve_answers import RECIPE, lowered

FAKE = Path(__file__).parent / "fake_worker.py"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")


@pytest.fixture
def full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices reach their published rates: no test depends on the published runs."""
    monkeypatch.setattr(rates, "reached", lambda generation: Reached())


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


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The recipe that a server is planned of."""
    return lowered(tmp_path_factory.mktemp("recipe"), RECIPE)
