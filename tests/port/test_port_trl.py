"""Test TRL's YAML: what its keys become, and that the report has each of them."""

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
from tests.port.dialects import codes, samples, spoken, unspoken, values, verdict

SFT: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "some/rows"}
LORA: dict[str, Any] = {**SFT, "use_peft": True}

SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto")

ported = functools.partial(dialects.ported, script="sft")


def rows(folder: Path, row: dict[str, Any]) -> str:
    """Write a file of one row into the folder, and return its path as a config has it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return "./rows.jsonl"


@pytest.mark.parametrize("objective", ["sft", "dpo", "orpo", "cpo"])
@pytest.mark.parametrize("adapters", [True, False])
def test_report_covers_every_trl_script_key(tmp_path: Path, objective: str, adapters: bool) -> None:
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


def test_report_covers_every_accelerate_launch_flag(tmp_path: Path) -> None:
    flags = keys_of("accelerate", "launch")
    ledger = ported("trl", tmp_path, {**samples(flags), **SFT})
    assert unspoken(ledger, flags) == []


@pytest.mark.parametrize("objective, rate", [("sft", 2e-5), ("dpo", 1e-6), ("orpo", 1e-6), ("cpo", 1e-6)])
def test_missing_keys_get_trl_script_defaults(tmp_path: Path, objective: str, rate: float) -> None:
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


def test_unknown_data_format_is_guessed_as_chat_with_warning(tmp_path: Path) -> None:
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
        ({"label_smoothing": 0.1, "cpo_alpha": 1.0, "loss_type": "hinge"}, None, "cpo"),
        ({"loss_type": "simpo"}, None, "cpo"),
        ({"precompute_ref_log_probs": True, "label_smoothing": 0.1}, None, "dpo"),
        ({"beta": 0.2, "max_completion_length": 64, "padding_value": 0}, None, "dpo orpo cpo kto"),
        ({"beta": 0.2}, None, "dpo orpo cpo kto"),
        ({"beta": 0.2, "max_prompt_length": 64}, PAIR, "dpo orpo cpo"),
        ({}, None, "sft dpo orpo cpo kto"),
        ({}, PAIR, "dpo orpo cpo"),
        ({}, TALK, "sft"),
        ({}, {"text": "a"}, "sft"),
        ({}, {"prompt": "a", "completion": "b"}, "sft"),
        ({"sync_ref_model": True, "label_smoothing": None}, PAIR, "dpo"),
        ({"desirable_weight": 1.2}, None, "kto"),
        ({"beta": 0.1}, {"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"packing": True, "beta": 0.1}, None, "sft dpo orpo cpo kto"),
    ],
)  # fmt: skip
def test_keys_and_first_row_determine_the_trl_script(
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
        ({"center_rewards_coefficient": 0.1}, None, "reward", "center_rewards_coefficient"),
        ({"teacher_model_name_or_path": "a/b"}, None, "distillation", "teacher_model_name_or_path"),
        ({}, {"prompt": "a"}, "grpo or rloo", "dataset_name"),
    ],
)  # fmt: skip
def test_unsupported_trl_script_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any] | None, named: str, key: str
) -> None:
    content = {**LORA, **keys, **({"dataset_name": rows(tmp_path, row)} if row else {})}
    with pytest.raises(Refused) as refused:
        ported("trl", tmp_path, content, script=None, name="sft.yaml")
    found = refused.value.diagnostic
    assert (found.code, found.path) == ("E1171", key)
    assert f"a run of TRL's {named} script" in found.message
    assert found.help is not None and "--script " in found.help


def test_every_unsupported_trl_script_is_recognized_and_refused(tmp_path: Path) -> None:
    sections = tools()["trl"]["sections"]
    commands = [name for name in sections if not name.startswith("experimental.")]
    assert {*SCRIPTS, "grpo", "rloo", "reward", "distillation"} <= set(commands)
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


def test_dpo_disables_lora_dropout_by_default(tmp_path: Path) -> None:
    ledger = ported(
        "trl", tmp_path, {**LORA, "lora_dropout": 0.1, "beta": 0.3, "label_smoothing": 0.2}, script="dpo"
    )
    assert values(ledger, "lora.dropout", "train.beta", "train.label_smoothing") == [0.0, 0.3, None]
    ledger = ported(
        "trl", tmp_path, {**LORA, "lora_dropout": 0.1, "beta": 0.3, "disable_dropout": False}, script="dpo"
    )
    assert ledger.value("lora.dropout") == 0.1


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_missing_model_or_dataset_gives_set_hint(tmp_path: Path, missing: str) -> None:
    content = {key: value for key, value in LORA.items() if key != missing}
    ledger = ported("trl", tmp_path, content)
    (found,) = [diagnostic for diagnostic in ledger.diagnostics if diagnostic.path == missing]
    assert found.help is not None and f"--set {missing}=" in found.help


def test_devices_option_overrides_accelerate_file(tmp_path: Path) -> None:
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
def test_precision_keys_determine_model_and_adapter_dtype(
    tmp_path: Path, keys: dict[str, Any], dtype: str, adapters: str, note: bool
) -> None:
    ledger = ported("trl", tmp_path, {**LORA, **keys})
    assert values(ledger, "model.dtype", "lora.dtype") == [dtype, adapters]
    assert bool(ledger.lines["model.dtype"].comment) is note


def test_null_max_length_sets_overlong_to_error(tmp_path: Path) -> None:
    ledger = ported("trl", tmp_path, {**LORA, "max_length": None})
    assert values(ledger, "data.overlong") == ["error"]


def test_sampling_strategy_and_data_seed_set_shuffle_seed(tmp_path: Path) -> None:
    ledger = ported("trl", tmp_path, {**LORA, "train_sampling_strategy": "sequential", "seed": 5})
    assert "data.shuffle_seed" in ledger.lines and ledger.lines["data.shuffle_seed"].value is None
    assert ported("trl", tmp_path, {**LORA, "seed": 5, "data_seed": 6}).value("data.shuffle_seed") == 6


def test_missing_lora_targets_get_peft_defaults(tmp_path: Path) -> None:
    assert ported("trl", tmp_path, LORA).value("lora.targets") == ["q_proj", "v_proj"]
    gemma = {**LORA, "model_name_or_path": "google/gemma-4-E4B-it"}
    assert ported("trl", tmp_path, gemma).value("lora.targets") == ["q_proj", "v_proj"]
    none = {**LORA, "model_name_or_path": "google/gemma-3-4b-it"}
    assert ("E1148", "lora_target_modules") in codes(ported("trl", tmp_path, none))
    every = {**LORA, "lora_target_modules": "all-linear"}
    assert len(ported("trl", tmp_path, every).value("lora.targets")) == 7


def test_eval_strategy_enables_eval_data_and_interval(tmp_path: Path) -> None:
    keys = {**LORA, "eval_strategy": "steps", "eval_steps": 25, "dataset_test_split": "held"}
    ledger = ported("trl", tmp_path, keys)
    assert ledger.value("data.eval") == [{"path": "hf://some/rows", "split": "held"}]
    assert ledger.value("train.eval_every") == 25
    assert ported("trl", tmp_path, LORA).value("data.eval") is None


def test_dataset_mixture_becomes_several_train_sources(tmp_path: Path) -> None:
    mixture = [{"path": "a/b", "split": "train[:50%]"}, {"path": "json", "data_files": "./more.jsonl"}]
    ledger = ported("trl", tmp_path, {**LORA, "datasets": mixture, "test_split_size": 0.1})
    assert ledger.value("data.train") == [{"path": "hf://a/b", "split": "train[:50%]"}, "./more.jsonl"]
    assert ledger.value("data.eval_fraction") == 0.1
    spoken(ledger)


def test_base_model_gets_instruct_tokenizer_or_given_template(tmp_path: Path) -> None:
    keys = {**LORA, "model_name_or_path": "meta-llama/Llama-3.1-8B", "assistant_only_loss": True}
    assert ported("trl", tmp_path, keys).value("model.tokenizer") == "meta-llama/Llama-3.1-8B-Instruct"
    keys["chat_template_path"] = "talk.jinja"
    ledger = ported("trl", tmp_path, keys)
    assert values(ledger, "data.chat_template", "model.tokenizer") == ["talk.jinja", None]
