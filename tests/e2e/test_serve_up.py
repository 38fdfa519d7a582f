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

    def __init__(self, folder: Path, engine: Engine, *sets: str, name: str = "sample") -> None:
        self.port = free_port()
        self.engine = engine
        self.folder = build(
            folder, f"serve.image={stand_in.NAME}", f"serve.port={self.port}", *sets, name=name
        )

    def tell(self, **told: Any) -> None:
        (self.folder / "merged/stand_in.json").write_text(json.dumps(told))

    def run(self, *arguments: object, **environ: str) -> Command:
        command, *rest = arguments
        return Command(self.engine.host, [command, self.folder, *rest], environ)

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
    up.until("Ctrl-C stops it")
    assert "loading 50 % ██ done\n" in up.text and "a warning\n" in up.text
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(served.get("/slow")))
    asking.start()
    up.until("a request is in flight")
    up.signal()
    assert up.ended() == 130
    asking.join()
    assert answers == [b"answered"]
    assert "finished" in up.text and "sample is down" in up.text
    assert served.engine.containers() == []
    assert "sample_xla-cache" in served.engine.docker("volume", "ls", "--quiet").split()


@pytest.mark.e2e
def test_detached_server_serves_until_down_and_hides_the_key(served: Served, tmp_path: Path) -> None:
    served.tell(echo_key=True)
    up = served.run("up", "--detach", VLLM_API_KEY=SENTINEL)
    assert up.ended() == 0, up.text
    assert "INFO api_key=*** in mid-line" in up.text and SENTINEL not in up.text
    assert served.get("/health") == b"answered"
    image = served.engine.docker("image", "inspect", "sample") + served.engine.docker("history", "sample")
    assert SENTINEL not in image
    arguments = served.engine.docker(
        "inspect", "sample", "--format", "{{json .Args}} {{json .Config.Labels}}"
    )
    assert SENTINEL not in arguments

    again = served.run("up")
    assert again.ended() == 1
    assert "error: sample is up already: its container is running\n" in again.text

    other = Served(tmp_path / "other", served.engine, f"serve.port={served.port}", name="other")
    second = other.run("up")
    assert second.ended() == 1
    assert f"error: port {served.port} is in use by the container sample\n" in second.text

    down = served.run("down", "--volumes")
    assert down.ended() == 0, down.text
    assert "sample is down" in down.text and "removed the volume sample_xla-cache" in down.text
    assert served.engine.containers() == []
    down = served.run("down")
    assert (down.ended(), down.text) == (0, "sample does not run\n")
