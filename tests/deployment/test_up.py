"""Tests of `recipe serve up` and `down` with a fake docker command and engine, and of what they refuse."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipec.compiler.deployment import compose
from recipec.compiler.deployment.compose import down, up
from recipec.compiler.deployment.docker_engine import PullProgress, layer_sizes
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.errors import ArtifactError
from tests.deployment.fake_engine import FakeEngine, fake_engine
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
    print(plan.pop("manifest_text", "") if "manifest" in words else " ".join(words), flush=True)
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
        """Return each call's words, standard input and folders, but for the question for its version."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        calls = [json.loads(line) for line in lines]
        return [call for call in calls if call[0] != ["compose", "version"]]

    def words(self) -> list[str]:
        return [" ".join(words) for words, _, _ in self.calls()]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return build(tmp_path, f"serve.port={free_port()}")


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Docker:
    monkeypatch.setenv("PATH", f"{tmp_path / 'docker'}:{os.environ['PATH']}")
    return Docker(tmp_path / "docker")


RUNNING = {"Running": True, "Health": {"Status": "starting", "Log": [{"Output": "\nrefused\n"}]}}
HEALTHY = {"Running": True, "Health": {"Status": "healthy", "Log": []}}


def ended(status: int, **more: Any) -> dict[str, Any]:
    return {"Running": False, "ExitCode": status, **more}


@pytest.fixture(autouse=True)
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    """Run an engine that has the base image, and whose server becomes healthy."""
    monkeypatch.setattr(compose, "POLL_SECONDS", 0.01)
    with fake_engine() as running:
        running.images, running.states = {"base:1"}, [RUNNING, HEALTHY]
        monkeypatch.setenv("DOCKER_HOST", running.host)
        yield running


DOWN = "compose --project-name sample down --timeout 5"


def test_detached_up_waits_for_health_and_then_sets_the_restart_policy(
    artifact: Path, docker: Docker, engine: FakeEngine
) -> None:
    said: list[str] = []
    engine.states = [RUNNING, RUNNING, RUNNING, HEALTHY]
    up(open_artifact(artifact), said.append, detach=True, minutes=0.5)
    (start,) = docker.calls()
    assert start[0] == [
        *("compose", "--file", f"{artifact}/serve/compose.yaml", "--file", "-"),
        *("up", "--build", "--detach"),
    ]
    # A server that dies while it loads is not started again.
    assert json.loads(start[1]) == {"services": {"vllm": {"restart": "no"}}}
    assert start[2] == {"MODEL_DIR": f"{artifact}/merged"}
    assert engine.requests[-1] == f"POST /containers/{'1' * 64}/update"
    assert said[-1].startswith(f"stop it with: recipe serve down {artifact}; its log: docker logs")
    assert said[0].startswith("note: the recipe serves on v6e-8, and this machine shows no TPU")


TRACE = """\
(EngineCore pid=9) ERROR 11-29 torch: ValueError: 4 heads are not divisible by 8
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above.

"""


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (
            [RUNNING, ended(1)],
            "it ended with exit status 1: ValueError: 4 heads are not div",
        ),
        (
            [RUNNING, ended(137, OOMKilled=True)],
            "the system killed it because memory ran out",
        ),
        (
            [RUNNING, ended(137)],
            "it was killed (exit status 137): if nobody did, this machine",
        ),
        (
            [ended(128, Error="no\nsuch device")],
            "the engine did not start it: no such device",
        ),
        ([RUNNING], "within 0 s, and its health check says: refused"),
    ],
)
def test_server_that_does_not_become_ready_is_told_why_and_removed(
    states: list[dict[str, Any]],
    why: str,
    artifact: Path,
    docker: Docker,
    engine: FakeEngine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine.states, engine.log = states, TRACE
    with pytest.raises(ArtifactError) as caught:
        up(open_artifact(artifact), print, detach=True, minutes=0.005)
    assert re.match(rf"sample did not (stay up: |become ready ){re.escape(why)}", str(caught.value))
    assert TRACE.splitlines()[0] in capsys.readouterr().err and docker.words()[1:] == [DOWN]


def test_failed_build_leaves_no_container(artifact: Path, docker: Docker, engine: FakeEngine) -> None:
    docker.tell(up=1)
    engine.states = []
    with pytest.raises(ArtifactError, match="docker compose ended with exit status 1"):
        up(open_artifact(artifact), print, detach=True)
    assert docker.words()[1:] == [DOWN]


@pytest.mark.parametrize("status", [0, 1])
def test_attached_up_ends_with_its_server_and_removes_it(
    status: int, artifact: Path, docker: Docker, engine: FakeEngine
) -> None:
    docker.tell(up=status)
    engine.states, engine.log = [ended(status)], "loading\nbad flag\n"
    try:
        up(open_artifact(artifact), print)
        assert status == 0
    except ArtifactError as error:
        assert str(error) == "sample did not stay up: it ended with exit status 1: bad flag"
    start, removal = docker.words()
    assert start.endswith("up --build --exit-code-from vllm") and removal == DOWN


LAYERS = {
    "layers": [
        {"digest": f"sha256:{'a' * 64}", "size": 6_000_000_000},
        {"digest": f"sha256:{'b' * 64}", "size": 2_000_000_000},
    ]
}


def entry(architecture: str, manifest: dict[str, Any]) -> dict[str, Any]:
    platform = {"os": "linux", "architecture": architecture}
    return {"Descriptor": {"platform": platform}, "OCIManifest": manifest}


INDEX = json.dumps([entry("arm64", {"layers": []}), entry("amd64", LAYERS)])


def test_missing_image_is_pulled_with_its_size_and_progress(
    artifact: Path, docker: Docker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.images.clear()
    docker.tell(manifest_text=INDEX)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=24_000_000_000))
    said: list[str] = []
    up(open_artifact(artifact), said.append, detach=True)
    assert "pulling base:1: 8.0 GB, compressed" in said and engine.images == {"base:1"}
    assert docker.words()[0] == "manifest inspect --verbose base:1"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=23_000_000_000))
    engine.images.clear()
    assert refusal(artifact).startswith(
        "/ has 23.0 GB free, too little for base:1: its layers have 8.0 GB, and unpacked about 3 times that\n"
    )
    monkeypatch.undo()


def test_progress_of_a_pull_counts_each_layer_downloaded_and_unpacked() -> None:
    progress = PullProgress(layer_sizes(INDEX))
    first, second = ({"id": digit * 12} for digit in "ab")
    messages = [
        first | {"status": "Downloading", "progressDetail": {"current": 10, "total": 6_000_000_000}},
        first | {"status": "Downloading", "progressDetail": {"current": 30, "total": 6_000_000_000}},
        first | {"status": "Download complete"},
        first | {"status": "Extracting", "progressDetail": {"current": 7, "units": "s"}},
        first | {"status": "Extracting", "progressDetail": {"current": 5, "total": 6_000_000_000}},
        first | {"status": "Pull complete"},
        second | {"status": "Already exists"},
        {"status": "Status: Downloaded newer image"},
    ]
    size = 6_000_000_000
    added = [progress.advanced(message) for message in messages]
    assert added == [10, 20, size - 30, 0, 5, size - 5, 4_000_000_000, 0]
    assert sum(added) == progress.total
    assert PullProgress(layer_sizes("no such manifest")).total is None


def test_image_that_cannot_be_pulled_gives_one_sentence(
    artifact: Path, docker: Docker, engine: FakeEngine
) -> None:
    engine.images.clear()
    engine.pulled = [{"status": "Downloading"}, {"error": "write /x:\nno space left on device"}]
    said = refusal(artifact)
    assert said.startswith("base:1 was not pulled: write /x: no space left on device\nfree space if")
    assert [words for words in docker.words() if "up" in words] == []


def test_missing_engine_missing_plugin_and_little_memory_are_told(
    artifact: Path, docker: Docker, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.info = {"MemTotal": 10}
    said: list[str] = []
    up(open_artifact(artifact), said.append, detach=True)
    assert any(line.startswith("note: the weights have 0.0 MB, and this machine has 0.0 MB") for line in said)
    docker.tell(version=1)
    assert refusal(artifact).startswith("docker has no command compose\ninstall its plug-in:")
    docker.tell()
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert refusal(artifact).startswith(
        "recipe serve up needs a Docker engine, and none answers at unix:///no"
    )


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
