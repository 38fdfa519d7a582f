"""Tests of what the file of reached rates must hold, for any figures."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

import pytest

from recipec.compiler.lowering.hardware import generations
from recipec.compiler.plan import kernels, rates
from scripts import published_runs, step_times
from scripts.step_times import BEGIN, END, PAGE, table

MACHINES = {"v4": "v4-8", "v5e": "v5e-8", "v5p": "v5p-8", "v6e": "v6e-8", "tpu7x": "tpu7x-8"}


def test_machines_cover_every_generation() -> None:
    assert set(MACHINES) == set(generations())


@pytest.mark.parametrize("generation", MACHINES)
def test_reached_shares_are_above_0_and_at_most_2(generation: str) -> None:
    """Allow a little more than 1: a device may exceed its links' rate and libtpu's cycles."""
    assert all(0 < share <= 2 for share in asdict(rates.reached(generation)).values())


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("generation", MACHINES)
def test_interval_is_positive_and_ordered_and_has_a_basis(generation: str, lora: bool) -> None:
    found = rates.interval(generation, lora)
    low, high = found.of(2.0)
    assert 0 < low <= high and (low, high) == (2 * found.low, 2 * found.high)
    assert found.basis
    assert rates.interval(generation, True) == rates.interval("v5p", True)


def test_rate_files_have_only_known_keys() -> None:
    found, known = json.loads(rates.DATA.read_text(encoding="utf-8")), {*generations()}
    assert set(found) == {"reached", "intervals", "operations"} and set(found["reached"]) <= known
    assert set(found["operations"]) <= known
    assert {"all", "lora"} <= set(found["intervals"]) <= {*known, "all", "lora"}
    laws = json.loads(kernels.DATA.read_text(encoding="utf-8"))
    assert set(laws) == {"attention", "backward"} and set(laws["attention"]) <= known


TABLE = json.loads(published_runs.TABLE.read_text())


def test_published_runs_of_one_model_imply_equal_flops_per_token() -> None:
    counted = defaultdict(set)
    for name, run in TABLE["runs"].items():
        chip, _, model = name.split("-", 2)
        flops = run["tflops_per_chip"] * run["step_s"] / (run["rows_per_device"] * run["length"])
        counted[chip, model].add(flops)
    assert len(counted["v6e", "llama3.1-8b"]) == 6
    for flops in counted.values():
        assert max(flops) == pytest.approx(min(flops), rel=1e-3)
    llama2, llama3 = counted["v6e", "llama2-70b"], counted["v6e", "llama3.1-70b"]
    assert max(llama2) == pytest.approx(max(llama3), rel=0.1)  # equal sizes, apart from the vocabulary


def test_refused_libtpu_flags_are_dropped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published_runs.metadata, "version", {"libtpu": "0.0.52"}.__getitem__)
    flags, dropped = published_runs.taken(TABLE, "v6e-16-llama3.1-8b")
    gather = "--xla_tpu_enable_async_collective_fusion_fuse_all_gather=true"
    assert dropped[gather].startswith("continuation fusion")
    assert gather not in flags
    assert "--xla_latency_hiding_scheduler_rerun=2" in flags
    assert gather in published_runs.taken(TABLE, "v5e-256-16b")[0]


@pytest.mark.e2e
def test_planning_page_table_equals_the_time_model_table() -> None:
    said = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert said == f"{table()}\n", "python -m scripts.step_times write"


def test_unknown_command_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "PAGE", tmp_path / "missing.md")
    assert step_times.main(["fitt"]) == 2
