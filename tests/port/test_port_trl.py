"""Test TRL's YAML: what its keys become, and that the report has each of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from recipec.port.keys import tools
from recipec.spec.yaml_document import Refused
from tests.port import dialects
from tests.port.dialects import samples

SFT: dict[str, Any] = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset_name": "some/rows"}
LORA: dict[str, Any] = {**SFT, "use_peft": True}

SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto", "grpo", "rloo", "gkd")

ported = functools.partial(dialects.ported, script="sft")


def rows(folder: Path, row: dict[str, Any]) -> str:
    """Write a file of one row into the folder, and return its path as a config has it."""
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return "./rows.jsonl"


PAIR, TALK = {"chosen": "a", "rejected": "b"}, {"messages": []}


@pytest.mark.parametrize(
    "keys, row, expected",
    [
        ({"completion_only_loss": True}, None, "sft"),
        ({"loss_type": "nll"}, None, "sft"),
        ({"loss_type": ["sigmoid"]}, None, "dpo"),
        ({"label_smoothing": 0.1}, None, "dpo"),
        ({"label_smoothing": 0.1, "cpo_alpha": 1.0, "loss_type": "hinge"}, None, "cpo"),
        ({"loss_type": "simpo"}, None, "cpo"),
        ({"precompute_ref_log_probs": True, "label_smoothing": 0.1}, None, "dpo"),
        ({"beta": 0.2}, None, "dpo orpo cpo kto grpo rloo"),
        ({"beta": 0.2, "max_prompt_length": 64}, PAIR, "dpo orpo cpo"),
        ({}, PAIR, "dpo orpo cpo"),
        ({}, TALK, "sft"),
        ({}, {"prompt": "a", "completion": "b"}, "sft"),
        ({"sync_ref_model": True, "label_smoothing": None}, PAIR, "dpo"),
        ({"desirable_weight": 1.2}, None, "kto"),
        ({"beta": 0.1}, {"prompt": "a", "completion": "b", "label": True}, "kto"),
        ({"num_generations": 8, "beta": 0.04, "top_p": 1}, None, "grpo"),
        ({"scale_rewards": "group"}, PAIR, "grpo"),
        ({"normalize_advantages": True}, None, "rloo"),
        ({}, {"prompt": "a"}, "grpo"),
        ({"packing": True, "beta": 0.1}, None, "sft dpo orpo cpo kto grpo rloo gkd"),
        ({"teacher_model_name_or_path": "Qwen/Qwen3-14B", "seq_kd": False}, None, "gkd"),
        ({"teacher_model_name_or_path": "Qwen/Qwen3-14B", "max_new_tokens": 8}, TALK, "gkd"),
    ],
)  # fmt: skip
def test_keys_and_first_row_determine_the_trl_script(
    tmp_path: Path, keys: dict[str, Any], row: dict[str, Any] | None, expected: str
) -> None:
    content = {**LORA, **keys, **({"dataset_name": rows(tmp_path, row)} if row else {})}
    scripts = expected.split()
    if len(scripts) == 1:
        ledger = ported("trl", tmp_path, content, script=None, name="orpo-grpo.yaml")
        loss = "rloo" if ledger.value("train.grpo.loss") == "rloo" else None
        objective = ledger.value("train.objective", "sft")
        assert (loss or {"distill": "gkd"}.get(objective, objective)) == expected
        return
    with pytest.raises(Refused) as refused:
        ported("trl", tmp_path, content, script=None, name="sft.yaml")
    found = refused.value.diagnostic
    assert found.code == "E1172"
    assert [word for word in (found.help or "").replace(",", "").split() if word in SCRIPTS] == scripts


@pytest.mark.parametrize(
    "keys, row, named, key",
    [
        ({"center_rewards_coefficient": 0.1}, None, "reward", "center_rewards_coefficient"),
        ({"teacher_model_name_or_path": "a/b"}, None, "distillation", "teacher_model_name_or_path"),
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
    assert {*SCRIPTS, "reward", "distillation"} <= set(commands)
    for name in set(commands) - {*SCRIPTS, "script", "model", "mixture", "dataset"}:
        with pytest.raises(Refused) as refused:
            ported("trl", tmp_path, {**samples(sections[name]), **SFT}, script=None)
        assert refused.value.diagnostic.code == "E1171" and f"{name} script" in str(refused.value), name


def test_devices_option_overrides_accelerate_file(tmp_path: Path) -> None:
    file = {"distributed_type": "MULTI_GPU", "num_processes": 4}
    assert ported("trl", tmp_path, LORA, accelerate=file).value("train.global_batch_size") == 32
    assert ported("trl", tmp_path, LORA, devices=2, accelerate=file).value("train.global_batch_size") == 16
