"""Tests of `recipe serve up` and `down` with a fake docker command, and of what they refuse."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.deployment.compose import down, up
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.errors import ArtifactError
from tests.deployment.up_artifact import Command, build, write_adapter, write_model
from tests.ports import free_port, listening

DOCKER = """\
#!{python} -S
import json, os, sys, time
words = sys.argv[1:]
with open({log!r}, "a") as log:
    names = ("MODEL_DIR", "ADAPTER_DIR")
    environment = {{name: os.environ[name] for name in names if name in os.environ}}
    log.write(json.dumps([words, sys.stdin.read(), environment]) + "\\n")
plan = json.load(open({plan!r}))
try:
    print(" ".join(words), flush=True)
    time.sleep(300 if "up" in words and plan.get("hang") else 0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    time.sleep(300 if plan["hang"] == "deaf" else 0)
sys.exit(next((plan[word] for word in words if word in plan), 0))
"""


class Docker:
    """A fake docker command: plan.json has the exit status of its subcommands."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.log, self.plan = folder / "log", folder / "plan.json"
        self.tell()
        text = DOCKER.format(python=sys.executable, log=str(self.log), plan=str(self.plan))
        (folder / "docker").write_text(text)
        (folder / "docker").chmod(0o755)

    def tell(self, **plan: Any) -> None:
        self.plan.write_text(json.dumps(plan))

    def calls(self) -> list[Any]:
        """Return each call's words, standard input and folders."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def words(self) -> list[str]:
        return [" ".join(words) for words, _, _ in self.calls()]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return build(tmp_path, f"serve.port={free_port()}")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    monkeypatch.setenv("PATH", f"{tmp_path / 'docker'}:{os.environ['PATH']}")
    return Docker(tmp_path / "docker")


DOWN = "compose --project-name sample down --timeout 5"


def test_detached_up_waits_for_health_and_then_sets_the_restart_policy(
    artifact: Path, docker: Docker
) -> None:
    said: list[str] = []
    up(open_artifact(artifact), said.append, detach=True, minutes=0.5)
    start, policy = docker.calls()
    assert start[0] == [
        *("compose", "--file", f"{artifact}/serve/compose.yaml", "--file", "-"),
        *("up", "--build", "--detach", "--wait", "--wait-timeout", "30"),
    ]
    # A server that dies while it loads is not started again.
    assert json.loads(start[1]) == {"services": {"vllm": {"restart": "no"}}}
    assert start[2] == {"MODEL_DIR": f"{artifact}/merged"}
    assert policy[0] == ["update", "--restart", "unless-stopped", "sample-vllm-1"]
    assert said[-1].startswith(f"stop it with: recipe serve down {artifact}; its log: docker logs")
    assert said[0].startswith("note: the recipe serves on v6e-8, and this machine shows no TPU")


def test_failed_start_shows_the_log_and_leaves_no_container(artifact: Path, docker: Docker) -> None:
    docker.tell(up=1)
    with pytest.raises(ArtifactError, match="sample did not become ready"):
        up(open_artifact(artifact), print, detach=True)
    assert docker.words()[1:] == ["compose --project-name sample logs --no-log-prefix --tail 15 vllm", DOWN]


@pytest.mark.parametrize("status", [0, 137])
def test_attached_up_ends_with_its_server_and_removes_it(status: int, artifact: Path, docker: Docker) -> None:
    docker.tell(up=status)
    try:
        up(open_artifact(artifact), print)
        assert status == 0
    except ArtifactError as error:
        assert str(error) == f"docker compose ended with exit status {status}"
    start, removal = docker.words()
    assert start.endswith("up --build --exit-code-from vllm") and removal == DOWN


@pytest.mark.parametrize(
    ("signum", "hang"), [(signal.SIGINT, "polite"), (signal.SIGTERM, "polite"), (signal.SIGINT, "deaf")]
)
def test_signal_ends_docker_compose_and_removes_the_container(
    signum: int, hang: str, artifact: Path, docker: Docker
) -> None:
    """A second Ctrl-C kills a docker compose that does not end."""
    docker.tell(hang=hang)
    command = Command("up", artifact)
    command.until("--exit-code-from")
    command.signal(signum)
    if hang == "deaf":
        command.until("interrupted")
        command.signal(signum)
    assert command.ended() == 128 + signum
    assert docker.words()[-1] == DOWN


def test_down_removes_the_project_and_its_volumes_on_request(artifact: Path, docker: Docker) -> None:
    down(open_artifact(artifact), volumes=False)
    down(open_artifact(artifact), volumes=True)
    project = "compose --project-name sample down"
    assert docker.words() == [project, f"{project} --volumes"]
    docker.tell(down=1)
    with pytest.raises(ArtifactError, match="docker compose down ended with exit status 1"):
        down(open_artifact(artifact), volumes=False)


def test_missing_docker_gives_one_sentence_error(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        refusal(artifact)
        == "docker is not installed\ninstall Docker Engine, with its plug-in for docker compose"
    )


def refusal(folder: Path, **options: Path) -> str:
    """Return why `up` refuses a folder, and what helps."""
    with pytest.raises(ArtifactError) as caught:
        up(open_artifact(folder), print, **options)
    return f"{caught.value}\n{caught.value.help}"


MERGE = "python merge.py in the artifact's folder writes it; --model DIR names another folder"
AGAIN = "copy or merge it again"


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
    "none": (_no_weights, f"the weights are not there: no folder MERGED\n{MERGE}"),
    "no config": (
        lambda merged: (merged / "config.json").unlink(),
        f"MERGED holds no model: it has no config.json\n{MERGE}",
    ),
    "broken config": (
        lambda merged: (merged / "config.json").write_text("{"),
        "MERGED/config.json is not JSON (Expecting property name enclosed in double quotes: line 1 "
        f"column 2 (char 1))\n{AGAIN}",
    ),
    "no tokenizer": (
        lambda merged: (merged / "tokenizer.json").unlink(),
        "MERGED holds no tokenizer\ncopy the base model's tokenizer files next to it",
    ),
    "cut off": (_cut_off, f"MERGED/model.safetensors is truncated: 80 of 83 bytes\n{AGAIN}"),
    "another file": (
        lambda merged: (merged / "model.safetensors").write_text("version https://git-lfs"),
        f"MERGED/model.safetensors is not a safetensors file, or is truncated within its header\n{AGAIN}",
    ),
    "missing shards": (
        _missing_shard,
        f"MERGED is incomplete: model-00002-of-00004.safetensors and 1 more of 4 shards are missing\n{AGAIN}",
    ),
    "another shard": (
        _wrong_shard,
        "MERGED/model-00002-of-00002.safetensors lacks the tensor layer.1, which "
        f"model.safetensors.index.json says it holds\n{AGAIN}",
    ),
    "links": (
        _linked,
        "MERGED/model.safetensors is a link to FOLDER/generated/blob, which the container would not "
        "see\ncopy the files themselves, and name the copy: cp -rL MERGED COPY",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_missing_incomplete_or_damaged_weights_are_refused(
    case: str, artifact: Path, docker: Docker, tmp_path: Path
) -> None:
    spoil, expected = WEIGHTS[case]
    spoil(artifact / "merged")
    shown = expected.replace("MERGED", str(artifact / "merged")).replace("FOLDER", str(tmp_path))
    assert refusal(artifact) == shown
    assert docker.calls() == []


def test_folder_comes_from_the_option_or_the_environment(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert f"no folder {tmp_path / 'other'}\n" in refusal(artifact, model=tmp_path / "other")
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "third"))  # as in compose.yaml
    assert f"no folder {tmp_path / 'third'}\n" in refusal(artifact)


def test_folders_that_the_server_does_not_read_are_refused(tmp_path: Path, artifact: Path) -> None:
    own = build(tmp_path, "serve.model=recipec/tiny", name="own")
    assert refusal(own) == (
        "the recipe does not say where the weights lie on this machine\nname the folder: --model DIR"
    )
    hub = build(tmp_path, "serve.model=google/gemma-4-31B-it", name="hub")
    assert refusal(hub, model=tmp_path).startswith(
        "the recipe has vLLM load google/gemma-4-31B-it, not a folder\nleave --model out"
    )
    assert refusal(artifact, adapter=tmp_path).startswith(
        "the recipe serves merged weights, without an adapter\nleave --adapter out"
    )


def test_missing_or_incomplete_adapter_is_refused(tmp_path: Path) -> None:
    sets = ("serve.weights=adapter", "serve.model=./merged", "serve.env={MODEL_IMPL_TYPE: vllm}")
    served = build(tmp_path, *sets, name="lora")
    folder = served / "merged-adapter"
    help = "python merge.py in the artifact's folder writes it; --adapter DIR names another folder"
    assert refusal(served) == f"the adapter is not there: no folder {folder}\n{help}"
    write_adapter(folder)
    (folder / "adapter_model.safetensors").unlink()
    assert refusal(served) == f"{folder} holds no adapter: it has no adapter_model.safetensors\n{help}"
    write_adapter(folder)
    for config, part in (
        ('{"r": 8, "modules_to_save": ["embed_tokens"]}', 'modules_to_save: ["embed_tokens"]'),
        ('{"r": 8, "use_dora": true}', "use_dora: true"),
    ):
        (folder / "adapter_config.json").write_text(config)
        assert refusal(served).startswith(f"vLLM 0.32.0 refuses the adapter in {folder}: it has {part}\n")
    write_adapter(folder)
    (folder / "generation_config.json").unlink()
    assert refusal(served).startswith(f"{folder} has no generation_config.json, from which the server reads")


def test_occupied_port_and_foreign_host_are_refused(tmp_path: Path) -> None:
    with listening() as port:
        artifact = build(tmp_path, f"serve.port={port}")
        assert refusal(artifact).startswith(f"port {port} of 127.0.0.1 is in use\nif it is this artifact's")
    assert refusal(build(tmp_path, "serve.host=192.0.2.1", name="far")) == (
        "serve.host 192.0.2.1 is not an address of this machine\n"
        "serve.host: 127.0.0.1, or 0.0.0.0 for all of its addresses"
    )


def test_missing_token_for_a_hub_model_and_dockerfile_are_told(
    tmp_path: Path, docker: Docker, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build(tmp_path, f"serve.port={free_port()}", "serve.model=google/gemma-4-31B-it")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    said: list[str] = []
    up(open_artifact(folder), said.append, detach=True)
    note = "note: HF_TOKEN is not set, which the Hugging Face hub may need for google/gemma-4-31B-it"
    assert note in said and docker.calls()[0][2] == {}
    (folder / "serve/Dockerfile").unlink()
    assert refusal(folder) == f"{folder}/serve/Dockerfile is missing\nbuild it again: recipe build RECIPE"
