"""TRL's YAML: what its keys become, and that each of them is spoken of."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.port.keys import keys_of, tools
from recipec.compiler.port.ledger import Verdict
from recipec.spec.document import Refused
from tests.port import dialects
from tests.port.dialects import codes, finding, samples, spoken, unspoken, values, verdict

SFT: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "some/rows"}
LORA: dict[str, Any] = {**SFT, "use_peft": True}

SCRIPTS = ("sft", "dpo", "orpo")

ported = functools.partial(dialects.ported, script="sft")


def rows(folder: Path, row: dict[str, Any]) -> str:
    """A file of one row in the folder; its path as a config has it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return "./rows.jsonl"


def test_a_qlora_run_is_taken_over(tmp_path: Path) -> None:
    ledger = ported(
        "trl",
        tmp_path,
        "model_name_or_path: google/gemma-3-1b-it\n"
        "dataset_name: some/talks\n"
        "dataset_config: short\n"
        "use_peft: true\nlora_r: 8\nlora_alpha: 4\nuse_rslora: true\nload_in_4bit: true\n"
        "lora_target_modules: [q_proj, down_proj]\n"
        "learning_rate: 3e-4\nnum_train_epochs: 2\nper_device_train_batch_size: 2\n"
        "gradient_accumulation_steps: 3\nlr_scheduler_type: cosine\nwarmup_ratio: 0.05\n"
        "assistant_only_loss: true\nmax_length: 512\npacking: true\nseed: 3\n",
    )
    spoken(ledger)
    assert codes(ledger) == []
    assert {path: line.value for path, line in ledger.lines.items()} == {
        "model.id": "google/gemma-3-1b-it",
        "model.dtype": "bfloat16",
        "lora.rank": 8,
        "lora.alpha": 4,
        "lora.rslora": True,
        "lora.dropout": 0.05,
        "lora.targets": ["q_proj", "down_proj"],
        "lora.layers": "all",
        "lora.quantize": "nf4",
        "lora.dtype": "bfloat16",
        "data.train": [{"path": "hf://some/talks", "config": "short"}],
        "data.format": "chat",
        "data.loss_on": "assistant",
        "data.max_length": 512,
        "data.overlong": "truncate",
        "data.packing": True,
        "data.shuffle_seed": 3,
        "train.epochs": 2,
        "train.micro_batch_size": 2,
        "train.global_batch_size": 6,
        "train.loss_normalization": "tokens",
        "train.optimizer.name": "adamw",
        "train.optimizer.learning_rate": 3e-4,
        "train.optimizer.b1": 0.9,
        "train.optimizer.b2": 0.999,
        "train.optimizer.eps": 1e-8,
        "train.optimizer.weight_decay": 0.0,
        "train.optimizer.max_grad_norm": 1.0,
        "train.schedule.name": "cosine",
        "train.schedule.warmup_ratio": 0.05,
        "train.seed": 3,
        "remat.policy": "decoder",
    }


@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo"])
@pytest.mark.parametrize("adapters", [True, False])
def test_no_key_of_a_script_is_passed_over(tmp_path: Path, objective: str, adapters: bool) -> None:
    keys = keys_of("trl", objective, "script", "model", "mixture")
    content = {
        **samples(keys),
        **SFT,
        "use_peft": adapters,
        "datasets": [samples(keys_of("trl", "dataset"))],
    }
    ledger = ported("trl", tmp_path, content, script=objective)
    assert unspoken(ledger, keys) == []
    assert ledger.unread(ledger.sources.main) == []


def test_no_flag_of_the_launcher_is_passed_over(tmp_path: Path) -> None:
    flags = keys_of("accelerate", "launch")
    ledger = ported("trl", tmp_path, {**samples(flags), **SFT})
    assert unspoken(ledger, flags) == []


@pytest.mark.parametrize("objective, rate", [("sft", 2e-5), ("dpo", 1e-6), ("orpo", 1e-6)])
def test_the_defaults_are_the_scripts_own(tmp_path: Path, objective: str, rate: float) -> None:
    ledger = ported("trl", tmp_path, LORA, script=objective)
    assert values(ledger, "train.optimizer.learning_rate", "train.epochs", "data.max_length") == [
        rate,
        3,
        1024,
    ]
    assert values(ledger, "lora.rank", "lora.alpha", "train.schedule.name") == [16, 32, "linear"]
    assert values(ledger, "train.global_batch_size", "remat.policy", "model.dtype") == [
        8,
        "decoder",
        "bfloat16",
    ]
    for key in (
        "learning_rate",
        "weight_decay",
        "max_grad_norm",
        "per_device_train_batch_size",
        "max_length",
    ):
        assert verdict(ledger, key) is Verdict.DEFAULTED


@pytest.mark.parametrize(
    "row, keys, expected",
    [
        ({"messages": []}, {}, ["chat", "all"]),
        ({"messages": []}, {"assistant_only_loss": True}, ["chat", "assistant"]),
        ({"conversations": []}, {}, ["chat", "all"]),
        ({"prompt": "a", "completion": "b"}, {}, ["prompt_completion", "completion"]),
        ({"prompt": "a", "completion": "b"}, {"completion_only_loss": False}, ["prompt_completion", "all"]),
        ({"text": "a"}, {}, ["text", "all"]),
        ({"body": "a"}, {"dataset_text_field": "body"}, ["text", "all"]),
    ],
)
def test_the_rows_columns_say_what_is_learnt(
    tmp_path: Path, row: dict[str, Any], keys: dict[str, Any], expected: list[str]
) -> None:
    ledger = ported("trl", tmp_path, {**LORA, **keys, "dataset_name": rows(tmp_path, row)})
    assert values(ledger, "data.format", "data.loss_on") == expected
    assert codes(ledger) == []
    assert ledger.value("data.fields") == ({"text": "body"} if "body" in row else None)


def test_a_format_that_is_not_known_is_a_guess(tmp_path: Path) -> None:
    ledger = ported("trl", tmp_path, LORA)
    assert codes(ledger) == [("W1168", "dataset_name")]
    assert values(ledger, "data.format", "data.loss_on") == ["chat", "all"]


PAIR, TALK = {"chosen": "a", "rejected": "b"}, {"messages": []}


@pytest.mark.parametrize(
    "keys, row, expected",
    [
        ({"packing": False}, None, "sft"),
        ({"completion_only_loss": True}, None, "sft"),
        ({"loss_type": "nll"}, None, "sft"),
        ({"loss_type": ["sigmoid"]}, None, "dpo"),
        ({"loss_type": "ipo"}, None, "dpo"),
        ({"label_smoothing": 0.1}, None, "dpo"),
        ({"precompute_ref_log_probs": True, "label_smoothing": 0.1}, None, "dpo"),
        ({"beta": 0.2, "max_completion_length": 64, "padding_value": 0}, None, "dpo orpo"),
        ({"beta": 0.2}, None, "dpo orpo"),
        ({"beta": 0.2, "max_prompt_length": 64}, PAIR, "dpo orpo"),
        ({}, None, "sft dpo orpo"),
        ({}, PAIR, "dpo orpo"),
        ({}, TALK, "sft"),
        ({}, {"text": "a"}, "sft"),
        ({}, {"prompt": "a", "completion": "b"}, "sft"),
        ({"sync_ref_model": True, "label_smoothing": None}, PAIR, "dpo"),
        ({"packing": True, "beta": 0.1}, None, "sft dpo orpo"),
    ],
)  # fmt: skip
def test_the_script_is_told_by_keys_and_rows(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any] | None, expected: str
) -> None:
    content = {**LORA, **keys, **({"dataset_name": rows(tmp_path, row)} if row else {})}
    scripts = expected.split()
    if len(scripts) == 1:
        ledger = ported("trl", tmp_path, content, script=None, name="orpo-grpo.yaml")
        assert ledger.value("train.objective", "sft") == expected
        return
    with pytest.raises(Refused) as refused:
        ported("trl", tmp_path, content, script=None, name="sft.yaml")
    found = refused.value.diagnostic
    assert found.code == "E1172"
    assert [word for word in (found.help or "").replace(",", "").split() if word in SCRIPTS] == scripts


@pytest.mark.parametrize(
    "keys, row, named, key",
    [
        ({"num_generations": 8, "beta": 0.04, "top_p": 1}, None, "grpo or rloo", "num_generations"),
        ({"scale_rewards": "group"}, PAIR, "grpo", "scale_rewards"),
        ({"normalize_advantages": True}, None, "rloo", "normalize_advantages"),
        ({"shuffle_dataset": True, "beta": 0.1}, None, "grpo or rloo", "beta"),
        ({"loss_type": "dapo"}, None, "grpo", "loss_type"),
        ({"desirable_weight": 1.2, "packing": True}, None, "kto", "desirable_weight"),
        ({"beta": 0.1}, {"prompt": "a", "completion": "b", "label": True}, "kto", "dataset_name"),
        ({"center_rewards_coefficient": 0.1}, None, "reward", "center_rewards_coefficient"),
        ({"teacher_model_name_or_path": "a/b"}, None, "distillation", "teacher_model_name_or_path"),
        ({"cpo_alpha": 1.0}, None, "cpo", "cpo_alpha"),
        ({}, {"prompt": "a"}, "grpo or rloo", "dataset_name"),
    ],
)  # fmt: skip
def test_a_run_of_another_script_is_refused_by_its_name(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any] | None, named: str, key: str
) -> None:
    content = {**LORA, **keys, **({"dataset_name": rows(tmp_path, row)} if row else {})}
    with pytest.raises(Refused) as refused:
        ported("trl", tmp_path, content, script=None, name="sft.yaml")
    found = refused.value.diagnostic
    assert (found.code, found.path) == ("E1171", key)
    assert f"a run of TRL's {named} script" in found.message
    assert found.help is not None and "--script " in found.help


def test_every_script_of_trl_is_known_and_each_key_of_it_tells_it(tmp_path: Path) -> None:
    sections = tools()["trl"]["sections"]
    commands = [name for name in sections if not name.startswith("experimental.")]
    assert {*SCRIPTS, "grpo", "kto", "rloo", "reward", "distillation"} <= set(commands)
    for name in set(commands) - {*SCRIPTS, "script", "model", "mixture", "dataset"}:
        with pytest.raises(Refused) as refused:
            ported("trl", tmp_path, {**samples(sections[name]), **SFT}, script=None)
        assert refused.value.diagnostic.code == "E1171" and f"{name} script" in str(refused.value), name


@pytest.mark.parametrize("script, key", [("sft", "beta"), ("orpo", "loss_type"), ("dpo", "packing")])
def test_a_key_that_the_named_script_does_not_have_is_an_error(tmp_path: Path, script: str, key: str) -> None:
    content = {**LORA, "dataset_name": rows(tmp_path, TALK), key: 0.1}
    ledger = ported("trl", tmp_path, content, script=script)
    assert codes(ledger) == [("E1171", key)]
    assert f"--set {key}=null" in (ledger.diagnostics[0].help or "")
    ledger = ported("trl", tmp_path, {**content, key: None}, script=script)
    assert codes(ledger) == []
    spoken(ledger)


def test_dpo_switches_dropout_off(tmp_path: Path) -> None:
    ledger = ported(
        "trl", tmp_path, {**LORA, "lora_dropout": 0.1, "beta": 0.3, "label_smoothing": 0.2}, script="dpo"
    )
    assert values(ledger, "lora.dropout", "train.beta", "train.label_smoothing") == [0.0, 0.3, None]
    ledger = ported(
        "trl", tmp_path, {**LORA, "lora_dropout": 0.1, "beta": 0.3, "disable_dropout": False}, script="dpo"
    )
    assert ledger.value("lora.dropout") == 0.1


@pytest.mark.parametrize(
    "keys, code, key",
    [
        ({"beta": 0.1, "loss_type": ["ipo"]}, "E1163", "loss_type"),
        ({"beta": 0.1, "loss_type": ["sigmoid", "sft"]}, "E1163", "loss_type"),
        ({"beta": 0.1, "f_divergence_type": "js_divergence"}, "E1163", "f_divergence_type"),
        ({"loss_type": "dft"}, "E1163", "loss_type"),
        ({"optim": "lomo"}, "E1163", "optim"),
        ({"lr_scheduler_type": "sawtooth"}, "E1163", "lr_scheduler_type"),
        ({"lora_target_modules": ["c_attn"]}, "E1164", "lora_target_modules"),
        ({"model_name_or_path": "nobody/nothing"}, "E0801", "model_name_or_path"),
        ({"use_peft": False, "load_in_4bit": True}, "E1146", "load_in_4bit"),
        ({"dataset_name": "s3://rows/there"}, "E1143", "dataset_name"),
        ({"learning_rate": "fast"}, "E1160", "learning_rate"),
        ({"bnb_4bit_quant_type": "int3"}, "E1160", "bnb_4bit_quant_type"),
        ({"assistant_only_loss": True, "completion_only_loss": True}, "E1145", "completion_only_loss"),
        ({"parallelism_config": {"tp_size": 3}, "num_processes": 8}, "E1162", "per_device_train_batch_size"),
    ],
)
def test_what_would_be_another_run_is_refused_at_its_key(
    tmp_path: Path, keys: dict[str, Any], code: str, key: str
) -> None:
    content = {**LORA, "dataset_name": rows(tmp_path, {"messages": []}), **keys}
    ledger = ported("trl", tmp_path, content, script="dpo" if "beta" in keys else "sft")
    assert codes(ledger) == [(code, key)]
    assert all(diagnostic.help for diagnostic in ledger.diagnostics)
    if key in keys:
        assert ledger.diagnostics[0].span is not None
        assert verdict(ledger, key) is Verdict.UNSUPPORTED


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_what_is_missing_is_asked_for(tmp_path: Path, missing: str) -> None:
    content = {key: value for key, value in LORA.items() if key != missing}
    ledger = ported("trl", tmp_path, content)
    (found,) = [diagnostic for diagnostic in ledger.diagnostics if diagnostic.path == missing]
    assert found.help is not None and f"--set {missing}=" in found.help


@pytest.mark.parametrize(
    "keys, rows_of_a_step",
    [
        ({}, 8),
        ({"num_processes": 4}, 32),
        ({"accelerate_config": "zero3"}, 64),
        ({"accelerate_config": "zero3", "num_processes": 2}, 16),
        ({"num_processes": 8, "parallelism_config": {"tp_size": 2, "cp_size": 2}}, 16),
    ],
)
def test_the_rows_of_a_step_are_those_of_all_processes(
    tmp_path: Path, keys: dict[str, Any], rows_of_a_step: int
) -> None:
    ledger = ported("trl", tmp_path, {**LORA, **keys, "gradient_accumulation_steps": 1})
    assert ledger.value("train.global_batch_size") == rows_of_a_step
    assert ledger.value("train.micro_batch_size") == 8


def test_devices_are_stronger_than_the_files(tmp_path: Path) -> None:
    file = {"distributed_type": "MULTI_GPU", "num_processes": 4}
    assert ported("trl", tmp_path, LORA, accelerate=file).value("train.global_batch_size") == 32
    assert ported("trl", tmp_path, LORA, devices=2, accelerate=file).value("train.global_batch_size") == 16


@pytest.mark.parametrize(
    "keys, dtype, adapters, note",
    [
        ({}, "bfloat16", "float32", True),
        ({"bf16": False}, "float32", "float32", False),
        ({"bf16": True, "dtype": "bfloat16"}, "bfloat16", "float32", False),
        ({"fp16": True}, "bfloat16", "float32", True),
        ({"bf16": False, "dtype": "bfloat16"}, "bfloat16", "float32", False),
        ({"load_in_8bit": True, "dtype": "auto"}, "bfloat16", "bfloat16", False),
    ],
)
def test_a_precision_becomes_the_models_and_the_adapters_types(
    tmp_path: Path, keys: dict[str, Any], dtype: str, adapters: str, note: bool
) -> None:
    ledger = ported("trl", tmp_path, {**LORA, **keys})
    assert values(ledger, "model.dtype", "lora.dtype") == [dtype, adapters]
    assert bool(ledger.lines["model.dtype"].comment) is note


@pytest.mark.parametrize(
    "keys, master",
    [
        ({}, True),
        ({"dtype": "bfloat16"}, False),
        ({"bf16": False}, None),
        ({"dtype": "bfloat16", "fsdp": "full_shard"}, True),
        ({"dtype": "bfloat16", "fsdp": "full_shard", "bf16": False}, False),
        ({"dtype": "bfloat16", "deepspeed": "zero2.json"}, True),
        ({"dtype": "bfloat16", "accelerate_config": "zero3"}, True),
    ],
)
def test_a_run_without_use_peft_trains_all_weights(
    tmp_path: Path, keys: dict[str, Any], master: bool | None
) -> None:
    ledger = ported("trl", tmp_path, {**SFT, **keys, "lora_r": 4, "weight_decay": 0.1})
    assert ledger.lines["lora"].value is None
    assert ledger.value("lora.rank") is None
    assert ledger.value("train.optimizer.master_weights") is master
    assert verdict(ledger, "weight_decay") is Verdict.APPROXIMATED


@pytest.mark.parametrize(
    "keys, key, expected",
    [
        ({"packing": True}, "packing", Verdict.EXACT),
        ({"packing": True, "packing_strategy": "bfd_split"}, "packing", Verdict.APPROXIMATED),
        ({"packing": True, "packing_strategy": "wrapped"}, "packing", Verdict.APPROXIMATED),
        ({"max_length": None}, "max_length", Verdict.APPROXIMATED),
        ({"truncation_mode": "keep_end"}, "truncation_mode", Verdict.UNSUPPORTED),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha", Verdict.UNSUPPORTED),
        ({"neftune_noise_alpha": None}, "neftune_noise_alpha", Verdict.EXACT),
        ({"use_dora": True}, "use_dora", Verdict.UNSUPPORTED),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save", Verdict.UNSUPPORTED),
        ({"optim": "paged_adamw_8bit"}, "optim", Verdict.APPROXIMATED),
        ({"optim": "adamw_torch"}, "optim", Verdict.EXACT),
        ({"num_train_epochs": 1.5}, "num_train_epochs", Verdict.APPROXIMATED),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "load_in_4bit", Verdict.APPROXIMATED),
        ({"average_tokens_across_devices": False, "num_processes": 2}, "average_tokens_across_devices",
         Verdict.APPROXIMATED),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", Verdict.APPROXIMATED),
        ({"load_best_model_at_end": True}, "load_best_model_at_end", Verdict.UNSUPPORTED),
    ],
)  # fmt: skip
def test_how_keys_are_taken_over(tmp_path: Path, keys: dict[str, Any], key: str, expected: Verdict) -> None:
    found = finding(ported("trl", tmp_path, {**LORA, **keys}), key)
    assert found.verdict is expected
    assert expected is Verdict.EXACT or found.note


def test_without_a_limit_a_long_sample_is_an_error(tmp_path: Path) -> None:
    ledger = ported("trl", tmp_path, {**LORA, "max_length": None})
    assert values(ledger, "data.overlong") == ["error"]


def test_the_order_of_the_sources_is_kept(tmp_path: Path) -> None:
    ledger = ported("trl", tmp_path, {**LORA, "train_sampling_strategy": "sequential", "seed": 5})
    assert "data.shuffle_seed" in ledger.lines and ledger.lines["data.shuffle_seed"].value is None
    assert ported("trl", tmp_path, {**LORA, "seed": 5, "data_seed": 6}).value("data.shuffle_seed") == 6


def test_targets_that_are_not_given_are_peft_s_own(tmp_path: Path) -> None:
    assert ported("trl", tmp_path, LORA).value("lora.targets") == ["q_proj", "v_proj"]
    gemma = {**LORA, "model_name_or_path": "google/gemma-4-E4B-it"}
    assert ported("trl", tmp_path, gemma).value("lora.targets") == ["q_proj", "v_proj"]
    none = {**LORA, "model_name_or_path": "google/gemma-3-4b-it"}
    assert ("E1148", "lora_target_modules") in codes(ported("trl", tmp_path, none))
    every = {**LORA, "lora_target_modules": "all-linear"}
    assert len(ported("trl", tmp_path, every).value("lora.targets")) == 7


def test_evaluation_is_taken_over_where_a_strategy_asks_for_it(tmp_path: Path) -> None:
    keys = {**LORA, "eval_strategy": "steps", "eval_steps": 25, "dataset_test_split": "held"}
    ledger = ported("trl", tmp_path, keys)
    assert ledger.value("data.eval") == [{"path": "hf://some/rows", "split": "held"}]
    assert ledger.value("train.eval_every") == 25
    assert ported("trl", tmp_path, LORA).value("data.eval") is None


def test_a_mixture_becomes_several_sources(tmp_path: Path) -> None:
    mixture = [{"path": "a/b", "split": "train[:50%]"}, {"path": "json", "data_files": "./more.jsonl"}]
    ledger = ported("trl", tmp_path, {**LORA, "datasets": mixture, "test_split_size": 0.1})
    assert ledger.value("data.train") == [{"path": "hf://a/b", "split": "train[:50%]"}, "./more.jsonl"]
    assert ledger.value("data.eval_fraction") == 0.1
    spoken(ledger)


def test_a_base_gets_the_tuned_models_template(tmp_path: Path) -> None:
    keys = {**LORA, "model_name_or_path": "meta-llama/Llama-3.1-8B", "assistant_only_loss": True}
    assert ported("trl", tmp_path, keys).value("model.tokenizer") == "meta-llama/Llama-3.1-8B-Instruct"
    keys["chat_template_path"] = "talk.jinja"
    ledger = ported("trl", tmp_path, keys)
    assert values(ledger, "data.chat_template", "model.tokenizer") == ["talk.jinja", None]
