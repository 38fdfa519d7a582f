"""Test torchtune's YAML: what its components become, and that the report has each key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.catalog import find
from recipec.port.dialects.torchtune import BUILDERS, COLUMNS, KINDS, PREFIX
from recipec.port.keys import tools
from recipec.port.ledger import Verdict
from tests.port.dialects import base, codes, ported, samples, spoken, unspoken, values, verdict
from tests.port.test_port_names import rendered

SECTIONS = tools()["torchtune"]["sections"]

LORA = base("torchtune")
DATA = {"_component_": "torchtune.datasets.chat_dataset", "source": "a/b", "conversation_column": "messages"}
REPOSITORY = ("llama4", "smol")
"""Packages of builders that are in no release."""


def changed(section: str, **keys: Any) -> dict[str, Any]:
    return {**LORA, section: {**LORA[section], **keys}}


@pytest.mark.parametrize("builder", sorted(BUILDERS))
def test_report_covers_every_builder_key(tmp_path: Path, builder: str) -> None:
    package, _, name = builder.partition(".")
    for prefix in ("", "lora_", "qlora_"):
        component = f"torchtune.models.{package}.{prefix}{name}"
        if component not in SECTIONS:
            assert prefix == "qlora_" or package in REPOSITORY, component
            continue
        model = {**samples(SECTIONS[component]), "_component_": component}
        if prefix:
            model["lora_attn_modules"] = ["q_proj", "k_proj", "v_proj", "output_proj"]
        id = BUILDERS[builder][-1]
        checkpointer = {"checkpoint_dir": f"/models/{id.rpartition('/')[2]}"}
        ledger = ported("torchtune", tmp_path, {**LORA, "model": model, "checkpointer": checkpointer})
        assert unspoken(ledger, SECTIONS[component]) == []
        assert ledger.value("model.id") == id
        assert ("lora" in ledger.lines) is (prefix == "")
        assert not [code for code in codes(ledger) if code[0] != "E1146"]


@pytest.mark.parametrize("name", sorted(KINDS))
def test_report_covers_every_dataset_key(tmp_path: Path, name: str) -> None:
    component = PREFIX + name
    keys = SECTIONS.get(component, SECTIONS[f"{PREFIX}alpaca_dataset"])
    skipped = ("tokenizer", "load_dataset_kwargs")
    entry = {key: value for key, value in samples(keys).items() if key not in skipped}
    entry |= {"_component_": component, "filter_fn": None}
    entry.pop("source", None)
    if len(keys["source"]) == 1:
        entry["source"] = "a/b"
    if "conversation_style" in entry:
        entry["conversation_style"] = "sharegpt"
    loss = {"_component_": "torchtune.rlhf.loss.DPOLoss"} if KINDS[name] == "preference" else LORA["loss"]
    ledger = ported("torchtune", tmp_path, {**LORA, "dataset": entry, "loss": loss})
    assert ledger.unread(ledger.sources.main) == []
    assert codes(ledger) == []
    default = keys["source"][1] if len(keys["source"]) == 2 else "a/b"
    assert str(default if name != "alpaca_cleaned_dataset" else "yahma/alpaca-cleaned") in str(
        ledger.value("data.train")
    )
    if name in COLUMNS:
        written = "".join(ledger.files.values()) + str(ledger.value("data.fields"))
        assert all(column in written for column in COLUMNS[name])


def test_global_batch_size_excludes_tensor_parallel_devices(tmp_path: Path) -> None:
    ledger = ported("torchtune", tmp_path, {**LORA, "tensor_parallel_dim": 2}, devices=8)
    assert ledger.value("train.global_batch_size") == 2 * 4 * 4
    ledger = ported("torchtune", tmp_path, {**LORA, "tensor_parallel_dim": 3}, devices=8)
    assert codes(ledger) == [("E1162", "tensor_parallel_dim")]


@pytest.mark.parametrize(
    ("folder", "id"),
    [
        ("/tmp/Qwen2.5-Coder-7B-Instruct/", "Qwen/Qwen2.5-Coder-7B-Instruct"),
        ("/hub/models--Qwen--Qwen2.5-7B/snapshots/a1", "Qwen/Qwen2.5-7B"),
        ("~/modelscope/Qwen/Qwen2___5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("Qwen/Qwen2.5-Coder-7B", "Qwen/Qwen2.5-Coder-7B"),
        ("out/qwen2_5_7b/epoch_0", "./out/qwen2_5_7b/epoch_0"),
        ("/data/our-qwen-7b", "/data/our-qwen-7b"),
    ],
)
def test_checkpoint_folder_decides_which_model_is_trained(tmp_path: Path, folder: str, id: str) -> None:
    model = {**LORA["model"], "_component_": "torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct"}
    content = {**LORA, "model": model, "checkpointer": {"checkpoint_dir": folder}}
    ledger = ported("torchtune", tmp_path, content)
    assert ledger.value("model.id") == id and codes(ledger) == []
    spoken(ledger)


def test_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    model = {**LORA["model"], "_component_": "torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct"}
    checkpointer = {"checkpoint_dir": "/tmp/Qwen2.5-Coder-3B"}
    ledger = ported("torchtune", tmp_path, {**LORA, "model": model, "checkpointer": checkpointer})
    assert codes(ledger) == [("E1145", "model._component_")]
    config = find("Qwen/Qwen3-8B", tmp_path).config
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ledger = ported("torchtune", tmp_path, {**LORA, "model": model, "checkpointer": {"checkpoint_dir": "."}})
    assert codes(ledger) == [("E1145", "model._component_")]


def test_reference_of_another_folder_is_refused_where_torchtune_loads_it(tmp_path: Path) -> None:
    full = {**LORA, "model": {"_component_": "torchtune.models.llama3_2.llama3_2_1b"}}
    data = {"_component_": "torchtune.datasets.stack_exchange_paired_dataset"}
    dpo = {"dataset": data, "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss"}}
    for run, folder, expected in (
        (full, "/models/Llama-3.2-1B", [("E1180", "ref_checkpointer.checkpoint_dir")]),
        (full, "/models/Llama-3.2-1B-Instruct/", []),
        (LORA, "/models/Llama-3.2-1B", []),
    ):
        reference = {"checkpoint_dir": folder, "checkpoint_files": ["model.safetensors"]}
        ledger = ported("torchtune", tmp_path, {**run, **dpo, "ref_checkpointer": reference})
        assert codes(ledger) == expected
        spoken(ledger)


def test_mixed_dataset_kinds_get_separate_settings_or_are_refused(tmp_path: Path) -> None:
    packed = bool(LORA["dataset"].get("packed"))
    text = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "c/d", "packed": packed}
    asked = {"_component_": "torchtune.datasets.samsum_dataset", "source": "e/f", "packed": packed}
    ledger = ported("torchtune", tmp_path, {**LORA, "dataset": [text, LORA["dataset"], asked]})
    assert codes(ledger) == []
    spoken(ledger)
    train = ledger.value("data.train")
    assert train[0] == {"path": "hf://c/d", "loss_on": "all"}
    assert {name: train[2][name] for name in ("format", "transform")} == {
        "format": "chat",
        "transform": f"convert{'_2' * ('transform' in train[1])}.py:convert",
    }
    assert values(ledger, "data.format", "data.transform", "data.loss_on") == ["text", None, "assistant"]
    other = {**LORA["dataset"], "train_on_input": not LORA["dataset"].get("train_on_input", False)}
    ledger = ported("torchtune", tmp_path, {**LORA, "dataset": [LORA["dataset"], other]})
    assert codes(ledger) == [("E1142", "dataset[1]._component_")]
    other = {**text, "packed": not packed}
    ledger = ported("torchtune", tmp_path, {**LORA, "dataset": [LORA["dataset"], other]})
    assert codes(ledger) == [("E1142", "dataset[1]._component_")]
    both = ported(
        "torchtune", tmp_path, {**LORA, "dataset": [LORA["dataset"], {**LORA["dataset"], "source": "c/d"}]}
    )
    assert both.value("data.train") == ["hf://a/b", "hf://c/d"]


def test_validation_dataset_is_ported_only_with_run_val_interval(tmp_path: Path) -> None:
    keys = {"dataset_val": {**DATA, "split": "train[95%:]"}, "batch_size_val": 4}
    made = ported("torchtune", tmp_path, {**LORA, **keys, "run_val_every_n_steps": 25})
    spoken(made)
    assert codes(made) == [] and made.value("train.eval_every") == 25
    assert made.value("data.eval") == [{"path": "hf://a/b", "split": "train[95%:]"}]
    off = ported("torchtune", tmp_path, {**LORA, **keys, "run_val_every_n_steps": None})
    spoken(off)
    assert off.value("data.eval") is None and verdict(off, "dataset_val") is Verdict.EXACT
    alone = ported("torchtune", tmp_path, {**LORA, "run_val_every_n_steps": 25})
    assert codes(alone) == [("E1145", "run_val_every_n_steps")]
    other = {"dataset_val": {**DATA, "train_on_input": True}, "run_val_every_n_steps": 25}
    assert codes(ported("torchtune", tmp_path, {**LORA, **other})) == [("E1142", "dataset_val._component_")]


@pytest.mark.parametrize(
    ("length", "whole", "learned", "after"),
    [(64, False, "", "<|im_end|>"), (None, False, "<|im_end|>", ""), (64, True, "", "")],
)
def test_qwen2_5_template_learns_answer_header_and_unmasked_end(
    tmp_path: Path, length: int | None, whole: bool, learned: str, after: str
) -> None:
    """Train as torchtune 0.6.1 does: port/scripts/same_run.py compares its tokens and masks with a port's."""
    tokenizer = {"_component_": "torchtune.models.qwen2_5.qwen2_5_tokenizer", "max_seq_len": length}
    content = {**changed("dataset", train_on_input=whole), "tokenizer": tokenizer}
    template = str(ported("torchtune", tmp_path, content).value("data.chat_template"))
    marks = template.replace("{%- generation -%}", "{{- '[' -}}").replace(
        "{%- endgeneration -%}", "{{- ']' -}}"
    )
    turns = [("user", "Why?"), ("assistant", "So."), ("user", "And?"), ("assistant", "No.")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert rendered(marks, messages) == (
        "<|im_start|>user\nWhy?<|im_end|>\n[<|im_start|>assistant\nSo.<|im_end|>\n]"
        f"<|im_start|>user\nAnd?<|im_end|>\n[<|im_start|>assistant\nNo.{learned}]{after}"
    )
