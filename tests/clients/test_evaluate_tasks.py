"""Tests of lm-eval's command line, results and faults, with a script in place of lm-eval.

`make nightly` runs the real one.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.clients import evaluate
from recipec.runtime.clients.evaluate_tasks import LmEval, TaskSettings, command, explained
from recipec.runtime.errors import guarded
from tests.clients.fake_vllm import FakeVllm, Start

STAND_IN = """\
#!{python}
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
given = dict(zip(words, words[1:]))
model = json.loads(given["--model_args"])
with open({calls!r}, "a") as file:
    file.write(json.dumps([words, os.environ["OPENAI_API_KEY"], os.environ.get("PYTHONPATH")]) + "\\n")
task = given["--tasks"]
if task == "broken":
    print(f"Traceback:\\n  File x\\nValueError: {{os.environ['OPENAI_API_KEY']}} is odd")
    sys.exit(1)
folder = Path(given["--output_path"], "some_name")
folder.mkdir(parents=True)
right = 6 if model["model"] == "m" else 3
values = [1.0] * right + [0.0] * (8 - right)
results = {{
    "results": {{task: {{
        "name": task, "alias": task, "sample_len": 8,
        "exact_match,none": right / 8, "exact_match_stderr,none": 0.17,
        "perplexity,none": 9.5, "perplexity_stderr,none": "N/A",
    }}}},
    "higher_is_better": {{task: {{"exact_match": True, "perplexity": False}}}},
    "n-samples": {{task: {{"original": 20, "effective": 8}}}},
    "lm_eval_version": "0.4.13",
}}
if task == "group":
    results["groups"] = {{"group": {{"alias": "g", "acc,none": 0.5, "acc_stderr,none": 0.1}}}}
    results["results"]["part"] = {{"alias": " - part", "acc,none": 0.4, "acc_stderr,none": 0.2}}
(folder / "results_2026-01-01T00-00-00.json").write_text(json.dumps(results))
row = {{"doc_hash": "h", "filter": "none"}}
lines = [row | {{"doc_id": i, "exact_match": value}} for i, value in enumerate(values)]
samples = folder / f"samples_{{task}}_2026-01-01T00-00-00.jsonl"
samples.write_text("\\n".join(map(json.dumps, lines)) + "\\n")
print("API returned null content. Content filled" if task == "mute" else "done")
"""


@pytest.fixture
def lm_eval(tmp_path: Path) -> Path:
    path = tmp_path / "lm_eval"
    path.write_text(STAND_IN.format(python=sys.executable, calls=str(tmp_path / "calls")))
    path.chmod(0o755)
    return path


def calls(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def run(server: FakeVllm, lm_eval: Path, *more: str) -> int:
    words = ["--url", server.url, "--name", "m", "--base", "m-base", "--lm-eval", str(lm_eval)]
    words += ["--results", str(lm_eval.parent / "results"), *more]
    return guarded(lambda: evaluate.main(words))


def summary(lm_eval: Path) -> dict[str, Any]:
    return json.loads((lm_eval.parent / "results/summary.json").read_text())


def test_lm_eval_tasks_run_on_base_and_tuned_model(
    fake: Start, lm_eval: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("PYTHONPATH", "/of/this/script")
    server = fake(["m", "m-base"], key="a-secret")
    assert run(server, lm_eval, "--tasks", "sums", "--limit", "8") == 0
    exact, perplexity = summary(lm_eval)["tasks"]
    assert (exact["base"]["value"], exact["tuned"]["value"]) == (3 / 8, 6 / 8)
    assert exact["tuned"]["low"] == pytest.approx(0.4093, abs=1e-4)  # Wilson's interval of 6 in 8
    assert exact["difference"] | {"low": 0, "high": 0} == {
        **{"value": 3 / 8, "low": 0, "high": 0, "better": 3, "worse": 0, "p_value": 0.25, "paired": True}
    }
    assert perplexity["better"] == "lower" and perplexity["tuned"]["low"] is None
    out = capsys.readouterr().out
    assert "| sums | perplexity, lower is better | 9.5 | 9.5 | - |" in out
    # lm-eval gets the key only from its environment.
    for words, key, path in calls(lm_eval.parent):
        assert key == "a-secret" and path is None and not any("a-secret" in word for word in words)
        assert words[words.index("--limit") + 1] == "8"
    assert [json.loads(words[4])["model"] for words, _, _ in calls(lm_eval.parent)] == ["m-base", "m"]


def test_finished_tasks_are_not_run_again(fake: Start, lm_eval: Path) -> None:
    server = fake(["m", "m-base"])
    assert run(server, lm_eval, "--tasks", "sums") == 0
    assert run(server, lm_eval, "--tasks", "sums", "other") == 0
    assert len(calls(lm_eval.parent)) == 4
    assert run(server, lm_eval, "--tasks", "sums", "--limit", "3", "--side", "tuned") == 1
    assert summary(lm_eval)["problems"] == ["base: there is no result of sums"]
    assert "difference" not in summary(lm_eval)["tasks"][0]


def test_task_group_is_the_first_row_and_differences_are_unpaired(fake: Start, lm_eval: Path) -> None:
    assert run(fake(["m", "m-base"]), lm_eval, "--tasks", "group") == 0
    rows = summary(lm_eval)["tasks"]
    assert [row["task"] for row in rows] == ["group", "part"]
    assert rows[1]["difference"]["paired"] is False
    assert rows[1]["difference"]["high"] == pytest.approx(1.96 * 0.2 * 2**0.5, abs=1e-3)


def test_failed_task_keeps_other_results_and_its_log_hides_the_key(
    fake: Start, lm_eval: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "a-secret")
    assert run(fake(["m", "m-base"], key="a-secret"), lm_eval, "--tasks", "broken", "sums") == 1
    said = capsys.readouterr()
    assert "error: fine-tuned: broken: lm-eval ended with 1: ValueError:" in said.err
    assert "a-secret" not in said.err + said.out
    logs = [*lm_eval.parent.glob("results/*/tasks/*/lm-eval.log")]
    assert len(logs) == 4 and not any("a-secret" in log.read_text() for log in logs)
    assert [row["task"] for row in summary(lm_eval)["tasks"]] == ["sums", "sums"]


def test_empty_answers_that_lm_eval_counts_as_wrong_are_reported(
    fake: Start, lm_eval: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(fake(["m", "m-base"]), lm_eval, "--tasks", "mute") == 1
    assert "base: 1 answers to mute are empty, which lm-eval counts as wrong" in capsys.readouterr().err


def test_lm_eval_command_uses_completions_or_chat_endpoint(tmp_path: Path) -> None:
    settings = TaskSettings("completions", None, 64, 4096, "org/tokenizer")
    words = command(LmEval("lm", "http://h:1", "2026", 4, tmp_path / "more"), "t", settings, tmp_path)
    given = dict(pairwise(words))
    assert given["--model"] == "local-completions" and "--apply_chat_template" not in words
    assert json.loads(given["--model_args"]) == {
        "model": "2026",
        "base_url": "http://h:1/v1/completions",
        "num_concurrent": 4,
        "max_gen_toks": 64,
        "timeout": 3600,
        "max_length": 4096,
        "tokenizer": "org/tokenizer",
        "tokenizer_backend": "huggingface",
    }
    assert given["--include_path"] == str(tmp_path / "more") and "--limit" not in words
    chat = command(LmEval("lm", "http://h:1", "m", 4), "t", TaskSettings(limit=5), tmp_path)
    assert "local-chat-completions" in chat and "--apply_chat_template" in chat


SAID = [
    ("ValueError: Tasks not found: ['nosuch']", "lm-eval knows no such task"),
    (
        "NotImplementedError: Loglikelihood is not supported for chat completions. Consider",
        "scores given answers by their log probabilities",
    ),
    (
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find",
        "could not be fetched from the Hugging Face",
    ),
    (
        "Requesting API: 0%\naiohttp.client_exceptions.ClientConnectorError: Cannot connect",
        "no longer answers",
    ),
    (
        'API request failed! Status code: 400, Response text: {"error": 1}. Retrying...',
        'the server answered 400: {"error": 1}. Retrying',
    ),
    (
        "Attempted to run tasks: ['x'] which are unsafe. confirm_run_unsafe_code",
        "runs code that the model writes",
    ),
    ("KeyError: 'x'", "lm-eval ended with 3: KeyError: 'x'"),
]


@pytest.mark.parametrize(("log", "wanted"), SAID)
def test_lm_eval_failure_reason_is_read_from_its_log(log: str, wanted: str) -> None:
    assert wanted in explained(log, 3)
