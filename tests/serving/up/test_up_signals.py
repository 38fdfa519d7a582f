"""Tests of Ctrl-C and SIGTERM at every stage of `recipe serve up`: nothing remains, and it ends quickly."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serving.fake_docker import STDOUT, FakeDocker, Script
from tests.serving.up_artifact import Command

STAGES = {
    "fetching": (Script(images=(), pull=None), "Waiting", []),
    "building": (Script(build=None), "Step 1/2", []),
    "loading": (
        Script(ready=None, output=[(STDOUT, b"Loading weights\n")]),
        "Loading weights",
        ["stopping sample, within 5 s; Ctrl-C again kills it", "sample is down"],
    ),
    "serving": (
        Script(),
        "Ctrl-C stops it",
        [
            "stopping sample, within 2 min 30 s: requests in flight may finish; Ctrl-C again kills it",
            "sample is down",
        ],
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_signal_at_any_stage_of_up_leaves_no_container(
    stage: str, artifact: Path, docker: FakeDocker
) -> None:
    docker.script, words, expected = STAGES[stage]
    signum = signal.SIGTERM if stage == "loading" else signal.SIGINT
    up = Command(docker.host, ["up", artifact])
    up.until(words)
    up.signal(signum)
    started = time.monotonic()
    assert up.ended() == 128 + signum
    assert time.monotonic() - started < 60  # and not the 150 s of a stop
    said = up.text.splitlines()
    assert said[said.index(next(line for line in said if words in line)) + 1 :] == [
        *expected,
        f"interrupted by {signal.Signals(signum).name}",
    ]
    assert docker.containers == {}
    # The compiled programs remain for the next start.
    assert set(docker.volumes) == ({"sample_xla-cache"} if expected else set())


def test_signal_during_container_creation_leaves_no_container(artifact: Path, docker: FakeDocker) -> None:
    """Find and remove the container that the engine is creating."""
    docker.script.create_seconds = 0.7
    up = Command(docker.host, ["up", artifact])
    assert docker.creating.wait(60)
    up.signal()
    assert up.ended() == 130
    assert docker.containers == {} and docker.sent("DELETE", "")


def test_second_signal_kills_the_container(artifact: Path, docker: FakeDocker) -> None:
    docker.script.stop = None
    up = Command(docker.host, ["up", artifact])
    up.until("Ctrl-C stops it")
    up.signal()
    up.until("stopping sample")
    assert docker.hanging.wait(60)
    up.signal()
    assert up.ended() == 130
    assert up.text.splitlines()[-3:] == ["killing sample", "sample is down", "interrupted by SIGINT"]
    assert docker.containers == {}


LEADER = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command whose terminal is its stdin. Tests cannot fork, because jax has threads after its import."""


def test_closed_terminal_leaves_no_container(artifact: Path, docker: FakeDocker) -> None:
    """Stop and remove the container after SIGHUP, even without a place for output."""
    terminal, of_command = pty.openpty()
    command = [sys.executable, "-m", "recipec.compiler.cli.main", "serve", "up", str(artifact)]
    process = subprocess.Popen(
        [sys.executable, "-c", LEADER, *command],
        env={**os.environ, "DOCKER_HOST": docker.host},
        **dict.fromkeys(("stdin", "stdout", "stderr"), of_command),
    )
    os.close(of_command)
    said = b""
    while b"Ctrl-C stops it" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert process.wait() == 128 + signal.SIGHUP
    assert docker.containers == {} and docker.sent("POST", "/stop")


def test_signal_to_down_kills_the_container(artifact: Path, docker: FakeDocker) -> None:
    docker.script.stop = None
    docker.add("sample", **{"recipec.artifact": str(artifact)})
    down = Command(docker.host, ["down", artifact])
    assert docker.hanging.wait(60)
    down.signal()
    assert down.ended() == 130
    assert down.text.splitlines()[-2:] == ["killing sample", "interrupted by SIGINT"]
    assert docker.containers == {}
