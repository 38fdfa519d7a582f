"""Tests of eval.sh's program against a fake vLLM: both models, restarts, faults and tables."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.clients import evaluate, evaluate_answers
from recipec.runtime.clients.evaluate_answers import Answer, SamplingSettings, SideAnswers, recorded
from recipec.runtime.clients.evaluate_prompts import parse, read
from recipec.runtime.clients.evaluate_summary import judge
from recipec.runtime.clients.output_files import guarded
from recipec.runtime.errors import UserError
from tests.clients.fake_language import Language
from tests.clients.fake_vllm import FakeVllm, Faults, Start

SUMS = [{"prompt": f"What is {n} plus {n}?", "expected": rf"\b{2 * n}\b"} for n in range(1, 9)]


def sums(model: str, prompt: str, sample: int) -> str | None:
    """Add in the tuned model, and add 1 in the base, which is only right about 1 + 1."""
    found = re.search(r"What is (\d+) plus", prompt)
    if found is None:
        return None
    number = int(found.group(1))
    return f"It is {number * 2 if model == 'sums' else number + 1}."


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_answers, "PAUSE", 0.01)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return written(tmp_path / "prompts.jsonl", SUMS)


def written(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(server: FakeVllm, prompts: Path, *more: str, results: str = "results") -> int:
    """Evaluate as eval.sh does. The results are next to the prompts."""
    folder = prompts.parent / results
    words = ["--url", server.url, "--name", "sums", "--prompts", str(prompts), "--results", str(folder)]
    return guarded(lambda: evaluate.main([*words, *more]))


def summary(prompts: Path, results: str = "results") -> dict[str, Any]:
    return json.loads((prompts.parent / results / "summary.json").read_text("utf-8"))


def asked(server: FakeVllm) -> list[Any]:
    """Return the requests for answers, without the probes."""
    bodies = server.bodies("/v1/chat/completions") + server.bodies("/v1/completions")
    return [body for body in bodies if body["max_tokens"] > 1]


def test_evaluation_compares_adapter_and_base_of_one_server(
    fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(["sums", "sums-base"], language=Language(script=sums))
    assert run(server, prompts, "--base", "sums-base") == 0
    data = summary(prompts)
    row = data["prompts"]["pass_at"]["1"]
    assert (row["base"]["value"], row["tuned"]["value"]) == (1 / 8, 1.0)
    assert row["difference"]["value"] == 7 / 8 and row["difference"]["low"] > 0.5
    assert (row["difference"]["better"], row["difference"]["worse"]) == (7, 0)
    assert data["problems"] == []
    page = (prompts.parent / "results" / "summary.md").read_text("utf-8")
    assert capsys.readouterr().out == page
    assert "| pass@1 | 12.5 % [2.2, 47.1] | 100.0 % [67.6, 100.0] | +87.5 points [+62.5, +100.0] |" in page
    assert "| 2 | What is 2 plus 2? | 0 / 1 | 1 / 1 |" in page


def test_samples_are_separate_requests_and_reported_as_pass_at_k(fake: Start, prompts: Path) -> None:
    def often(model: str, prompt: str, sample: int) -> str:
        # Every second answer is right.
        with server.lock:
            count[prompt] = count.get(prompt, 0) + 1
            return sums("sums", prompt, 0) or "" if count[prompt] % 2 else "I do not know."

    count: dict[str, int] = {}
    server = fake(["sums"], language=Language(script=often))
    assert run(server, prompts, "--samples", "4", "--temperature", "0.8", "--max-tokens", "60") == 0
    bodies = asked(server)
    assert len(bodies) == 8 * 4
    assert all("seed" not in body and body["temperature"] == 0.8 for body in bodies)
    rates = summary(prompts)["prompts"]["pass_at"]
    assert [*rates] == ["1", "2", "4"]
    # A probe's question shifts the first prompt's turn, but not its count of two in four.
    assert rates["1"]["tuned"]["value"] == 0.5
    assert rates["2"]["tuned"]["value"] == pytest.approx(5 / 6)
    assert rates["4"]["tuned"]["value"] == 1.0


def test_restart_requests_only_missing_answers(fake: Start, prompts: Path) -> None:
    server = fake(["sums"], language=Language(script=sums))
    assert run(server, prompts) == 0
    answers = prompts.parent / "results/tuned/answers.jsonl"
    lines = answers.read_bytes().splitlines(keepends=True)
    # The last line is cut in the middle, and another line is missing.
    answers.write_bytes(b"".join(lines[:-2]) + lines[-1][:20])
    again = fake(["sums"], language=Language(script=sums))
    assert run(again, prompts) == 0
    assert len(asked(again)) == 2
    assert summary(prompts)["prompts"]["pass_at"]["1"]["tuned"]["prompts"] == 8
    third = fake(["sums"], language=Language(script=sums))
    assert run(third, prompts, "--samples", "2") == 0
    assert len(asked(third)) == 8
    fourth = fake(["sums"], language=Language(script=sums))
    assert run(fourth, prompts, "--fresh") == 0
    assert len(asked(fourth)) == 8


def test_changed_expected_regex_rejudges_recorded_answers(fake: Start, prompts: Path) -> None:
    server = fake(["sums"], language=Language(script=sums))
    assert run(server, prompts) == 0
    written(prompts, [{**row, "expected": "It is 2\\."} for row in SUMS])
    assert run(server, prompts) == 0
    assert len(asked(server)) == 8
    assert summary(prompts)["prompts"]["pass_at"]["1"]["tuned"]["value"] == 1 / 8


def test_answers_under_different_settings_are_not_compared(
    fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(["sums", "sums-base"], language=Language(script=sums))
    assert run(server, prompts, "--side", "base", "--base", "sums-base", "--max-tokens", "99") == 0
    assert [*summary(prompts)["sides"]] == ["base"]
    assert "fine-tuned: not evaluated yet: eval.sh --side tuned --url URL" in capsys.readouterr().out
    assert run(server, prompts, "--side", "tuned") == 1
    data = summary(prompts)
    assert data["problems"] == ["base: 8 of 8 answers are missing (8 are recorded under other settings)"]
    assert (
        "base" not in data["prompts"]["pass_at"]["1"] and "difference" not in data["prompts"]["pass_at"]["1"]
    )
    assert run(server, prompts, "--side", "tuned", "--max-tokens", "99") == 0
    assert summary(prompts)["prompts"]["pass_at"]["1"]["difference"]["value"] == 7 / 8


def test_base_url_evaluates_the_base_on_its_own_server(fake: Start, prompts: Path) -> None:
    tuned = fake(["sums"], language=Language(script=sums))
    base = fake(["google/base"], language=Language(script=sums))
    assert run(tuned, prompts, "--base-url", base.url) == 0
    assert summary(prompts)["sides"]["base"]["model"] == "google/base"
    assert {body["model"] for body in asked(base)} == {"google/base"}
    assert {body["model"] for body in asked(tuned)} == {"sums"}
    assert summary(prompts)["prompts"]["pass_at"]["1"]["difference"]["value"] == 7 / 8


def test_text_flag_sends_prompts_to_the_completions_api(fake: Start, prompts: Path) -> None:
    server = fake(["sums"], language=Language(script=sums))
    assert run(server, prompts, "--text") == 0
    assert not server.bodies("/v1/chat/completions")
    assert {body["prompt"] for body in asked(server)} == {row["prompt"] for row in SUMS}


@pytest.mark.parametrize("status", [400, 500])
def test_failed_request_counts_as_missing_and_the_next_run_retries_it(
    status: int, fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(["sums"], language=Language(script=sums))
    real = server.language.encode_chat

    def refuse(messages: Any) -> list[int]:
        if "5 plus 5" in str(messages):
            return [0] * (server.max_model_len + 1)
        return real(messages)

    if status == 400:
        server.language.encode_chat = refuse  # type: ignore[method-assign]
        assert run(server, prompts) == 1
        data = summary(prompts)
        assert data["prompts"]["pass_at"]["1"]["tuned"] == pytest.approx(
            {"value": 1.0, "prompts": 7, "low": 0.6457, "high": 1.0}, abs=1e-4
        )
        assert data["problems"][0] == "fine-tuned: 1 of 8 answers are missing"
        assert "answers 400 Bad Request: This model's maximum context length is 4096" in data["problems"][1]
        assert "error: fine-tuned: 1 request failed" in capsys.readouterr().err
        return
    assert run(server, prompts, "--side", "tuned") == 0
    server.faults.fail["/v1/chat/completions"] = 500
    written(prompts, [*SUMS, {"prompt": "What is 9 plus 9?", "expected": "18"}])
    assert run(server, prompts) == 1
    assert "1 of 9 answers are missing" in capsys.readouterr().err
    # It failed three times, and the next run retries it.
    del server.faults.fail["/v1/chat/completions"]
    assert run(server, prompts) == 0
    assert summary(prompts)["prompts"]["pass_at"]["1"]["tuned"]["prompts"] == 9


def test_answers_before_a_server_death_are_kept(
    fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = fake(["sums"], language=Language(script=sums), faults=Faults(die_after=4))
    assert run(server, prompts, "--concurrency", "1") == 1
    said = capsys.readouterr().err
    assert f"error: nothing listens at {server.url}" in said
    assert "3 of 8 answers are in" in said and "run again to continue" in said
    again = fake(["sums"], language=Language(script=sums))
    assert run(again, prompts) == 0
    assert len(asked(again)) == 5


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_interrupted_or_killed_run_keeps_its_answers(
    signum: int, status: int, fake: Start, prompts: Path, root: Path
) -> None:
    server = fake(["sums"], language=Language(script=sums), faults=Faults(pause=0.05))
    words = ["--url", server.url, "--name", "sums", "--prompts", str(prompts), "--concurrency", "1"]
    words += ["--results", str(prompts.parent / "results"), "--samples", "20"]
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.clients.evaluate", *words],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    answers = prompts.parent / "results/tuned/answers.jsonl"
    while process.poll() is None and not (answers.is_file() and answers.read_bytes().count(b"\n") >= 3):
        time.sleep(0.01)
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status and "Traceback" not in err and not out
    if signum == signal.SIGINT:
        assert "interrupted; the answers so far are kept" in err
    kept = answers.read_bytes().count(b"\n")
    again = fake(["sums"], language=Language(script=sums))
    assert run(again, prompts, "--samples", "20") == 0
    assert len(asked(again)) == 8 * 20 - kept


FAULTS: list[tuple[list[str], list[str], str]] = [
    (["else"], [], "error: URL does not serve sums, but else\n  = help: start the recipe's server there"),
    (
        ["a", "b"],
        ["--side", "base"],
        "error: URL serves a, b: which of them is meant?\n  = help: --base NAME",
    ),
    (
        ["sums"],
        ["--side", "both"],
        "error: the address of the base's server is not known\n  = help: give --base-url URL",
    ),
    (
        ["sums"],
        ["--tasks", "gsm8k", "--lm-eval", "/nowhere/lm_eval"],
        "error: there is no program /nowhere/lm_eval: the recipe's tasks cannot be run\n  = help: python3",
    ),
]


@pytest.mark.parametrize(("models", "more", "wanted"), FAULTS)
def test_invalid_evaluation_setup_gives_one_sentence_error(
    models: list[str],
    more: list[str],
    wanted: str,
    fake: Start,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = fake(models)
    assert run(server, prompts, *more) == 1
    assert capsys.readouterr().err.replace(server.url, "URL").startswith(wanted)


def test_recorded_answers_of_another_model_are_refused(
    fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Detect by its log probabilities a model that was trained again under the same name."""
    assert run(fake(["sums"], language=Language({"sums": "first"})), prompts) == 0
    assert run(fake(["sums"], language=Language({"sums": "second"})), prompts) == 1
    said = capsys.readouterr().err
    assert "holds the answers of another model of the name sums" in said and "--fresh" in said
    assert run(fake(["other"], language=Language({"other": "first"})), prompts, "--model", "other") == 1
    assert "holds the answers of sums, not of other" in capsys.readouterr().err


def test_adapter_with_the_base_log_probabilities_is_reported(
    fake: Start, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    language = Language({"sums": "one", "sums-base": "one"})
    assert run(fake(["sums", "sums-base"], language=language), prompts, "--base", "sums-base") == 0
    assert "both sides give the same log probabilities" in capsys.readouterr().out


def test_regex_over_the_time_limit_leaves_the_answer_undecided(tmp_path: Path) -> None:
    path = written(
        tmp_path / "p.jsonl", [{"prompt": "one", "expected": "(a+)+$"}, {"prompt": "two", "expected": "a"}]
    )
    prompts, settings = read(path), SamplingSettings()
    answers = SideAnswers({(p.digest, 0): Answer(p.digest, 0, "a" * 60 + "!") for p in prompts})
    slow, fast = judge(prompts, answers, settings, seconds=0.5)
    assert slow.undecided and slow.rate(1) is None
    assert not fast.undecided and fast.rate(1) == 1.0


def test_second_run_on_a_locked_answers_file_is_refused(fake: Start, prompts: Path, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with evaluate_answers._journal(path), pytest.raises(UserError, match="another run writes to"):
        evaluate_answers.ask(
            evaluate_answers.Client(fake(["sums"]).url), "sums", read(prompts), SamplingSettings(), path
        )


def test_lone_surrogate_in_an_answer_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    with evaluate_answers._journal(path) as write:
        write(
            {"prompt": "p", "sample": 0, "text": "\ud83d", "cut": False, "tokens": 1}
            | SamplingSettings().drawn()
        )
    assert recorded(path, SamplingSettings()).kept["p", 0].text == "\ud83d"


LINES: list[tuple[str, str]] = [
    ('{"prompt": "a"', ":1: it is not JSON: Expecting ',' delimiter at column 15"),
    ("[]", ":1: it is not a JSON object"),
    ('{"prompt": "a"}', ":1: `expected` must be a regular expression, as text"),
    ('{"prompt": "", "expected": "b"}', ":1: `prompt` must be a text that is not empty"),
    ('{"expected": "b"}', ":1: it must have either `prompt` or `messages`"),
    ('{"prompt": "a", "expcted": "b"}', ":1: it has the unknown key `expcted`"),
    ('{"messages": [], "expected": "b"}', ":1: `messages` must be a list that is not empty"),
    ('{"messages": [{"role": "usr", "content": "a"}], "expected": "b"}', "has a `role`, one of system,"),
    ('{"messages": [{"role": "user"}], "expected": "b"}', ":1: each of `messages` has a `content`"),
    (
        '{"messages": [{"role": "assistant", "content": "b"}], "expected": "c"}',
        "there is nothing left to answer",
    ),
    (
        '{"prompt": "a", "expected": "(b"}',
        ":1: `expected` is not a regular expression: missing ), unterminated subpattern at position 0",
    ),
    (
        '{"prompt": "a", "expected": "b"}\n\n{"prompt": "a", "expected": "c"}',
        ":3: it asks the same as line 1",
    ),
    ("\n\n", ": it holds no prompts"),
    ("{\n[", " (and 1 more)"),
    (f'{{"prompt": {"1" * 5000}}}', ":1: its JSON is nested too deeply, or has too long a number"),
]


@pytest.mark.parametrize(("text", "wanted"), LINES)
def test_prompt_file_errors_name_their_line(text: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read(path)
    assert wanted in caught.value.message and caught.value.message.startswith(str(path))


def test_unreadable_prompt_files_give_one_sentence_errors(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9", "expected": "a"}')
    said = [parse(tmp_path / name)[1][0].message for name in ("nowhere", "latin", ".")]
    assert said == ["there is no such file", "it is not UTF-8 text", "it cannot be read: Is a directory"]


def test_unicode_line_separators_do_not_split_prompt_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b", "expected": "c"}\r\n', encoding="utf-8")
    (prompt,) = read(path)
    messages = [{"role": "user", "content": "a\u2028b"}]
    assert prompt.messages == messages
    assert evaluate_answers.request("m", prompt, SamplingSettings())[1]["messages"] == messages
