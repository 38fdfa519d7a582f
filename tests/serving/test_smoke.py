"""smoke: a line for each check; what it says of servers that are well, and of all others."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runtime.serving import smoke, smoke_checks
from runtime.serving.answers import Scored, Streamed
from runtime.serving.client import KEY_VARIABLE, Client
from runtime.serving.difference import distance
from runtime.serving.findings import Failed
from runtime.serving.smoke_checks import _one_by_one
from runtime.serving.waiting import Waited, wait
from tests.serving import fake_vllm
from tests.serving.fake_vllm import FakeVllm, Faults, Language, Ranked
from tests.serving.test_client import closed_port

Start = Callable[..., FakeVllm]

BOTH = ["tuned", "tuned-base"]
SAME = {"tuned": "one", "tuned-base": "one"}


def paced(**faults: Any) -> Faults:
    """A server whose tokens come one by one."""
    return Faults(**{"token_seconds": 0.001, **faults})


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """smoke's exit status and what it prints, with addresses as URL and figures of time as N."""

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


def line(output: str, name: str) -> str:
    """The line of a check with what belongs to it, after its seconds."""
    found = re.search(rf"^\S+ +{name} .*\n(?: .*\n)*", output, re.MULTILINE)
    assert found, output
    return re.sub(r"  +", " ", found[0])


def test_an_adapter_that_is_well(fake: Start, run: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    server = fake(BOTH, faults=paced())
    report = tmp_path / "smoke.json"
    status, output = run(server, "--base", "tuned-base", "--vllm", "0.32.0", "--json", report)
    assert output == (
        "ok      ready N s  URL\n"
        "ok      served models N s  tuned, tuned-base\n"
        "ok      version N s  vLLM 0.32.0\n"
        "ok      first request N s  first token after N ms\n"
        "ok      chat completion N s  29 tokens: "
        '"grey fish sailor west milk five leaf wind queen root salt..."\n'
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
    # The same tokens went to both.
    asked = server.bodies("/v1/completions")
    assert [body["model"] for body in asked] == BOTH * 3
    assert all(asked[n]["prompt"] == asked[n + 1]["prompt"] for n in (0, 2, 4))


def test_merged_weights_without_their_base(
    fake: Start, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    write_record(tmp_path)
    status, output = run(fake(faults=paced()), "--weights", tmp_path)
    assert status == 0
    assert line(output, "differs from base") == (
        "- differs from base N s not compared: the endpoint serves the merged weights alone\n"
        " = note: to compare, serve the base at another address and give it: --base-url URL\n"
    )
    assert line(output, "merged weights") == (
        "ok merged weights N s step 400's adapters (rank 16, alpha 32) merged into 410 tensors, 77 kept "
        "(merge.json)\n"
    )
    assert output.endswith("8 checks ok in N s\n")


RECORD: dict[str, Any] = {
    "base": {"files": {"a.safetensors": {"size": 1, "sha256": "aa"}}},
    "checkpoint": {"step": 400},
    "lora": {"rank": 16, "alpha": 32.0},
    "tensors": {"merged": 410, "kept": 77},
    "recipe": {"name": "tuned"},
    "files": {"a.safetensors": {"size": 1, "sha256": "bb"}, "config.json": {"size": 1, "sha256": "cc"}},
}


def write_record(folder: Path, **changed: Any) -> None:
    (folder / "merge.json").write_text(json.dumps({**RECORD, **changed}))


SAME_FILES = {"a.safetensors": {"size": 1, "sha256": "aa"}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tensors": {"merged": 0, "kept": 487}}, "no tensor was merged, so the weights are the base's"),
        ({"lora": {"rank": 16, "alpha": 0}}, "lora.alpha is 0, so the weights are the base's"),
        ({"files": SAME_FILES}, "the files of the weights are the base's, byte for byte"),
        ({"tensors": None}, "is not what merge.py writes"),
        ({"lora": 7}, "is not what merge.py writes"),
        ({"base": {"files": ["a"]}}, "is not what merge.py writes"),
    ],
)
def test_merges_that_changed_nothing(
    changed: dict[str, Any], said: str, fake: Start, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    write_record(tmp_path, **changed)
    status, output = run(fake(faults=paced()), "--weights", tmp_path)
    assert status == 1
    found = line(output, "merged weights")
    assert found.startswith(f"FAILED merged weights N s {tmp_path}/merge.json") and said in found
    assert " = help: " in found


def test_what_merge_json_leaves_open(
    fake: Start, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    server = fake(faults=paced())
    status, output = run(server, "--weights", tmp_path)
    assert status == 0
    nothing = f"- merged weights N s {tmp_path}/merge.json is not there: nothing is known of the weights\n"
    assert line(output, "merged weights") == nothing
    write_record(tmp_path, lora=None, recipe={"name": "other"})
    found = line(run(server, "--weights", tmp_path)[1], "merged weights")
    assert "step 400's weights merged into 410 tensors, 77 kept" in found
    assert "= warning: the weights were merged for the recipe `other`, and `tuned` is served" in found
    (tmp_path / "merge.json").write_text("{")
    assert run(server, "--weights", tmp_path)[0] == 1


def test_an_adapter_that_is_a_no_op(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
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
def test_log_probabilities_alone(
    shift: float, status: int, fake: Start, run: Callable[..., tuple[int, str]]
) -> None:
    language = Language(seeds=SAME, shifts={"tuned": shift})
    found = run(fake(BOTH, language=language, faults=paced()), "--base", "tuned-base", "--prompt", "one")
    assert found[0] == status
    if not status:
        assert line(found[1], "differs from base") == (
            "ok differs from base N s log probabilities alone, by up to 0.0002 (tuned-base)\n"
            " = note: the greedy answers are the base's: the training changed little, or these prompts are "
            "far from it; name others in serve.smoke_prompts\n"
        )


def test_an_answer_that_must_differ(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    """Where the recipe names prompts, other log probabilities are not enough."""
    language = Language(seeds=SAME, shifts={"tuned": -0.02})
    server = fake(BOTH, language=language, faults=paced())
    status, output = run(server, "--base", "tuned-base", "--must-differ", "Who are you?", "--must-differ=-x")
    assert status == 1
    assert line(output, "differs from base") == (
        'FAILED differs from base N s the answer to "Who are you?" and 1 more is the base\'s, and '
        "serve.smoke_prompts says that it differs; log probabilities differ by at most 0.02\n"
        " = help: was it trained long enough? take prompts that the training data answers in its own way\n"
    )
    asked = [body["messages"][0]["content"] for body in server.bodies("/v1/chat/completions")]
    assert asked[-2:] == ["Who are you?", "-x"]


def test_a_base_at_another_address(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    server, base = fake(["tuned"], faults=paced()), fake(["adapter", "google/base"])
    status, output = run(server, "--base-url", base.url + "/v1")
    assert status == 0
    found = line(output, "differs from base")
    assert "answers to 3 of 3 prompts" in found and "(google/base)" in found
    assert {body["model"] for body in base.bodies("/v1/completions")} == {"google/base"}


def test_a_merge_that_is_a_no_op(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    language = Language(seeds={"tuned": "one", "base": "one"})
    server, base = fake(language=language, faults=paced()), fake(["base"], language=language)
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert found.startswith("FAILED differs from base N s the merge is a no-op: tuned answers as base does")
    assert "a wrong or untrained checkpoint was merged, or the server loads the base's folder" in found
    language.shifts["tuned"] = -0.01
    found = line(run(server, "--base-url", base.url)[1], "differs from base")
    assert "= note: two servers of one model may differ by 0.05: this may be no difference at all" in found


def test_bases_that_cannot_be_asked(
    fake: Start, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(faults=paced())
    closed = f"http://127.0.0.1:{closed_port()}"
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
    # The server's own key is not for other servers.
    monkeypatch.setenv(KEY_VARIABLE, "another")
    run(server, "--base-url", base.url)
    assert all(asked.authorization is None for asked in base.asked)
    monkeypatch.setenv(smoke.BASE_KEY_VARIABLE, "sesame")
    assert run(server, "--base-url", base.url)[0] == 0


FAULTS: dict[str, tuple[str, Faults, str]] = {
    "no JSON": (
        "served models",
        Faults(html={"/v1/models"}),
        "URL/v1/models answers with something that is not JSON: "
        "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>\n = help: is this vLLM's address?\n",
    ),
    "version": (
        "version",
        Faults(fail={"/version": 500}),
        "URL/version answers 500 Internal Server Error: EngineCore encountered an issue.\n"
        " = help: look at the server's log\n",
    ),
    "no stream": (
        "first request",
        Faults(html={"/v1/chat/completions"}),
        "URL/v1/chat/completions answers with text/html in place of a stream of events: "
        "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>\n = help: is this vLLM's address?\n",
    ),
    "cut stream": (
        "first request",
        Faults(cut_stream=3),
        "the stream of URL/v1/chat/completions ended after 3 events without [DONE]\n"
        " = help: the server stopped in mid-answer: look at its log\n",
    ),
    "stream without an answer": (
        "first request",
        Faults(cut_stream=1, no_done=False),
        "the stream of URL/v1/chat/completions ended after 1 events without [DONE]\n"
        " = help: the server stopped in mid-answer: look at its log\n",
    ),
    "failing stream": (
        "streaming",
        Faults(fail_stream=5),
        "URL/v1/chat/completions failed in mid-answer: EngineCore encountered an issue.\n"
        " = help: look at the server's log\n",
    ),
    "a gateway's page": (
        "chat completion",
        Faults(html_errors={"/v1/chat/completions"}),
        "URL/v1/chat/completions answers 502 Bad Gateway: 502 Bad Gateway nginx\n"
        " = help: look at the server's log\n",
    ),
    "half an answer": (
        "chat completion",
        Faults(half={"/v1/chat/completions"}),
        "the connection to URL/v1/chat/completions ended before the answer: a part of it came\n"
        " = help: the server may have died: look at its log\n",
    ),
    "no choices": (
        "chat completion",
        Faults(shape={"/v1/chat/completions": {"choices": []}}),
        "/v1/chat/completions answers without a proper `choices[0]`\n = help: is this vLLM's address?\n",
    ),
    "no usage": (
        "streaming",
        Faults(no_usage=True, token_seconds=0.001),
        "the stream tells no usage\n = help: stream_options.include_usage was asked for\n",
    ),
    "chunks at once": (
        "streaming",
        Faults(lump=True, token_seconds=0.002),
        "all 64 chunks came at once, N ms after the request\n"
        " = help: something on the way holds the stream back: switch off the proxy's buffering\n",
    ),
    "another streamed answer": (
        "streaming",
        Faults(wobble=4, token_seconds=0.001),
        'the streamed answer is another than the whole one from token 5 on: "grey fish sailor west tea six '
        'root sea child bird milk on..." against "grey fish sailor west milk five leaf wind queen root '
        'salt..."\n'
        " = help: both are greedy: does something on the way change or cache answers?\n",
    ),
    "any model": (
        "unknown model",
        Faults(accept_all=True),
        "a request for `no-such-model` is answered\n = help: does a router answer in the server's place?\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_one_sentence(name: str, fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    check, faults, said = FAULTS[name]
    status, output = run(fake(faults=faults))
    assert status == 1
    assert line(output, check) == f"FAILED {check} N s {said}"
    assert "Traceback" not in output
    assert re.search(r"^\d of \d checks FAILED in N s", output, re.MULTILINE)


def test_a_model_without_a_chat_template(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    server = fake(BOTH, faults=paced())
    status, output = run(server, "--base", "tuned-base", "--text")
    assert status == 0
    assert not server.bodies("/v1/chat/completions")
    assert line(output, "completion").startswith('ok completion N s 23 tokens: "baker')
    assert "answers to 3 of 3 prompts" in line(output, "differs from base")
    assert server.bodies("/v1/completions")[0]["prompt"] == smoke_checks.FIRST
    server.faults.wobble = 4
    assert "= help: both are greedy" in line(run(server, "--text")[1], "streaming")
    server.faults.shape["/v1/completions"] = {"choices": [7]}
    found = line(run(server, "--text")[1], "completion")
    assert "/v1/completions answers without a proper `choices[0]`" in found


ODD = (None, True, 7, -1.5, "x", "", [], {}, [7], [None], {"a": 1}, float("nan"))


def garbled(value: Any, random: Random) -> Any:
    """JSON in which a part is left out here and there, or of another kind."""
    if random.random() < 0.08:
        return random.choice(ODD)
    if isinstance(value, dict):
        return {key: garbled(part, random) for key, part in value.items() if random.random() > 0.03}
    if isinstance(value, list):
        return [garbled(part, random) for part in value if random.random() > 0.03]
    return value


@pytest.mark.parametrize("seed", range(12))
def test_garbled_answers_are_no_tracebacks(
    seed: int, fake: Start, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    send, events = fake_vllm._Handler._json, fake_vllm._Answers.events
    garble = lambda handler, value, status=200: send(handler, garbled(value, random), status)  # noqa: E731
    monkeypatch.setattr(fake_vllm._Handler, "_json", garble)
    monkeypatch.setattr(
        fake_vllm._Answers, "events", lambda answers: [garbled(event, random) for event in events(answers)]
    )
    server, base = fake(BOTH), fake(["base"])
    arguments = ["--base", "tuned-base"] if seed % 2 else ["--base-url", base.url]
    status, output = run(server, *arguments, *(["--text"] if seed % 3 else []), "--timeout", "5")
    assert status in (0, 1) and "checks" in output


class Close(Language):
    """Two tokens are about as likely."""

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        return [(token, -0.5 - 0.01 * rank) for rank, (token, _) in enumerate(super().predict(model, prefix))]


def test_a_streamed_answer_that_numerics_parted(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(language=Close(), faults=paced(wobble=4)))
    assert status == 0
    assert (
        "= note: the streamed answer is another from token 5 on: the two likeliest tokens there are 0.01 "
        "apart, and which is taken hangs on numerics"
    ) in output


def test_a_model_that_is_not_served(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(["tuned"]), "--base", "tuned-base")
    assert status == 1
    assert line(output, "served models") == (
        "FAILED served models N s tuned-base is not served: the server has tuned\n"
        " = help: is this recipe's server at this address?\n"
    )
    assert output.endswith("1 of 2 checks FAILED in N s; the checks after it were not made\n")


def test_an_adapter_that_is_not_loaded(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    """Its name is one more of the base's own: --served-model-name tuned-base tuned."""
    cards = {"data": [{"id": "tuned-base", "parent": None}, {"id": "tuned", "parent": None}]}
    faults = paced(shape={"/v1/models": cards})
    status, output = run(fake(BOTH, language=Language(seeds=SAME), faults=faults), "--base", "tuned-base")
    assert status == 1 and "the adapter is a no-op" in output
    assert (
        "= warning: tuned is served as a model of its own, not as an adapter: is --lora-modules set?"
        in output
    )


def test_another_version(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    warning = (
        "= warning: the recipe's flags were checked against 0.32.0: another version may read them otherwise"
    )
    assert warning in line(run(fake(version="0.33.1", faults=paced()), "--vllm", "0.32.0")[1], "version")
    assert warning not in run(fake(version="0.32.0+cpu", faults=paced()), "--vllm", "0.32.0")[1]


def test_an_empty_answer_is_warned_of(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(language=Language(script=lambda *_: ""), faults=paced()))
    assert "= warning: the answer is empty: does the chat template fit the model?" in output
    assert status == 0


def test_a_server_that_dies_between(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(faults=paced(die_after=1)))
    assert status == 1
    assert (
        "FAILED chat completion N s the connection to URL/v1/chat/completions ended before the answer"
        in re.sub("  +", " ", output)
    )
    assert "s  nothing listens at URL\n" in output
    assert output.endswith("checks FAILED in N s; the checks after it were not made\n")


def test_a_server_that_hangs(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    """It is not asked again and again."""
    faults = Faults(pauses={"/v1/chat/completions": 2.0})
    status, output = run(fake(faults=faults), "--timeout", "0.2")
    assert status == 1
    said = "FAILED first request N s URL/v1/chat/completions gave no answer within N s\n"
    assert line(output, "first request") == said
    assert output.endswith("1 of 4 checks FAILED in N s; the checks after it were not made\n")


# Keys


def test_a_key_that_is_demanded(
    fake: Start, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake(key="sesame", faults=paced())
    status, output = run(server, "--api-key")
    assert (status, output) == (
        1,
        "error: the recipe's server is open to others than this machine and demands a key\n"
        "  = help: export VLLM_API_KEY with the key that the server was started with\n",
    )
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    status, output = run(server, "--api-key")
    assert status == 0 and line(output, "API key") == "ok API key N s 401 without it\n"
    monkeypatch.setenv(KEY_VARIABLE, "tahini")
    status, output = run(server, "--api-key")
    assert status == 1
    assert "= help: the server has another key than VLLM_API_KEY" in line(output, "served models")


def test_a_server_that_asks_for_no_key(
    fake: Start, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
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
    assert line(output, "API key") == "- API key N s the server asks for none, though one is set here\n"


def test_the_key_is_printed_nowhere(
    fake: Start, run: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "sesame-4711")
    report = tmp_path / "smoke.json"
    fail = {"/version": 500, "/v1/chat/completions": 500}
    server = fake(key="sesame-4711", faults=Faults(fail=fail, repeat_key=True))
    status, output = run(server, "--api-key", "--json", report)
    assert status == 1 and "Bearer ***" in output
    assert "sesame" not in output and "sesame" not in report.read_text()


# Waiting


def test_nothing_listens(run: Callable[..., tuple[int, str]]) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    status, output = run(url, "--wait", "0.01")
    assert status == 1
    assert (
        "waiting for the server, 0 s: nothing listens yet (loading and compiling, or not started:" in output
    )
    assert line(output, "ready") == (
        "FAILED ready N s nothing listens at URL after 0.01 min\n"
        " = help: is the server started, and does it still load? docker compose ps; docker compose logs "
        "vllm\n"
    )
    assert "1 of 1 checks FAILED in N s; the checks after it were not made\n" in output


def test_a_server_that_becomes_ready(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(faults=paced(unready=0.5)))
    assert status == 0
    assert "waiting for the server, 0 s: the server listens, and its engine is not ready (503)\n" in output


def test_a_server_that_does_not_become_ready(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    status, output = run(fake(faults=Faults(unready=100)), "--wait", "0.005")
    assert status == 1
    assert "the server is not ready after 0.005 min: URL/health answers 503 Service Unavailable\n" in output


def test_a_server_that_is_gone_is_not_waited_for(fake: Start, run: Callable[..., tuple[int, str]]) -> None:
    server = fake(faults=Faults(unready=100, stop_after=2))
    started = time.monotonic()
    status, output = run(server, "--wait", "10")
    assert status == 1 and time.monotonic() - started < 60
    assert line(output, "ready") == (
        "FAILED ready N s the server at URL answered and is gone now: nothing listens there any longer\n"
        " = help: look at its log: docker compose logs vllm\n"
    )


@pytest.mark.parametrize("status", [401, 404])
def test_another_server_is_not_waited_for(
    status: int, fake: Start, run: Callable[..., tuple[int, str]]
) -> None:
    assert run(fake(faults=Faults(fail={"/health": status})), "--wait", "10")[0] == 1


def test_waiting_ends_with_the_process(fake: Start) -> None:
    said: list[tuple[float, str]] = []
    client = Client(f"http://127.0.0.1:{closed_port()}")
    ends = iter([None, None, "the server ended with 137: it was killed"])
    with pytest.raises(Exception, match="the server ended with 137") as caught:
        wait(client, 5, lambda *a: said.append(a), died=lambda: next(ends), pauses=(0.01,))
    assert len(said) == 2 and "look at its log" in str(getattr(caught.value, "help", ""))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminals_line_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    waited = Waited(out)
    waited(0.2, "nothing listens yet, and this is a long reason for it")
    waited(65, "503")
    waited.end()
    first, second, last = out.getvalue().split("\r")[1:4]
    assert first == "waiting for the server, 0 s: nothing listens yet, and this i"[:59]
    assert second == "waiting for the server, 1 min 05 s: 503".ljust(59)
    assert last.strip() == "" and "\n" not in out.getvalue()


def test_elsewhere_there_is_a_line_now_and_then() -> None:
    out = io.StringIO()
    waited = Waited(out, interval=30)
    for seconds in range(0, 65, 5):
        waited(seconds, "503" if seconds < 50 else "refused")
    waited.end()
    assert [line.split(", ")[1] for line in out.getvalue().splitlines()] == [
        "0 s: 503",
        "30 s: 503",
        "50 s: refused",
    ]


# The command


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--url", "http://x"],
        ["--url", "http://x", "--model", "m", "--wait", "soon"],
        ["--wait", "-1"],
        ["--wait", "nan"],
    ],
)
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        smoke.main(arguments)
    assert caught.value.code == 2
    assert "smoke: error: " in capsys.readouterr().err


def test_an_address_that_is_none(run: Callable[..., tuple[int, str]]) -> None:
    status, output = run("tpu:8000")
    assert status == 1
    assert output == "error: 'URL' is not the address of a server\n  = help: write it as http://HOST:PORT\n"


def test_a_report_that_cannot_be_written(
    fake: Start, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    status, output = run(fake(faults=paced()), "--json", tmp_path / "none" / "x.json")
    assert status == 1
    assert f"error: {tmp_path}/none/x.json cannot be written: No such file or directory\n" in output


def started(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "runtime.serving.smoke", "--model", "tuned", *arguments]
    return subprocess.Popen(
        command,
        cwd=Path(smoke.__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,
    )


def test_ctrl_c(fake: Start) -> None:
    process = started("--url", fake(faults=Faults(unready=100)).url)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("waiting for the server")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err.endswith("stopped\n") and "Traceback" not in out + err


def test_a_reader_that_goes(fake: Start) -> None:
    """smoke.sh | head -1"""
    process = started("--url", fake(faults=paced()).url)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    error = process.stderr.read()
    assert process.wait(30) == 1
    assert error == ""


def test_a_terminal_of_few_characters(fake: Start) -> None:
    server = fake(language=Language(script=lambda *_: "Käse \N{SNOWMAN}"), faults=paced())
    process = started("--url", server.url, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=30)
    assert "K\\xe4se \\u2603" in out and err == ""


# Chunks


def stream_of(*times: float, tokens: int = 64) -> Streamed:
    return Streamed(("", ""), None, "length", times, 1, tokens)


def test_chunks_that_come_one_by_one() -> None:
    assert _one_by_one(stream_of(*(0.1 + 0.01 * n for n in range(64)))) == []
    # After a long wait in the queue, or in bursts, as a busy machine reads them.
    assert _one_by_one(stream_of(*(60 + 0.005 * n for n in range(64)))) == []
    assert _one_by_one(stream_of(*(0.1 + 0.2 * (n // 16) for n in range(64)))) == []


def test_chunks_that_come_at_once() -> None:
    for times in (
        [2 + 0.0001 * n for n in range(64)],
        # This machine was busy for a moment.
        [2 + 0.0001 * n + (0.1 if n > 20 else 0) for n in range(64)],
        [2.0, 2.0],
        [2.0],
    ):
        with pytest.raises(Failed, match=r"2\.00 s after the request"):
            _one_by_one(stream_of(*times))


def test_answers_that_tell_nothing_of_their_chunks() -> None:
    (note,) = _one_by_one(stream_of(0.5, tokens=2))
    assert note == "the answer is too short to tell whether chunks come one by one"
    (note,) = _one_by_one(stream_of(0.01, 0.0101))
    assert note == "the answer came too quickly to tell whether chunks come one by one"


# Distances


def test_distances_of_log_probabilities() -> None:
    one = Scored("", [1, 2], [{1: -0.5, 2: -1.0}, {3: -0.5, 4: -1.0}])
    assert distance(one, one, None) == 0
    shifted = Scored("", [1, 2], [{1: -0.5, 2: -1.25}, {3: -0.5, 4: -9.0}])
    assert distance(one, shifted, None) == 8
    # After the first token that differs, the two have read different texts.
    assert distance(one, shifted, 0) == 0.25
    # Not among the other's likeliest: below the least of them.
    others = Scored("", [1, 2], [{1: -0.5, 9: -3.0}, {3: -0.5, 4: -1.0}])
    assert distance(one, others, None) == 2.0
