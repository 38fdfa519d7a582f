"""DPO by train.py, TRL and TorchAX is one run, in float32; tests/e2e/test_torchax_preference.py has more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity.preferences import assert_one_run, case
from tests.parity.running import Place

pytestmark = pytest.mark.e2e

TARGETS = ["q_proj", "v_proj", "down_proj"]


def test_dpo_is_one_run(tmp_path: Path) -> None:
    dpo = case("Qwen/Qwen3-0.6B", ["full_attention"], {"fsdp": 2, "tp": 1}, TARGETS, "dpo")
    assert_one_run(Place(tmp_path, dpo))
