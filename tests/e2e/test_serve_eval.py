"""eval.sh and `recipe serve verify` against the real vLLM: an adapter beside its base, with the real lm-eval.

One server: a tiny Gemma 4 of random weights in the multimodal layout, in float32. The figures go to
build/e2e/serve-eval.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.emit import emit
from compiler.emitters.evaluate import emit_evaluate
from compiler.lower import lower
from compiler.serving.verify import report, verify
from runtime.checkpoint import BaseCheckpoint
from spec.diagnostics import render_text
from spec.load import load
from tests.e2e import lm_eval, vllm_cpu
from tests.e2e.test_vllm import make_gemma4, merged_in_float32
from tests.runtime.runs import lora_section, save_run

pytestmark = pytest.mark.e2e

RECIPE = """\
recipe: 1
name: tiny
model: {id: Qwen/Qwen3-32B}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: gs://bucket/train.jsonl}]}
serve: {accelerator: v6e-8, weights: adapter, env: {MODEL_IMPL_TYPE: vllm}}
evaluate: {prompts: prompts.jsonl, samples: 5, temperature: 0.8, max_tokens: 24, tasks: [sums], limit: 8}
"""
"""What is evaluated has this recipe's names; its model is too large to be served here."""

PATTERNS = ("[aeiou]", r"^\s*\w+", "the|and", "[0-9]", "[A-Z][a-z]")

TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 16}}
filter_list:
  - name: first-letter
    filter: [{{function: regex, regex_pattern: "([a-z])"}}, {{function: take_first}}]
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The base, the merged folder and the adapter."""
    folder = tmp_path_factory.mktemp("models")
    make_gemma4(folder / "base")
    section = lora_section(rslora=True, rank_pattern={"o_proj": 5})
    save_run(folder / "run", BaseCheckpoint.open(folder / "base"), section, scale=0.1)
    return (folder / "base", *merged_in_float32(folder / "base", "gemma4", folder / "run", folder / "out"))


@pytest.fixture(scope="module")
def server(models: tuple[Path, Path, Path]) -> Iterator[vllm_cpu.Server]:
    base, _, adapter = models
    names = ("--served-model-name", "tiny-base")
    with vllm_cpu.serve(base, "serve-eval", *names, adapters={"tiny": adapter}) as running:
        yield running


@pytest.fixture(scope="module")
def figures(root: Path) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    yield found
    path = root / "build" / "e2e" / "serve-eval.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


def test_verify_passes_on_the_merged_folder_and_fails_on_the_base(
    models: tuple[Path, Path, Path], server: vllm_cpu.Server, figures: dict[str, Any]
) -> None:
    base, merged, _ = models
    result = verify(server.url, model=merged, name="tiny", server_dtype="float32")
    print(report(result))
    assert result["problems"] == []
    assert len(result["prompts"]) == 9 and all(row["same_prompt"] for row in result["prompts"])
    figures["verify: largest and mean difference"] = [f"{result[key]:.2g}" for key in ("largest", "mean")]
    assert verify(server.url, model=base, name="tiny-base", server_dtype="float32")["problems"] == []
    wrong = verify(server.url, model=merged, name="tiny-base", server_dtype="float32")
    assert any("log probabilities differ by up to" in problem for problem in wrong["problems"])
    figures["verify: the base in place of the merged model"] = f"{wrong['largest']:.2g}"


def test_both_sides_are_evaluated(
    server: vllm_cpu.Server, figures: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"Say the word number {i}, please.", "expected": PATTERNS[i % len(PATTERNS)]}
        for i in range(20)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lowered = lower(load(tmp_path / "recipe.yaml"))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    artifact = tmp_path / "generated" / "tiny"
    files = emit(lowered.program) | {k: v.encode() for k, v in emit_evaluate(lowered.program).items()}
    for path, content in files.items():
        (artifact / path).parent.mkdir(parents=True, exist_ok=True)
        (artifact / path).write_bytes(content)
    (tmp_path / "generated" / "runtime").symlink_to(root / "runtime")
    include = task_folder(tmp_path / "tasks")
    program = lm_eval.install((artifact / "requirements-eval.txt").read_text())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    command = ["bash", str(artifact / "serve" / "eval.sh"), "--url", server.url]
    command += ["--lm-eval", str(program), "--include-path", str(include)]

    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    figures["eval.sh: seconds"] = round(time.monotonic() - started)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    results = artifact / "results" / "eval"
    data = json.loads((results / "summary.json").read_text())
    assert [*data["prompts"]["pass_at"]] == ["1", "2", "5"]
    for side, model in (("base", "tiny-base"), ("tuned", "tiny")):
        assert data["sides"][side]["model"] == model
        answers = [json.loads(line) for line in (results / side / "answers.jsonl").read_text().splitlines()]
        assert len(answers) == 20 * 5
        # Sampled without a seed: a prompt's answers are different ones all the same.
        assert len({answer["text"] for answer in answers}) > 90
        rates = [data["prompts"]["pass_at"][k][side]["value"] for k in ("1", "2", "5")]
        assert 0.1 < rates[0] < rates[1] < rates[2]
    (task,) = data["tasks"]
    assert task["base"]["questions"] == task["tuned"]["questions"] == 8
    assert task["difference"]["paired"] is True
    figures["eval.sh: pass@1"] = {
        side: data["prompts"]["pass_at"]["1"][side] for side in ("base", "tuned", "difference")
    }

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and again.stdout == done.stdout
    assert "100 of 100 answers are of an earlier run" in again.stderr


def task_folder(folder: Path) -> Path:
    """A task of lm-eval's with its data, so that nothing is fetched."""
    folder.mkdir()
    rows = [{"question": f"What comes after {i}?", "answer": "abcdefghijkl"[i]} for i in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(TASK.format(data=folder / "sums.jsonl"))
    return folder
