"""A sweep's points: what is measured, what is kept, and what goes wrong. The client is a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from runtime.serving import bench_runner
from runtime.serving.bench import _left
from runtime.serving.bench_points import Point, parse_rate
from runtime.serving.bench_runner import Processes
from runtime.serving.bench_sweep import parsed
from tests.serving.benching import Bench, gone
from tests.serving.fake_vllm import FakeVllm

ROOT = Path(__file__).resolve().parents[2]
ALL = ["input-512-rate-0.5", "input-512-rate-inf", "input-1024-rate-0.5", "input-1024-rate-inf"]
FIRST, SECOND, THIRD, LAST = ALL


@pytest.fixture(autouse=True)
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all the rest, and are tested by themselves."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def server(fake: Callable[..., FakeVllm]) -> FakeVllm:
    return fake(["tuned"])


@pytest.fixture
def bench(tmp_path: Path, server: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path, server.url)
    monkeypatch.setenv("PATH", made.path)
    yield made
    assert all(gone(call["pid"]) for call in made.calls())
    assert not [folder for folder in made.folders if Path(folder).exists()]


def test_each_point_is_a_file(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run() == 0
    assert bench.measured() == ALL
    record = bench.record(FIRST)
    assert record["point"] == {"input_length": 512, "rate": "0.5"} and record["failure"] is None
    assert record["result"]["output_throughput"] == 8 and record["settings"]["prompts"] == 10
    assert record["server"]["vllm"] == "0.32.0"
    assert bench.outcomes() == dict.fromkeys(ALL, "measured")
    said = capsys.readouterr().out
    assert "1/4 512 tokens in, 0.5 requests/s: 8 output tokens/s, TTFT 51.7 ms, TPOT 10.5 ms" in said
    assert "no plots: matplotlib is not installed" in said


def test_the_time_left(bench: Bench) -> None:
    """Of 10 requests a point: 20 s at 0.5/s, and what the points before took beyond theirs."""
    sweep, _ = parsed(bench.words)
    todo = [Point(512, rate) for rate in ("0.5", "inf", "0.5")]
    assert _left(sweep, todo, 0, 0.0) == ""
    assert _left(sweep, todo, 1, 25.0) == " (30 s left)"
    assert _left(sweep, todo, 2, 90.0) == " (55 s left)"
    assert _left(sweep, todo, 2, 5.0) == " (20 s left)", "a clock that was set back"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("4", "4"), ("4.0", "4"), ("5e-1", "0.5"), ("1e-05", "0.00001"), ("inf", "inf"), ("1E2", "100")],
)
def test_a_rate_has_one_name(text: str, rate: str) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "-1", "nan", "", "4x", "-inf"])
def test_what_is_no_rate(text: str, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run(f"--request-rates={text}")
    assert ended.value.code == 2
    assert "--request-rates" in capsys.readouterr().err


def test_what_is_measured_is_not_measured_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run()
    bench.calls()
    assert bench.run() == 0 and bench.measured() == []
    assert "4 of 4 points are measured already, and kept" in capsys.readouterr().out
    (bench.results / f"{SECOND}.json").unlink()
    whole = (bench.results / f"{LAST}.json").read_text()
    (bench.results / f"{LAST}.json").write_text(whole[: len(whole) // 2])
    assert bench.run() == 0 and bench.measured() == [SECOND, LAST]
    # Another point of the same settings is measured alone.
    assert bench.run("--request-rates", "0.5,2,inf") == 0
    assert bench.measured() == ["input-512-rate-2", "input-1024-rate-2"]


def test_results_of_other_settings_are_not_mixed(
    bench: Bench, server: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "recipe.lock.json"

    def locked(**serve: object) -> list[str]:
        lock.write_text(json.dumps({"recipe": {"serve": {"max_num_seqs": 64, "port": 8000, **serve}}}))
        return ["--lock", str(lock)]

    bench.run(*locked())
    bench.calls()
    bench.run(*locked(port=9000))
    assert bench.measured() == []
    capsys.readouterr()
    bench.run(*locked(max_num_seqs=128))
    assert bench.measured() == ALL
    (aside,) = (bench.results / "earlier").iterdir()
    assert sorted(path.stem for path in aside.glob("*.json")) == sorted(ALL)
    assert len(list(aside.glob("*.log"))) == 4
    assert (
        f"4 results measured with other settings (recipe.max_num_seqs 64 -> 128) set aside in {aside}\n"
        in capsys.readouterr().out
    )
    server.version = "0.33.0"
    bench.run(*locked(max_num_seqs=128))
    assert bench.measured() == ALL
    assert "server.vllm 0.32.0 -> 0.33.0" in capsys.readouterr().out
    # And back: what was measured with these settings is taken from where it was set aside.
    server.version = "0.32.0"
    bench.run(*locked())
    assert bench.measured() == []
    assert (
        f"4 results measured earlier with these settings taken back from {aside}" in capsys.readouterr().out
    )


FAULTS = {
    "exit": "vllm bench serve ended with exit status 1: OSError: /model holds no tokenizer",
    "killed": "vllm bench serve was ended by signal 9: Namespace(seed=5)",
    "nothing": "vllm bench serve ended without a whole result",
    "half": "vllm bench serve ended without a whole result",
    "nan": "vllm bench serve ended without a number for median_ttft_ms",
    "refused": "3 of 10 requests failed: ServerDisconnectedError: gone",
    "fewer": "1 of 10 requests failed",
    "short": "answers ended early: 153 of 160 tokens came",
}


def test_failed_points_are_told_and_measured_again(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
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
        left = rf"{number}/9 {number} tokens in, 2 requests/s \(\d+ s left\): failed: "
        assert re.search(left + re.escape(FAULTS[fault]) + "\n", said.out)
        assert f"| {number} | 2 | - | - | - | - | - | - | failed: {FAULTS[fault]} |\n" in table
    assert said.err == "8 of 9 points failed; the same command measures them again\n"
    bench.plan({})
    assert bench.run(*sweep) == 0 and bench.measured() == list(names)[1:]
    assert set(bench.outcomes().values()) == {"measured"}


@pytest.mark.parametrize("fault", ["hang", "hang-deaf"])
def test_a_point_that_does_not_end_is_ended(
    fault: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runner, "GRACE_SECONDS", 0.2)
    bench.plan({LAST: fault})
    assert bench.run("--timeout", "0.005") == 1
    assert bench.outcomes()[LAST] == "failed: no end within 0.005 minutes"


class Dying:
    """Where vLLM is, and a server that dies in the middle of a point."""

    def __init__(self, server: FakeVllm, at: str) -> None:
        self.server, self.at, self.inner = server, at, Processes()

    def check(self) -> None:
        self.inner.check()

    def run(self, folder: str, words: Sequence[str], log: Path, seconds: float) -> int:
        if log.stem == self.at:
            self.server.die()
        return self.inner.run(folder, words, log, seconds)

    def read(self, folder: str, name: str) -> bytes | None:
        return self.inner.read(folder, name)

    def remove(self, folder: str) -> None:
        self.inner.remove(folder)


def test_a_dead_server_ends_the_sweep(
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
        "  = help: look at its log, start it again, and run this again: what is measured is kept\n"
    )


def test_lengths_that_the_server_does_not_take_are_left_out(
    bench: Bench, fake: Callable[..., FakeVllm], capsys: pytest.CaptureFixture[str]
) -> None:
    small = fake(["tuned"], max_model_len=1039)
    assert bench.run("--url", small.url) == 0
    assert bench.measured() == [FIRST, SECOND]
    left_out = "1,024 tokens in, 0.5 requests/s: with 16 out that is more than the 1,039 tokens of the server"
    assert f"left out: {left_out}\n" in capsys.readouterr().out
    assert f"- Left out: {left_out}.\n" in (bench.results / "summary.md").read_text()


def test_answers_that_do_not_fit(bench: Bench, fake: Callable[..., FakeVllm]) -> None:
    """vLLM cuts them to what its length leaves, when a prompt came out longer than asked."""
    small = fake(["tuned"], max_model_len=530)
    bench.plan({FIRST: "short"})
    assert bench.run("--url", small.url) == 1
    why = "; prompts come out some tokens longer, and the server takes no more"
    assert bench.outcomes()[FIRST] == f"failed: {FAULTS['short']}{why}"


def test_prompts_are_never_those_of_another_point(bench: Bench) -> None:
    """A server with prefix caching would know them already."""
    bench.run()
    seeds = [bench.record(name)["seed"] for name in ALL]
    assert len(set(seeds)) == 4
    words = [call["words"] for call in bench.calls()]
    assert [int(w[w.index("--seed") + 1]) for w in words] == seeds


def test_prompts_of_another_length_are_noted(bench: Bench) -> None:
    bench.plan({FIRST: "longer"})
    assert bench.run() == 0
    assert bench.outcomes()[FIRST] == "measured: its prompts had 563 tokens on average"


def test_the_key_stays_in_the_environment(
    bench: Bench,
    fake: Callable[..., FakeVllm],
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
    # A key for another service does not go to a server that asks for none.
    monkeypatch.delenv("VLLM_API_KEY")
    bench.run("--prompts", "11")
    assert {call["OPENAI_API_KEY"] for call in bench.calls()} == {""}


def interrupted(bench: Bench, numbers: Sequence[int]) -> subprocess.CompletedProcess[str]:
    """A run that gets signals once its third point is being measured."""
    without = bench.bin / "without"
    without.mkdir()
    (without / "matplotlib.py").write_text("raise ImportError")
    process = subprocess.Popen(
        [sys.executable, "-m", "runtime.serving.bench", *bench.words],
        env={**os.environ, "PYTHONPATH": f"{without}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    calls = bench.bin / "calls.jsonl"
    deadline = time.monotonic() + 20
    while not calls.is_file() or THIRD not in map(_point, calls.read_text().splitlines()):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.02)
    for number in numbers:
        process.send_signal(number)
        time.sleep(0.1)
    out, err = process.communicate(timeout=20)
    return subprocess.CompletedProcess([], process.returncode, out, err)


def _point(line: str) -> str:
    with suppress(ValueError):
        words = json.loads(line)["words"]
        return f"input-{words[words.index('--random-input-len') + 1]}-rate-" + str(
            words[words.index("--request-rate") + 1]
        )
    return ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_client_and_keeps_what_is_measured(number: int, bench: Bench) -> None:
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


def test_a_second_signal_does_not_leave_a_client_behind(bench: Bench) -> None:
    bench.plan({THIRD: "hang-deaf"})
    done = interrupted(bench, [signal.SIGINT, signal.SIGINT])
    assert done.returncode == 130 and "Traceback" not in done.stderr


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
    """The flags that measure in a container: one with an environment and processes of its own."""
    (bench.bin / "docker").write_text(DOCKER)
    (bench.bin / "docker").chmod(0o755)
    (tmp_path / "compose.yaml").write_text("")
    return ["--compose", str(tmp_path / "compose.yaml")]


def test_the_client_of_the_container(bench: Bench, container: list[str]) -> None:
    assert bench.run(*container) == 0
    calls = bench.calls()
    assert len(calls) == 4 and {call["OPENAI_API_KEY"] for call in calls} == {"of-the-container"}
    assert bench.outcomes() == dict.fromkeys(ALL, "measured")


@pytest.mark.parametrize("fault", ["hang", "hang-deaf"])
def test_the_client_of_the_container_is_ended(
    fault: str, bench: Bench, container: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runner, "GRACE_SECONDS", 0.3)
    bench.plan({SECOND: fault})
    one = ["--input-lengths", "512", "--request-rates", "inf", "--timeout", "0.02"]
    assert bench.run(*container, *one) == 1
    # On a busy machine it may have been ended before its first line.
    for call in bench.calls():
        assert gone(call["pid"])


def test_a_client_that_is_about_to_start_does_not(bench: Bench, tmp_path: Path) -> None:
    """A container's client may start when the command that brought it there has been ended already."""
    folder, log = str(tmp_path / "m"), tmp_path / "log"
    subprocess.run(["sh", "-c", bench_runner.PREPARE, "sh", folder], check=True)
    subprocess.run(["sh", "-c", bench_runner.STOP, "sh", folder, "1"], check=True)
    late = subprocess.run(["sh", "-c", bench_runner.START, "sh", folder, "vllm"], stderr=log.open("w"))
    assert late.returncode == 1 and bench.calls() == []
    Processes().remove(folder)
    gone = subprocess.run(["sh", "-c", bench_runner.START, "sh", folder, "vllm"], stderr=log.open("w"))
    assert gone.returncode != 0 and bench.calls() == []


def test_no_vllm_is_one_sentence(
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


def test_faults_before_the_first_point(
    bench: Bench, server: FakeVllm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(*more: str) -> str:
        assert bench.run(*more) == 1
        said = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]+\n(  = help: [^\n]+\n)?", said), said
        return said

    assert f"the server at {server.url} serves tuned, and not other" in fault("--model", "other")
    assert "nothing listens at http://127.0.0.1:9" in fault("--url", "http://127.0.0.1:9")
    assert "is not the address of a server" in fault("--url", "localhost")
    (tmp_path / "file").write_text("")
    assert "cannot hold results" in fault("--results", str(tmp_path / "file"))
    (tmp_path / "lock").write_text('{"recipe": []}')
    assert "is not an artifact's lock" in fault("--lock", str(tmp_path / "lock"))
    assert bench.measured() == []


def test_a_folder_in_the_place_of_a_file(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    (bench.results / "summary.md").mkdir(parents=True)
    assert bench.run() == 1
    assert capsys.readouterr().err == (
        f"error: {bench.results / 'summary.md'} cannot be written: Is a directory\n"
    )
    (bench.results / f"{FIRST}.json").unlink()
    (bench.results / f"{FIRST}.json").mkdir()
    assert bench.run() == 1
    assert capsys.readouterr().err == f"error: {bench.results / FIRST}.json: Is a directory\n"


def test_one_benchmark_at_a_time(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    from runtime.serving.bench_guards import alone

    with alone(bench.results):
        assert bench.run() == 1
    assert "another benchmark is writing to" in capsys.readouterr().err
    assert bench.run() == 0
