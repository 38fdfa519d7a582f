"""Tests of a server's clients against the real vLLM: smoke, eval.sh with lm-eval, and `recipe serve verify`.

One server runs on a CPU: a tiny Gemma 4 of random weights in the multimodal layout, in float32, with an
adapter, an adapter without effect, and a key. The other tests of clients use tests/clients/fake_vllm.py,
whose answers are compared with this server's. The figures are written to build/e2e/serve-clients.json.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.deployment.verify_server import VerifyOptions, document, verify
from recipec.compiler.emitters.emit import emit
from recipec.compiler.emitters.server import emit_evaluate
from recipec.compiler.lower import lower
from recipec.compiler.pages.text import write
from recipec.runtime.clients import evaluate, smoke
from recipec.runtime.clients.client import KEY_VARIABLE, Client, ServerError
from recipec.runtime.weights.checkpoint import HFCheckpoint
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load
from tests.clients.fake_vllm import FakeVllm
from tests.e2e import lm_eval, vllm_cpu
from tests.e2e.merged_models import make_gemma4, merged_in_float32
from tests.runtime.runs import lora_section, save_run

pytestmark = pytest.mark.nightly

KEY = "sesame-4711"

VERSION = "0.32.0"

RECIPE = """\
recipe: 1
name: tuned
model: {id: Qwen/Qwen3-32B}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [{path: gs://bucket/train.jsonl}]}
serve: {accelerator: v6e-8, weights: adapter, env: {MODEL_IMPL_TYPE: vllm}}
evaluate: {prompts: prompts.jsonl, samples: 5, temperature: 0.8, max_tokens: 24, tasks: [sums], limit: 8}
"""
"""The recipe with the names that the evaluation uses; its model is too large to be served here."""

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


@dataclass(frozen=True)
class Served:
    """A server of "tuned-base" and its adapters "tuned" and "untrained", which requires a key.

    Attributes:
        base, merged: the folders that "tuned-base" and "tuned" answer as.
        adapter: the folder of "tuned".
    """

    url: str
    base: Path
    merged: Path
    adapter: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("clients")
    make_gemma4(folder / "base")
    opened = HFCheckpoint.open(folder / "base")
    section = lora_section(rslora=True, rank_pattern={"o_proj": 5})
    merged, adapters = {}, {}
    for name, scale in (("tuned", 0.1), ("untrained", 0.0)):
        save_run(folder / name, opened, section, scale=scale)
        merged[name], adapters[name] = merged_in_float32(
            folder / "base", "gemma4", folder / name, folder / f"out-{name}"
        )
    options = ("--served-model-name", "tuned-base", "--api-key", KEY)
    with vllm_cpu.serve(folder / "base", "clients", *options, adapters=adapters) as server:
        yield Served(server.url, folder / "base", merged["tuned"], adapters["tuned"])


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


@pytest.fixture(scope="module")
def figures(root: Path) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {}
    yield found
    path = root / "build" / "e2e" / "serve-clients.json"
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


def run(served: Served, model: str, *arguments: str) -> int:
    options = ["--url", served.url, "--model", model, "--base", "tuned-base", "--vllm", VERSION, "--api-key"]
    return smoke.main([*options, *arguments])


def test_adapter_passes_every_smoke_check_on_real_vllm(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run(served, "tuned", "--json", str(tmp_path / "smoke.json"), "--must-differ", "Who are you?")
    output = capfd.readouterr().out
    print(output)
    assert status == 0
    assert "answers to 1 of 1 prompt, " in output and "API key               " in output and KEY not in output
    record = json.loads((tmp_path / "smoke.json").read_text("utf-8"))
    assert {check["state"] for check in record["checks"]} == {"ok"}
    assert record["figures"]["logprob_distance"] > 0.01
    assert 0 < record["figures"]["ttft_seconds"] < 60 and record["figures"]["tokens_per_second"] > 0.1


def test_verify_distinguishes_merged_model_and_base_on_real_vllm(
    served: Served, figures: dict[str, Any]
) -> None:
    result = verify(VerifyOptions(served.url, model=served.merged, name="tuned", server_dtype="float32"))
    print(write(document(result)))
    assert result["problems"] == []
    assert len(result["prompts"]) == 9 and all(row["same_prompt"] for row in result["prompts"])
    figures["verify: largest and mean difference"] = [f"{result[key]:.2g}" for key in ("largest", "mean")]
    base = VerifyOptions(served.url, model=served.base, name="tuned-base", server_dtype="float32")
    assert verify(base)["problems"] == []
    wrong = verify(replace(base, model=served.merged))
    assert any("log probabilities differ by up to" in problem for problem in wrong["problems"])
    figures["verify: the base in place of the merged model"] = f"{wrong['largest']:.2g}"


def test_eval_sh_evaluates_base_and_adapter_on_real_vllm(
    served: Served, figures: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": f"Say the word number {i}, please.", "expected": PATTERNS[i % len(PATTERNS)]}
        for i in range(10)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    lowered = lower(load(tmp_path / "recipe.yaml"))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    artifact = tmp_path / "generated" / "tuned"
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
    command = ["bash", str(artifact / "serve" / "eval.sh"), "--url", served.url]
    command += ["--lm-eval", str(program), "--include-path", str(include)]

    started = time.monotonic()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    figures["eval.sh: seconds"] = round(time.monotonic() - started)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    results = artifact / "results" / "eval"
    data = json.loads((results / "summary.json").read_text())
    assert [*data["prompts"]["pass_at"]] == ["1", "2", "5"]
    for side, model in (("base", "tuned-base"), ("tuned", "tuned")):
        assert data["sides"][side]["model"] == model
        answers = [json.loads(line) for line in (results / side / "answers.jsonl").read_text().splitlines()]
        assert len(answers) == 10 * 5
        # Without a seed, samples of a prompt still differ.
        assert len({answer["text"] for answer in answers}) > 45
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
    assert "50 of 50 answers are from an earlier run" in again.stderr


def test_folders_give_the_servers_answers(served: Served, figures: dict[str, Any], tmp_path: Path) -> None:
    """Run smoke and the evaluation on the server, on the adapter's folder and on the merged weights."""
    rows = [{"prompt": f"Say the word number {i}, please.", "expected": "e"} for i in range(6)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, smokes = {}, {}
    for name, url in (("server", served.url), ("adapter", served.adapter), ("merged", served.merged)):
        base = ["--base", "tuned-base"] + ["--base-url", str(served.base)] * (name == "merged")
        words = ["--url", str(url), "--name", "tuned", *base, "--max-tokens", "24"]
        words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--results", str(tmp_path / name)]
        started = time.monotonic()
        assert evaluate.main(words) == 0
        figures[f"evaluate on {name}: seconds"] = round(time.monotonic() - started, 1)
        for side in ("base", "tuned"):
            lines = (tmp_path / name / side / "answers.jsonl").read_text().splitlines()
            answers[name, side] = sorted(lines)
        report = tmp_path / f"{name}.json"
        words = ["--url", str(url), "--model", "tuned", *base, "--must-differ", "Who are you?"]
        assert smoke.main([*words, "--json", str(report)]) == 0
        record = json.loads(report.read_text())
        compared = next(check for check in record["checks"] if check["name"] == "differs from base")
        smokes[name] = compared["figures"]["prompts"]
    for name in ("adapter", "merged"):
        assert [answers[name, side] for side in ("base", "tuned")] == [
            answers["server", side] for side in ("base", "tuned")
        ]
        for here, there in zip(smokes[name], smokes["server"], strict=True):
            assert (here["answer"], here["base_answer"]) == (there["answer"], there["base_answer"])
            assert here["logprob_distance"] == pytest.approx(there["logprob_distance"], abs=1e-3)


def task_folder(folder: Path) -> Path:
    """Write an lm-eval task with its data, so that it downloads nothing."""
    folder.mkdir()
    rows = [{"question": f"What comes after {i}?", "answer": "abcdefghijkl"[i]} for i in range(12)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(TASK.format(data=folder / "sums.jsonl"))
    return folder


IDS = [2, 30, 31, 32]
CHAT = {"messages": [{"role": "user", "content": "What is the sea?"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": IDS, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
USAGE = {"stream_options": {"include_usage": True}}

REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with ids and logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat stream with usage and ids": (
        "/v1/chat/completions",
        {**CHAT, **USAGE, "return_token_ids": True, "stream": True},
    ),
    "completion": ("/v1/completions", TEXT),
    "completion with ids and logprobs": ("/v1/completions", {**TEXT, **TOKENS, "logprobs": 2}),
    "completion stream": ("/v1/completions", {**TEXT, **TOKENS, **USAGE, "logprobs": 1, "stream": True}),
    "no such model": ("/v1/chat/completions", {**CHAT, "model": "nobody"}),
    "too long": ("/v1/completions", {**TEXT, "prompt": [30] * 300}),
    "no such path": ("/v1/nothing", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_fake_vllm_json_has_the_shape_of_real_vllm_json(served: Served, name: str) -> None:
    path, body = REQUESTS[name]
    with FakeVllm(["tuned", "untrained", "tuned-base"], key=KEY, max_model_len=256) as fake:
        answers = [answer(url, path, body) for url in (served.url, fake.url)]
    assert same(*answers), f"{json.dumps(answers[0])}\n{json.dumps(answers[1])}"


def answer(url: str, path: str, body: dict[str, Any] | None) -> Any:
    """Return a server's answer: JSON, a stream's first and last events, or an error."""
    client = Client(url)
    try:
        if path == "/v1/models":
            return sorted(client.get(path)["data"], key=lambda card: card["id"])
        if body is None:
            return client.get(path)
        body = {"model": "tuned", **body}
        if not body.get("stream"):
            return client.post(path, body)
        events = list(client.stream(path, body))
        return [events[:2], events[-1:]]
    except ServerError as error:
        return [
            error.kind,
            error.status,
            re.sub(r"(?s)\. (Please|Valid).*", "", error.message).replace(url, "URL"),
        ]


def same(real: Any, fake: Any) -> bool:
    """Return whether two JSON values have the same keys, and values of the same kinds.

    Lists are compared up to the length of the shorter one. The fake has only some of OpenAI's permissions.
    """
    if isinstance(real, dict) and isinstance(fake, dict):
        if all(re.fullmatch(r"(token_id:)?\d+", key) for key in (*real, *fake)):
            return same(list(real.values()), list(fake.values()))
        if real.get("object") == "model_permission":
            return fake.keys() <= real.keys()
        return real.keys() == fake.keys() and all(same(real[key], fake[key]) for key in real)
    if isinstance(real, list) and isinstance(fake, list):
        if all(isinstance(item, int) for item in (*real, *fake)):
            # Tokens and bytes. A token that is part of a character has no bytes.
            return True
        return bool(real) == bool(fake) and all(same(a, b) for a, b in zip(real, fake, strict=False))
    if isinstance(real, str) and isinstance(fake, str) and " " in real and "URL" in real:
        return real == fake
    if real is None or fake is None:
        return real is fake
    return isinstance(fake, float) if isinstance(real, float) else type(real) is type(fake)
