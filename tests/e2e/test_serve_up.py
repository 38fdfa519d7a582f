"""Tests of `recipe serve up` and `down` with a real Docker engine and a fake vLLM."""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import stand_in
from tests.e2e.docker_engine import Engine
from tests.ports import free_port
from tests.serving.up_artifact import Command, build

SENTINEL = "sk-SENTINEL-9876543210"


@pytest.fixture(scope="module")
def engine(engine: Engine) -> Engine:
    """Add the fake's image to the shared engine; a second engine would wait for the first one's end."""
    stand_in.image(engine)
    return engine


class Served:
    """An artifact on a free port, whose server follows the test's settings."""

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.port = free_port()
        self.engine = engine
        self.folder = build(folder, f"serve.image={stand_in.NAME}", f"serve.port={self.port}")

    def tell(self, **told: Any) -> None:
        (self.folder / "merged/stand_in.json").write_text(json.dumps(told))

    def run(self, command: str, *arguments: object, **environ: str) -> Command:
        return Command(command, self.folder, *arguments, **self.engine.environment(**environ))

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as response:
            return bytes(response.read())


@pytest.fixture
def served(tmp_path: Path, engine: Engine) -> Served:
    return Served(tmp_path, engine)


@pytest.mark.nightly
def test_requests_in_flight_finish_at_ctrl_c(served: Served) -> None:
    served.tell(answer_seconds=2)
    up = served.run("up")
    up.until("listening")
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(served.get("/slow")))
    asking.start()
    up.until("a request is in flight")
    up.signal()
    assert up.ended() == 130
    asking.join()
    assert answers == [b"answered"]
    assert served.engine.containers() == []
    assert "sample_xla-cache" in served.engine.docker("volume", "ls", "--quiet").split()


@pytest.mark.e2e
def test_detached_server_serves_until_down_and_hides_the_key(served: Served) -> None:
    up = served.run("up", "--detach", VLLM_API_KEY=SENTINEL)
    assert up.ended() == 0, up.text
    assert SENTINEL not in up.text
    assert served.get("/health") == b"answered"
    image = served.engine.docker("image", "inspect", "sample") + served.engine.docker("history", "sample")
    shown = "{{json .Args}} {{json .Config.Labels}} {{.HostConfig.RestartPolicy.Name}}"
    container = served.engine.docker("inspect", "sample-vllm-1", "--format", shown)
    assert SENTINEL not in image + container and container.endswith("unless-stopped\n")
    inside = ("compose", "--project-name", "sample", "exec", "-T", "vllm", "python3", "-c", "print('in it')")
    assert served.engine.docker(*inside) == "in it\n"
    down = served.run("down", "--volumes")
    assert down.ended() == 0, down.text
    assert served.engine.containers() == []
    assert served.engine.docker("volume", "ls", "--quiet") == ""


@pytest.mark.nightly
def test_server_that_dies_while_it_loads_is_not_started_again(served: Served) -> None:
    (served.folder / "merged/stand_in.json").write_text("{")
    up = served.run("up", "--detach", "--wait", "2")
    assert up.ended() == 1
    assert "JSONDecodeError" in up.text and "error: sample did not become ready\n" in up.text
    assert served.engine.containers() == []
