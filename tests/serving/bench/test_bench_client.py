"""Tests of a sweep's client, here or in the server's container: it ends with the sweep, and gets one key."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from recipec.runtime.serving import bench_runner
from recipec.runtime.serving.bench_runner import Processes
from tests.serving.bench.points import ALL, FIRST, LAST, SECOND, THIRD
from tests.serving.benching import Bench
from tests.serving.fake_vllm import Start
from tests.waiting import gone

ROOT = Path(__file__).resolve().parents[3]


def test_api_key_reaches_the_client_only_by_environment_variable(
    bench: Bench,
    fake: Start,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = "sk-sentinel-5150"
    locked = fake(["tuned"], key=secret)
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    assert bench.run("--url", locked.url) == 1
    assert "export VLLM_API_KEY" in capfd.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", secret)
    assert bench.run("--url", locked.url) == 0
    calls = bench.calls()
    assert {call["OPENAI_API_KEY"] for call in calls} == {secret}
    assert not any(secret in word for call in calls for word in call["words"])
    for path in bench.results.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert secret not in "".join(capfd.readouterr())
    # A server that requires no key gets no key of another service.
    monkeypatch.delenv("VLLM_API_KEY")
    bench.run("--prompts", "11")
    assert {call["OPENAI_API_KEY"] for call in bench.calls()} == {""}


def interrupted(bench: Bench, numbers: Sequence[int]) -> subprocess.CompletedProcess[str]:
    """Run a sweep, and send signals while it measures its third point."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.serving.bench", *bench.words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    calls = bench.bin / "calls.jsonl"
    deadline = time.monotonic() + 60
    while not calls.is_file() or THIRD not in map(_point, calls.read_text().splitlines()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def _point(line: str) -> str:
    with suppress(ValueError):
        words = json.loads(line)["words"]
        return f"input-{words[words.index('--random-input-len') + 1]}-rate-" + str(
            words[words.index("--request-rate") + 1]
        )
    return ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_the_client_and_keeps_finished_points(number: int, bench: Bench) -> None:
    bench.plan({THIRD: "hang"})
    done = interrupted(bench, [number])
    assert done.returncode == 128 + number
    assert done.stderr == (
        f"error: stopped by {signal.Signals(number).name}\n  = help: finished points are kept\n"
    )
    assert bench.outcomes() == {
        FIRST: "measured",
        SECOND: "measured",
        THIRD: "not measured",
        LAST: "not measured",
    }
    bench.plan({})
    assert all(gone(call["pid"]) for call in bench.calls())
    assert bench.run() == 0 and bench.measured() == [THIRD, LAST]


def test_second_signal_kills_the_client_and_exits_130(bench: Bench) -> None:
    bench.plan({THIRD: "hang-deaf"})
    done = interrupted(bench, [signal.SIGINT, signal.SIGINT])
    assert done.returncode == 130 and "Traceback" not in done.stderr
    assert all(gone(call["pid"]) for call in bench.calls())


DOCKER = """\
#!/bin/sh
# docker compose --file FILE exec -T vllm COMMAND...: like Docker's, the command outlives its client.
test "$1 $2 $4 $5 $6" = "compose --file exec -T vllm" || exit 9
test -f "$3" || { echo 'service "vllm" is not running' >&2; exit 1; }
shift 6
env -i PATH="$PATH" VLLM_API_KEY=of-the-container setsid "$@" &
wait $!
"""


@pytest.fixture
def container(bench: Bench, tmp_path: Path) -> list[str]:
    """Return the flags for measuring in a fake container with its own environment and processes."""
    (bench.bin / "docker").write_text(DOCKER)
    (bench.bin / "docker").chmod(0o755)
    (tmp_path / "compose.yaml").write_text("")
    return ["--compose", str(tmp_path / "compose.yaml")]


def test_compose_flag_measures_with_the_container_client(bench: Bench, container: list[str]) -> None:
    assert bench.run(*container) == 0
    calls = bench.calls()
    assert len(calls) == 4 and {call["OPENAI_API_KEY"] for call in calls} == {"of-the-container"}
    assert bench.outcomes() == dict.fromkeys(ALL, "measured")


@pytest.mark.parametrize("fault", ["hang", "hang-deaf"])
def test_timeout_kills_the_container_client(
    fault: str, bench: Bench, container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runner, "GRACE_SECONDS", 0.3)
    bench.plan({SECOND: fault})
    one = ["--input-lengths", "512", "--request-rates", "inf", "--timeout", "0.02"]
    assert bench.run(*container, *one) == 1
    assert bench.outcomes()[SECOND] == "failed: no end within 0.02 minutes"
    # On a busy machine, it may have ended before its first line.
    assert all(gone(call["pid"]) for call in bench.calls())


def test_container_client_does_not_start_after_its_sweep_was_stopped(bench: Bench, tmp_path: Path) -> None:
    """Stop a container's client that starts after the command that brought it there has ended."""
    folder, log = str(tmp_path / "m"), tmp_path / "log"
    subprocess.run(["sh", "-c", bench_runner.PREPARE, "sh", folder], check=True)
    subprocess.run(["sh", "-c", bench_runner.STOP, "sh", folder, "1"], check=True)
    late = subprocess.run(["sh", "-c", bench_runner.START, "sh", folder, "vllm"], stderr=log.open("w"))
    assert late.returncode == 1 and bench.calls() == []
    Processes().remove(folder)
    gone = subprocess.run(["sh", "-c", bench_runner.START, "sh", folder, "vllm"], stderr=log.open("w"))
    assert gone.returncode != 0 and bench.calls() == []


def test_missing_vllm_gives_one_sentence_error(
    bench: Bench,
    container: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench.run("--compose", str(tmp_path / "other.yaml")) == 1
    assert 'has no vllm to measure with: service "vllm" is not running\n' in capsys.readouterr().err
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert bench.run() == 1
    assert capsys.readouterr().err.startswith("error: vllm is not on PATH\n")
