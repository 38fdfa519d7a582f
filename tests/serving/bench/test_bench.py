"""Tests of a sweep's points: which are measured or kept, and what fails. The client is a fake."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from recipec.runtime.serving import bench_runner
from recipec.runtime.serving.bench import parsed, time_left
from recipec.runtime.serving.bench_points import LoadPoint, parse_rate
from recipec.runtime.serving.bench_runner import Processes
from tests.serving.bench.points import ALL, FAULTS, FIRST, LAST, SECOND, THIRD
from tests.serving.benching import Bench
from tests.serving.fake_vllm import FakeVllm, Start


def test_sweep_writes_one_record_per_point_and_prints_figures(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run() == 0
    assert bench.measured() == ALL
    record = bench.record(FIRST)
    assert record["point"] == {"input_length": 512, "rate": "0.5"} and record["failure"] is None
    assert record["result"]["output_throughput"] == 8 and record["settings"]["prompts"] == 10
    assert record["server"]["vllm"] == "0.32.0"
    assert bench.outcomes() == dict.fromkeys(ALL, "measured")
    said = capsys.readouterr().out
    assert "1/4 512 tokens in, 0.5 requests/s: 8 output tokens/s, TTFT 51.7 ms, TPOT 10.5 ms" in said


def test_time_left_includes_extra_time_of_finished_points(bench: Bench) -> None:
    """Compute with 10 requests a point: 20 s at 0.5/s, and the earlier points' extra time."""
    sweep, _ = parsed(bench.words)
    todo = [LoadPoint(512, rate) for rate in ("0.5", "inf", "0.5")]
    assert time_left(sweep, todo, 0, 0.0) == ""
    assert time_left(sweep, todo, 1, 25.0) == " (30 s left)"
    assert time_left(sweep, todo, 2, 90.0) == " (55 s left)"
    assert time_left(sweep, todo, 2, 5.0) == " (20 s left)", "a clock that was set back"


@pytest.mark.parametrize(
    ("text", "rate"),
    [("4", "4"), ("4.0", "4"), ("5e-1", "0.5"), ("1e-05", "0.00001"), ("inf", "inf"), ("1E2", "100")],
)
def test_request_rate_spellings_parse_to_one_form(text: str, rate: str) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["0", "-1", "nan", "", "4x", "-inf"])
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


def test_changed_settings_move_old_results_aside_and_restore_them(
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
    # With the old settings again, their results are restored from the folder that they were moved to.
    server.version = "0.32.0"
    bench.run(*locked())
    assert bench.measured() == []
    assert (
        f"4 results measured earlier with these settings taken back from {aside}" in capsys.readouterr().out
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
        left = rf"{number}/9 {number} tokens in, 2 requests/s \(\d+ s left\): failed: "
        assert re.search(left + re.escape(FAULTS[fault]) + "\n", said.out)
        assert f"| {number} | 2 | - | - | - | - | - | - | failed: {FAULTS[fault]} |\n" in table
    assert said.err == "8 of 9 points failed; the same command measures them again\n"
    bench.plan({})
    assert bench.run(*sweep) == 0 and bench.measured() == list(names)[1:]
    assert set(bench.outcomes().values()) == {"measured"}


@pytest.mark.parametrize("fault", ["hang", "hang-deaf"])
def test_point_over_the_timeout_is_recorded_as_failed(
    fault: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_runner, "GRACE_SECONDS", 0.2)
    bench.plan({LAST: fault})
    assert bench.run("--timeout", "0.005") == 1
    assert bench.outcomes()[LAST] == "failed: no end within 0.005 minutes"


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


def test_answers_that_do_not_fit_the_length_limit_are_explained(bench: Bench, fake: Start) -> None:
    """Explain short answers: vLLM cuts them to its length limit if a prompt is longer than requested."""
    small = fake(["tuned"], max_model_len=530)
    bench.plan({FIRST: "short"})
    assert bench.run("--url", small.url) == 1
    why = "; some prompts are a few tokens longer than asked for, which exceeds the server's limit"
    assert bench.outcomes()[FIRST] == f"failed: {FAULTS['short']}{why}"


def test_each_point_uses_a_different_prompt_seed(bench: Bench) -> None:
    """Use new prompts, because a server with prefix caching would know the old ones."""
    bench.run()
    seeds = [bench.record(name)["seed"] for name in ALL]
    assert len(set(seeds)) == 4
    words = [call["words"] for call in bench.calls()]
    assert [int(w[w.index("--seed") + 1]) for w in words] == seeds


def test_unexpected_prompt_length_is_noted_in_the_outcome(bench: Bench) -> None:
    bench.plan({FIRST: "longer"})
    assert bench.run() == 0
    assert bench.outcomes()[FIRST] == "measured: its prompts had 563 tokens on average"


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


def test_folder_at_a_result_file_path_gives_one_sentence_error(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    (bench.results / "summary.md").mkdir(parents=True)
    assert bench.run() == 1
    assert capsys.readouterr().err == (
        f"error: {bench.results / 'summary.md'} cannot be written: Is a directory\n"
        "  = help: free disk space there, or get access to it\n"
    )
    (bench.results / f"{FIRST}.json").unlink()
    (bench.results / f"{FIRST}.json").mkdir()
    assert bench.run() == 1
    assert capsys.readouterr().err == f"error: {bench.results / FIRST}.json: Is a directory\n"


def test_second_benchmark_on_locked_results_folder_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    from recipec.runtime.serving.bench import alone

    with alone(bench.results):
        assert bench.run() == 1
    assert "another benchmark is writing to" in capsys.readouterr().err
    assert bench.run() == 0
