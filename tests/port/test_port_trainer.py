"""Test TrainingArguments and adapter_config.json: what their keys become, and that all are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.port.ledger import Ledger
from tests.port.dialects import base, beside, codes, ported, spoken, values

ARGUMENTS, ADAPTER = base("trainer"), beside("trainer")["adapter_config"]


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Port a run with other arguments and other keys of the adapter; None removes one."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")

    def made(
        arguments: dict[str, Any] | None = None, adapter: dict[str, Any] | None = None, **others: Any
    ) -> Ledger:
        content = {**ARGUMENTS, **(arguments or {})}
        files = {"adapter_config": {**ADAPTER, **(adapter or {})}, **others}
        files = {role: file for role, file in files.items() if file is not None}
        return ported("trainer", tmp_path, content, name="args.json", **files)

    return made


DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def test_deepspeed_auto_values_agree_with_trainer(run: Any) -> None:
    ledger = run(deepspeed=DEEPSPEED)
    spoken(ledger)
    assert codes(ledger) == []


@pytest.mark.parametrize(
    "key, value, right",
    [
        ("gradient_clipping", 0.5, 1.0),
        ("train_micro_batch_size_per_gpu", 2, 4),
        ("gradient_accumulation_steps", 8, 1),
        ("train_batch_size", 32, 4),
    ],
)
def test_deepspeed_values_that_differ_from_trainer_are_refused(
    run: Any, key: str, value: Any, right: Any
) -> None:
    assert codes(run(deepspeed={**DEEPSPEED, key: value})) == [("E1161", key)]
    assert codes(run(deepspeed={**DEEPSPEED, key: right})) == []
    assert codes(run({"deepspeed": {**DEEPSPEED, key: value}})) == [("E1161", f"deepspeed.{key}")]


@pytest.mark.parametrize(
    "given, micro, rows",
    [
        ({"split_batches": True}, 2, 8),
        ({"accelerator_config": {"split_batches": True}}, 2, 8),
        ({"split_batches": False, "accelerator_config": {"split_batches": True}}, 8, 32),
        ({"split_batches": None}, 8, 32),
    ],
)
def test_split_batches_divides_batch_among_processes(
    run: Any, given: dict[str, Any], micro: int, rows: int
) -> None:
    ledger = run(
        {"per_device_train_batch_size": 8, **given},
        accelerate={"distributed_type": "MULTI_GPU", "num_processes": 4},
    )
    spoken(ledger)
    assert ledger.value("train.micro_batch_size") == micro
    assert ledger.value("train.global_batch_size") == rows


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "head_dim": 16}
QWEN3 |= {"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
QWEN3 |= {"num_key_value_heads": 2, "tie_word_embeddings": True}


@pytest.mark.parametrize(("dtype", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_llamafactory_weights_default_to_checkpoint_dtype(tmp_path: Path, dtype: str, expected: str) -> None:
    """Load weights as LLaMA-Factory does without bf16 and fp16."""
    config = QWEN3 | {"dtype": dtype}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    given = {"model_name_or_path": "./model", "stage": "sft", "dataset": "own", "template": "qwen3_nothink"}
    made = ported("llamafactory", tmp_path, given, dataset_info={"own": {"file_name": "own.json"}})
    assert values(made, "model.dtype") == [expected]
