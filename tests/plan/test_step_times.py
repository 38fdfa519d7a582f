"""Tests that the page on planning has the time model's figures for the published steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import step_times
from scripts.step_times import BEGIN, END, PAGE, table


@pytest.mark.e2e
def test_planning_page_table_equals_the_time_model_table() -> None:
    said = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert said == f"{table()}\n", "python -m scripts.step_times write"


def test_unknown_command_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "PAGE", tmp_path / "missing.md")
    assert step_times.main(["fitt"]) == 2
