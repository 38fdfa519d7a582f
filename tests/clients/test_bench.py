"""Tests of a sweep with a fake of vLLM's client: its points, faults, signals, key and container."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from recipec.runtime.clients import bench_runner
from recipec.runtime.clients.bench import alone
from recipec.runtime.clients.bench_points import parse_rate
from recipec.runtime.clients.bench_runner import Processes
from tests.clients.benching import Bench, point_of
from tests.clients.fake_vllm import FakeVllm, Start
from tests.waiting import gone

ROOT = Path(__file__).resolve().parents[2]

ALL = ["input-512-rate-0.5", "input-512-rate-inf", "input-1024-rate-0.5", "input-1024-rate-inf"]
FIRST, SECOND, THIRD, LAST = ALL

FAULTS = {
    "exit": "vllm bench serve ended with exit status 1: OSError: /model holds no tokenizer",
    "killed": "vllm bench serve was ended by signal 9: Namespace(seed=5)",
    "half": "vllm bench serve ended without a complete result",
    "nan": "vllm bench serve ended without a number for median_ttft_ms",
    "refused": "3 of 10 requests failed: ServerDisconnectedError: gone",
    "short": "answers ended early: 153 of 160 tokens came",
}


@pytest.fixture
def server(fake: Start) -> FakeVllm:
    return fake(["tuned"])


@pytest.fixture
def bench(tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, server.url)
    monkeypatch.setenv("PATH", made.path)
    yield made
    assert all(gone(call["pid"]) for call in made.calls())
    assert not [folder for folder in made.folders if Path(folder).exists()]


def test_sweep_writes_one_record_per_point_and_prints_figures(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run() == 0
    words = [call["words"] for call in bench.calls()]
    assert [point_of(each) for each in words] == ALL
    # New prompts at each point, because a server with prefix caching would know the old ones.
    seeds = [bench.record(name)["seed"] for name in ALL]
    assert len(set(seeds)) == 4 and seeds == [int(each[each.index("--seed") + 1]) for each in words]
    record = bench.record(FIRST)
    assert record["point"] == {"input_length": 512, "rate": "0.5"} and record["failure"] is None
    assert record["result"]["output_throughput"] == 8 and record["settings"]["prompts"] == 10
    assert record["server"]["vllm"] == "0.32.0"
    assert bench.outcomes() == dict.fromkeys(ALL, "measured")
    said = capsys.readouterr().out
    assert "1/4 512 tokens in, 0.5 requests/s: 8 output tokens/s, TTFT 51.7 ms, TPOT 10.5 ms" in said


@pytest.mark.parametrize(
    ("text", "rate"), [("4.0", "4"), ("5e-1", "0.5"), ("1e-05", "0.00001"), ("inf", "inf"), ("1E2", "100")]
)
def test_request_rate_spellings_parse_to_one_form(text: str, rate: str) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "nan", "4x"])
def test_invalid_request_rate_is_a_usage_error(
    text: str, bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run(f"--request-rates={text}")
    assert ended.value.code == 2
    assert "--request-rates" in capsys.readouterr().err


def test_second_run_measures_only_missing_or_truncated_points(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.run()
    bench.calls()
    assert bench.run() == 0 and bench.measured() == []
    assert "4 of 4 points are already measured, and are kept" in capsys.readouterr().out
    (bench.results / f"{SECOND}.json").unlink()
    whole = (bench.results / f"{LAST}.json").read_text()
    (bench.results / f"{LAST}.json").write_text(whole[: len(whole) // 2])
    assert bench.run() == 0 and bench.measured() == [SECOND, LAST]
    # A new point with the same settings is measured alone.
    assert bench.run("--request-rates", "0.5,2,inf") == 0
    assert bench.measured() == ["input-512-rate-2", "input-1024-rate-2"]


def test_results_of_other_settings_are_refused(
    bench: Bench, server: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "recipe.lock.json"

    def run(seqs: int, port: int = 8000) -> int:
        lock.write_text(f'{{"recipe": {{"serve": {{"max_num_seqs": {seqs}, "port": {port}}}}}}}')
        return bench.run("--request-rates", "inf", "--input-lengths", "512", "--lock", str(lock))

    assert run(64) == 0 and bench.measured() == [SECOND]
    assert run(64, port=9000) == 0 and bench.measured() == []
    server.version = "0.33.0"
    assert run(128) == 1 and bench.measured() == []
    assert capsys.readouterr().err == (
        f"error: {bench.results} holds results that were measured with other settings: "
        "recipe.max_num_seqs 64 -> 128, server.vllm 0.32.0 -> 0.33.0\n"
        "  = help: give another folder with --results, or remove that one\n"
    )


def test_failed_points_are_reported_and_measured_by_the_next_run(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {f"input-{length}-rate-2": fault for length, fault in enumerate(["", *FAULTS], 1)}
    sweep = ["--seed", "5", "--request-rates", "2", "--input-lengths"]
    sweep.append(",".join(map(str, range(1, len(names) + 1))))
    bench.plan(names)
    assert bench.run(*sweep) == 1
    assert bench.measured() == list(names)
    assert bench.outcomes() == {
        name: f"failed: {FAULTS[fault]}" if fault else "measured" for name, fault in names.items()
    }
    said, table = capsys.readouterr(), (bench.results / "summary.md").read_text()
    for number, fault in enumerate(FAULTS, 2):
        assert f"{number}/7 {number} tokens in, 2 requests/s: failed: {FAULTS[fault]}\n" in said.out
        assert f"| {number} | 2 | - | - | - | - | - | - | failed: {FAULTS[fault]} |\n" in table
    assert said.err == "6 of 7 points failed; the same command measures them again\n"
    bench.plan({})
    assert bench.run(*sweep) == 0 and bench.measured() == list(names)[1:]
    assert set(bench.outcomes().values()) == {"measured"}


class Dying(Processes):
    """The client's processes, with a server that dies in the middle of a point."""

    def __init__(self, server: FakeVllm, at: str) -> None:
        super().__init__()
        self.server, self.at = server, at

    def run(self, folder: str, words: Sequence[str], log: Path, seconds: float) -> int:
        if log.stem == self.at:
            self.server.die()
        return super().run(folder, words, log, seconds)


def test_dead_server_stops_the_sweep_and_keeps_measured_points(
    bench: Bench, server: FakeVllm, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.plan({SECOND: "refused"})
    assert bench.run(runner=Dying(server, SECOND)) == 1
    assert bench.measured() == [FIRST, SECOND]
    assert bench.outcomes() == {
        FIRST: "measured",
        SECOND: f"failed: {FAULTS['refused']}",
        THIRD: "not measured",
        LAST: "not measured",
    }
    said = capsys.readouterr().err
    assert said == (
        "error: the server died at 512 tokens in, all requests at once: nothing listens at "
        f"{server.url}; points not begun: 2\n"
        "  = help: look at its log, start it again, and run the same command again; finished points are "
        "kept\n"
    )


def test_input_lengths_over_the_server_limit_are_left_out(
    bench: Bench, fake: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    small = fake(["tuned"], max_model_len=1039)
    assert bench.run("--url", small.url) == 0
    assert bench.measured() == [FIRST, SECOND]
    left_out = "1,024 tokens in, 0.5 requests/s: with 16 out that is more than the 1,039 tokens of the server"
    assert f"left out: {left_out}\n" in capsys.readouterr().out
    assert f"- Left out: {left_out}.\n" in (bench.results / "summary.md").read_text()


def test_setup_errors_are_one_sentence_and_measure_no_point(
    bench: Bench, server: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(*more: str) -> str:
        assert bench.run(*more) == 1
        said = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]+\n(  = help: [^\n]+\n)?", said), said
        return said

    assert f"the server at {server.url} serves tuned, not other" in fault("--model", "other")
    assert "nothing listens at http://127.0.0.1:9" in fault("--url", "http://127.0.0.1:9")
    assert "is not the address of a server" in fault("--url", "localhost")
    (tmp_path / "file").write_text("")
    assert "cannot hold results" in fault("--results", str(tmp_path / "file"))
    (tmp_path / "lock").write_text('{"recipe": []}')
    assert "is not an artifact's lock" in fault("--lock", str(tmp_path / "lock"))
    assert bench.measured() == []


def test_unwritable_summary_and_locked_folder_give_one_sentence_errors(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.results / "summary.md").mkdir(parents=True)
    one = ("--request-rates", "inf", "--input-lengths", "512")
    assert bench.run(*one) == 1
    assert capsys.readouterr().err == (
        f"error: {bench.results / 'summary.md'} cannot be written: Is a directory\n"
        "  = help: free disk space there, or get access to it\n"
    )
    with alone(bench.results):
        assert bench.run(*one) == 1
    assert "another benchmark is writing to" in capsys.readouterr().err


def test_api_key_reaches_the_client_only_by_environment_variable(
    bench: Bench, fake: Start, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "sk-sentinel-5150"
    locked = fake(["tuned"], key=secret)
    one = ("--request-rates", "inf", "--input-lengths", "512")
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-service")
    assert bench.run("--url", locked.url) == 1
    assert "export VLLM_API_KEY" in capfd.readouterr().err
    monkeypatch.setenv("VLLM_API_KEY", secret)
    assert bench.run("--url", locked.url, *one) == 0
    calls = bench.calls()
    assert {call["OPENAI_API_KEY"] for call in calls} == {secret}
    assert not any(secret in word for call in calls for word in call["words"])
    for path in bench.results.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    assert secret not in "".join(capfd.readouterr())
    # A server that requires no key gets no key of another service.
    monkeypatch.delenv("VLLM_API_KEY")
    assert bench.run("--prompts", "11", "--results", f"{bench.results}-2", *one) == 0
    assert {call["OPENAI_API_KEY"] for call in bench.calls()} == {""}


def interrupted(bench: Bench, numbers: Sequence[int]) -> subprocess.CompletedProcess[str]:
    """Run a sweep, and send signals while it measures its second point."""
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.clients.bench", *bench.words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    calls = bench.bin / "calls.jsonl"
    deadline = time.monotonic() + 60
    while not calls.is_file() or calls.read_bytes().count(b"\n") < 2:
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def test_signal_stops_the_client_and_keeps_finished_points(bench: Bench) -> None:
    bench.plan({SECOND: "hang"})
    done = interrupted(bench, [signal.SIGTERM])
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == "error: stopped by SIGTERM\n  = help: finished points are kept\n"
    assert list(bench.outcomes().values()) == ["measured", *["not measured"] * 3]
    bench.plan({})
    assert all(gone(call["pid"]) for call in bench.calls())
    assert bench.run() == 0 and bench.measured() == [SECOND, THIRD, LAST]


def test_second_signal_kills_the_client_and_exits_130(bench: Bench) -> None:
    bench.plan({SECOND: "hang-deaf"})
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


@pytest.mark.parametrize(("place", "fault"), [("here", "hang"), ("container", "hang-deaf")])
def test_timeout_kills_the_client(
    place: str, fault: str, bench: Bench, container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runner, "GRACE_SECONDS", 0.2)
    bench.plan({SECOND: fault})
    one = ["--input-lengths", "512", "--request-rates", "inf", "--timeout", "0.01"]
    assert bench.run(*(container if place == "container" else ()), *one) == 1
    assert bench.outcomes()[SECOND] == "failed: no end within 0.01 minutes"
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
