"""Test the files that a port of open-instruct writes: rows, and functions that stand for verifiers."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from recipec.port.commands import read_command
from tests.port.dialects import codes, ported

RUN = {
    "model_name_or_path": "Qwen/Qwen3-8B",
    "dataset_mixer_list": ["allenai/RLVR-GSM", "1.0"],
    "num_unique_prompts_rollout": 4,
    "total_episodes": 320,
    "with_tracking": True,
}


def module(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    """Port a run, and return what a file of it defines."""
    ledger = ported("open_instruct", folder, {**RUN, **changes})
    assert codes(ledger) == []
    (folder / name).write_text(ledger.files[name], encoding="utf-8")
    return runpy.run_path(str(folder / name))


def row(messages: list[dict[str, str]], truth: Any, verifier: Any) -> dict[str, Any]:
    return {"messages": messages, "ground_truth": truth, "dataset": verifier}


ASKED = {"role": "user", "content": "2 + 2?"}
ANSWERED = {"role": "assistant", "content": "4"}


def test_rows_become_prompts_without_answers(tmp_path: Path) -> None:
    convert = module(tmp_path, "convert.py")["convert"]
    assert convert(row([ASKED], "4", "GSM8K")) == {"prompt": [ASKED], "ground_truth": "4"}
    assert convert(row([ASKED, ANSWERED], ["4"], ["gsm8k"])) == {"prompt": [ASKED], "ground_truth": "4"}
    with pytest.raises(ValueError, match="verifier math"):
        convert(row([ASKED], "4", "math"))


def test_rows_get_the_system_prompt_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "told.txt").write_text('Say "so".\n', encoding="utf-8")
    convert = module(tmp_path, "convert.py", system_prompt_override_file="told.txt")["convert"]
    told = {"role": "system", "content": 'Say "so".'}
    talk = [{"role": "system", "content": "x"}, ASKED, ANSWERED]
    assert convert(row(talk, "4", "gsm8k"))["prompt"] == [told, ASKED]


def test_tests_of_code_may_be_json(tmp_path: Path) -> None:
    convert = module(tmp_path, "convert.py", dataset_mixer_list=["vwxyzjn/rlvr_acecoder", "1.0"])["convert"]
    for tests in ('["assert f(1) == 2"]', ["assert f(1) == 2", "assert f(2) == 3"]):
        found = convert(row([ASKED], tests, "code"))["ground_truth"]
        assert found[0] == "assert f(1) == 2"


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("<think>so</think> <answer>it is 1,234</answer>", "1234", 1.0),
        ("<think>so</think> <answer>it is 12.0</answer>", "12", 0.0),
        ("<think>so</think><answer>-3</answer>", "-3", 1.0),
        ("it is 1234", "1234", 0.0),
        ("<think>so</think> <answer>none</answer>", "4", 0.0),
    ],
)
def test_gsm8k_scores_the_last_number_of_completions_of_the_form(
    tmp_path: Path, text: str, truth: str, score: float
) -> None:
    verified = module(tmp_path, "rewards.py", apply_r1_style_format_reward=True)["verified"]
    assert verified([[{"role": "assistant", "content": text}]], ground_truth=[truth]) == [score]


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"thus \boxed{\frac{1}{2}}", r"\dfrac{1}{2}", 1.0),
        (r"first \boxed{3}, then \boxed{{4}x}", "{4}x", 1.0),
        (r"\boxed{3} and $4$", "4", 0.0),
        (r"so it is $1,000$.", "1000", 1.0),
        ("Final Answer: The final answer is 5. I hope it is correct.", "5.0", 1.0),
        (r"an open \boxed{7", "7", 0.0),
        ("7", "7", 1.0),
    ],
)
def test_math_scores_the_last_box_or_else_the_last_formula(
    tmp_path: Path, text: str, truth: str, score: float
) -> None:
    changes = {"dataset_mixer_list": ["allenai/RLVR-MATH", "1.0"]}
    verified = module(tmp_path, "rewards.py", **changes)["verified"]
    assert verified([text], ground_truth=[truth]) == [score]


@pytest.mark.parametrize(
    "head",
    [
        r"python mason.py --gpus 8 -- source setup.sh \&\& python open_instruct/grpo_fast.py",
        r"uv run mason.py --num_nodes 2 -- source setup.sh \&\&python open_instruct/grpo_fast.py",
        "uv run --active open_instruct/grpo_fast.py",
        "python open_instruct/grpo_fast.py",
    ],
)
def test_commands_behind_mason_are_read(tmp_path: Path, head: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        f"{head} \\\n  --total_episodes 64 --stop_strings '</a>' --beta 0.0\n", encoding="utf-8"
    )
    command, problems = read_command(script)
    assert command is not None, problems
    assert (command.dialect, command.script) == ("open_instruct", "grpo_fast")
    assert command.sources[0].data == {"total_episodes": 64, "stop_strings": ["</a>"], "beta": 0.0}
