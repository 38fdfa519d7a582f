"""Tests that docs/published_runs.json has consistent figures, and flags that libtpu accepts."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from scripts import published_runs

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
