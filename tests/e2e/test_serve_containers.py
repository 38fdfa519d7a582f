"""Tests of a generated artifact in a real container, with secrets that must appear nowhere.

Both builders build the image. `recipe serve` builds it too, starts it and ends it. The tests send requests,
benchmark and verify it. vLLM for CPU replaces vLLM-TPU (serving_image.py), and the model is a tiny Gemma 4 in
the multimodal layout.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e import serving_artifacts
from tests.e2e.docker_engine import FOLDER, Engine
from tests.e2e.serving_artifacts import SENTINELS, Artifact, Tiny, build, holding_a_sentinel


@pytest.fixture(scope="module")
def seen() -> Iterator[set[str]]:
    """Collect the argument lists of all processes that contain a sentinel during this module's tests."""
    with serving_artifacts.watched() as found:
        yield found


@pytest.fixture(scope="module")
def merged(
    engine: Engine, vllm_image: str, tiny: Tiny, seen: set[str], tmp_path_factory: pytest.TempPathFactory
) -> Artifact:
    """Make an artifact with merged weights in merge.py's default folder."""
    artifact = build(tmp_path_factory.mktemp("merged"), "tiny-merged", engine, vllm_image, tiny.base)
    serving_artifacts.copy(tiny.merged, artifact.folder / "merged")
    return artifact


@pytest.fixture(scope="module")
def composed(merged: Artifact) -> Iterator[Artifact]:
    """Start the artifact's server."""
    try:
        merged.recipe("serve", "up", merged.folder, "--detach")
        yield merged
    finally:
        merged.recipe("serve", "down", merged.folder, "--volumes")


@pytest.mark.e2e
def test_watcher_sees_secrets_in_argument_lists() -> None:
    with serving_artifacts.watched(["a-secret-of-this-test"]) as found:
        subprocess.run(["sh", "-c", "sleep 1; true", "a-secret-of-this-test"], check=True)
    assert found


@pytest.mark.nightly
def test_docker_build_with_and_without_buildkit_gives_the_same_image(
    merged: Artifact, engine: Engine, vllm_image: str
) -> None:
    """Build with each builder on another base than the Dockerfile's. The image adds no layer to its base."""
    configurations = []
    for buildkit in ("0", "1"):
        tag = f"built-{buildkit}"
        arguments = ("--network", "host", "--build-arg", f"BASE_IMAGE={vllm_image}", "--tag", tag)
        folder = str(merged.folder / "serve")
        merged.said.append(engine.docker("build", *arguments, folder, DOCKER_BUILDKIT=buildkit, **SENTINELS))
        (image,) = json.loads(engine.docker("image", "inspect", tag))
        (base,) = json.loads(engine.docker("image", "inspect", vllm_image))
        assert image["RootFS"]["Layers"] == base["RootFS"]["Layers"]
        keys = ("Entrypoint", "Cmd", "Env", "ExposedPorts", "Healthcheck", "User", "WorkingDir", "Volumes")
        configurations.append({key: image["Config"].get(key) for key in keys})
        for text in (engine.docker("history", "--no-trunc", tag), json.dumps(image)):
            assert not any(value in text for value in SENTINELS.values())
    assert configurations[0] == configurations[1]
    assert configurations[0]["Entrypoint"][:3] == ["vllm", "serve", "/model"]


@pytest.mark.e2e
def test_serve_up_waits_for_a_healthy_server(composed: Artifact) -> None:
    told = composed.inspect(_container(composed))
    assert told["State"]["Health"]["Status"] == "healthy"
    assert told["HostConfig"]["RestartPolicy"]["Name"] == "unless-stopped"
    assert composed.client.healthy()


@pytest.mark.e2e
def test_api_key_is_only_in_the_container_environment(composed: Artifact) -> None:
    told = composed.inspect(_container(composed))
    # Local weights need no Hugging Face token.
    secrets = {word for word in told["Config"].pop("Env") if word.startswith(tuple(SENTINELS))}
    assert secrets == {f"VLLM_API_KEY={SENTINELS['VLLM_API_KEY']}"}
    assert not any(value in json.dumps(told) for value in SENTINELS.values())
    # Prove that the search works: the engine stores a container's environment while the container exists.
    assert holding_a_sentinel(FOLDER / "data" / "containers") != []


@pytest.mark.e2e
def test_smoke_sh_passes_on_the_composed_server(composed: Artifact) -> None:
    said = composed.run("./smoke.sh")
    assert "checks ok" in said
    assert re.search(r"first request .* first token after [0-9]+ ms", said)
    assert "API key" in said


@pytest.mark.e2e
def test_bench_sh_measures_two_points_on_the_composed_server(composed: Artifact) -> None:
    composed.run("./bench.sh")
    for name in ("input-32-rate-8", "input-32-rate-inf"):
        record = json.loads((composed.folder / "results" / "bench" / f"{name}.json").read_text())
        assert record["failure"] is None
        assert record["result"]["completed"] == record["settings"]["prompts"] == 12
        assert record["result"]["failed"] == 0
        assert record["result"]["total_output_tokens"] == 12 * 8


@pytest.mark.e2e
def test_verify_accepts_the_served_merged_checkpoint(composed: Artifact) -> None:
    said = composed.recipe("serve", "verify", composed.url, "--artifact", composed.folder)
    assert "verdict: the same model" in said


@pytest.mark.e2e
def test_verify_rejects_the_base_checkpoint(composed: Artifact, tiny: Tiny) -> None:
    """Verify against the base, which differs from the merged weights."""
    words = ("--model", tiny.base, "--server-dtype", "float32")
    said = composed.recipe("serve", "verify", composed.url, *words, status=1)
    assert "verdict: the endpoint is not this checkpoint" in said


@pytest.mark.e2e
def test_serve_down_leaves_no_secret(composed: Artifact, engine: Engine, seen: set[str]) -> None:
    """Search argument lists, outputs, the artifact and the engine's files after all tests above."""
    logs = composed.run("docker", "compose", "logs", "--no-color")
    assert "Application startup complete" in logs
    composed.recipe("serve", "down", composed.folder)
    assert engine.containers() == []
    check_secrets(composed, engine, seen)


def asked(artifact: Artifact, prompt: list[int], tokens: int) -> dict[str, object]:
    """Return a request for an answer of a number of tokens."""
    body = {"model": artifact.name, "prompt": prompt, "max_tokens": tokens}
    return body | {"temperature": 0, "ignore_eos": True}


@pytest.mark.nightly
def test_all_requests_of_64_clients_are_answered(composed: Artifact) -> None:
    def ask(number: int) -> tuple[str, int]:
        prompt = [2, *(30 + number * step % 400 for step in range(1, 9))]
        answer = composed.client.post("/v1/completions", asked(composed, prompt, 8))
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(64) as pool:
        assert Counter(pool.map(ask, range(1000))) == {("length", 8): 1000}


@pytest.mark.nightly
def test_requests_in_flight_finish_when_serve_down_stops_the_server(composed: Artifact) -> None:
    """Stop the server when each of eight streams has begun."""
    begun = threading.Barrier(8 + 1)

    def answer(number: int) -> str:
        reason, first = "", True
        for event in composed.client.stream("/v1/completions", asked(composed, [2, 40 + number], 200)):
            if first:
                begun.wait(300)
            first = False
            reason = event["choices"][0]["finish_reason"] or reason
        return reason

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(answer, number) for number in range(8)]
        begun.wait(300)
        composed.recipe("serve", "down", composed.folder)
    assert [one.result() for one in answers] == ["length"] * 8
    assert composed.engine.containers() == []


def check_secrets(artifact: Artifact, engine: Engine, seen: set[str]) -> None:
    """Check that no secret was seen, printed, written or stored."""
    assert seen == set()
    assert not [said for said in artifact.said if any(value in said for value in SENTINELS.values())]
    # All folders except the layers of the base image, which was made without secrets.
    kept = [FOLDER / "log"]
    for name in ("image", "containers", "buildkit", "volumes"):
        kept.append(FOLDER / "data" / name)
    assert holding_a_sentinel(artifact.folder.parents[1], *kept) == []


def _container(artifact: Artifact) -> str:
    (name,) = artifact.engine.containers()
    return name
