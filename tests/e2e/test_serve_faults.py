"""Tests of a real server's faults in a container, and of how `recipe serve` handles them.

vLLM's start takes 40 s of a core, so that one server serves most tests in order. It answers many clients at
once, dies during a benchmark, restarts with an overwritten tokenizer, and ends during requests.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recipec.runtime.serving.client import ServerError
from tests.e2e import serving_artifacts
from tests.e2e.docker_engine import Engine
from tests.e2e.serving_artifacts import Artifact, Tiny, build

pytestmark = pytest.mark.nightly

CLIENTS, REQUESTS = 64, 1000
TOKENS = 8
"""The tokens of each answer."""

LONG_TOKENS = 200
"""The tokens of answers that are in flight when the server is told to end."""

STREAMS = 8
"""Clients that request such answers one after another until the server stops."""

SILENCE = 20.0
"""Seconds without an answer: vLLM does not answer a request that arrives after SIGTERM."""

START_SECONDS = 300


@pytest.fixture(scope="module")
def faulty(engine: Engine, vllm_image: str, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """Make an artifact whose server never becomes ready."""
    artifact = build(tmp_path_factory.mktemp("faulty"), "tiny-faulty", engine, vllm_image, tiny.base)
    serving_artifacts.copy(tiny.merged, artifact.folder / "merged")
    return artifact


def test_server_killed_while_loading_gives_one_sentence_error(faulty: Artifact, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    process = faulty.start("serve", "up", faulty.folder, log=log)
    try:
        # vLLM's first log lines.
        _until(lambda: "non-default args" in log.read_text(errors="replace"), process.poll)
        os.kill(faulty.inspect(f"{faulty.name}-vllm-1")["State"]["Pid"], signal.SIGKILL)
        assert process.wait(60) == 1
    finally:
        process.kill()
    said = log.read_text()
    assert "error: docker compose ended with exit status 137\n" in said
    assert "Traceback" not in said.partition("error: ")[2]
    assert faulty.engine.containers() == []


@pytest.fixture(scope="module")
def serving(
    engine: Engine, vllm_image: str, tiny: Tiny, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Artifact]:
    """Serve merged weights with `recipe serve up`."""
    artifact = build(
        tmp_path_factory.mktemp("serving"),
        "tiny-serving",
        engine,
        vllm_image,
        tiny.base,
        # The second point takes 10 s.
        benchmark="{input_lengths: [32], output_length: 8, request_rates: [inf, 1], prompts: 10}",
    )
    serving_artifacts.copy(tiny.merged, artifact.folder / "merged")
    try:
        artifact.recipe("serve", "up", artifact.folder, "--detach")
        yield artifact
    finally:
        artifact.recipe("serve", "down", artifact.folder, "--volumes")


def test_all_requests_of_64_clients_are_answered(serving: Artifact) -> None:
    client = serving.client

    def ask(number: int) -> tuple[str, int]:
        prompt = [2, *(30 + (number * step) % 400 for step in range(1, 9))]
        answer = client.post("/v1/completions", _body(serving, prompt, TOKENS))
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    started = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = Counter(pool.map(ask, range(REQUESTS)))
    seconds = time.monotonic() - started
    print(f"\n{REQUESTS} requests of {CLIENTS} clients: {seconds:.1f} s, {REQUESTS / seconds:.1f} requests/s")
    assert answers == {("length", TOKENS): REQUESTS}
    assert serving.metric("vllm:request_success_total") >= REQUESTS


def test_server_death_in_a_benchmark_fails_only_the_current_point(serving: Artifact, tmp_path: Path) -> None:
    """Report the failed point. When the engine has restarted the server, measure only that point."""
    points = [serving.folder / "results" / "bench" / f"input-32-rate-{rate}.json" for rate in ("inf", "1")]
    log = tmp_path / "bench.log"
    process = serving.start("serve", "bench", serving.folder, log=log)
    try:
        _until(points[0].is_file, process.poll)
        before = serving.metric("vllm:request_success_total")
        _until(lambda: serving.metric("vllm:request_success_total") >= before + 2, process.poll)
        os.kill(serving.inspect(f"{serving.name}-vllm-1")["State"]["Pid"], signal.SIGKILL)
        assert process.wait(120) == 1
    finally:
        process.kill()
    print(said := log.read_text())
    assert "error: the server died at 32 tokens in, 1 requests/s: " in said
    assert "finished points are kept" in said
    assert "Traceback" not in said
    assert json.loads(points[1].read_text())["failure"] is not None
    first = points[0].read_bytes()

    _overwrite_the_tokenizer(serving.folder / "merged")
    seconds = serving.await_health(START_SECONDS)
    print(f"\nstarted again by the engine in {seconds:.0f} s")
    said = serving.recipe("serve", "bench", serving.folder).output
    assert "1 of 2 points are already measured, and are kept" in said
    assert points[0].read_bytes() == first
    assert json.loads(points[1].read_text())["failure"] is None


def test_verify_finds_the_overwritten_tokenizer(serving: Artifact, tiny: Tiny) -> None:
    """Check that the server answers, and that `recipe serve verify` reports another tokenization."""
    words = ("--model", tiny.merged, "--name", serving.name, "--server-dtype", "float32")
    said = serving.recipe("serve", "verify", serving.url, *words, status=1).output
    assert "tokenizer" in said.partition("problem: ")[2]


def test_requests_in_flight_finish_when_serve_down_stops_the_server(
    serving: Artifact, tmp_path: Path
) -> None:
    """Stop the server while every client is in the middle of an answer.

    Each client sends requests in a loop.
    """
    serving.await_health(START_SECONDS)
    answering, stopping, log = threading.Barrier(STREAMS + 1), threading.Event(), tmp_path / "down.log"
    with ThreadPoolExecutor(STREAMS) as pool:
        clients = [pool.submit(_answers, serving, number, answering, stopping) for number in range(STREAMS)]
        try:
            answering.wait(START_SECONDS)
            process = serving.start("serve", "down", serving.folder, log=log)
            _until(lambda: "tiny-serving-vllm-1 Stopping" in log.read_text(), process.poll, pause=0.01)
        finally:
            stopping.set()
        assert process.wait(START_SECONDS) == 0, log.read_text()
        answers = [client.result() for client in clients]
    print(f"\n{sum(map(len, answers))} answers of {STREAMS} clients until the server was down")
    assert all(answers)
    assert {answer for of_one in answers for answer in of_one} == {("length", LONG_TOKENS)}
    assert not serving.client.healthy()
    assert serving.engine.containers() == []


def _answers(
    artifact: Artifact, number: int, answering: threading.Barrier, stopping: threading.Event
) -> list[tuple[str, int]]:
    """Send requests until the server stops, and return how each answer ended and its number of tokens.

    Args:
        answering: a barrier that is passed once, in the middle of an answer.
    """
    client = artifact.client.within(SILENCE)
    body = _body(artifact, [2, 40 + number], LONG_TOKENS)
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    ended: list[tuple[str, int]] = []
    while not stopping.is_set():
        begun, reason, tokens = False, "none", 0
        try:
            for event in client.stream("/v1/completions", body):
                tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    reason = choice["finish_reason"] or reason
                if not begun and tokens and not ended:
                    answering.wait(START_SECONDS)
                begun = begun or tokens > 0
        except ServerError:
            if begun or not stopping.is_set():
                raise
        if begun:
            ended.append((reason, tokens))
    return ended


def _body(artifact: Artifact, prompt: list[int], tokens: int) -> dict[str, object]:
    return {
        "model": artifact.name,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _overwrite_the_tokenizer(folder: Path) -> None:
    """Exchange the ids of the ordinary tokens."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    markers = {token["id"] for token in tokenizer["added_tokens"]}
    vocabulary = tokenizer["model"]["vocab"]
    names = [name for name, number in vocabulary.items() if number not in markers]
    numbers = [vocabulary[name] for name in names]
    vocabulary |= dict(zip(names, reversed(numbers), strict=True))
    path.write_text(json.dumps(tokenizer), "utf-8")


def _until(
    true: Callable[[], bool],
    ended: Callable[[], int | None],
    seconds: float = START_SECONDS,
    pause: float = 0.2,
) -> None:
    """Wait until `true()`, and fail as soon as `ended()` is not None."""
    deadline = time.monotonic() + seconds
    while not true():
        assert ended() is None, f"it ended with {ended()}"
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(pause)
