"""`recipe serve up` and `down` with a real Docker engine; a stand-in for vLLM shows what the engine does."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import docker_engine, stand_in
from tests.e2e.docker_engine import Engine
from tests.ports import free_port
from tests.serving.up_artifact import Command, build
from tests.waiting import until

SENTINEL = "sk-SENTINEL-9876543210"

WITHOUT_GRACE = 60.0
"""Seconds: less than half of what a server has from SIGTERM to SIGKILL, and enough for a busy machine."""


@pytest.fixture(scope="module")
def engine(engine: Engine) -> Engine:
    """The one of all tests (a second one would wait for its end), with the image of the stand-in."""
    stand_in.image(engine)
    return engine


class Served:
    """An artifact on a free port, whose server does as it is told."""

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


@pytest.mark.nightly
def test_a_second_ctrl_c_kills_the_container(served: Served) -> None:
    served.tell(ignore_sigterm=True)
    up = served.run("up")
    up.until("Ctrl-C stops it")
    up.signal()
    up.until("stopping sample")
    time.sleep(0.5)
    up.signal()
    assert up.ended(WITHOUT_GRACE) == 130
    assert served.engine.containers() == []


@pytest.mark.nightly
def test_sigterm_while_it_loads_leaves_no_container(served: Served) -> None:
    served.tell(start_seconds=600)
    up = served.run("up")
    up.until("a warning")
    up.signal(signal.SIGTERM)
    # Python as process 1 has no handler yet, so that only SIGKILL ends it.
    assert up.ended(WITHOUT_GRACE) == 143
    assert served.engine.containers() == []


@pytest.mark.nightly
def test_ctrl_c_while_it_is_built_leaves_no_container(served: Served) -> None:
    dockerfile = served.folder / "serve/Dockerfile"
    dockerfile.write_text(dockerfile.read_text() + 'RUN ["python3", "-c", "import time; time.sleep(600)"]\n')
    up = served.run("up")
    up.until(": RUN [")
    until(served.engine.containers)
    up.signal()
    assert up.ended(WITHOUT_GRACE) == 130
    # The engine ends the step of a build that nobody waits for.
    until(lambda: not served.engine.containers())


@pytest.mark.e2e
def test_a_detached_server_serves_until_down(served: Served, tmp_path: Path) -> None:
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
    assert f"error: port {served.port} is taken by the container sample\n" in second.text

    down = served.run("down", "--volumes")
    assert down.ended() == 0, down.text
    assert "sample is down" in down.text and "removed the volume sample_xla-cache" in down.text
    assert served.engine.containers() == []
    down = served.run("down")
    assert (down.ended(), down.text) == (0, "sample does not run\n")


@pytest.mark.nightly
def test_a_container_out_of_memory_is_told_with_its_limit(served: Served) -> None:
    served.tell(load_mb=400)
    up = served.run("up", "--memory", "80m")
    assert up.ended() == 1
    assert (
        "error: sample is gone before it was ready: it ran out of memory, with more than its limit" in up.text
    )
    assert served.engine.containers() == []


@pytest.mark.nightly
def test_a_server_that_crashes_while_it_loads_is_told_with_its_log(served: Served) -> None:
    served.tell(crash="RuntimeError: no room for the key/value cache")
    up = served.run("up", "--detach")
    assert up.ended() == 1
    assert (
        "error: sample is gone before it was ready: it ended with exit status 1; its log ends:\n" in up.text
    )
    assert "\n    RuntimeError: no room for the key/value cache\n" in up.text
    assert served.engine.containers() == []


@pytest.mark.nightly
def test_a_server_that_dies_while_it_serves_is_told_with_its_log(served: Served) -> None:
    served.tell(die_after_seconds=2)
    up = served.run("up")
    assert up.ended() == 1
    assert "error: sample is gone: it ended with exit status 7; its log ends:\n" in up.text
    assert served.engine.containers() == []


@pytest.mark.nightly
def test_an_image_that_is_nowhere_is_one_sentence(served: Served) -> None:
    up = served.run("up", "--base-image", "127.0.0.1:1/none:1")
    assert up.ended() == 1
    assert (
        "error: the base image 127.0.0.1:1/none:1 is not on this machine and cannot be fetched: " in up.text
    )


@pytest.mark.nightly
def test_an_engine_that_stops_in_the_middle_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = docker_engine.FOLDER.parent / "docker-stopped"
    monkeypatch.setattr(docker_engine, "FOLDER", folder)
    try:
        # It ends without an engine to clear.
        with suppress(AssertionError), docker_engine.engine() as running:
            stand_in.image(running)
            served = Served(tmp_path, running)
            up = served.run("up")
            up.until("Ctrl-C stops it")
            os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
            status = up.ended()
        assert status == 1
        assert "error: " in up.text and "Traceback" not in up.text
        down = served.run("down")
        assert down.ended() == 1
        assert "error: no Docker engine runs here: " in down.text
    finally:
        # What the engine leaves mounted.
        subprocess.run(["umount", folder / "exec/netns/default"], capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)
