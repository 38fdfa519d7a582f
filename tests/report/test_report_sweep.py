"""Tests of a serving sweep's page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipec.compiler.report.run_folder import existing_folder
from recipec.compiler.report.sweep import read_sweep
from tests.report import writing
from tests.report.reading import golden, refused, report


def test_sweep_page_matches_golden_file(place: Path, request: pytest.FixtureRequest) -> None:
    writing.sweep(place / "first" / "bench")
    writing.sweep(place / "second" / "bench", slower=1.3)
    page = report("first/bench", "--compare", "second/bench")
    golden("sweep", page, request.config.getoption("--update"))


def test_charts_show_the_summary_points(place: Path) -> None:
    folder = writing.sweep(place / "bench")
    page = report("bench")
    charts = page.charts
    rows = json.loads((folder / "summary.json").read_text())["points"]
    measured = [row for row in rows if row["outcome"] == "measured" and row["input_length"] == 512]
    short, published, long = charts["throughput"]
    axis = page.figures["throughput"]["layout"]["xaxis"]
    assert short["x"] == ["1", "4", "16", "all at once"] == axis["categoryarray"]
    assert short["y"] == pytest.approx([row["output_tokens_per_s"] for row in measured], rel=1e-5)
    assert published["y"] == [1403] * 4 and published["line"]["dash"] == "dot"
    assert [value is None for value in long["y"]] == [False, False, True, False], "one of its points failed"
    names = [curve["name"] for curve in charts["ttft"]]
    assert names[:2] == ["512 tokens in, median", "512 tokens in, p99"]
    assert "4,096 tokens in, published median" in names
    against = charts["ttft-against-throughput"][0]
    assert against["x"] == sorted(against["x"]) and len(against["text"]) == 4


def test_times_that_lie_far_apart_are_on_a_logarithmic_axis(place: Path) -> None:
    folder = writing.sweep(place / "bench")
    file = folder / "input-512-rate-inf.json"
    record = json.loads(file.read_text())
    record["result"] |= {"median_ttft_ms": 9_000.0, "p99_ttft_ms": 20_000.0}
    file.write_text(json.dumps(record))
    figures = report("bench").figures
    assert figures["ttft"]["layout"]["yaxis"]["type"] == "log"
    assert figures["tpot"]["layout"]["yaxis"]["rangemode"] == "tozero"


def test_a_sweep_that_was_killed_before_its_summary_has_a_page(place: Path) -> None:
    folder = writing.sweep(place / "bench")
    (folder / "summary.json").unlink()
    (folder / "input-512-rate-4.json").write_text('{"point": {')
    words = report("bench").words
    assert "the sweep ended before it was written" in words and "6 of 7" in words
    assert "Where it was measured is not recorded." in words


def test_a_sweep_without_a_measured_point_has_nothing_to_draw(place: Path) -> None:
    folder = writing.sweep(place / "bench")
    summary = json.loads((folder / "summary.json").read_text())
    summary["points"] = [
        {"input_length": 512, "rate": "1", "outcome": "failed", "reason": "no"},
        {"rate": 3},
        4,
    ]
    (folder / "summary.json").write_text(json.dumps(summary))
    words = report("bench").words
    assert "No point was measured: there is nothing to draw." in words and "Failed. 512 tokens in" in words


def test_folder_without_sweep_and_plan_option_for_sweep_are_refused(place: Path) -> None:
    (place / "bench").mkdir()
    (place / "bench" / "summary.json").write_text('{"sides": {}}')
    assert read_sweep(existing_folder("bench")) is None
    assert "contains neither a run nor a sweep" in refused("bench")
    writing.sweep(place / "other")
    assert "apply to a run, not to a sweep" in refused("other", "--plan", "x.json")
