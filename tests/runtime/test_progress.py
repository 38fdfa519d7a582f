"""Tests of the progress line of a long job."""

from __future__ import annotations

import io

import pytest

from recipec.runtime import progress
from recipec.runtime.progress import Progress, duration


class Clock:
    """A fake of the time module, whose seconds a test advances."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    monkeypatch.setattr(progress, "silent", False)  # an earlier command in this process may have changed it
    return clock


def test_byte_progress_shows_rate_and_time_left(clock: Clock) -> None:
    out = io.StringIO()
    with Progress("merging", 10e9, out, unit="B") as bar:
        bar.skip(2e9)
        clock.now = 1.0
        bar.advance(1e9)
        assert out.getvalue() == "", "a short job prints nothing"
        clock.now = 4.0
        bar.advance(1e9)
    assert out.getvalue() == "merging:  25%, 0.50 GB/s, 12 s left\n"


def test_early_progress_shows_no_estimate(clock: Clock) -> None:
    out = io.StringIO()
    with Progress("merging", 100e9, out, unit="B") as bar:
        clock.now = 3.0
        bar.advance(1e9)
    assert out.getvalue() == "merging:   1%\n"


def test_work_without_a_pace_shows_the_time_so_far(clock: Clock) -> None:
    out = io.StringIO()
    with Progress("planning", 1.0, out, foreseen=False) as bar:
        bar.advance(0.9)
        clock.now = 840.0
        bar.advance(0.0)
    assert out.getvalue() == "planning:  90%, 14 min 00 s so far\n"


def test_job_of_unknown_length_shows_count_done(clock: Clock) -> None:
    out = io.StringIO()
    with Progress("tokenizing", None, out, unit="rows") as bar:
        clock.now = 3.0
        bar.advance(12345)
    assert out.getvalue() == "tokenizing: 12,345 rows\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(42.4, "42 s"), (185, "3 min 05 s"), (2 * 3600 + 600, "2 h 10 min")]
)
def test_durations_use_seconds_minutes_and_hours(seconds: float, words: str) -> None:
    assert duration(seconds) == words
