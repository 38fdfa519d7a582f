"""Tests that ORPO by train_trl.py is the run of train.py, in float32.

tests/e2e/test_torchax_preference.py has more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.emitters.backends import Backend
from tests.parity.preferences import assert_one_run, case
from tests.parity.running import Place

pytestmark = pytest.mark.e2e

TARGETS = ["k_proj", "o_proj", "up_proj"]


def test_orpo_is_one_run(tmp_path: Path) -> None:
    llama = ("meta-llama/Llama-3.1-8B-Instruct", ["full_attention"] * 2)
    orpo = case(*llama, {"fsdp": 2, "tp": 1}, TARGETS, "orpo", eval_fraction=0.1)
    backends = (Backend.TUNIX, Backend.TRL)
    assert_one_run(Place(tmp_path, orpo, backends), backends)
