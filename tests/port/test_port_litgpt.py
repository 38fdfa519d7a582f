"""Test litgpt's YAML: what its keys become, and that the report has each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.port.dialects import base, ported

LORA = base("litgpt")


@pytest.mark.parametrize(
    "name, keys, lora",
    [
        ("run.yaml", {"lora_r": 4}, True),
        ("qlora.yaml", {}, True),
        ("full.yaml", {}, False),
        ("run.yaml", {}, False),
    ],
)
def test_file_name_or_lora_key_selects_lora_or_full(
    tmp_path: Path, name: str, keys: dict[str, Any], lora: bool
) -> None:
    content = {"checkpoint_dir": LORA["checkpoint_dir"], **keys}
    ledger = ported("litgpt", tmp_path, content, name=name)
    assert ("lora" not in ledger.lines) is lora
    assert (ledger.value("lora.rank") is not None) is lora


@pytest.mark.parametrize(
    ("style", "begins"),
    [("alpaca", "Below is"), ("llama3", "<|start_header_id|>system"), ("gemma", "<start")],
)
def test_prompt_style_omits_bos_that_the_tokenizer_adds(tmp_path: Path, style: str, begins: str) -> None:
    data = {"class_path": "litgpt.data.JSON", "init_args": {"json_path": "a.jsonl", "prompt_style": style}}
    made = ported(
        "litgpt", tmp_path, {"checkpoint_dir": "meta-llama/Llama-3.1-8B", "lora_r": 4, "data": data}
    )
    space: dict[str, Any] = {}
    exec(made.files["convert.py"], space)
    row = {"instruction": "Add.", "input": "", "output": "3"}
    found = space["convert"](row)
    assert found["prompt"].startswith(begins) and "Add." in found["prompt"] and found["completion"] == "3"
