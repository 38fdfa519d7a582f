"""Tests of how metrics.jsonl is read, and of the points that are drawn of it."""

from __future__ import annotations

import json
import math
import random

from recipec.compiler.report.metrics import MOST, Metrics, centered_mean, spread, thin


def parse(text: str) -> Metrics:
    metrics = Metrics()
    list(metrics.take(text.encode()))
    return metrics


def line(**values: object) -> str:
    return json.dumps(values) + "\n"


def test_nan_and_infinity_are_parsed() -> None:
    found = parse(line(step=1, loss=2.5) + line(step=2, loss="NaN") + line(step=3, loss="-Infinity"))
    loss = found.get("loss")
    assert loss.steps == [1, 2, 3] and loss.finite == [(1, 2.5)]
    assert math.isnan(loss.values[1]) and loss.values[2] == -math.inf
    assert [step for step, _ in loss.lost] == [2, 3] and found.last_step == 3


def test_invalid_metrics_lines_are_counted() -> None:
    bad = [
        "nonsense",
        "[1]",
        '{"loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": -1}',
        "[" * 100_000,
        "\x00",
    ]
    text = (
        line(step=1, loss=2.5)
        + "".join(f"{one}\n" for one in bad)
        + line(step=2, loss="low", note="x", up=True)
    )
    found = parse(text)
    assert found.unreadable == len(bad) and not found.rest
    assert list(found.series) == ["loss"] and found.get("loss").steps == [1]


def test_step_logged_twice_uses_the_later_line() -> None:
    """Use the later line, as after two runs in one file. An evaluation is no repetition."""
    text = (
        line(step=1, loss=3.0) + line(step=2, loss=9.0) + line(step=2, eval_loss=4.0) + line(step=2, loss=2.0)
    )
    found = parse(text)
    assert found.get("loss").finite == [(1, 3.0), (2, 2.0)] and found.twice == {2}
    assert found.get("eval_loss").finite == [(2, 4.0)]


def test_thinning_keeps_every_peak() -> None:
    chance = random.Random(3)
    values = [chance.random() for _ in range(100_000)]
    values[43_210], values[77_777] = 50.0, -50.0
    kept = thin(values)
    assert len(kept) <= MOST and kept[0] == 0 and kept[-1] == len(values) - 1
    assert {43_210, 77_777} <= set(kept) and kept == sorted(kept)
    # Each hundredth of the run is drawn between its own lowest and highest value.
    for start in range(0, 100_000, 1000):
        part = [values[i] for i in kept if start <= i < start + 1000]
        whole = values[start : start + 1000]
        assert (min(part), max(part)) == (min(whole), max(whole))


def test_thinning_keeps_all_of_few_points() -> None:
    assert thin([1.0, 2.0]) == [0, 1] and thin([]) == [] and thin([1.0] * MOST) == list(range(MOST))


def test_centered_mean_averages_and_spread_picks_even_indices() -> None:
    assert centered_mean([1.0, 2.0, 6.0, 4.0, 5.0], 3) == [1.0, 3.0, 4.0, 5.0, 5.0]
    line = [float(value) for value in range(20, 0, -1)]
    assert centered_mean(line, 5) == line, "the mean of a straight fall is the fall"
    assert spread(5, 10) == [0, 1, 2, 3, 4]
    assert spread(100, 3) == [0, 50, 99] and len(spread(100_000, 40)) == 40
