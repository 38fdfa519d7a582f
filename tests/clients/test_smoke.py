"""Tests of smoke on healthy servers, on models and adapters without effect, and on servers with faults."""

from __future__ import annotations

import base64
import io
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image

from recipec.runtime.clients import smoke, smoke_checks
from recipec.runtime.clients.answers import ServedModel, Streamed
from recipec.runtime.clients.client import KEY_VARIABLE
from recipec.runtime.clients.findings import CheckFailed
from recipec.runtime.clients.smoke_checks import came_one_by_one
from tests.clients import fake_vllm
from tests.clients.fake_answers import Answers
from tests.clients.fake_language import Language, Ranked
from tests.clients.fake_vllm import FakeVllm, Faults, Start
from tests.ports import free_port

Run = Callable[..., tuple[int, str]]
"""Runs smoke on a server with more arguments, and returns its exit status and output."""

BOTH = ["tuned", "tuned-base"]
SAME = {"tuned": "one", "tuned-base": "one"}


def paced(**faults: Any) -> Faults:
    """Return faults of a server whose tokens come one by one."""
    return Faults(**{"token_seconds": 0.001, **faults})


def line(output: str, name: str) -> str:
    """Return a check's lines, without its seconds."""
    found = re.search(rf"^\S+ +{name} .*\n(?: .*\n)*", output, re.MULTILINE)
    assert found, output
    return re.sub(r"  +", " ", found[0])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run smoke, and return its exit status and output, with URL for addresses and N for times."""
    monkeypatch.setattr(smoke, "PAUSE_SECONDS", 0.1)

    def run(server: FakeVllm | str, *arguments: object, model: str = "tuned") -> tuple[int, str]:
        url = server if isinstance(server, str) else server.url
        status = smoke.main(["--url", url, "--model", model, *map(str, arguments)])
        captured = capsys.readouterr()
        out = captured.out + captured.err
        out = out.replace(url, "URL")
        out = re.sub(r" +\d+\.\d s(?=  |$|;)", " N s", out, flags=re.MULTILINE)
        return status, re.sub(
            r"\d+ ms|\d\.\d\d s", "N ms", re.sub(r"then [\d.e+]+ tokens", "then N tokens", out)
        )

    return run


def test_working_adapter_passes_every_check(fake: Start, run: Run, tmp_path: Path) -> None:
    server = fake(BOTH, faults=paced())
    report = tmp_path / "smoke.json"
    status, output = run(server, "--base", "tuned-base", "--vllm", "0.32.0", "--json", report)
    assert output == (
        "ok      ready N s  URL\n"
        "ok      served models N s  tuned, tuned-base\n"
        "ok      version N s  vLLM 0.32.0\n"
        "ok      first request N s  first token after N ms\n"
        "ok      chat completion N s  32 tokens: "
        '"house four down up star bird east queen six ink smith fri..."\n'
        "ok      streaming N s  64 chunks; second request: first token after N ms, then N tokens/s\n"
        "ok      unknown model N s  404\n"
        "ok      differs from base N s  answers to 3 of 3 prompts, log probabilities by up to 3.8 "
        "(tuned-base)\n"
        "8 checks ok in N s\n"
    )
    assert status == 0
    record = json.loads(report.read_text("utf-8"))
    assert record["ok"] is True and record["model"] == "tuned" and record["url"] == server.url
    assert [check["state"] for check in record["checks"]] == ["ok"] * 8
    figures = record["figures"]
    assert 0 < figures["ttft_first_seconds"] < 5 and 0 < figures["ttft_seconds"] < 5
    assert 1 < figures["tokens_per_second"] < 1001
    prompts = record["checks"][-1]["figures"]["prompts"]
    assert [prompt["prompt"] for prompt in prompts] == list(smoke.PROMPTS)
    assert all(one["answer"] != one["base_answer"] for one in prompts)
    # Both models get the same tokens.
    asked = server.bodies("/v1/completions")
    assert [body["model"] for body in asked] == BOTH * 3
    assert all(asked[n]["prompt"] == asked[n + 1]["prompt"] for n in (0, 2, 4))


def test_merged_weights_without_a_base_server_skip_the_comparison(fake: Start, run: Run) -> None:
    status, output = run(fake(faults=paced()))
    assert status == 0
    assert line(output, "differs from base") == (
        "- differs from base N s not compared: the endpoint serves only the merged weights\n"
        " = note: to compare, serve the base at another address and give it: --base-url URL\n"
    )


def test_no_op_adapter_fails_the_comparison(fake: Start, run: Run) -> None:
    server = fake(BOTH, language=Language(seeds=SAME), faults=paced())
    status, output = run(server, "--base", "tuned-base")
    assert status == 1
    assert line(output, "differs from base") == (
        "FAILED differs from base N s the adapter is a no-op: tuned answers as tuned-base does, with the "
        "same log probabilities (within 0.0001, 3 prompts)\n"
        f" = help: {smoke.CAUSES}\n"
    )
    assert output.endswith("1 of 8 checks FAILED in N s\n")


@pytest.mark.parametrize(("shift", "status"), [(-2e-4, 0), (-5e-5, 1)])
def test_comparison_passes_on_log_probability_differences_over_1e_4(
    shift: float, status: int, fake: Start, run: Run
) -> None:
    language = Language(seeds=SAME, shifts={"tuned": shift})
    found = run(fake(BOTH, language=language, faults=paced()), "--base", "tuned-base", "--prompt", "one")
    assert found[0] == status
    if not status:
        assert line(found[1], "differs from base") == (
            "ok differs from base N s only log probabilities, by up to 0.0002 (tuned-base)\n"
            " = note: the greedy answers are the base's: the training changed little, or these prompts are "
            "far from it; name others in serve.smoke_prompts\n"
        )


def test_must_differ_prompt_with_the_base_answer_fails(fake: Start, run: Run) -> None:
    """Require another answer to the recipe's prompts; other log probabilities do not suffice."""
    language = Language(seeds=SAME, shifts={"tuned": -0.02})
    server = fake(BOTH, language=language, faults=paced())
    status, output = run(server, "--base", "tuned-base", "--must-differ", "Who are you?", "--must-differ=-x")
    assert status == 1
    assert line(output, "differs from base") == (
        'FAILED differs from base N s the answer to "Who are you?" and 1 more is the base\'s, and '
        "serve.smoke_prompts says that it differs; log probabilities differ by at most 0.02\n"
        " = help: was it trained long enough? use prompts that the training data answers differently from "
        "the base\n"
    )
    asked = [body["messages"][0]["content"] for body in server.bodies("/v1/chat/completions")]
    assert asked[-2:] == ["Who are you?", "-x"]


def test_no_op_merge_fails_the_comparison(fake: Start, run: Run) -> None:
    language = Language(seeds={"tuned": "one", "base": "one"})
    server, base = fake(language=language, faults=paced()), fake(["base"], language=language)
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert found.startswith("FAILED differs from base N s the merge is a no-op: tuned answers as base does")
    assert "a wrong or untrained checkpoint was merged, or the server loads the base's folder" in found
    assert {body["model"] for body in base.bodies("/v1/completions")} == {"base"}
    language.shifts["tuned"] = -0.01
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert "= note: two servers of one model may differ by 0.05: this may be no difference at all" in found


def test_base_server_errors_are_reported_and_base_gets_only_its_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(faults=paced())
    closed = f"http://127.0.0.1:{free_port()}"
    found = line(run(server, "--base-url", closed)[1], "differs from base")
    assert f"the base's server: nothing listens at {closed}" in found
    assert (
        "--base-url serves tuned, the model that it is to be compared with"
        in run(server, "--base-url", server.url)[1]
    )
    base = fake(["base"], key="sesame")
    assert (
        "= help: export VLLM_BASE_API_KEY with the key of the base's server"
        in run(server, "--base-url", base.url)[1]
    )
    # Other servers do not get this server's key.
    monkeypatch.setenv(KEY_VARIABLE, "another")
    run(server, "--base-url", base.url)
    assert all(asked.authorization is None for asked in base.asked)
    monkeypatch.setenv(smoke.BASE_KEY_VARIABLE, "sesame")
    assert run(server, "--base-url", base.url)[0] == 0


def test_api_key_check_tests_server_with_and_without_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(key="sesame", faults=paced())
    status, output = run(server, "--api-key")
    assert (status, output) == (
        1,
        "error: the recipe's server is open to other machines and requires a key\n"
        "  = help: export VLLM_API_KEY with the key that the server was started with\n",
    )
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    status, output = run(server, "--api-key")
    assert status == 0
    assert line(output, "API key") == (
        "ok API key N s 401 without it\n"
        " = warning: asked for no key: /tokenize, /metrics; let a proxy or a firewall pass only "
        "/v1 and /health\n"
    )
    # Routes with an effect get no request that triggers it.
    strange = [asked for asked in server.asked if not asked.path.startswith(("/v1", "/health", "/version"))]
    assert all(asked.method == "GET" for asked in strange if asked.authorization is None)
    monkeypatch.setenv(KEY_VARIABLE, "tahini")
    status, output = run(server, "--api-key")
    assert status == 1
    assert "= help: the server has another key than VLLM_API_KEY" in line(output, "served models")


def test_open_server_fails_the_api_key_check_if_the_recipe_requires_a_key(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    server = fake(faults=paced())
    status, output = run(server, "--api-key")
    assert status == 1
    assert line(output, "API key") == (
        "FAILED API key N s /v1/models without a key is answered\n"
        " = help: start the server with VLLM_API_KEY set: anyone may use it now\n"
    )
    status, output = run(server)
    assert status == 0
    assert line(output, "API key") == "- API key N s the server requires no key, although one is set here\n"


def test_api_key_is_hidden_in_output_and_report(
    fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame-4711")
    report = tmp_path / "smoke.json"
    fail = {"/version": 500, "/v1/chat/completions": 500}
    server = fake(key="sesame-4711", faults=Faults(fail=fail, repeat_key=True))
    status, output = run(server, "--api-key", "--json", report)
    assert status == 1 and "Bearer ***" in output
    assert "sesame" not in output and "sesame" not in report.read_text()


@pytest.mark.parametrize(
    ("unready", "said"),
    [(None, "nothing listens at URL"), (10_000, "URL/health answers 503 Service Unavailable")],
)
def test_server_that_is_not_ready_in_time_fails(
    unready: int | None, said: str, fake: Start, run: Run
) -> None:
    faults = Faults(unready=unready or 0)
    server = fake(faults=faults) if unready else f"http://127.0.0.1:{free_port()}"
    status, output = run(server, "--wait", "0.005")
    assert status == 1
    assert f"waiting for the server, 0 s: {said}\n" in output
    assert line(output, "ready") == (
        f"FAILED ready N s the server is not ready after 0.005 min: {said}\n"
        " = help: look at its log: docker compose logs vllm\n"
    )
    assert "1 of 1 checks FAILED in N s; the checks after it were not made\n" in output


def test_smoke_waits_for_a_loading_server_but_not_for_another_one(fake: Start, run: Run) -> None:
    status, output = run(fake(faults=paced(unready=2)))
    assert status == 0 and output.count("waiting for the server") == 1
    code, output = run(fake(faults=Faults(fail={"/health": 404})), "--wait", "1")
    assert code == 1 and "waiting for the server" not in output


def started(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runtime.clients.smoke", "--model", "tuned", *arguments]
    return subprocess.Popen(
        command,
        cwd=Path(smoke.__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def test_ctrl_c_ends_the_wait_without_a_traceback(fake: Start) -> None:
    process = started("--url", fake(faults=Faults(unready=10_000)).url)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("waiting for the server")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("stopped\n") and "Traceback" not in out + err


def test_closed_output_pipe_prints_no_error(fake: Start) -> None:
    """Close the pipe early, as `head -1` does."""
    process = started("--url", fake(faults=paced()).url)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(60) == 1
    assert error == ""


FAULTS: dict[str, tuple[str, Faults, str]] = {
    "no usage": (
        "streaming",
        Faults(no_usage=True, token_seconds=0.001),
        "the stream reports no usage\n = help: stream_options.include_usage was requested\n",
    ),
    "chunks at once": (
        "streaming",
        Faults(lump=True, token_seconds=0.002),
        "all 64 chunks came at once, N ms after the request\n"
        " = help: a proxy holds the stream back: switch off its buffering\n",
    ),
    "another streamed answer": (
        "streaming",
        Faults(wobble=4, token_seconds=0.001),
        'the streamed answer differs from the whole one from token 5 on: "house four down up rain fish '
        'west child seven song sailor..." against "house four down up star bird east queen six ink smith '
        'fri..."\n'
        " = help: both are greedy: check whether a proxy changes or caches answers\n",
    ),
    "any model": (
        "unknown model",
        Faults(accept_all=True),
        "a request for `no-such-model` is answered\n = help: does a router answer in the server's place?\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_server_fault_fails_its_check_in_one_sentence(name: str, fake: Start, run: Run) -> None:
    check, faults, said = FAULTS[name]
    status, output = run(fake(faults=faults))
    assert status == 1
    assert line(output, check) == f"FAILED {check} N s {said}"
    assert "Traceback" not in output
    assert re.search(r"^\d of \d checks FAILED in N s", output, re.MULTILINE)


def test_text_flag_uses_completions_instead_of_chat(fake: Start, run: Run) -> None:
    server = fake(BOTH, faults=paced())
    status, output = run(server, "--base", "tuned-base", "--text")
    assert status == 0
    assert not server.bodies("/v1/chat/completions")
    assert line(output, "completion").startswith('ok completion N s 20 tokens: "down')
    assert "answers to 3 of 3 prompts" in line(output, "differs from base")
    assert server.bodies("/v1/completions")[0]["prompt"] == smoke_checks.FIRST
    server.faults.wobble = 4
    assert "= help: both are greedy" in line(run(server, "--text")[1], "streaming")
    server.faults.shape["/v1/completions"] = {"choices": [7]}
    found = line(run(server, "--text")[1], "completion")
    assert "/v1/completions answers without a proper `choices[0]`" in found


ODD = (None, True, 7, -1.5, "x", "", [], {}, [7], [None], {"a": 1}, float("nan"))


def garbled(value: Any, random: Random) -> Any:
    """Remove random parts of JSON, or replace them by other types."""
    if random.random() < 0.08:
        return random.choice(ODD)
    if isinstance(value, dict):
        return {key: garbled(part, random) for key, part in value.items() if random.random() > 0.03}
    if isinstance(value, list):
        return [garbled(part, random) for part in value if random.random() > 0.03]
    return value


@pytest.mark.parametrize("seed", range(6))
def test_garbled_server_answers_give_no_traceback(
    seed: int, fake: Start, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    send, events = fake_vllm._Handler._json, Answers.events
    garble = lambda handler, value, status=200: send(handler, garbled(value, random), status)  # noqa: E731
    monkeypatch.setattr(fake_vllm._Handler, "_json", garble)
    monkeypatch.setattr(
        Answers, "events", lambda answers: [garbled(event, random) for event in events(answers)]
    )
    server, base = fake(BOTH), fake(["base"])
    arguments = ["--base", "tuned-base"] if seed % 2 else ["--base-url", base.url]
    status, output = run(server, *arguments, *(["--text"] if seed % 3 else []), "--timeout", "5")
    assert status in (0, 1) and "checks" in output


class Close(Language):
    """A model whose first two tokens are almost equally likely."""

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        return [(token, -0.5 - 0.01 * rank) for rank, (token, _) in enumerate(super().predict(model, prefix))]


def test_streamed_answer_that_differs_at_a_near_tie_is_a_note(fake: Start, run: Run) -> None:
    status, output = run(fake(language=Close(), faults=paced(wobble=4)))
    assert status == 0
    assert (
        "= note: the streamed answer differs from token 5 on: the two likeliest tokens there are 0.01 "
        "apart, so the choice depends on numerics"
    ) in output


def test_missing_base_model_fails_the_served_models_check(fake: Start, run: Run) -> None:
    status, output = run(fake(["tuned"]), "--base", "tuned-base")
    assert status == 1
    assert line(output, "served models") == (
        "FAILED served models N s tuned-base is not served: the server has tuned\n"
        " = help: is this recipe's server at this address?\n"
    )
    assert output.endswith("1 of 2 checks FAILED in N s; the checks after it were not made\n")


def test_adapter_served_as_a_separate_model_is_warned_of(fake: Start, run: Run) -> None:
    """Serve the adapter's name as another name of the base: --served-model-name tuned-base tuned."""
    cards = {"data": [{"id": "tuned-base", "parent": None}, {"id": "tuned", "parent": None}]}
    faults = paced(shape={"/v1/models": cards})
    status, output = run(fake(BOTH, language=Language(seeds=SAME), faults=faults), "--base", "tuned-base")
    assert status == 1 and "the adapter is a no-op" in output
    assert (
        "= warning: tuned is served as a separate model, not as an adapter: is --lora-modules set?" in output
    )


def test_other_vllm_version_gives_a_warning(fake: Start, run: Run) -> None:
    warning = (
        "= warning: the recipe's flags were checked against 0.32.0: another version may read them differently"
    )
    assert warning in line(run(fake(version="0.33.1", faults=paced()), "--vllm", "0.32.0")[1], "version")
    assert warning not in run(fake(version="0.32.0+cpu", faults=paced()), "--vllm", "0.32.0")[1]


def test_empty_answer_gives_a_warning(fake: Start, run: Run) -> None:
    status, output = run(fake(language=Language(script=lambda *_: ""), faults=paced()))
    assert "= warning: the answer is empty: does the chat template fit the model?" in output
    assert status == 0


def test_server_death_stops_the_remaining_checks(fake: Start, run: Run) -> None:
    status, output = run(fake(faults=paced(die_after=1)))
    assert status == 1
    assert (
        "FAILED chat completion N s the connection to URL/v1/chat/completions ended before the answer"
        in re.sub("  +", " ", output)
    )
    assert "s  nothing listens at URL\n" in output
    assert output.endswith("checks FAILED in N s; the checks after it were not made\n")


def stream_of(*times: float, tokens: int = 64, held_up: float = 0.0) -> Streamed:
    return Streamed(("", ""), None, "length", times, 1, tokens, held_up)


def test_stream_passes_only_if_its_chunks_arrive_one_by_one() -> None:
    for times in (
        [0.1 + 0.01 * n for n in range(64)],
        # After a long wait in the queue, or in bursts, as a busy machine receives them.
        [60 + 0.005 * n for n in range(64)],
        [0.1 + 0.2 * (n // 16) for n in range(64)],
    ):
        assert came_one_by_one(stream_of(*times)) == []
    for times in (
        [2 + 0.0001 * n for n in range(64)],
        # This machine was busy for a moment.
        [2 + 0.0001 * n + (0.1 if n > 20 else 0) for n in range(64)],
        [2.0],
    ):
        with pytest.raises(CheckFailed, match=r"2\.00 s after the request"):
            came_one_by_one(stream_of(*times))


def test_streams_that_cannot_be_judged_give_a_note() -> None:
    times = [0.2 + 0.0001 * n for n in range(64)]
    for stream, said in (
        (stream_of(*times, held_up=0.19), "this machine was too busy"),
        (stream_of(0.5, tokens=2), "the answer is too short"),
        (stream_of(0.01, 0.0101), "the answer came too quickly"),
    ):
        (note,) = came_one_by_one(stream)
        assert note == f"{said} to tell whether chunks come one by one"
    with pytest.raises(CheckFailed):
        came_one_by_one(stream_of(*times, held_up=0.09))


class Seeing:
    """A client of a server that counts some tokens for each picture."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.pictures = tokens, []

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = body["messages"][0]["content"]
        shown = [
            part["image_url"]["url"] for part in content if isinstance(part, dict) and "image_url" in part
        ]
        self.pictures += shown
        usage = {"prompt_tokens": 12 + self.tokens * len(shown), "completion_tokens": 1}
        choice = {"message": {"content": "red"}, "finish_reason": "stop", "token_ids": [3]}
        return {"choices": [choice], "usage": usage}


def test_a_picture_must_add_tokens_to_the_prompt() -> None:
    seeing: Any = Seeing(256)
    finding = smoke_checks.picture(ServedModel(seeing, "tuned"))
    assert finding.figures == {"picture_tokens": 256} and "red" in finding.text
    (address,) = seeing.pictures
    png = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert png.size == (64, 64) and png.getpixel((5, 60)) == (220, 30, 30)
    blind: Any = Seeing(0)
    with pytest.raises(CheckFailed, match="adds no token"):
        smoke_checks.picture(ServedModel(blind, "tuned"))
