"""Tests of each backend's TensorBoard and wandb logs: after a stop, a lost step and a signal."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator

import pytest

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.parity.run import SCRIPTS
from recipec.compiler.report.folder import open_folder
from recipec.compiler.watch.watch import WatchedRun
from tests.parity.running import Case, Place
from tests.runtime.logged import IN_SINGLE, assert_same, of_lines, of_tensorboard, of_wandb, records

pytestmark = pytest.mark.nightly

STEPS = 6
FOLDERS = {
    Backend.TUNIX: "checkpoints",
    Backend.TORCHAX: "checkpoints-torchax",
    Backend.TRL: "checkpoints-trl",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Make a tiny recipe that logs to both, with wandb offline."""
    case = Case(
        "Qwen/Qwen3-0.6B",
        ["full_attention"] * 2,
        {
            "mesh": {"accelerator": "cpu-2", "axes": {"fsdp": 2, "tp": 1}},
            "lora": {"rank": 4, "targets": ["q_proj", "v_proj"]},
            "data": {"train": ["train.jsonl"], "eval": ["train.jsonl"], "max_length": 64, "packing": True},
            "train": {
                "steps": STEPS,
                "global_batch_size": 4,
                "micro_batch_size": 2,
                "eval_every": 3,
                "log": {"every": 2, "wandb_project": "live"},
            },
            "checkpoint": {"directory": "checkpoints", "every_steps": 2, "keep": 3},
        },
    )
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
            patch.setenv(name, str(home))
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        yield Place(tmp_path_factory.mktemp("live"), case)


@pytest.mark.parametrize("backend", FOLDERS, ids=lambda backend: backend.value)
def test_run_resumed_after_a_lost_checkpoint_logs_each_step_once(place: Place, backend: Backend) -> None:
    """Train step 3 twice; all logs show it once."""
    script, data = SCRIPTS[backend], ("--data-dir", place.folder)
    output = f"logged-{backend.value}"
    place.run(script, output, *data, "--steps", "3")
    folder = place.folder / output / FOLDERS[backend]
    run = WatchedRun(open_folder(str(folder)))
    run.update()
    assert (run.outcome, run.reason, run.metrics.last_step, run.total) == ("stopped", "--steps 3", 3, STEPS)
    first = of_lines(folder)
    assert_same(of_tensorboard(folder), first, IN_SINGLE)
    (lost,) = [path for path in (folder / "3", folder / "checkpoint-3") if path.is_dir()]
    shutil.rmtree(lost)
    place.run(script, output, *data, "--resume")
    whole = of_lines(folder)
    assert {step for name, step in whole if name == "train/loss"} == set(range(1, STEPS + 1))
    assert {step for name, step in whole if name == "eval/loss"} == {0, 3, 6}
    assert_same(of_tensorboard(folder), whole, IN_SINGLE)
    found = records(folder)
    logged = of_wandb(found)
    # Step 3 as first logged: the same numbers, with other times.
    again = {key: first[key] for key in whole if key[1] == 3 and key in first}
    assert_same(logged, whole | again)
    for name in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert first[name, 3] == whole[name, 3]
    runs = [record["run"] for record in found if record["type"] == "run"]
    assert len(runs) == 2 and runs[0]["run_id"] == runs[1]["run_id"]
    lock = json.loads((place.artifact / "recipe.lock.json").read_text())
    config = runs[0]["config"]["update"]
    assert {name: config[name] for name in lock["recipe"]} == lock["recipe"]
    run.update()
    assert (run.outcome, run.metrics.last_step) == ("done", STEPS)
    assert not run.metrics.twice, "the lines were read anew"


def test_signal_ends_the_wandb_run_with_exit_code_143(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the signal while a line is written, after the first step."""
    from recipec.runtime.metrics.loggers import JsonLines

    script, data = SCRIPTS[Backend.TUNIX], ("--data-dir", place.folder)
    folder = place.folder / "stopped" / "checkpoints"
    log, sent = JsonLines.log, []

    def stopping(lines: JsonLines, mode: str, step: int, values: dict[str, float]) -> None:
        log(lines, mode, step, values)
        if not sent and (folder / "metrics.jsonl").read_text().count("\n") == 2:
            sent.append(signal.SIGTERM)  # a second signal would end this process at once
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(JsonLines, "log", stopping)
    with pytest.raises(AssertionError, match="ended with 143"):
        place.run(script, "stopped", *data)
    assert json.loads((folder / "state.json").read_text())["reason"] == "SIGTERM"
    found = records(folder)
    assert [record["exit"]["exit_code"] for record in found if record["type"] == "exit"] == [143]
    assert any(record["type"] == "preempting" for record in found)
    assert_same(of_wandb(found), of_lines(folder))
