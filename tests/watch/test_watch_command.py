"""Tests of `recipe watch` on fixed folders: its output about a run, and its exit status."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from recipec.compiler.cli.main import app
from recipec.compiler.report import run_folder as folders
from recipec.compiler.report.run_folder import Folder, open_folder
from recipec.compiler.watch import watch as watching
from recipec.compiler.watch.watch import WatchedRun, screen
from tests.watch.watching import LOCK, append, entry, lines, state, write_run

SCREENS = Path(__file__).parent / "screens"
ROOT = Path(__file__).resolve().parents[2]
NOW = 1_790_000_000.0


def watch(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["watch", *map(str, arguments)])


def looked_at(folder: Path) -> WatchedRun:
    run = WatchedRun(open_folder(str(folder)))
    run.update()
    return run


def losses(run: WatchedRun) -> dict[int, float]:
    return run.metrics.values["loss"]


@pytest.fixture
def later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder half a minute after its last line."""
    for name, seconds in (("100", 75), ("metrics.jsonl", 30)):
        os.utime(folder / name, (NOW - seconds, NOW - seconds))
    monkeypatch.setattr(folders, "time", SimpleNamespace(time=lambda: NOW))
    return folder


def test_once_prints_run_as_one_line(later: Path) -> None:
    found = watch(later, "--once")
    assert (found.exit_code, found.stdout) == (
        0,
        "support-qlora: step 120/400 (30%), loss 1.4463, eval_loss 1.6730 (step 100), lr 1.00e-04, "
        "grad_norm 0.5, 12,346 tokens/s, 1.5 s a step, peak memory 12.0 GiB, checkpoint 100, 1 min 15 s old, "
        "7 min 00 s left\n",
    )


def test_json_output_has_run_status(later: Path) -> None:
    found = watch(later, "--once", "--json")
    (run,) = json.loads(found.stdout)
    assert (run["name"], run["state"], run["step"], run["total"]) == ("support-qlora", "training", 120, 400)
    assert run["loss"] == pytest.approx(1 + 2 * math.exp(-1.5))
    assert (run["eval_step"], run["checkpoint"], run["checkpoint_seconds"]) == (100, 100, 75.0)
    assert (run["seconds_left"], run["silent_seconds"], run["warnings"]) == (420.0, 30.0, [])


@pytest.mark.parametrize(
    ("name", "width", "height", "encoding"),
    [
        ("wide", 100, 30, "utf-8"),
        ("narrow", 40, 24, "utf-8"),
        ("ascii", 40, 24, "ascii"),
        ("low", 60, 8, "utf-8"),
        ("page", 80, 20, "utf-8"),
    ],
)
def test_screen_matches_golden_file_at_every_size(
    later: Path, tmp_path: Path, update: bool, name: str, width: int, height: int, encoding: str
) -> None:
    """Draw several sizes, with another run that has failed."""
    other = write_run(tmp_path / "other", 60, {**LOCK, "name": "second-run-of-a-longer-name"})
    state(other, "failed", reason="step 60: the loss is nan, in micro-batch 59")
    if name != "page":
        append(later, json.dumps(entry(121, loss=9.5)) + "\n")
    os.utime(later / "metrics.jsonl", (NOW - 30, NOW - 30))
    runs = [looked_at(later)] if name in ("wide", "page") else [looked_at(later), looked_at(other)]
    raw = io.BytesIO()
    console = Console(
        file=io.TextIOWrapper(raw, encoding), width=width, height=height, force_terminal=True, no_color=True
    )
    console.print(screen(console, runs, "every 2 s; Ctrl-C leaves; the run continues"), end="")
    console.file.flush()
    drawn = raw.getvalue().decode(encoding)
    plain = "\n".join(line.rstrip() for line in _without_styles(drawn).split("\n")).rstrip("\n") + "\n"
    rows = plain.splitlines()
    assert len(rows) <= height
    assert max(map(len, rows)) <= width
    golden = SCREENS / f"{name}.txt"
    if update:
        golden.write_text(plain, encoding="utf-8")
    assert plain == golden.read_text(encoding="utf-8")


def test_screen_without_plotext_shows_status_and_install_hint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotext", None)
    console = Console(file=io.StringIO(), width=200, height=30, force_terminal=True, no_color=True)
    console.print(screen(console, [looked_at(folder)]))
    drawn = console.file.getvalue()
    assert "step 120/400 (30%)" in drawn
    assert "plotext, which is not installed, draws the loss:" in drawn and "[report]" in drawn


def _without_styles(text: str) -> str:
    import re

    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_missing_empty_or_unusable_folder_gives_one_sentence(tmp_path: Path) -> None:
    missing = watch(tmp_path / "missing", "--once")
    assert missing.exit_code == 1 and str(missing.exception).startswith("there is no folder ")
    file = tmp_path / "file"
    file.touch()
    assert "is not a folder" in str(watch(file).exception)
    (tmp_path / "empty").mkdir()
    empty = watch(tmp_path / "empty", "--once")
    assert (empty.exit_code, empty.stdout) == (
        0,
        f"empty: waiting for the first line of {tmp_path}/empty/metrics.jsonl\n",
    )
    refused = watch("nothing-opens-this://bucket/run", "--once")
    assert refused.exit_code == 1 and "cannot be opened" in str(refused.exception)


@pytest.mark.parametrize("depth", [65, 970, 100_000])
@pytest.mark.parametrize("file", ["metrics.jsonl", "recipe.lock.json", "state.json"])
def test_deeply_nested_json_does_not_crash_watch_or_report(folder: Path, file: str, depth: int) -> None:
    """Nest 970 levels, which Python's default limit allows to read, but not to print."""
    nested = "[" * depth + "]" * depth
    if file == "metrics.jsonl":
        append(folder, f'{nested}\n{{"step": 121, "loss": {nested}}}\n')
    else:
        (folder / file).write_text(f'{{"name": {nested}, "reason": {nested}, "state": "failed"}}')
    for command in (["watch", "--once"], ["watch", "--once", "--json"], ["report", "-o", f"{folder}.html"]):
        done = CliRunner().invoke(app, [*command, str(folder)])
        assert done.exit_code == 0 and done.exception is None, done.exception


@pytest.mark.parametrize(
    ("how", "reason", "status", "told"),
    [
        ("done", None, 0, "done"),
        ("stopped", "--steps 120", 0, "stopped (--steps 120)"),
        ("stopped", "SIGTERM", 1, "stopped (SIGTERM)"),
        ("failed", "step 120: the loss is nan", 1, "failed (step 120: the loss is nan)"),
    ],
)
def test_ended_run_prints_outcome_and_sets_exit_status(
    folder: Path, how: str, reason: str | None, status: int, told: str
) -> None:
    state(folder, how, reason=reason)
    found = watch(folder, "--no-wait")
    assert found.exit_code == status
    assert found.stdout.startswith("support-qlora: step 120/400") and found.stdout.endswith(f", {told}\n")


def test_run_whose_process_died_is_reported_as_killed(folder: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state(folder, pid=gone.pid)
    found = watch(folder, "--no-wait")
    assert found.exit_code == 1
    assert found.stdout.endswith(
        f"killed\nsupport-qlora: warning: its process ({gone.pid}) ended without an error message; continue "
        "it with --resume\n"
    )
    state(folder, pid=gone.pid, host="another-machine")
    assert looked_at(folder).outcome == "training", "another machine's processes are not known here"


def test_outcome_without_state_file_comes_from_metrics_and_lock(folder: Path) -> None:
    (folder / "state.json").unlink()
    assert looked_at(folder).outcome == "training"
    append(folder, lines(121, 400))
    assert looked_at(folder).outcome == "done"
    (folder / "recipe.lock.json").write_text('{"recipe": [], "name"')
    run = looked_at(folder)
    assert (run.title, run.total, run.outcome) == ("checkpoints", None, "training")
    assert watching.parts(run)[0] == "step 400"


def test_growing_metrics_file_is_read_incrementally(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = json.dumps(entry(0)).removeprefix('{"step": 0')
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {step}{one}\n' for step in range(1, 100_001)))
    size = (folder / "metrics.jsonl").stat().st_size
    run = WatchedRun(open_folder(str(folder)))
    taken: list[int] = []
    read = Folder.read

    def counted(folder: Folder, file: str, start: int = 0, end: int = 0) -> bytes | None:
        taken.append(end - start if file == "metrics.jsonl" else 0)
        return read(folder, file, start, end or None)

    monkeypatch.setattr(Folder, "read", counted)
    run.update()
    assert sum(taken) == size and run.metrics.last_step == 100_000 and len(losses(run)) == 100_000
    taken.clear()
    run.update()
    assert sum(taken) == 0
    append(folder, lines(100_001, 100_010))
    run.update()
    assert run.metrics.last_step == 100_010
    assert sum(taken) < 4000, "what is new, and a little before it"


def test_incomplete_metrics_line_waits_and_malformed_lines_are_skipped(folder: Path) -> None:
    run = looked_at(folder)
    whole = json.dumps(entry(121, loss=7.0)) + "\n"
    append(folder, whole[:20])
    run.update()
    assert run.metrics.last_step == 120
    append(folder, whole[20:])
    run.update()
    assert list(losses(run).items())[-1] == (121, 7.0)
    append(
        folder,
        '{"step": 122, "lo\n["step"]\n\xff\n{"step": true, "loss": 1}\n' + json.dumps(entry(123)) + "\n",
    )
    run.update()
    assert list(losses(run))[-2:] == [121, 123]


@pytest.mark.parametrize("replaced", [True, False])
def test_rewritten_metrics_file_is_read_again(folder: Path, replaced: bool) -> None:
    """Replace the file, as train.py does, or change it in place, as the copy of a bucket's file does."""
    run = looked_at(folder)
    anew = lines(1, 100) + "".join(json.dumps(entry(step, loss=5.0)) + "\n" for step in range(101, 130))
    if replaced:
        (folder / "new").write_text(anew)
        (folder / "new").replace(folder / "metrics.jsonl")
    else:
        (folder / "metrics.jsonl").write_text(anew)
    run.update()
    assert list(losses(run)) == list(range(1, 130))
    assert list(losses(run).values())[100:] == [5.0] * 29
    (folder / "metrics.jsonl").write_text(lines(1, 10))
    run.update()
    assert list(losses(run)) == list(range(1, 11))
    (folder / "metrics.jsonl").unlink()
    run.update()
    assert not run.metrics.lines


def test_warnings_report_loss_jump_nan_rising_eval_loss_and_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = looked_at(folder)
    assert run.warnings == []
    append(folder, json.dumps(entry(121, loss=8.25)) + "\n")
    run.update()
    assert len(run.warnings) == 1 and run.warnings[0].startswith("step 121: the loss jumped to 8.25, from 1.")
    for step, loss in ((150, 1.2), (160, 1.3), (170, 1.4), (180, 1.5)):
        append(folder, json.dumps({"step": step, "eval_loss": loss}) + "\n")
    append(folder, json.dumps(entry(181, loss="NaN", grad_norm="Infinity")) + "\n")
    run.update()
    assert run.warnings[1:] == [
        "step 181: the loss is nan",
        "step 181: the gradient's norm is inf",
        "eval_loss has risen since step 150, from 1.2 to 1.5",
    ]
    assert math.isnan(run.latest["loss"]) and "loss nan" in watching.line(run)
    changed = (folder / "metrics.jsonl").stat().st_mtime
    monkeypatch.setattr(folders, "time", SimpleNamespace(time=lambda: changed + 100))
    run.update()
    assert run.warnings[-1] == "no line for 1 min 40 s; 10 steps take 15 s"
    monkeypatch.setattr(folders, "time", SimpleNamespace(time=lambda: changed + 59))
    run.update()
    assert not any("no line" in text for text in run.warnings)


def test_control_characters_are_replaced_in_output(folder: Path) -> None:
    (folder / "recipe.lock.json").write_text(json.dumps({**LOCK, "name": "evil\x1b[2J\r\nname"}))
    state(folder, "failed", reason="\x1b]0;title\x07")
    found = watch(folder)
    assert "\x1b" not in found.stdout and "\r" not in found.stdout and "\x07" not in found.stdout
    assert found.stdout.startswith("evil?[2J??name: step 120/400")


def test_artifact_folder_shows_runs_of_all_backends(tmp_path: Path) -> None:
    """Watch an artifact's folder, which holds its backends' runs."""
    for name, steps in (("checkpoints", 120), ("checkpoints-torchax", 50)):
        state(write_run(tmp_path / "artifact" / name, steps), "done")
    (tmp_path / "artifact" / "serve").mkdir()
    found = watch(tmp_path / "artifact")
    assert found.exit_code == 0
    assert [line.split(",")[0] for line in found.stdout.splitlines()] == [
        "support-qlora: step 120/400 (30%)",
        "support-qlora: step 50/400 (12%)",
    ]
    state(tmp_path / "artifact" / "checkpoints", "stopped", reason="SIGINT")
    assert watch(tmp_path / "artifact", "--once").exit_code == 1


def test_piped_watch_prints_a_line_per_event_until_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Watch a folder that appears later, grows, is resumed and ends, with one line for each event."""
    folder = tmp_path / "later"

    def resumed() -> None:
        (folder / "new").write_text(lines(1, 100) + lines(101, 110))
        (folder / "new").replace(folder / "metrics.jsonl")

    happenings: list[Any] = [
        lambda: None,
        lambda: write_run(folder, 0),
        lambda: append(folder, lines(1, 120)),
        lambda: None,
        resumed,
        lambda: (folder / "110").mkdir(),
        lambda: append(folder, json.dumps(entry(111, loss=20.0)) + "\n"),
        lambda: (append(folder, lines(112, 400)), state(folder, "done")),
    ]
    slept = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        happenings.pop(0)()

    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=sleep))  # threads of other tests sleep too
    found = watch(folder, "--interval", "0.5")
    assert found.exit_code == 0 and not happenings and set(slept) == {0.5}
    told = [line.partition(", loss")[0] for line in found.stdout.splitlines()]
    assert told == [
        f"later: waiting for {folder}, which does not exist yet",
        "support-qlora: Qwen/Qwen3-14B, LoRA 16, v5e-8: starting: no step is done yet",
        "support-qlora: step 120/400 (30%)",
        "support-qlora: step 110/400 (28%)",
        "support-qlora: step 110/400 (28%)",
        "support-qlora: step 111/400 (28%)",
        told[6],
        "support-qlora: step 400/400 (100%)",
    ]
    assert told[6].startswith("support-qlora: warning: step 111: the loss jumped to 20, from 1.")
    assert found.stdout.endswith(", done\n")


def test_watch_waits_for_resume_of_killed_and_stopped_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    happenings: list[Any] = [
        lambda: state(folder),  # --resume: another process
        lambda: (append(folder, lines(121, 200)), state(folder, "stopped", reason="SIGTERM")),
        lambda: None,
        lambda: state(folder),
        lambda: (append(folder, lines(201, 400)), state(folder, "done")),
    ]
    monkeypatch.setattr(watching, "time", SimpleNamespace(sleep=lambda _: happenings.pop(0)()))
    state(folder, pid=gone.pid)
    found = watch(folder)
    assert found.exit_code == 0 and not happenings
    ends = [line.rpartition(", ")[2] for line in found.stdout.splitlines() if "warning" not in line]
    assert [ends[0], ends[2], ends[-1]] == ["killed", "stopped (SIGTERM)", "done"], found.stdout


def test_run_at_fsspec_address_is_watched(folder: Path) -> None:
    import fsspec

    system = fsspec.filesystem("memory")
    try:
        waiting = WatchedRun(open_folder("memory://watched/run"))
        waiting.update()
        assert watching.standing(waiting) == "waiting for memory://watched/run, which does not exist yet"
        system.put(str(folder) + "/", "/watched/run", recursive=True)
        system.makedirs("/watched/run/100", exist_ok=True)
        system.pipe_file("/watched/run/100/file", b"")
        waiting.update()
        assert (waiting.metrics.last_step, waiting.name, waiting.outcome) == (
            120,
            "support-qlora",
            "training",
        )
        assert waiting.facts()["checkpoint"] == 100
        with system.open("/watched/run/metrics.jsonl", "ab") as file:
            file.write(lines(121, 150).encode())
        waiting.update()
        assert waiting.metrics.last_step == 150
        found = watch("memory://watched/run", "--once")
        assert found.exit_code == 0 and "step 150/400" in found.stdout
    finally:
        system.rm("/watched", recursive=True)


def test_watch_imports_no_jax_numpy_fsspec_etils_or_plotext(folder: Path) -> None:
    code = (
        "import sys; from recipec.compiler.watch import watch; w = watch.Watch([sys.argv[1]]); w.update(); "
        "print(sorted({'jax', 'numpy', 'fsspec', 'etils', 'plotext'} & set(sys.modules)), w.runs[0].total)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout == "[] 400\n"


def test_step_seconds_exclude_the_compiling_first_step(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(entry(s, step_seconds=x)) + "\n" for s, x in ((1, 90.0),))
    )
    run = looked_at(folder)
    assert run.step_seconds == 90.0
    append(
        folder, json.dumps(entry(2, step_seconds=2.0)) + "\n" + json.dumps(entry(3, step_seconds=4.0)) + "\n"
    )
    run.update()
    assert run.step_seconds == 3.0 and run.facts()["seconds_left"] == 3.0 * 397
