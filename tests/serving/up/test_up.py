"""Tests of `recipe serve up` and `down` with the real Docker SDK, and a fake engine without containers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.serving.artifacts import open_artifact
from recipec.compiler.serving.down import down
from recipec.compiler.serving.up import Options, up
from tests.serving.fake_docker import CUT, STDERR, STDOUT, FakeDocker, Script
from tests.serving.up_artifact import PORT, SENTINEL, build, write_adapter

ADAPTER = (
    "serve.weights=adapter",
    "serve.model=google/gemma-4-31B-it",
    "serve.env={MODEL_IMPL_TYPE: vllm}",
    "serve.host=0.0.0.0",
)


def start(
    folder: Path,
    engine: FakeDocker,
    options: Options | None = None,
    said: list[str] | None = None,
    **environ: str,
) -> list[str]:
    """Run `up`, and return its output."""
    said = [] if said is None else said
    up(
        open_artifact(folder),
        options or Options(detach=True),
        said.append,
        {"DOCKER_HOST": engine.host, **environ},
    )
    return said


def failure(
    folder: Path, engine: FakeDocker, options: Options | None = None, said: list[str] | None = None
) -> str:
    """Return `up`'s error. It must leave no container. Its output is added to `said`."""
    with pytest.raises(ArtifactError) as caught:
        start(folder, engine, options, said)
    assert engine.containers == {}
    return f"{caught.value}\n{caught.value.help}"


def stop(folder: Path, engine: FakeDocker, volumes: bool = False) -> list[str]:
    said: list[str] = []
    down(open_artifact(folder), volumes, said.append, {"DOCKER_HOST": engine.host})
    return said


def composed(folder: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return compose.yaml as docker compose reads it."""
    command = [Path(sys.executable).parent / "docker-compose", "config", "--format", "json"]
    done = subprocess.run(
        command, cwd=folder / "serve", env=dict(environ), capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("sets", [(), ADAPTER], ids=["merged", "adapter"])
def test_up_creates_the_same_container_as_compose_yaml(
    sets: tuple[str, ...], tmp_path: Path, docker: FakeDocker
) -> None:
    folder = build(tmp_path, f"serve.port={PORT}", *sets)
    write_adapter(folder / "merged-adapter")
    environ = {"VLLM_API_KEY": SENTINEL, "HF_TOKEN": f"{SENTINEL}-hub", "UNRELATED": "1"}
    project = composed(folder, environ)
    service = project["services"]["vllm"]
    start(folder, docker, **environ)

    (create,) = docker.sent("POST", "/containers/create")
    asked = json.loads(create.body)
    assert asked["Image"] == service["image"] == project["name"] == create.query["name"]
    # Both use the image's command.
    assert not asked.get("Cmd") and not asked.get("Entrypoint")
    assert not service["command"] and not service["entrypoint"]
    expected = {f"{name}={value}" for name, value in service["environment"].items()}
    assert set(asked["Env"]) == expected and f"VLLM_API_KEY={SENTINEL}" in expected
    minutes, seconds = service["stop_grace_period"].removesuffix("s").split("m")
    assert asked["StopTimeout"] == int(minutes) * 60 + int(seconds)
    volumes = project["volumes"]
    assert asked["HostConfig"] == {
        "Mounts": [
            {
                "Type": mount["type"],
                "Source": volumes[mount["source"]]["name"] if mount["type"] == "volume" else mount["source"],
                "Target": mount["target"],
                "ReadOnly": mount.get("read_only", False),
            }
            for mount in service["volumes"]
        ],
        "ShmSize": int(service["shm_size"]),
        "Privileged": service["privileged"],
        "NetworkMode": service["network_mode"],
        "Init": service["init"],
    }
    assert set(docker.volumes) == {volume["name"] for volume in volumes.values()}
    for name, labels in docker.volumes.items():
        assert labels["com.docker.compose.project"] == project["name"]
        assert volumes[labels["com.docker.compose.volume"]]["name"] == name
    # Compose sets the restart policy at once. `up` sets it after it has seen the server start.
    assert docker.find("sample").restart == service["restart"]  # type: ignore[union-attr]
    known = {
        *("image", "command", "entrypoint", "environment", "stop_grace_period", "volumes", "shm_size"),
        *("privileged", "network_mode", "restart", "build", "init"),
    }
    assert set(service) == known, "a key of compose.yaml that `up` knows nothing of"


def test_api_key_is_sent_only_in_the_container_environment(
    tmp_path: Path, docker: FakeDocker, capfd: Any
) -> None:
    folder = build(tmp_path, f"serve.port={PORT}", "serve.host=0.0.0.0")
    docker.script.output = [
        (STDOUT, f"args: api_key='{SENTINEL}' once".encode()),
        (STDERR, f"and {SENTINEL[:9]}".encode()),
        (STDERR, f"{SENTINEL[9:]} in two pieces\n".encode()),
        (STDOUT, b"\n"),
    ]
    docker.script.exit = (0.0, 3, False)
    docker.script.ready = None
    said: list[str] = []
    with pytest.raises(ArtifactError) as caught:
        environ = {"DOCKER_HOST": docker.host, "VLLM_API_KEY": SENTINEL}
        up(open_artifact(folder), Options(), said.append, environ)
    shown = capfd.readouterr()
    assert shown.out == "args: api_key='***' once\n" and shown.err == "and *** in two pieces\n"
    for text in (*said, str(caught.value), str(caught.value.help)):
        assert SENTINEL not in text
    assert "api_key='***'" in str(caught.value)
    holding = [request.path for request in docker.requests if SENTINEL.encode() in request.body]
    assert holding == ["/containers/create"]
    create = json.loads(docker.sent("POST", "/containers/create")[0].body)
    assert SENTINEL not in json.dumps(create | {"Env": []})
    assert not any(SENTINEL in str((request.query, request.headers)) for request in docker.requests)


def test_up_prints_its_progress_and_the_container_log(artifact: Path, docker: FakeDocker, capfd: Any) -> None:
    docker.script.build = [
        {"stream": "Step 1/2 : FROM base\n"},
        {"stream": " ---> 0123456789ab\n"},
        {"stream": f"Step 2/2 : ENTRYPOINT {'x' * 200}\n"},
        {"aux": {"ID": "sha256:1"}},
    ]
    bar = "loading ██ 50 %\n".encode()
    docker.script.output = [(STDOUT, bar[:9]), (STDERR, b"a warning\n"), (STDOUT, bar[9:])]
    said = start(artifact, docker)
    assert [re.sub(r"\d+ s\b", "N s", line) for line in said if "time" not in line] == [
        "note: the recipe serves on v6e-8, and this machine shows no TPU (no /dev/vfio or /dev/accel*)",
        "building the image sample",
        "  Step 1/2 : FROM base",
        f"  Step 2/2 : ENTRYPOINT {'x' * 85}...",
        "built in N s",
        "starting sample",
        f"sample is ready after N s: http://127.0.0.1:{PORT}/v1",
        f"stop it with: recipe serve down {artifact}; its log: docker logs --follow sample",
    ]
    shown = capfd.readouterr()
    # Characters in two pieces stay whole, with the other stream between the pieces.
    assert shown.out in ("", bar.decode()) and shown.err in ("", "a warning\n")
    (built,) = docker.sent("POST", "/build")
    assert (
        built.query["t"] == "sample" and built.query["forcerm"] == "True" and "buildargs" not in built.query
    )


def test_base_image_option_is_passed_to_the_build(artifact: Path, docker: FakeDocker) -> None:
    docker.script.images = ("other:2",)
    start(artifact, docker, Options(base_image="other:2", detach=True))
    assert json.loads(docker.sent("POST", "/build")[0].query["buildargs"]) == {"BASE_IMAGE": "other:2"}


def test_missing_base_image_is_pulled(artifact: Path, docker: FakeDocker) -> None:
    docker.script.images = ()
    docker.script.pull = [
        {"status": "Pulling from base", "id": "1"},
        {"status": "Downloading", "progressDetail": {"current": 1, "total": 2}, "id": "ab"},
        {"status": "Download complete", "progressDetail": {}, "id": "ab"},
    ]
    said = start(artifact, docker)
    fetching = said.index("fetching base:1, which is not here yet")
    assert said[fetching + 1 : fetching + 3] == ["  1: Pulling from base", "  ab: Download complete"]


def test_up_notes_a_missing_hf_token_for_a_hub_model(tmp_path: Path, docker: FakeDocker) -> None:
    folder = build(tmp_path, f"serve.port={PORT}", "serve.model=google/gemma-4-31B-it")
    note = "note: HF_TOKEN is not set, which the Hugging Face hub may need for google/gemma-4-31B-it"
    assert note in start(folder, docker)
    assert set(docker.volumes) == {"sample_xla-cache", "sample_hub-cache"}
    stop(folder, docker, volumes=True)
    assert docker.volumes == {}
    assert note not in start(folder, docker, HF_TOKEN=SENTINEL)


def test_memory_option_limits_memory_and_swap(artifact: Path, docker: FakeDocker) -> None:
    start(artifact, docker, Options(memory="2g", detach=True))
    host = json.loads(docker.sent("POST", "/containers/create")[0].body)["HostConfig"]
    assert (host["Memory"], host["MemorySwap"]) == (2 << 30, 2 << 30)


def test_failed_build_shows_its_output(artifact: Path, docker: FakeDocker) -> None:
    docker.script.build = [
        {"stream": "Step 1/1 : RUN false\n"},
        {"stream": "some words\n"},
        {"error": "The command '/bin/sh -c false' returned a non-zero code: 1", "errorDetail": {}},
    ]
    said: list[str] = []
    with pytest.raises(ArtifactError) as caught:
        up(open_artifact(artifact), Options(), said.append, {"DOCKER_HOST": docker.host})
    assert said[-2:] == ["  Step 1/1 : RUN false", "  some words"]
    assert str(caught.value) == (
        "the image sample could not be built: The command '/bin/sh -c false' returned a non-zero code: 1"
    )
    assert caught.value.help == f"the Dockerfile is {artifact / 'serve/Dockerfile'}; its output is above"
    assert docker.containers == {}


@pytest.mark.parametrize("stage", ["build", "pull"])
def test_engine_lost_during_build_or_pull_gives_one_sentence_error(
    stage: str, artifact: Path, docker: FakeDocker
) -> None:
    setattr(docker.script, stage, [{"stream": "Step 1/2 : FROM base\n", "status": "Waiting"}, CUT])
    docker.script.images = () if stage == "pull" else docker.script.images
    doing = {"build": "build the image sample", "pull": "fetch the image base:1"}[stage]
    assert failure(artifact, docker) == (
        f"the Docker engine stopped when asked to {doing}\nsee whether it runs: docker info"
    )


ENDS: dict[str, tuple[tuple[float, int, bool], Options, str]] = {
    "crash": (
        (0.0, 1, False),
        Options(),
        "sample has stopped before it was ready: it ended with exit status 1; its log ends:\n"
        "    ValueError: no room\nthe reason is in its log, above",
    ),
    "memory": (
        (0.0, 137, True),
        Options(memory="1g"),
        "sample has stopped before it was ready: it ran out of memory, with more than its limit of 1g; its "
        "log ends:\n    ValueError: no room\na larger --memory, or none",
    ),
    "the machine's memory": (
        (0.0, 137, True),
        Options(),
        "sample has stopped before it was ready: it ran out of memory, with more than what the machine has; "
        "its log ends:\n    ValueError: no room\nuse a machine with more memory",
    ),
    "killed": (
        (0.0, 137, False),
        Options(detach=True),
        "sample has stopped before it was ready: it was killed (exit status 137) by another command, or "
        "because the machine ran out of memory; its log ends:\n    ValueError: no room\n"
        "dmesg shows whether the kernel killed it",
    ),
    "signal": (
        (0.0, 139, False),
        Options(),
        "sample has stopped before it was ready: it ended by a signal (exit status 139); its log ends:\n"
        "    ValueError: no room\nthe reason is in its log, above",
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_server_that_exits_before_ready_fails_with_reason_and_log(
    case: str, artifact: Path, docker: FakeDocker
) -> None:
    end, options, expected = ENDS[case]
    docker.script = Script(output=[(STDERR, b"ValueError: no room\n")], ready=None, exit=end)
    assert failure(artifact, docker, options) == expected


def test_server_that_exits_while_serving_fails_with_its_status(artifact: Path, docker: FakeDocker) -> None:
    docker.script.exit = (1.0, 2, False)
    assert failure(artifact, docker, Options()) == (
        "sample has stopped: it ended with exit status 2; its log is empty\nthe reason is in its log, above"
    )


def test_server_not_ready_within_the_wait_is_removed(
    artifact: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker.script.ready = None
    monkeypatch.setattr("recipec.compiler.serving.up.TELL_SECONDS", 0.0)
    said: list[str] = []
    assert failure(artifact, docker, Options(minutes=0.025), said) == (
        f"sample is not ready after 0.025 min: http://127.0.0.1:{PORT}/health does not answer; its log is "
        "empty\nif its log shows that it still loads or compiles, give more time with --wait MINUTES"
    )
    assert f"waiting for http://127.0.0.1:{PORT}/health, 1 s so far, at most 0 s more" in said
    # Without requests, the stop has a shorter timeout than with requests.
    assert docker.sent("POST", "/stop")[0].query == {"t": "5"}


def test_image_without_vllm_gives_one_sentence_error(artifact: Path, docker: FakeDocker) -> None:
    docker.script.start = (400, 'exec: "vllm": executable file not found in $PATH: unknown')
    assert failure(artifact, docker) == (
        "the image has no program `vllm`\ncheck that its base is an image of vLLM-TPU; --base-image IMAGE "
        "names another"
    )


def test_container_start_error_gives_one_sentence_error(artifact: Path, docker: FakeDocker) -> None:
    docker.script.start = (500, "no space left\n  on device")
    assert failure(artifact, docker) == (
        "the Docker engine could not start the container sample: no space left on device\nNone"
    )


def test_engine_lost_while_serving_gives_error_and_down_hint(artifact: Path, docker: FakeDocker) -> None:
    docker.script.vanish = True
    said: list[str] = []
    with pytest.raises(ArtifactError) as caught:
        up(open_artifact(artifact), Options(), said.append, {"DOCKER_HOST": docker.host})
    assert str(caught.value) == "the Docker engine stopped when asked to wait for the container sample"
    assert said[-1] == (
        "note: sample may still run (the Docker engine stopped when asked to remove the container "
        f"sample); once the engine answers again: recipe serve down {artifact}"
    )


def test_up_removes_an_exited_container_of_the_same_artifact(artifact: Path, docker: FakeDocker) -> None:
    left = docker.add("sample", "exited", **{"recipec.artifact": str(artifact)})
    start(artifact, docker)
    assert left.id not in docker.containers and docker.find("sample") is not None


def test_up_ends_without_error_if_another_command_stops_the_server(
    artifact: Path, docker: FakeDocker
) -> None:
    """Run `down` in another terminal: `up` ends without an error."""
    said: list[str] = []

    def stop_when_ready() -> None:
        while not any("Ctrl-C stops it" in line for line in said):
            pass
        found = docker.find("sample")
        assert found is not None
        docker.end(found, 0)

    threading.Thread(target=stop_when_ready, daemon=True).start()
    up(open_artifact(artifact), Options(), said.append, {"DOCKER_HOST": docker.host})
    assert said[-2:] == ["sample was stopped by another command", "sample is down"]


def test_down_stops_the_server_and_keeps_its_cache(artifact: Path, docker: FakeDocker) -> None:
    assert stop(artifact, docker) == ["sample does not run"]
    start(artifact, docker)
    assert stop(artifact, docker) == [
        "stopping sample, within 2 min 30 s: requests in flight may finish; Ctrl-C kills it",
        "sample is down",
    ]
    assert docker.sent("POST", "/stop")[0].query == {"t": "150"}
    assert docker.containers == {} and set(docker.volumes) == {"sample_xla-cache"}
    assert stop(artifact, docker) == ["sample does not run"]
    assert stop(artifact, docker, volumes=True) == [
        "sample does not run",
        "removed the volume sample_xla-cache",
    ]
    assert stop(artifact, docker, volumes=True) == ["sample does not run"]


def test_down_removes_an_exited_container(artifact: Path, docker: FakeDocker) -> None:
    docker.add("sample", "exited", **{"recipec.artifact": str(artifact)})
    assert stop(artifact, docker) == ["sample is down"]
    assert docker.containers == {} and not docker.sent("POST", "/stop")


def test_down_leaves_containers_that_up_did_not_start(artifact: Path, docker: FakeDocker) -> None:
    docker.add("sample")
    with pytest.raises(ArtifactError, match="the container sample was not started by `recipe serve up`"):
        stop(artifact, docker)
    docker.containers.clear()
    docker.add("sample-vllm-1", **{"com.docker.compose.project": "sample"})
    assert stop(artifact, docker) == [
        "sample does not run by `recipe serve up`, and docker compose started one: docker compose down in "
        f"{artifact}/serve"
    ]
    assert len(docker.containers) == 1
