"""TrainingArguments and adapter_config.json: what their keys become, and that each is spoken of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port.keys import keys_of
from recipec.compiler.port.ledger import Ledger, Verdict
from tests.port.dialects import codes, finding, ported, samples, spoken, unspoken, values, verdict

ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "train_file": "./rows.jsonl",
    "per_device_train_batch_size": 4,
}
ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "base_model_name_or_path": "Qwen/Qwen3-0.6B",
    "r": 16,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Ports a run with other arguments and other keys of the adapter; None removes one of them."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")

    def made(
        arguments: dict[str, Any] | None = None, adapter: dict[str, Any] | None = None, **others: Any
    ) -> Ledger:
        content = {**ARGUMENTS, **(arguments or {})}
        files = {"adapter_config": {**ADAPTER, **(adapter or {})}, **others}
        files = {role: file for role, file in files.items() if file is not None}
        return ported("trainer", tmp_path, content, name="args.json", **files)

    return made


def test_a_lora_run_is_taken_over(run: Any) -> None:
    ledger = run(
        {
            "learning_rate": 1e-4,
            "max_steps": 40,
            "gradient_accumulation_steps": 2,
            "bf16": True,
            "warmup_steps": 0.1,
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
            "max_seq_length": 128,
            "logging_steps": 5,
            "save_steps": 20,
            "save_total_limit": 2,
            "seed": 3,
            "data_seed": 4,
        },
        {"use_rslora": True, "lora_dropout": 0.1, "rank_pattern": {"v_proj": 4}},
        accelerate={"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
    )
    spoken(ledger)
    assert codes(ledger) == []
    assert {path: line.value for path, line in ledger.lines.items()} == {
        "model.id": "Qwen/Qwen3-0.6B",
        "model.dtype": "bfloat16",
        "lora.rank": 16,
        "lora.alpha": 8,
        "lora.rslora": True,
        "lora.dropout": 0.1,
        "lora.targets": ["q_proj", "v_proj"],
        "lora.layers": "all",
        "lora.rank_pattern": {"v_proj": 4},
        "lora.init": "peft",
        "lora.dtype": "float32",
        "data.train": ["./rows.jsonl"],
        "data.format": "text",
        "data.max_length": 128,
        "data.overlong": "truncate",
        "data.packing": False,
        "data.shuffle_seed": 4,
        "train.steps": 40,
        "train.micro_batch_size": 4,
        "train.global_batch_size": 32,
        "train.loss_normalization": "tokens",
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": 1e-4,
        "train.optimizer.weight_decay": 0.0,
        "train.optimizer.b1": 0.9,
        "train.optimizer.b2": 0.999,
        "train.optimizer.eps": 1e-8,
        "train.optimizer.max_grad_norm": 1.0,
        "train.schedule.name": "cosine",
        "train.schedule.final_ratio": 0.1,
        "train.schedule.warmup_ratio": 0.1,
        "train.seed": 3,
        "train.log.every": 5,
        "checkpoint.every_steps": 20,
        "checkpoint.keep": 2,
        "remat.policy": "none",
    }


def test_no_training_argument_is_passed_over(run: Any) -> None:
    keys = keys_of("trainer", "training_arguments")
    ledger = run({**samples(keys), "per_device_train_batch_size": 4})
    assert unspoken(ledger, keys) == []


def test_no_key_of_an_adapter_is_passed_over(run: Any) -> None:
    keys = keys_of("peft", "lora")
    ledger = run(None, {**samples(keys), **ADAPTER})
    assert ledger.unread(ledger.sources.others["adapter_config"]) == []
    assert {found.key for found in ledger.findings if found.file.endswith("adapter_config.json")} >= set(keys)


def test_the_defaults_are_transformers_own(run: Any) -> None:
    ledger = run()
    assert values(ledger, "train.optimizer.learning_rate", "train.epochs", "train.schedule.name") == [
        5e-5,
        3,
        "linear",
    ]
    assert values(ledger, "train.seed", "data.shuffle_seed", "remat.policy") == [42, 42, "none"]
    assert values(ledger, "model.dtype", "lora.dropout") == ["float32", 0.0]
    assert verdict(ledger, "learning_rate") is Verdict.DEFAULTED


def test_without_an_adapter_all_weights_are_trained(run: Any) -> None:
    ledger = run({"model_name_or_path": "Qwen/Qwen3-0.6B"}, adapter_config=None)
    assert ledger.lines["lora"].value is None
    assert ledger.value("model.id") == "Qwen/Qwen3-0.6B"


@pytest.mark.parametrize(
    "base, keys, targets, layers",
    [
        ("Qwen/Qwen3-0.6B", {"target_modules": "all-linear"}, 7, "all"),
        ("Qwen/Qwen3-0.6B", {"target_modules": r".*\.(q|k)_proj"}, ["q_proj", "k_proj"], "all"),
        ("Qwen/Qwen3-0.6B", {"layers_to_transform": [3, 4, 5]}, ["q_proj", "v_proj"], "3-5"),
        ("Qwen/Qwen3-0.6B", {"layers_to_transform": 2}, ["q_proj", "v_proj"], [2]),
        ("Qwen/Qwen3-0.6B", {"exclude_modules": ["v_proj"]}, ["q_proj"], "all"),
        ("Qwen/Qwen3-0.6B", {"target_modules": None}, ["q_proj", "v_proj"], "all"),
        ("google/gemma-3-4b-it", {"target_modules": ".*language_model.*q_proj"}, ["q_proj"], "all"),
    ],
)
def test_target_modules_become_the_recipes_targets(
    run: Any, base: str, keys: dict[str, Any], targets: Any, layers: Any
) -> None:
    ledger = run(None, {**keys, "base_model_name_or_path": base})
    found = ledger.value("lora.targets")
    assert len(found) == targets if isinstance(targets, int) else found == targets
    assert ledger.value("lora.layers") == layers
    assert codes(ledger) == []


@pytest.mark.parametrize(
    "init, expected",
    [
        (True, Verdict.EXACT),
        ("gaussian", Verdict.APPROXIMATED),
        (False, Verdict.APPROXIMATED),
        ("pissa", Verdict.UNSUPPORTED),
        ("pissa_niter_4", Verdict.UNSUPPORTED),
        ("loftq", Verdict.UNSUPPORTED),
    ],
)
def test_initial_weights_that_there_are_not_are_told(run: Any, init: Any, expected: Verdict) -> None:
    ledger = run(None, {"init_lora_weights": init})
    assert verdict(ledger, "init_lora_weights") is expected
    assert ledger.value("lora.init") == "peft"


@pytest.mark.parametrize(
    "key", ["use_dora", "modules_to_save", "target_parameters", "trainable_token_indices"]
)
def test_features_without_a_counterpart_are_told(run: Any, key: str) -> None:
    value = True if key == "use_dora" else ["lm_head"]
    found = finding(run(None, {key: value}), key)
    assert found.verdict is Verdict.UNSUPPORTED and found.note


def test_an_adapter_of_another_kind_is_refused(run: Any) -> None:
    assert codes(run(None, {"peft_type": "IA3"})) == [("E1149", "peft_type")]


def test_targets_in_an_embedding_or_a_head_are_told_to_be_lost(run: Any) -> None:
    ledger = run(None, {"target_modules": ["q_proj", "lm_head", "embed_tokens"]})
    found = finding(ledger, "target_modules")
    assert found.verdict is Verdict.APPROXIMATED and "lm_head" in found.note and "embed_tokens" in found.note


@pytest.mark.parametrize(
    "steps, ratio, expected",
    [
        (None, None, {"train.schedule.warmup_steps": 0}),
        (10, None, {"train.schedule.warmup_steps": 10}),
        (0.03, None, {"train.schedule.warmup_ratio": 0.03}),
        (10, 0.1, {"train.schedule.warmup_ratio": 0.1, "train.schedule.warmup_steps": None}),
        (None, 1.0, {"train.schedule.warmup_steps": 1}),
    ],
)
def test_warm_up_steps_and_ratios_become_the_recipes(
    run: Any, steps: Any, ratio: Any, expected: dict[str, Any]
) -> None:
    given = {"warmup_steps": steps, "warmup_ratio": ratio}
    ledger = run({key: value for key, value in given.items() if value is not None})
    assert {path: ledger.value(path) for path in expected} == expected


def test_constant_has_no_warm_up(run: Any) -> None:
    ledger = run({"lr_scheduler_type": "constant", "warmup_steps": 10})
    assert values(ledger, "train.schedule.name", "train.schedule.warmup_steps") == ["constant", None]


DEEPSPEED: dict[str, Any] = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}


def test_deepspeeds_auto_is_the_trainers_own(run: Any) -> None:
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
def test_deepspeed_must_agree_with_the_trainer(run: Any, key: str, value: Any, right: Any) -> None:
    assert codes(run(deepspeed={**DEEPSPEED, key: value})) == [("E1161", key)]
    assert codes(run(deepspeed={**DEEPSPEED, key: right})) == []
    assert codes(run({"deepspeed": {**DEEPSPEED, key: value}})) == [("E1161", f"deepspeed.{key}")]


def test_deepspeeds_optimizer_holds(run: Any) -> None:
    ledger = run(
        {"optim": "adafactor"},
        deepspeed={**DEEPSPEED, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}},
    )
    assert ledger.value("train.optimizer.name") == "adamw"
    assert codes(ledger) == []


@pytest.mark.parametrize(
    "given, micro, rows",
    [
        ({"split_batches": True}, 2, 8),
        ({"accelerator_config": {"split_batches": True}}, 2, 8),
        ({"split_batches": False, "accelerator_config": {"split_batches": True}}, 8, 32),
        ({"split_batches": None}, 8, 32),
    ],
)
def test_split_batches_shares_a_devices_rows_out(
    run: Any, given: dict[str, Any], micro: int, rows: int
) -> None:
    ledger = run(
        {"per_device_train_batch_size": 8, **given},
        accelerate={"distributed_type": "MULTI_GPU", "num_processes": 4},
    )
    spoken(ledger)
    assert ledger.value("train.micro_batch_size") == micro
    assert ledger.value("train.global_batch_size") == rows


def test_an_epochs_part_is_rounded_up(run: Any) -> None:
    ledger = run({"num_train_epochs": 0.5})
    assert ledger.value("train.epochs") == 1
    assert verdict(ledger, "num_train_epochs") is Verdict.APPROXIMATED


@pytest.mark.parametrize("gone", ["train_file", "base_model_name_or_path"])
def test_what_is_missing_is_asked_for(tmp_path: Path, gone: str) -> None:
    arguments = {key: value for key, value in ARGUMENTS.items() if key != gone}
    adapter = {key: value for key, value in ADAPTER.items() if key != gone}
    ledger = ported("trainer", tmp_path, arguments, name="args.json", adapter_config=adapter)
    found = [diagnostic for diagnostic in ledger.diagnostics if diagnostic.code in ("E1144", "E1143")]
    assert len(found) == 1 and found[0].help is not None and "--set" in found[0].help
