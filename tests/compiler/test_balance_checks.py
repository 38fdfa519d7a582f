"""Tests of `train.router_aux_loss_coef`: which models support it, and its value in the script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.checks import backends
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import Lowered
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.plan.identity import step

Lower = Callable[..., Lowered]

MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
LOCAL = (
    *("model.id=./checkpoint", "mesh={accelerator: cpu-2, axes: {fsdp: 2}}"),
    *("lora={rank: 8, targets: [q_proj, v_proj]}", "model.dtype=float32"),
)
WEIGHT = "train.router_aux_loss_coef=0.001"


@pytest.fixture
def moe(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MOE))


def test_router_loss_is_refused_for_gemma_4(lowered: Lower) -> None:
    found = [
        one.message
        for one in lowered("model.id=google/gemma-4-26B-A4B-it", WEIGHT).diagnostics
        if one.code == "E0514"
    ]
    assert found == [
        "router_aux_loss_coef is the weight of the load-balancing loss: transformers does not define it for "
        "Gemma 4's experts"
    ]


@pytest.mark.usefixtures("moe")
def test_router_loss_coef_is_in_both_scripts_only_if_set(lowered: Lower) -> None:
    without, with_loss = (lowered(*LOCAL, *more).program for more in ((), (WEIGHT,)))
    assert without is not None and with_loss is not None
    assert not [one for one in diagnosed(with_loss, (Backend.TRL,)) if one.severity == "error"]
    for program, there in ((without, False), (with_loss, True)):
        files = emit(program, (Backend.TRL,))
        for script in ("train.py", "baseline/train_trl.py"):
            assert (b"    router_aux_loss_coef=0.001,\n" in files[script]) is there
    train = step(with_loss)["train"]
    assert train.pop("router_aux_loss_coef") == 0.001
    assert train == step(without)["train"], "a kept plan goes by the name that it had"


@pytest.mark.usefixtures("moe")
def test_trl_refuses_router_loss_without_router_logits(
    lowered: Lower, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = lowered(*LOCAL, WEIGHT).program
    assert program is not None
    monkeypatch.setattr(backends, "UNTOLD", ("qwen3_moe",))
    assert [one.code for one in diagnosed(program, (Backend.TRL,)) if one.severity == "error"] == ["E0514"]
