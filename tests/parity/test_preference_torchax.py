"""Tests that DPO by train.py, TRL and TorchAX is one run, in float32.

tests/e2e/test_torchax_preference.py has more.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import ComparedRun, compare
from tests.parity.preferences import LIMITS, assert_one_run, case
from tests.parity.running import BACKENDS, STEPS, Place

pytestmark = pytest.mark.e2e

TARGETS = ["q_proj", "v_proj", "down_proj"]


def test_dpo_matches_across_all_backends(tmp_path: Path) -> None:
    dpo = case("Qwen/Qwen3-0.6B", ["full_attention"], {"fsdp": 2, "tp": 1}, TARGETS, "dpo")
    assert_one_run(Place(tmp_path, dpo))


def test_full_weight_dpo_matches_across_backends_and_after_resume(tmp_path: Path) -> None:
    """Compare the reference, which is the run's initial model, bit for bit, also after a resumption."""
    dpo = case("Qwen/Qwen3-0.6B", ["full_attention"], {"fsdp": 2, "tp": 1}, TARGETS, "dpo")
    sets = {"lora": None, "checkpoint": {"directory": "checkpoints", "every_steps": STEPS // 2}}
    here = Place(tmp_path, replace(dpo, recipe={**dpo.recipe, **sets}))
    runs = [ComparedRun(backend.value, here.train(backend, backend.value)) for backend in BACKENDS]
    rows = compare(runs, LIMITS)
    for row in rows:
        print(f"\n{row.left} - {row.right}: {row.quantity} differ by {row.difference} of {row.largest:.3g}")
    assert [row for row in rows if not row.ok] == []
    for run in runs:
        assert run.trace.losses[0] == pytest.approx(np.log(2), abs=1e-6)
        assert min(run.trace.losses) < 0.5, "the reference is not the model that is trained"
        here.train(Backend(run.name), "cut", "--steps", str(STEPS // 2))
        rest = here.train(Backend(run.name), "cut", "--resume")
        assert rest.losses == run.trace.losses[STEPS // 2 :]
