"""Recipes of preference training, and the checks of their runs by all backends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import TOLERANCES, WORDS, ComparedRun, compare
from recipec.runtime.training.objective_losses import PAIR_METRICS
from tests.parity.parity_cases import recipe
from tests.parity.running import BACKENDS, STEPS, Case, Place, merged_tensors

LIMITS = TOLERANCES["float32"]
OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "dpo": {"beta": 0.3, "label_smoothing": 0.1},
    "orpo": {"beta": 0.2},
}
WARMUP = 2


def case(
    like: str,
    layers: Sequence[str],
    axes: Mapping[str, int],
    targets: Sequence[str],
    objective: str,
    **data: Any,
) -> Case:
    """Return a recipe with two micro-batches of two pairs in a step."""
    sections = recipe(
        dict(axes),
        {"rank": 4, "alpha": 8, "targets": targets},
        {"format": "preference", "loss_on": "completion", "packing": False, **data},
        objective=objective,
        **OBJECTIVES[objective],
        global_batch_size=4,
        micro_batch_size=2 // axes["fsdp"],
        eval_every=STEPS,
        schedule={"name": "cosine", "warmup_steps": WARMUP},
    )
    return Case(like, layers, sections)


def assert_one_run(here: Place, backends: Sequence[Backend] = BACKENDS) -> None:
    """Train with each backend, train.py's first, and compare traces, merged weights and metrics."""
    runs = []
    for backend in backends:
        trace = here.train(backend, backend.value)
        if backend is not Backend.TUNIX:
            here.merge(backend.value, "--import-adapter", here.folder / backend.value / "adapter")
        runs.append(ComparedRun(backend.value, trace, merged_tensors(here.merge(backend.value))))
        assert len(trace.losses) == STEPS and min(trace.targets) > 0
    rows = compare(runs, LIMITS)
    for row in rows:
        print(f"\n{here.folder.name}: {row.quantity} differ by {row.difference} of {row.largest:.3g}")
    assert [row for row in rows if not row.ok] == []
    assert {row.quantity for row in rows} == set(WORDS)
    gradients, trained = runs[0].trace.gradients, runs[0].trace.trained
    assert max(float(np.abs(array).max()) for array in gradients.values()) > 100 * LIMITS["gradients"]
    moved = max(float(np.abs(array).max()) for name, array in trained.items() if name.endswith("lora_B"))
    assert moved > 100 * LIMITS["merged"], "B, which begins as zero, has been trained"
    for backend in backends[1:]:
        compare_metrics(here.folder / Backend.TUNIX.value, here.folder / backend.value)


def compare_metrics(own: Path, other: Path) -> None:
    """Compare each line: the same names, and the same numbers except for time and memory."""
    left, right = logged(own), logged(other)
    assert len(left) == len(right) >= STEPS
    assert sum(PAIR_METRICS[0] in line for line in right) == STEPS
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {*PAIR_METRICS, "loss", "eval_loss", "grad_norm", "learning_rate", "tokens"}:
            if name == "rewards_accuracy" and a["step"] <= WARMUP:
                continue  # with zero adapters, only rounding decides which of two equal answers is larger
            assert b[name] == pytest.approx(a[name], abs=1e-4), (name, a["step"])


def logged(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
