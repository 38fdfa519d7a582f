"""Tests of serve/eval.sh, requirements-eval.txt, the prompts' file, and the evaluate section's checks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from recipec.compiler.emitters.server import emit_evaluate
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering import pins
from recipec.compiler.render import shell_word
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load
from tests.clients.fake_vllm import Start

RECIPE = """\
recipe: 1
name: sample
model: {id: google/gemma-3-27b-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: gs://bucket/train.jsonl}]}
serve: {accelerator: v6e-8, max_model_len: 4096}
evaluate: {prompts: prompts.jsonl, num_generations: 2, temperature: 0.8}
"""

GOOD = '{"prompt": "2 + 2?", "expected": "4"}\n'


def lowered(folder: Path, *sets: str, prompts: str | None = GOOD, text: str = RECIPE) -> Lowered:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    if prompts is not None:
        (folder / "prompts.jsonl").write_text(prompts, encoding="utf-8")
    return lower(load(folder / "recipe.yaml", sets))


def files_of(folder: Path, *sets: str) -> dict[str, str]:
    found = lowered(folder, *sets)
    assert found.program is not None, render_text(found.diagnostics)
    return emit_evaluate(found.program)


def found(folder: Path, *sets: str, prompts: str | None = GOOD) -> list[str]:
    """Return the evaluate section's diagnostics, as code and message."""
    diagnostics = lowered(folder, *sets, prompts=prompts).diagnostics
    return [f"{d.code} {d.message}" for d in diagnostics if "E0650" <= f"E{d.code[1:]}" <= "E0659"]


def words_of(folder: Path, script: str, *more: str) -> list[str]:
    """Return the arguments that eval.sh passes to its program, with a python3 that prints them."""
    for name in ("bin", "generated/sample/serve"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "bin/python3").write_text('#!/bin/sh\nprintf "%s\\n" "$PYTHONPATH" "$@"\n')
    (folder / "bin/python3").chmod(0o755)
    path = folder / "generated/sample/serve/eval.sh"
    path.write_text(script, encoding="utf-8")
    (folder / "generated/sample/requirements-train.txt").write_text("recipec-runtime==1\n")
    wheel = folder / "generated/recipec_runtime-1-py3-none-any.whl"
    wheel.touch()
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(path), *more], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    here = f"{folder / 'generated/sample/serve'}"
    return done.stdout.replace(here, "HERE").replace(str(wheel), "WHEEL").splitlines()


def test_eval_sh_passes_the_recipe_values(tmp_path: Path) -> None:
    sets = ["evaluate.tasks=[gsm8k, mmlu_pro]", "evaluate.limit=50", "serve.port=9000"]
    words = words_of(tmp_path, files_of(tmp_path, *sets)["serve/eval.sh"], "--side", "tuned")
    assert words == [
        *("HERE/../..:WHEEL", "-m", "runtime.clients.evaluate"),
        *("--url", "http://127.0.0.1:9000", "--name", "sample"),
        *("--prompts", "HERE/../prompts.jsonl", "--samples", "2", "--temperature", "0.8"),
        *("--max-tokens", "512"),
        *("--requirements", "HERE/../requirements-eval.txt", "--task-api", "chat", "--max-length", "4096"),
        *("--limit", "50", "--tasks", "gsm8k", "mmlu_pro"),
        *("--results", "HERE/../results/eval", "--side", "tuned"),
    ]


def test_eval_sh_passes_base_name_for_an_adapter_server(tmp_path: Path) -> None:
    sets = ["model.id=Qwen/Qwen3-32B", "serve.weights=adapter", "serve.env={MODEL_IMPL_TYPE: vllm}"]
    script = files_of(tmp_path, *sets)["serve/eval.sh"]
    assert "    --base sample-base\n" in script and "--base-url" not in script
    assert "--base-url URL" in files_of(tmp_path)["serve/eval.sh"]


@pytest.mark.parametrize(("format", "text"), [("chat", False), ("text", True), ("prompt_completion", True)])
def test_eval_sh_uses_chat_or_text_according_to_data_format(format: str, text: bool, tmp_path: Path) -> None:
    files = files_of(tmp_path, f"data.format={format}", "evaluate.tasks=[gsm8k]")
    script = files["serve/eval.sh"]
    assert ("\n    --text\n" in script) == text
    assert ("--task-api completions\n" in script) == text
    assert ("\n    --tokenizer google/gemma-3-27b-it\n" in script) == text


@pytest.mark.parametrize("own", ["model.tokenizer=./words", "model.add_tokens={'<a>': null}"])
def test_lm_eval_reads_a_changed_tokenizer_from_the_merged_folder(own: str, tmp_path: Path) -> None:
    script = files_of(tmp_path, own, "data.format=text", "evaluate.tasks=[gsm8k]")["serve/eval.sh"]
    assert '\n    --tokenizer "$here/../"merged\n' in script


def test_no_eval_files_without_evaluate_or_serve_section(tmp_path: Path) -> None:
    assert files_of(tmp_path, "evaluate={}") == {}
    assert files_of(tmp_path, "serve=null") == {}
    assert [*files_of(tmp_path)] == ["serve/eval.sh"]


def test_requirements_pin_lm_eval_and_its_dependencies(tmp_path: Path) -> None:
    text = files_of(tmp_path, "evaluate={tasks: [gsm8k]}")["requirements-eval.txt"]
    pinned = [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]
    assert str(pinned[0]) == "lm-eval[api]==0.4.13"
    assert {one.name: str(one.specifier)[2:] for one in pinned} == {
        name.partition("[")[0]: version for name, version in pins.evaluation().all.items()
    }
    assert {"transformers", "datasets", "aiohttp", "tenacity"} <= {one.name for one in pinned}


@pytest.mark.parametrize("name", ["a'\"`id` $(touch pwned).jsonl"])
def test_eval_sh_quotes_unusual_prompt_file_names(name: str, tmp_path: Path) -> None:
    tmp_path.joinpath(name).write_text(GOOD)
    script = files_of(tmp_path, f"evaluate.prompts={json.dumps(name)}")["serve/eval.sh"]
    assert f"HERE/../{name}" in words_of(tmp_path, script)
    assert not [*tmp_path.rglob("pwned")]
    assert shell_word(name) in script


def test_eval_sh_runs_in_an_artifact_and_hides_the_api_key(fake: Start, tmp_path: Path, root: Path) -> None:
    """Run it as in a pack: next to runtime/, with the machine's python3."""
    artifact = tmp_path / "generated/sample"
    (artifact / "serve").mkdir(parents=True)
    shutil.copytree(root / "runtime", tmp_path / "generated/runtime")
    (artifact / "serve/eval.sh").write_text(files_of(tmp_path)["serve/eval.sh"])
    (artifact / "prompts.jsonl").write_text(GOOD)
    (artifact / "requirements-train.txt").write_text("recipec-runtime==0\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").symlink_to(sys.executable)
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "VLLM_API_KEY": "a-secret"}
    with_key = fake(["sample"], key="a-secret")
    command = ["bash", str(artifact / "serve/eval.sh"), "--url", with_key.url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (artifact / "results/eval/summary.md").read_text() == done.stdout
    written = b"".join(path.read_bytes() for path in artifact.rglob("*") if path.is_file())
    assert b"a-secret" not in written + done.stdout.encode() + done.stderr.encode()


FAULTS = [
    (None, (), ["E0650 prompts.jsonl: there is no such file"]),
    ("", (), ["E0650 prompts.jsonl: it holds no prompts"]),
    (
        GOOD,
        ("evaluate.prompts=gs://b/p.jsonl",),
        ["E0650 `gs://b/p.jsonl` is an address: the prompts must be a local file"],
    ),
    (
        GOOD + '{"prompt": "3 + 3?"}\n{"prompt": "5?", "expected": "5)"}\n',
        (),
        [
            "E0651 prompts.jsonl:2: `expected` must be a regular expression, as text",
            "E0652 prompts.jsonl:3: `expected` is not a regular expression: unbalanced parenthesis at",
        ],
    ),
    ("{\n" * 9, (), [*["E0651 prompts.jsonl:"] * 5, "E0651 prompts.jsonl: 4 more lines have errors"]),
    (
        '{"prompt": "2 + 2?", "expected": "4?"}\n',
        (),
        ["W0653 prompts.jsonl:1: `expected` also matches an empty answer, so every answer passes"],
    ),
    (
        GOOD,
        ("evaluate.temperature=0",),
        ["W0654 at temperature 0 all 2 samples of a prompt are the same answer"],
    ),
    (GOOD, ("evaluate.max_tokens=4096",), ["E0655 max_tokens 4,096 leaves no room for a prompt: the server"]),
    (
        GOOD,
        ("serve=null",),
        ["N0656 without a serve section there is no server to evaluate, and eval.sh is not written"],
    ),
    (
        GOOD,
        ("evaluate.tasks=['gsm8k,mmlu', '--model_args']",),
        [
            "E0657 `gsm8k,mmlu` is not the name of a task of lm-eval",
            "E0657 `--model_args` is not the name of a task of lm-eval",
        ],
    ),
    (
        GOOD,
        ("evaluate.tasks=[mmlu]", "data.format=text"),
        ["W0658 tasks that score given answers by log probabilities, such as mmlu, crash the server"],
    ),
    (GOOD, ("evaluate.tasks=[mmlu]", "data.format=text", "model.id=Qwen/Qwen3-32B"), []),
    (GOOD, ("evaluate.tasks=[mmlu]",), []),
    (GOOD, (), []),
]


@pytest.mark.parametrize(("prompts", "sets", "wanted"), FAULTS)
def test_evaluate_section_checks_give_the_expected_diagnostics(
    prompts: str | None, sets: Sequence[str], wanted: list[str], tmp_path: Path
) -> None:
    said = found(tmp_path, *sets, prompts=prompts)
    assert len(said) == len(wanted)
    assert all(one.startswith(start) for one, start in zip(said, wanted, strict=True)), said


def test_slow_regex_does_not_block_the_check(tmp_path: Path) -> None:
    text = json.dumps({"prompt": "2 + 2?", "expected": "^((a+)+)+$"}) + "\n"
    assert found(tmp_path, prompts=text) == []
