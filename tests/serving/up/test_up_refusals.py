"""Tests that `recipe serve up` refuses what cannot work, in a sentence, before it builds or starts."""

from __future__ import annotations

import builtins
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from recipec.compiler.packages import install
from recipec.compiler.serving.up import Options
from tests.ports import free_port, listening
from tests.serving.fake_docker import FakeDocker, Script
from tests.serving.up_artifact import build, refusal, write_adapter, write_model


@pytest.fixture
def docker(tmp_path: Path) -> Iterator[FakeDocker]:
    """Run an engine that must only get requests that change nothing."""
    with FakeDocker(tmp_path) as engine:
        yield engine
        asked = {(request.method, request.path) for request in engine.requests if request.method != "GET"}
        assert asked <= {("POST", "/images/create")}


ADAPTER = ("serve.weights=adapter", "serve.model=./merged", "serve.env={MODEL_IMPL_TYPE: vllm}")

MERGE = "python merge.py in the artifact's folder writes it; --model DIR names another folder"


def _no_weights(merged: Path) -> None:
    for file in merged.iterdir():
        file.unlink()
    merged.rmdir()


def _cut_off(merged: Path) -> None:
    file = merged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _missing_shard(merged: Path) -> None:
    (merged / "model.safetensors").unlink()
    write_model(merged, 4)
    (merged / "model-00002-of-00004.safetensors").unlink()
    (merged / "model-00004-of-00004.safetensors").unlink()


def _wrong_shard(merged: Path) -> None:
    _no_weights(merged)
    write_model(merged, 2)
    first, second = (merged / f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())


def _linked(merged: Path) -> None:
    elsewhere = merged.parent.parent / "blob"
    (merged / "model.safetensors").rename(elsewhere)
    (merged / "model.safetensors").symlink_to(elsewhere)


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "none": (_no_weights, f"error: the weights are not there: no folder MERGED\n  = help: {MERGE}"),
    "file": (
        lambda merged: (_no_weights(merged), merged.write_text("")),
        f"error: MERGED is not a folder\n  = help: {MERGE}",
    ),
    "no config": (
        lambda merged: (merged / "config.json").unlink(),
        f"error: MERGED holds no model: it has no config.json\n  = help: {MERGE}",
    ),
    "broken config": (
        lambda merged: (merged / "config.json").write_text("{"),
        "error: MERGED/config.json is not JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1))\n  = help: copy or merge it again",
    ),
    "no shards": (
        lambda merged: (merged / "model.safetensors").unlink(),
        f"error: MERGED holds no weights: no .safetensors file\n  = help: {MERGE}",
    ),
    "no tokenizer": (
        lambda merged: (merged / "tokenizer.json").unlink(),
        "error: MERGED holds no tokenizer\n  = help: copy the base model's tokenizer files next to it",
    ),
    "cut off": (
        _cut_off,
        "error: MERGED/model.safetensors is truncated: 80 of 83 bytes\n  = help: copy or merge it again",
    ),
    "too long": (
        lambda merged: (merged / "model.safetensors").open("ab").write(b"more"),
        "error: MERGED/model.safetensors is longer than its header says: 87 of 83 bytes\n"
        "  = help: copy or merge it again",
    ),
    "another file": (
        lambda merged: (merged / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1"
        ),
        "error: MERGED/model.safetensors is not a safetensors file, or is truncated within its header\n"
        "  = help: copy or merge it again",
    ),
    "damaged header": (
        lambda merged: (merged / "model.safetensors").write_bytes(bytes([2, *bytes(7), *b"{]"])),
        "error: MERGED/model.safetensors does not have the header of a safetensors file\n"
        "  = help: copy or merge it again",
    ),
    "missing shards": (
        _missing_shard,
        "error: MERGED is incomplete: model-00002-of-00004.safetensors and 1 more of 4 shards are missing\n"
        "  = help: copy or merge it again",
    ),
    "another shard": (
        _wrong_shard,
        "error: MERGED/model-00002-of-00002.safetensors lacks the tensor layer.1, which "
        "model.safetensors.index.json says it holds\n  = help: copy or merge it again",
    ),
    "broken index": (
        lambda merged: (merged / "model.safetensors.index.json").write_text('{"weight_map": 1}'),
        "error: MERGED/model.safetensors.index.json is not the index of a model: it has no weight_map\n"
        "  = help: copy or merge it again",
    ),
    "links": (
        _linked,
        "error: MERGED/model.safetensors is a link to FOLDER/generated/blob, which the container would not "
        "see\n  = help: copy the files themselves, and name the copy: cp -rL MERGED COPY",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_missing_incomplete_or_damaged_weights_are_refused(
    case: str, artifact: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    spoil, expected = WEIGHTS[case]
    spoil(artifact / "merged")
    shown = expected.replace("MERGED", str(artifact / "merged")).replace("FOLDER", str(tmp_path))
    assert refusal(artifact, DOCKER_HOST=docker.host) == shown
    assert docker.requests == []


def test_missing_weights_at_a_given_path_are_refused(
    artifact: Path, docker: FakeDocker, tmp_path: Path
) -> None:
    said = refusal(artifact, Options(model=tmp_path / "other"), DOCKER_HOST=docker.host)
    assert said.startswith(f"error: the weights are not there: no folder {tmp_path / 'other'}\n")
    # As in compose.yaml.
    said = refusal(artifact, DOCKER_HOST=docker.host, MODEL_DIR=str(tmp_path / "third"))
    assert said.startswith(f"error: the weights are not there: no folder {tmp_path / 'third'}\n")


def test_weights_without_a_local_folder_are_refused(tmp_path: Path, docker: FakeDocker) -> None:
    bucket = build(tmp_path, "serve.model=gs://bucket/merged", name="bucket")
    assert refusal(bucket, DOCKER_HOST=docker.host) == (
        "error: the weights lie at gs://bucket/merged, and `up` mounts a folder of this machine\n"
        "  = help: copy them: gcloud storage rsync --recursive gs://bucket/merged DIR; then --model DIR"
    )
    own = build(tmp_path, "serve.model=recipec/tiny", name="own")
    assert refusal(own, DOCKER_HOST=docker.host) == (
        "error: the recipe does not say where the weights lie on this machine\n"
        "  = help: name the folder: --model DIR"
    )
    hub = build(tmp_path, "serve.model=google/gemma-4-31B-it", name="hub")
    assert refusal(hub, Options(model=tmp_path), DOCKER_HOST=docker.host) == (
        "error: the recipe has vLLM load google/gemma-4-31B-it from the Hugging Face hub, not a folder\n"
        "  = help: leave --model out, or build it with --set serve.model=DIR"
    )


def test_unserved_missing_or_incomplete_adapters_are_refused(
    tmp_path: Path, artifact: Path, docker: FakeDocker
) -> None:
    said = refusal(artifact, Options(adapter=tmp_path), DOCKER_HOST=docker.host)
    assert said == (
        "error: the recipe serves merged weights, without an adapter\n"
        "  = help: leave --adapter out, or build it with --set serve.weights=adapter"
    )
    served = build(tmp_path, *ADAPTER, name="lora")
    folder = served / "merged-adapter"
    help = "python merge.py in the artifact's folder writes it; --adapter DIR names another folder"
    said = refusal(served, DOCKER_HOST=docker.host)
    assert said == f"error: the adapter is not there: no folder {folder}\n  = help: {help}"
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    said = refusal(served, DOCKER_HOST=docker.host)
    assert said == (
        f"error: {folder} holds no adapter: it has no adapter_model.safetensors\n  = help: {help}"
    )


def test_open_host_without_an_api_key_is_refused(tmp_path: Path, docker: FakeDocker) -> None:
    open_to_all = build(tmp_path, "serve.host=0.0.0.0")
    for environ in ({}, {"VLLM_API_KEY": ""}):
        assert refusal(open_to_all, DOCKER_HOST=docker.host, **environ) == (
            "error: serve.host is 0.0.0.0, which others can reach: the server needs an API key, and "
            "VLLM_API_KEY is not set\n"
            '  = help: make one with: export VLLM_API_KEY="$(openssl rand -hex 32)"; or serve.host: 127.0.0.1'
        )
    assert docker.requests == []


def test_artifact_without_a_dockerfile_is_refused(artifact: Path, docker: FakeDocker) -> None:
    (artifact / "serve/Dockerfile").unlink()
    assert refusal(artifact, DOCKER_HOST=docker.host) == (
        f"error: {artifact}/serve/Dockerfile is missing\n  = help: build it again: recipe build RECIPE"
    )


def test_invalid_memory_size_is_refused(artifact: Path, docker: FakeDocker) -> None:
    assert refusal(artifact, Options(memory="lots"), DOCKER_HOST=docker.host) == (
        "error: --memory lots is not a size\n  = help: write it in bytes, or as 512m or 64g"
    )


def test_port_in_use_is_refused_and_its_owner_named(tmp_path: Path, docker: FakeDocker) -> None:
    with listening() as port:
        artifact = build(tmp_path, f"serve.port={port}")
        assert refusal(artifact, DOCKER_HOST=docker.host) == (
            f"error: port {port} of 127.0.0.1 is in use\n"
            "  = help: stop the program that listens there, or build the recipe with another port: --set "
            "serve.port=8001"
        )
        labels = {"recipec.artifact": "/srv/other", "recipec.port": str(port)}
        docker.add("other", **labels)
        assert refusal(artifact, DOCKER_HOST=docker.host) == (
            f"error: port {port} is in use by the container other\n"
            "  = help: stop it with: recipe serve down /srv/other; or build the recipe with another port"
        )
        docker.containers.clear()
        docker.add("sample-vllm-1", **{"com.docker.compose.project": "sample"})
        assert refusal(artifact, DOCKER_HOST=docker.host) == (
            f"error: port {port} is in use, probably by sample-vllm-1, which docker compose started\n"
            "  = help: stop it with: docker compose down, in the artifact's serve folder"
        )


def test_serve_host_of_another_machine_is_refused(tmp_path: Path, docker: FakeDocker) -> None:
    artifact = build(tmp_path, "serve.host=192.0.2.1")
    assert refusal(artifact, DOCKER_HOST=docker.host, VLLM_API_KEY="k") == (
        "error: serve.host 192.0.2.1 is not an address of this machine\n"
        "  = help: serve.host: 127.0.0.1, or 0.0.0.0 for all of its addresses"
    )


def test_container_name_in_use_is_refused(artifact: Path, docker: FakeDocker) -> None:
    docker.add("sample", **{"recipec.artifact": "/srv/sample"})
    assert refusal(artifact, DOCKER_HOST=docker.host) == (
        "error: sample is up already: its container is running\n"
        "  = help: stop it with: recipe serve down /srv/sample; its log: docker logs --follow sample"
    )
    docker.containers.clear()
    docker.add("sample", "exited")
    assert refusal(artifact, DOCKER_HOST=docker.host) == (
        "error: there is a container named sample that `recipe serve up` did not start\n"
        "  = help: docker rm --force sample removes it"
    )


def test_failed_pull_of_the_base_image_is_refused(artifact: Path, docker: FakeDocker) -> None:
    docker.script = Script(
        images=(), pull=[{"status": "Pulling from x"}, {"error": "manifest unknown", "errorDetail": {}}]
    )
    assert refusal(artifact, DOCKER_HOST=docker.host) == (
        "error: the base image base:1 is not on this machine and cannot be fetched: manifest unknown\n"
        "  = help: check that its name is right and that its registry can be reached (docker login, if it "
        "is private); "
        "--base-image IMAGE names another"
    )
    assert docker.sent("POST", "/images/create")[0].query == {"tag": "1", "fromImage": "base"}
    refusal(artifact, Options(base_image="registry:5000/vllm"), DOCKER_HOST=docker.host)
    asked = docker.sent("POST", "/images/create")[1].query
    assert asked == {"tag": "latest", "fromImage": "registry:5000/vllm"}


START = "start it (sudo systemctl start docker), or set DOCKER_HOST to the address of one that runs here"

ENGINES = {
    "unix://FOLDER/none.sock": (
        f"error: no Docker engine runs here: there is no socket FOLDER/none.sock\n  = help: {START}"
    ),
    "unix://FOLDER/dead.sock": (
        f"error: no Docker engine runs here: nothing listens at unix://FOLDER/dead.sock\n  = help: {START}"
    ),
    "tcp://127.0.0.1:PORT": (
        f"error: no Docker engine runs here: nothing listens at tcp://127.0.0.1:PORT\n  = help: {START}"
    ),
    "tcp://10.1.2.3:2375": (
        "error: DOCKER_HOST is tcp://10.1.2.3:2375, the engine of another machine, which does not have "
        "this machine's folders\n  = help: run the command on the machine that serves, with its own engine"
    ),
    "ssh://me@there": (
        "error: DOCKER_HOST is ssh://me@there, the engine of another machine, which does not have this "
        "machine's folders\n  = help: run the command on the machine that serves, with its own engine"
    ),
    "ftp://x": (
        "error: DOCKER_HOST is `ftp://x`, which is not the address of an engine\n"
        "  = help: unset it, or write it as unix:///var/run/docker.sock"
    ),
    "tcp://localhost:port": (
        "error: DOCKER_HOST is `tcp://localhost:port`, which is not the address of an engine\n"
        "  = help: unset it, or write it as unix:///var/run/docker.sock"
    ),
}


@pytest.mark.parametrize("host", ENGINES)
def test_unreachable_or_remote_engines_give_one_sentence_errors(
    host: str, artifact: Path, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    filled = {"FOLDER": str(tmp_path), "PORT": str(free_port())}
    address, expected = host, ENGINES[host]
    for name, value in filled.items():
        address, expected = address.replace(name, value), expected.replace(name, value)
    assert refusal(artifact, DOCKER_HOST=address) == expected


def test_socket_without_permission_gives_one_sentence_error(
    artifact: Path, docker: FakeDocker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fake the system's refusal, because root may do everything.
    connect = socket.socket.connect

    def refused(self: socket.socket, address: object) -> None:
        if address == str(docker.socket):
            raise PermissionError(13, os.strerror(13))
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", refused)
    assert refusal(artifact, DOCKER_HOST=docker.host) == (
        f"error: this user may not talk to the Docker engine: no permission on its socket {docker.socket}\n"
        "  = help: join the group docker (sudo usermod -aG docker $USER) and log in again, or use sudo"
    )


def test_missing_docker_sdk_error_gives_the_install_command(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: object, **keywords: object) -> object:
        if name.partition(".")[0] == "docker":
            raise ModuleNotFoundError("No module named 'docker'", name="docker")
        return real(name, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    assert refusal(artifact) == (
        f"error: the Docker SDK for Python is not installed (no module docker)\n  = help: {install('serve')}"
    )
