"""Fixtures for the planner's tests: a fake compiler, a serving recipe, and pages without Plotly's script."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import pool, rates
from recipec.compiler.plan.timeline import Reached
from tests.plan import plans
from tests.plan.serve_answers import RECIPE, lowered

FAKE = Path(__file__).parent / "fake_worker.py"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")


@pytest.fixture
def full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every device reach its published rates, so that no test depends on the published runs."""
    monkeypatch.setattr(rates, "reached", lambda generation: Reached())


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the worker by the fake, with an empty cache, and return the folder with its starts."""
    log = tmp_path / "starts"
    log.mkdir()
    monkeypatch.setattr(pool, "WORKER", ("-I", "-S", str(FAKE)))
    monkeypatch.setattr(pool, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(pool, "require_compiler", lambda: None)
    monkeypatch.setenv("FAKE_WORKER_LOG", str(log))
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    return log


@pytest.fixture
def told(fake: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let the fake worker compile whatever it is asked for."""
    monkeypatch.setenv("FAKE_WORKER_TOLD", "compiled")
    return monkeypatch


@pytest.fixture(scope="session")
def program() -> Program:
    """Lower the flagship's recipe."""
    return plans.lowered("gemma4-31b-v5p8")


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Lower the serving recipe."""
    return lowered(tmp_path_factory.mktemp("recipe"), RECIPE)
