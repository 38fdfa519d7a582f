"""Tests of the emitted smoke.sh: it runs in an artifact, and passes a recipe's texts unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.emitters.server import emit_smoke
from tests.clients.fake_vllm import Faults, Start
from tests.conftest import ROOT
from tests.emit.emitting import program_of

RECIPE = """\
recipe: 1
name: tuned
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: data/train.jsonl}]}
serve: {accelerator: v6e-8}
"""

ADAPTER = ["serve.weights=adapter", "serve.env={MODEL_IMPL_TYPE: vllm}"]


def script_of(folder: Path, *sets: str) -> str:
    """Return the smoke.sh of a recipe in `folder`."""
    (text,) = emit_smoke(program_of(folder, sets, RECIPE)).values()
    return text


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run smoke.sh in an artifact next to its runtime, from another folder, with this Python."""
    serving = tmp_path / "my work" / "runtime" / "clients"
    shutil.copytree(ROOT / "runtime" / "clients", serving, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("__init__.py", "errors.py", "progress.py"):
        shutil.copy(ROOT / "runtime" / name, serving.parent / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)

    def run(text: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "my work" / "tuned" / "serve" / "smoke.sh"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(text, encoding="utf-8")
        (script.parents[1] / "requirements-train.txt").touch()
        known = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "LC_ALL": "C.UTF-8",
        }
        return subprocess.run(
            ["bash", str(script), *arguments],
            cwd=tmp_path,
            env=known | environment,
            capture_output=True,
            encoding="utf-8",
            timeout=60,
        )

    return run


def test_smoke_sh_compares_adapter_and_base_on_the_server(
    fake: Start, run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    server = fake(["tuned", "tuned-base"], faults=Faults(token_seconds=0.001))
    text = script_of(tmp_path, *ADAPTER, f"serve.port={server.port}", "serve.smoke_prompts=[Who are you?]")
    assert "\n    --base tuned-base\n" in text
    report = tmp_path / "smoke.json"
    done = run(text, "--json", str(report))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "answers to 1 of 1 prompt, " in done.stdout.replace("of 1 prompts", "of 1 prompt")
    assert report.is_file()
    assert server.bodies("/v1/chat/completions")[-1]["messages"][0]["content"] == "Who are you?"


WORDS = [
    'it\'s $HOME, `id`, "quoted" \\ and $(id) !!',
    "-starts like a flag",
    "two\nlines\n",
    "ünïcode \N{SNOWMAN} ' \t tab",
    "${x:-}} }",
    "\\",
    "#comment; rm -rf * & | > <",
]


def test_smoke_sh_passes_unusual_prompts_and_paths_unchanged(
    run: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Replace python3 by a script that prints its arguments."""
    (tmp_path / "bin" / "python3").unlink()
    (tmp_path / "bin" / "python3").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    sets = [f"serve.smoke_prompts={json.dumps(WORDS)}", "serve.host=0.0.0.0", "serve.port=9000"]
    text = script_of(tmp_path, *sets)
    words = run(text).stdout.split("\0")
    assert words[:2] == ["-m", "runtime.clients.smoke"]
    assert [
        word.removeprefix("--must-differ=") for word in words if word.startswith("--must-differ=")
    ] == WORDS
    assert words[words.index("--url") + 1] == "http://127.0.0.1:9000" and "--api-key" in words


def test_smoke_sh_uses_short_one_turn_evaluation_prompts(tmp_path: Path) -> None:
    lines = [
        '{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}], '
        '"expected": "x"}',
        '{"messages": [{"role": "user", "content": "One turn?"}], "expected": "x"}',
        '{"prompt": "two\\nlines", "expected": "x"}',
        json.dumps({"prompt": "long" * 100, "expected": "x"}),
        *(f'{{"prompt": "Question {number}?", "expected": "x"}}' for number in range(5)),
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    sets = ["evaluate.prompts=questions.jsonl"]
    text = script_of(tmp_path, *sets)
    assert [line.strip() for line in text.splitlines() if "--prompt" in line] == [
        f'--prompt="{question}?"' for question in ("One turn", "Question 0", "Question 1")
    ]
    text = script_of(tmp_path, *sets, "serve.smoke_prompts=[Who are you?]")
    assert "--prompt" not in text and '--must-differ="Who are you?"\n' in text


def test_smoke_sh_passes_text_flag_for_text_data(tmp_path: Path) -> None:
    """Send plain text, because the model may have no chat template."""
    (tmp_path / "questions.jsonl").write_text('{"prompt": "Once upon", "expected": "time"}')
    text = script_of(tmp_path, "data.format=text", "evaluate.prompts=questions.jsonl")
    assert "\n    --text\n" in text and '--prompt="Once upon"\n' in text
    assert "--text" not in script_of(tmp_path)
