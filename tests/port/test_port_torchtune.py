"""Test torchtune's YAML: what its components become, and that the report has each key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port.dialects.torchtune import BUILDERS, COLUMNS, KINDS, PREFIX
from recipec.compiler.port.keys import keys_of, tools
from recipec.compiler.port.ledger import Verdict
from tests.port.dialects import codes, finding, ported, samples, spoken, unspoken, values, verdict
from tests.port.test_port_names import rendered

SECTIONS = tools()["torchtune"]["sections"]
DATA = {"_component_": "torchtune.datasets.chat_dataset", "source": "a/b", "conversation_column": "messages"}
LORA: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_2.lora_llama3_2_1b", "lora_attn_modules": ["q_proj"]},
    "checkpointer": {"checkpoint_dir": "/models/Llama-3.2-1B-Instruct"},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 1024},
    "dataset": {**DATA, "conversation_style": "openai"},
    "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-4},
    "lr_scheduler": {
        "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
        "num_warmup_steps": 5,
    },
    "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
    "batch_size": 2,
    "gradient_accumulation_steps": 4,
    "epochs": 2,
    "max_steps_per_epoch": None,
    "shuffle": True,
    "seed": 7,
    "dtype": "bf16",
}

REPOSITORY = ("llama4", "smol")
"""Packages of builders that are in no release."""


def changed(section: str, **keys: Any) -> dict[str, Any]:
    """Return the run with other keys in one section."""
    return {**LORA, section: {**LORA[section], **keys}}


def test_lora_run_gives_expected_recipe_values(tmp_path: Path) -> None:
    ledger = ported("torchtune", tmp_path, LORA, devices=2)
    spoken(ledger)
    assert codes(ledger) == []
    template = ledger.lines.pop("data.chat_template").value
    assert "<|start_header_id|>user<|end_header_id|>" in template
    assert {path: line.value for path, line in ledger.lines.items()} == {
        "model.id": "meta-llama/Llama-3.2-1B-Instruct",
        "model.dtype": "bfloat16",
        "lora.rank": 8,
        "lora.alpha": 16,
        "lora.dropout": 0.0,
        "lora.targets": ["q_proj"],
        "lora.init": "peft",
        "lora.dtype": "bfloat16",
        "data.train": ["hf://a/b"],
        "data.format": "chat",
        "data.loss_on": "assistant",
        "data.packing": False,
        "data.max_length": 1024,
        "data.overlong": "truncate",
        "data.shuffle_seed": 0,
        "train.epochs": 2,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 16,
        "train.loss_normalization": "tokens",
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": 1e-4,
        "train.optimizer.weight_decay": 0.01,
        "train.optimizer.b1": 0.9,
        "train.optimizer.b2": 0.999,
        "train.optimizer.eps": 1e-8,
        "train.optimizer.max_grad_norm": None,
        "remat.policy": "none",
        "train.schedule.name": "cosine",
        "train.schedule.warmup_steps": 5,
        "train.seed": 7,
    }


@pytest.mark.parametrize("recipe", [name for name in SECTIONS if "." not in name])
def test_report_covers_every_torchtune_recipe_key(tmp_path: Path, recipe: str) -> None:
    keys = keys_of("torchtune", recipe)
    ledger = ported("torchtune", tmp_path, {**samples(keys), **LORA})
    assert unspoken(ledger, keys) == []


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
        ledger = ported("torchtune", tmp_path, {**LORA, "model": model, "checkpointer": {}})
        assert unspoken(ledger, SECTIONS[component]) == []
        assert ledger.value("model.id") == BUILDERS[builder][0]
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


def test_instruct_dataset_columns_become_messages(tmp_path: Path) -> None:
    entry = {
        "_component_": "torchtune.datasets.instruct_dataset",
        "source": "json",
        "data_files": "./rows.jsonl",
        "column_map": {"input": "question", "output": "reply"},
        "new_system_prompt": "Be brief.",
        "packed": True,
    }
    ledger = ported("torchtune", tmp_path, {**LORA, "dataset": entry})
    assert values(ledger, "data.train", "data.packing", "data.loss_on") == [
        ["./rows.jsonl"],
        True,
        "assistant",
    ]
    made: dict[str, Any] = {}
    exec(ledger.files["convert.py"], made)
    assert made["convert"]({"question": "a", "reply": "b"}) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ]
    }


def test_global_batch_size_excludes_tensor_parallel_devices(tmp_path: Path) -> None:
    ledger = ported("torchtune", tmp_path, {**LORA, "tensor_parallel_dim": 2}, devices=8)
    assert ledger.value("train.global_batch_size") == 2 * 4 * 4
    ledger = ported("torchtune", tmp_path, {**LORA, "tensor_parallel_dim": 3}, devices=8)
    assert codes(ledger) == [("E1162", "tensor_parallel_dim")]


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


def test_qwen3_builder_is_ported(tmp_path: Path) -> None:
    model = {"_component_": "torchtune.models.qwen3.lora_qwen3_8b_instruct", "lora_attn_modules": ["q_proj"]}
    tokenizer = {"_component_": "torchtune.models.qwen3.qwen3_tokenizer", "max_seq_len": 1024}
    content = {**LORA, "model": model, "checkpointer": {}, "tokenizer": tokenizer}
    made = ported("torchtune", tmp_path, content)
    assert codes(made) == [] and values(made, "model.id", "lora.rank") == ["Qwen/Qwen3-8B", 8]
    assert "<|im_start|>" in made.value("data.chat_template")


@pytest.mark.parametrize(
    ("length", "whole", "learned", "after"),
    [(64, False, "", "<|im_end|>"), (None, False, "<|im_end|>", ""), (64, True, "", "")],
)
def test_qwen2_5_template_learns_answer_header_and_unmasked_end(
    tmp_path: Path, length: int | None, whole: bool, learned: str, after: str
) -> None:
    """Train as torchtune 0.6.1 does: scripts/same_run.py compares its tokens and masks with a port's."""
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


def test_wandb_logger_is_ported_and_comet_is_unsupported(tmp_path: Path) -> None:
    logger = {"_component_": "torchtune.training.metric_logging.WandBLogger", "project": "ours"}
    made = ported("torchtune", tmp_path, {**LORA, "metric_logger": logger, "output_dir": "gs://ours/run"})
    spoken(made)
    assert values(made, "train.log.wandb_project", "checkpoint.directory") == ["ours", "gs://ours/run"]
    logger = {"_component_": "torchtune.training.metric_logging.CometLogger"}
    made = ported("torchtune", tmp_path, {**LORA, "metric_logger": logger})
    assert verdict(made, "metric_logger._component_") is Verdict.UNSUPPORTED


def test_epochs_note_says_torchtune_skips_incomplete_steps(tmp_path: Path) -> None:
    ledger = ported("torchtune", tmp_path, LORA)
    assert verdict(ledger, "epochs") is Verdict.APPROXIMATED
    assert "torchtune skips them" in finding(ledger, "epochs").note
    counted = ported("torchtune", tmp_path, {**LORA, "epochs": 1, "max_steps_per_epoch": 10})
    assert "if an epoch has fewer" in finding(counted, "max_steps_per_epoch").note
