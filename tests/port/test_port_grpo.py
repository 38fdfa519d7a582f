"""Test what a script of reinforcement learning becomes: the functions that its rows and rewards need."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from recipec.port import dialects
from recipec.port.ledger import Ledger
from recipec.port.python_source import read_script
from recipec.port.source import Sources
from tests.port.dialects import codes, finding

SCRIPT = """\
import re
from unsloth import FastLanguageModel
from datasets import load_dataset
from trl import {config}, {trainer}
{imports}
length = 1024
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/Qwen3-4B", max_seq_length=length)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=32)

OPEN, CLOSE = "<work>", "</work>"
SYSTEM = f"Think between {{OPEN}} and {{CLOSE}}."
PATTERN = re.compile(rf"{{OPEN}}.+?{{CLOSE}}\\s*(\\d+)")


def final(text):
    return text.split("####")[1].strip() if "####" in text else None


def questions(split="train"):
    rows = load_dataset("openai/gsm8k", "main")[split]
    return rows.map(
        lambda row: {{
            "prompt": [
                {{"role": "system", "content": SYSTEM}},
                {{"role": "user", "content": row["question"]}},
            ],
            "answer": final(row["answer"]),
        }}
    )


def form(completions, **kwargs):
    return [0.5 if PATTERN.search(each[0]["content"]) else 0.0 for each in completions]


def correct(completions, answer, **kwargs):
    found = [PATTERN.search(each[0]["content"]) for each in completions]
    return [2.0 if one and one[1] == wanted else 0.0 for one, wanted in zip(found, answer)]


def long(completions, **kwargs):
    return [float(len(tokenizer(each[0]["content"]).input_ids)) for each in completions]


dataset = questions(){rows}
args = {config}(
    learning_rate=5e-6, per_device_train_batch_size=1, num_generations=6,
    max_completion_length=length - 256, max_steps=250, {arguments}
)
trainer = {trainer}(
    model=model, processing_class=tokenizer, reward_funcs={rewards}, args=args, train_dataset=dataset
)
"""


def script(folder: Path, **changes: str) -> Ledger:
    """Port the script with some parts replaced."""
    parts = {"config": "GRPOConfig", "trainer": "GRPOTrainer", "imports": "", "rows": "", "arguments": ""}
    text = SCRIPT.format(**{**parts, "rewards": "[form, correct]", **changes})
    (folder / "train.py").write_text(text, encoding="utf-8")
    source, problems = read_script(folder / "train.py")
    assert source is not None, problems
    ledger = Ledger(Sources(source))
    dialects.apply(dialects.load("trl"), ledger)
    return ledger


def module(ledger: Ledger, folder: Path, name: str) -> dict[str, Any]:
    """Run a file that the port writes, without the script."""
    (folder / name).write_text(ledger.files[name], encoding="utf-8")
    return runpy.run_path(str(folder / name))


def test_functions_of_a_script_run_without_it(tmp_path: Path) -> None:
    ledger = script(tmp_path)
    assert codes(ledger) == []
    assert ledger.value("rewards") == [{"function": "rewards.py:form"}, {"function": "rewards.py:correct"}]
    assert ledger.value("data.transform") == "convert.py:convert"
    row = module(ledger, tmp_path, "convert.py")["convert"]({"question": "2 + 2", "answer": "so #### 4"})
    assert row["answer"] == "4" and row["question"] == "2 + 2"
    assert row["prompt"][0] == {"role": "system", "content": "Think between <work> and </work>."}
    rewards = module(ledger, tmp_path, "rewards.py")
    said = [[{"role": "assistant", "content": f"<work>x</work> {number}"}] for number in (4, 5)]
    assert rewards["form"](completions=said) == [0.5, 0.5]
    assert rewards["correct"](completions=said, answer=["4", "4"]) == [2.0, 0.0]
    assert "unsloth" not in ledger.files["rewards.py"] and "SYSTEM" not in ledger.files["rewards.py"]


def test_unsloths_defaults_are_those_of_its_loss(tmp_path: Path) -> None:
    ledger = script(tmp_path)
    values = {key: ledger.value(f"train.grpo.{key}") for key in ("loss", "beta", "mask_truncated")}
    assert values == {"loss": "dapo", "beta": 0.0, "mask_truncated": None}
    assert ledger.value("train.global_batch_size") == 12  # 6, the group, x 2 micro-batches
    assert finding(ledger, "per_device_train_batch_size").verdict.value == "approximated"
    assert (ledger.value("train.grpo.max_prompt_length"), ledger.value("data.max_length")) == (256, 1024)
    explicit = script(tmp_path, arguments='loss_type="dapo"')
    assert explicit.value("train.grpo.mask_truncated") is True
    assert explicit.value("train.grpo.epsilon_high") == 0.28
    assert script(tmp_path, arguments='loss_type="bnpo"').value("train.grpo.beta") == 0.001
    assert script(tmp_path, arguments='loss_type="cispo"').value("train.grpo.epsilon_high") == 5.0
    assert script(tmp_path, arguments='loss_type="dr_grpo"').value("train.grpo.scale_rewards") == "none"


def test_rows_are_filtered_by_the_scripts_own_function(tmp_path: Path) -> None:
    ledger = script(tmp_path, rows=".filter(lambda row: row['answer'] is not None)")
    convert = module(ledger, tmp_path, "convert.py")["convert"]
    assert convert({"question": "2 + 2", "answer": "4"}) is None
    assert convert({"question": "2 + 2", "answer": "#### 4"})["answer"] == "4"


def test_trls_own_rewards_are_ready_ones(tmp_path: Path) -> None:
    imports = "from trl.rewards import accuracy_reward, get_soft_overlong_punishment"
    rewards = "[accuracy_reward, get_soft_overlong_punishment(max_completion_len=768, soft_punish_cache=64)]"
    ledger = script(tmp_path, imports=imports, rewards=rewards)
    assert ledger.value("rewards") == [{"boxed_answer": {"column": "solution"}}]
    assert ledger.value("train.grpo.overlong_penalty") == 64
    assert "rewards.py" not in ledger.files


def test_rewards_of_another_file_are_copied(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("def kind(completions, **columns):\n    return [1.0]\n")
    ledger = script(tmp_path, imports="from judge import kind", rewards="kind")
    assert ledger.value("rewards") == [{"function": "judge.py:kind"}]
    assert ledger.files["judge.py"].startswith("def kind")


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ("[long]", "it uses `tokenizer`, which the script loads or constructs"),
        ("[sum]", "it is neither think_format_reward"),
        ("['some/judge']", "it looks like a model that scores completions"),
        ("[(lambda k: lambda completions: [k])(1)]", "it uses `k`"),
    ],
)
def test_a_reward_that_needs_the_script_is_refused_with_what_to_write(
    tmp_path: Path, rewards: str, why: str
) -> None:
    (found,) = [each for each in script(tmp_path, rewards=rewards).diagnostics if each.code == "E1189"]
    assert why in found.message
    assert "into rewards.py next to the config" in (found.help or "")


def test_rloo_is_a_loss_of_grpo(tmp_path: Path) -> None:
    ledger = script(tmp_path, config="RLOOConfig", trainer="RLOOTrainer", arguments="beta=0.0")
    assert ledger.value("train.grpo.loss") == "rloo" and ledger.value("train.objective") == "grpo"
