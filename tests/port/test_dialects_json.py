"""Compare compiler/data/dialects.json with its sources."""

from __future__ import annotations

import pytest

from recipec.compiler.port.keys import DATA, keys_of
from scripts import dialects
from tests.port import wheels


def test_dialects_json_matches_its_sources() -> None:
    made = dialects.text(dialects.catalog(wheels.fetch()))
    assert DATA.read_text(encoding="utf-8") == made, "run: python scripts/dialects.py build/dialects"


@pytest.mark.parametrize(
    "tool, section, key, entry",
    [
        ("trl", "sft", "learning_rate", ["float", 2e-5]),
        ("trl", "sft", "weight_decay", ["float", 0.0]),
        ("trl", "model", "lora_r", ["int", 16]),
        ("trl", "dpo", "loss_type", ["list[str]", ["sigmoid"]]),
        ("trainer", "training_arguments", "learning_rate", ["float", 5e-5]),
        ("peft", "lora", "r", ["int", 8]),
        ("litgpt", "lora", "lora_r", ["int", 8]),
        ("litgpt", "lora", "checkpoint_dir", ["Path"]),
        ("llamafactory", "train", "lora_rank", ["int", 8]),
        ("llamafactory", "train", "learning_rate", ["float", 5e-5]),
        ("accelerate", "cluster", "num_processes", ["int", -1]),
    ],
)
def test_keys_have_the_types_and_defaults_of_their_tool(
    tool: str, section: str, key: str, entry: list[object]
) -> None:
    assert keys_of(tool, section)[key] == entry


def test_qlora_builder_has_lora_keys_and_quantize_base_true() -> None:
    whole = keys_of("torchtune", "torchtune.models.llama3_2.lora_llama3_2_1b")
    quantized = keys_of("torchtune", "torchtune.models.llama3_2.qlora_llama3_2_1b")
    assert quantized == {**whole, "quantize_base": ["bool", True]}
    assert whole["lora_attn_modules"] == ["List[LORA_ATTN_MODULES]"]


def test_axolotl_key_table_includes_common_keys() -> None:
    keys = keys_of("axolotl", "config")
    assert {"base_model", "sequence_len", "lora_target_linear", "sample_packing", "datasets"} <= set(keys)
    assert "path" in keys_of("axolotl", "SFTDataset")
