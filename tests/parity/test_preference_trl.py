"""Tests that train_trl.py runs as train.py does, in float32: ORPO, and DPO with trained rows of embeddings.

tests/e2e/test_torchax_preference.py has more.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lowering.backend import Backend
from tests.parity.preferences import assert_one_run, case
from tests.parity.running import Place

pytestmark = pytest.mark.e2e

TARGETS = ["k_proj", "o_proj", "up_proj"]


def test_trl_orpo_matches_train_py(tmp_path: Path) -> None:
    llama = ("meta-llama/Llama-3.1-8B-Instruct", ["full_attention"] * 2)
    orpo = case(*llama, {"fsdp": 2, "tp": 1}, TARGETS, "orpo", eval_fraction=0.1)
    backends = (Backend.TUNIX, Backend.TRL)
    assert_one_run(Place(tmp_path, orpo, backends), backends)


def test_trl_dpo_with_trained_embedding_rows_matches_train_py(tmp_path: Path) -> None:
    """The reference has the embedding's own rows: PEFT's without its adapters, and a copy in train.py."""
    qwen = ("Qwen/Qwen3-0.6B", ["full_attention"] * 2)
    dpo = case(*qwen, {"fsdp": 2, "tp": 1}, TARGETS, "dpo")
    dpo.recipe["lora"] |= {"trainable_tokens": ["<|im_start|>", 70, "<|im_end|>"], "loraplus_lr_ratio": 2.0}
    backends = (Backend.TUNIX, Backend.TRL)
    assert_one_run(Place(tmp_path, dpo, backends), backends)
