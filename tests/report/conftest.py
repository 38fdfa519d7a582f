"""Fixture with a working folder, its own cache, and pages without Plotly's script."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("recipec.compiler.pages.html.plotly", lambda: "/* Plotly */")
    return tmp_path
