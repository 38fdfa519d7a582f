"""Tests of smoke on servers that answer wrongly, late or not at all: one sentence each, and no traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from recipec.runtime.serving import smoke_checks
from recipec.runtime.serving.answers import Streamed
from recipec.runtime.serving.findings import CheckFailed
from recipec.runtime.serving.smoke_checks import came_one_by_one
from tests.serving import fake_vllm
from tests.serving.fake_answers import Answers
from tests.serving.fake_faults import Faults
from tests.serving.fake_language import Language, Ranked
from tests.serving.fake_vllm import Start
from tests.serving.smoke.runs import BOTH, SAME, Run, line, paced

FAULTS: dict[str, tuple[str, Faults, str]] = {
    "no JSON": (
        "served models",
        Faults(html={"/v1/models"}),
        "URL/v1/models answers with something that is not JSON: "
        "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>\n = help: check that this is vLLM's "
        "address\n",
    ),
    "version": (
        "version",
        Faults(fail={"/version": 500}),
        "URL/version answers 500 Internal Server Error: EngineCore encountered an issue.\n"
        " = help: look at the server's log\n",
    ),
    "no choices": (
        "chat completion",
        Faults(shape={"/v1/chat/completions": {"choices": []}}),
        "/v1/chat/completions answers without a proper `choices[0]`\n = help: check that this is vLLM's "
        "address\n",
    ),
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


@pytest.mark.parametrize("seed", range(12))
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


def test_request_timeout_stops_the_remaining_checks(fake: Start, run: Run) -> None:
    """Send no further request after a timeout."""
    faults = Faults(pauses={"/v1/chat/completions": 5.0})
    status, output = run(fake(faults=faults), "--timeout", "0.8")
    assert status == 1
    said = "FAILED first request N s URL/v1/chat/completions gave no answer within N s\n"
    assert line(output, "first request") == said
    assert output.endswith("1 of 4 checks FAILED in N s; the checks after it were not made\n")


def stream_of(*times: float, tokens: int = 64, held_up: float = 0.0) -> Streamed:
    return Streamed(("", ""), None, "length", times, 1, tokens, held_up)


def test_stream_chunks_that_arrive_one_by_one_pass() -> None:
    assert came_one_by_one(stream_of(*(0.1 + 0.01 * n for n in range(64)))) == []
    # After a long wait in the queue, or in bursts, as a busy machine receives them.
    assert came_one_by_one(stream_of(*(60 + 0.005 * n for n in range(64)))) == []
    assert came_one_by_one(stream_of(*(0.1 + 0.2 * (n // 16) for n in range(64)))) == []


def test_stream_chunks_that_arrive_all_at_once_fail() -> None:
    for times in (
        [2 + 0.0001 * n for n in range(64)],
        # This machine was busy for a moment.
        [2 + 0.0001 * n + (0.1 if n > 20 else 0) for n in range(64)],
        [2.0, 2.0],
        [2.0],
    ):
        with pytest.raises(CheckFailed, match=r"2\.00 s after the request"):
            came_one_by_one(stream_of(*times))


def test_stream_chunks_read_late_by_a_busy_machine_give_a_note() -> None:
    times = [0.2 + 0.0001 * n for n in range(64)]
    (note,) = came_one_by_one(stream_of(*times, held_up=0.19))
    assert note == "this machine was too busy to tell whether chunks come one by one"
    with pytest.raises(CheckFailed):
        came_one_by_one(stream_of(*times, held_up=0.09))


def test_streams_too_short_or_too_quick_to_judge_give_a_note() -> None:
    (note,) = came_one_by_one(stream_of(0.5, tokens=2))
    assert note == "the answer is too short to tell whether chunks come one by one"
    (note,) = came_one_by_one(stream_of(0.01, 0.0101))
    assert note == "the answer came too quickly to tell whether chunks come one by one"
