"""Tests of a rehearsal's steps: what they report, and what happens if one fails or is interrupted."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.rehearse.artifact_run import CACHE, MARKER, ArtifactRun, claim
from recipec.compiler.rehearse.pipeline import Pipeline, StepFailed, carry_out, new_console
from recipec.compiler.rehearse.quickstart import check_losses
from tests.waiting import gone

TRAIN = """
import json, pathlib, sys, time
output = pathlib.Path(sys.argv[sys.argv.index("--output") + 1]) / "checkpoints"
output.mkdir(parents=True, exist_ok=True)
with (output / "metrics.jsonl").open("a") as log:
    for step in range(1, 4):
        log.write(json.dumps({"step": step, "loss": 4.0 - step}) + "\\n")
        log.flush()
        (output / str(step)).mkdir(exist_ok=True)
        SLEEP
print("done: steps=3 tokens/s=812 loss=1.0")
"""


def make_run(folder: Path, sleep: str = "", script: str = TRAIN) -> tuple[ArtifactRun, io.StringIO]:
    """Make a run whose train.py is a plain script, and return the output of its pipeline with it."""
    artifact = folder / "artifact"
    artifact.mkdir()
    (artifact / "train.py").write_text(script.replace("SLEEP", sleep or "pass"))
    screen = io.StringIO()
    pipeline = Pipeline(new_console(screen), folder / "logs")
    run = ArtifactRun(pipeline, artifact, folder / "model", folder, folder / "work", "checkpoints", "merged")
    return run, screen


def test_train_step_reports_steps_loss_and_speed(tmp_path: Path) -> None:
    run, screen = make_run(tmp_path)
    run.pipeline.step("train", run.train)
    run.pipeline.print_table("a run")
    assert run.pipeline.ok
    assert run.pipeline.results[0].figure == "3 steps, loss 3.00 to 1.00, 812 tokens/s"
    assert "\x1b" not in screen.getvalue(), "no colors where the output is piped"
    assert screen.getvalue().startswith("train")
    assert run.saved_steps(run.whole) == [1, 2, 3]


def test_a_killed_run_leaves_its_checkpoints(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, "time.sleep(2)")
    run.pipeline.step("kill", run.kill)
    assert run.pipeline.results[0].figure == "SIGKILL at step 1, checkpoint of step 1 exists"
    assert run.saved_steps(run.resumed) == [1]


def test_kill_step_fails_if_the_run_ends_before_the_kill(tmp_path: Path) -> None:
    script = "import time\ntime.sleep(0.1)\nprint('done: steps=0')\n"
    run, _ = make_run(tmp_path, script=script)
    with pytest.raises(StepFailed, match="ended before it could be killed"):
        run.pipeline.step("kill", run.kill)


def test_a_failing_script_shows_its_last_lines(tmp_path: Path) -> None:
    script = "for i in range(99): print('line', i)\nraise SystemExit(3)\n"
    run, screen = make_run(tmp_path, script=script)
    carry_out(run.pipeline, tmp_path, lambda: run.pipeline.step("train", run.train))
    run.pipeline.print_table("a run")
    assert not run.pipeline.ok
    assert "train.py exited with status 3" in run.pipeline.results[0].figure
    printed = screen.getvalue()
    assert "line 98" in printed and "line 60" not in printed
    assert "failed" in printed


def test_nan_loss_fails_the_train_step(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path, script=TRAIN.replace("4.0 - step", "float('nan')"))
    with pytest.raises(StepFailed, match="not finite"):
        run.pipeline.step("train", run.train)


def test_an_interrupt_ends_the_script_and_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
        "time.sleep(60)\n"
    )
    run, _ = make_run(tmp_path, script=script)

    def interrupt() -> None:
        while not pids.exists() or not pids.read_text().endswith(" "):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run.pipeline.step("train", run.train)
    for pid in map(int, pids.read_text().split()):
        assert gone(pid)


def test_incomplete_last_line_of_metrics_jsonl_is_ignored(tmp_path: Path) -> None:
    run, _ = make_run(tmp_path)
    folder = run.whole / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.5}) + '\n{"step": 2, "lo')
    assert run.losses(run.whole) == [2.5]
    assert run.metrics(run.whole).last_step == 1


def test_quickstart_requires_falling_losses() -> None:
    assert "64%" in check_losses([5.0, 4.0, 3.2], [5.0, 3.0])
    with pytest.raises(StepFailed, match="must fall"):
        check_losses([5.0, 4.9, 4.8], [5.0, 3.0])
    with pytest.raises(StepFailed, match="must fall"):
        check_losses([5.0, 3.0], [5.0, 4.9])
    with pytest.raises(StepFailed, match=r"loss 5\.00 to nan"):
        check_losses([5.0, float("nan")], [5.0, 3.0])


def test_only_a_folder_made_by_a_rehearsal_is_cleared(tmp_path: Path) -> None:
    own = claim(tmp_path / "new")
    for name in ("whole", CACHE):
        (own / name).mkdir()
    (own / "recipe.yaml").touch()
    assert claim(own) == own
    assert {entry.name for entry in own.iterdir()} == {MARKER, CACHE, "recipe.yaml"}
    other = tmp_path / "other"
    (other / "generated").mkdir(parents=True)
    with pytest.raises(ArtifactError, match="holds other files"):
        claim(other)
    assert (other / "generated").is_dir()
