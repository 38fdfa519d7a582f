"""Tests of what a run survives, and of its messages: kills, signals, a full disk and NaN."""

from __future__ import annotations

import errno
import json
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from recipec.runtime.checkpoints import manifest, resuming, saving
from recipec.runtime.errors import UserError
from recipec.runtime.metrics.loggers import Metrics
from tests.runtime.artifacts import (
    SLOW,
    STEPS,
    assert_equal,
    begin,
    entries,
    error_of,
    steps,
    train,
    write_artifact,
)
from tests.runtime.lives import Lives

POISONED = """
import numpy as np

from runtime.training import trainer

clean = trainer.Trainer._step


def poisoned(self, train_step, stream):
    def spoil(batch):
        return batch | {"norm": np.asarray(1.2e-38 if batch["index"] == 17 else batch["norm"], np.float32)}

    return clean(self, train_step, map(spoil, stream))


trainer.Trainer._step = poisoned
"""
"""Code of an artifact whose micro-batch 17, the second of step 9, has an infinite loss."""


@pytest.mark.parametrize(
    ("kills", "last", "seed"),
    [pytest.param(3, STEPS, 8, marks=pytest.mark.e2e), pytest.param(20, 24, 7, marks=pytest.mark.nightly)],
)
def test_randomly_killed_run_ends_like_uninterrupted_run(
    kills: int, last: int, seed: int, place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    """Send SIGKILL during start-up, steps and saves, and resume each time.

    A kill loses nothing that was saved before. The last process ends with exactly the parameters, optimizer
    state and metrics of an undisturbed run.
    """
    name = f"killed-{last}"
    write_artifact(place / name, steps=last, every=1)
    undisturbed = "whole" if last == STEPS else "undisturbed"
    if last != STEPS:
        assert train(lives, place, undisturbed, artifact=name).status == 0
    folder, choose = place / name / "checkpoints", random.Random(seed)

    def saving() -> set[tuple[str, int]]:
        return {(path.name, path.stat().st_ino) for path in folder.glob("*.orbax-checkpoint-tmp")}

    def within_a_save(before: set[tuple[str, int]]) -> bool:
        try:
            return bool(saving() - before)
        except FileNotFoundError:  # it has got its final name meanwhile
            return False

    newest, moments = 0, []
    for _ in range(kills):
        life = begin(lives, place, name, "--resume", artifact=name)
        moment = choose.choice(["start", "step", "save"])
        moments.append(moment)
        if moment == "step":
            life.until(lambda newest=newest: steps(folder)[-1:] > [newest])  # type: ignore[misc]
            time.sleep(choose.uniform(0.0, 0.3))
        elif moment == "save":
            before = saving()
            life.until(lambda before=before: within_a_save(before))  # type: ignore[misc]
            time.sleep(choose.uniform(0.0, 0.05))
        else:
            time.sleep(choose.uniform(0.0, 3.0))
        life.send(signal.SIGKILL)
        assert life.wait() == -signal.SIGKILL, f"the run ended before it was killed\n{life.stderr}"
        assert "damaged" not in life.stderr and "Traceback" not in life.stderr
        if "continuing after" in life.stderr:
            assert f"continuing after step {newest} of {last}" in life.stderr, "a saved step was lost"
        assert steps(folder)[-1:] >= [newest][: newest > 0]
        newest = (steps(folder) or [0])[-1]
    assert set(moments) == {"start", "step", "save"}
    assert 0 < newest < last
    end = train(lives, place, name, "--resume", artifact=name)
    assert end.status == 0, end.stderr
    assert f"continuing after step {newest} of {last}" in end.stderr
    assert_equal(place, undisturbed, name, last)
    assert entries(folder) == entries(place / undisturbed / "checkpoints")
    assert not list(folder.glob("*.orbax-checkpoint-tmp")), "what kills left in part is removed"


@pytest.mark.parametrize(
    ("signum", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.e2e),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
    ],
)
def test_signal_during_step_saves_that_step(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str], signum: int, status: int
) -> None:
    """Save at a step where no checkpoint is due, because of the signal."""
    name = signal.Signals(signum).name
    write_artifact(place / f"slow-{name}", every=100, prelude=SLOW.format(seconds=1.5))
    life = begin(lives, place, name, artifact=f"slow-{name}")
    assert life.until(lambda: "step 1/10: loss" in life.stderr)
    time.sleep(random.Random(3).uniform(0.2, 1.2))
    life.send(signum)
    assert life.wait() == status, life.stderr
    folder = place / name / "checkpoints"
    assert steps(folder) == [2]
    assert "stopping after this step; interrupt again to stop at once" in life.stderr
    assert life.stderr.splitlines()[-1] == (
        f"stopped by {name}; kept: the checkpoint of step 2 in {folder}; --resume continues from it"
    )
    assert "Traceback" not in life.stderr
    last = train(lives, place, name, "--resume", artifact=f"slow-{name}")
    assert last.status == 0, last.stderr
    assert_equal(place, "whole", name, STEPS)


@pytest.mark.e2e
def test_full_disk_ends_run_and_keeps_last_checkpoint(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    """Refuse files of more than 8 KiB from the second save on."""
    write_artifact(place / "full-disk", every=2, prelude=SLOW.format(seconds=0.5))
    life = begin(lives, place, "full-disk", artifact="full-disk")
    folder = place / "full-disk" / "checkpoints"
    assert life.until(lambda: steps(folder) == [2])
    resource.prlimit(life.pid, resource.RLIMIT_FSIZE, (8192, 8192))
    assert life.wait() == 1, life.stderr
    assert error_of(life, place, "full-disk") == [
        "error: DIRECTORY: a checkpoint could not be written: File too large; kept: the checkpoint of step 2",
        "  = help: free disk space or allow writing to the directory, and continue with --resume",
    ]
    assert steps(folder) == [2], "what is there in part does not look like a checkpoint"
    last = train(lives, place, "full-disk", "--resume", artifact="full-disk")
    assert last.status == 0, last.stderr
    assert "continuing after step 2 of 10" in last.stderr
    assert_equal(place, "whole", "full-disk", STEPS)


def test_failed_background_save_is_reported_and_previous_step_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report the error at the end, or at the next save. The previous checkpoint stays the newest."""
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.kernel = nnx.LoRAParam(jnp.ones((2, 3)))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    arrays = saving.StepArrays(model, optimizer, lora_only=True)

    def full(folder: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    message = (
        f"{tmp_path}: a checkpoint could not be written: No space left on device; "
        "kept: the checkpoint of step 1"
    )
    manager = saving.Checkpoints(str(tmp_path), keep=3)
    manager.write(1, arrays, resuming.describe({"next": 1}))
    manager._checkpoint_manager.wait_until_finished()
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        manager.write(2, arrays, resuming.describe({"next": 2}))
        with pytest.raises(UserError) as caught:
            manager.write(3, arrays, resuming.describe({"next": 3}))
        assert str(caught.value) == message
    again = saving.Checkpoints(str(tmp_path), keep=3)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        again.write(2, arrays, resuming.describe({"next": 2}))
        with pytest.raises(UserError) as caught:
            again.finish()
        assert str(caught.value) == message
    found = resuming.find(str(tmp_path))
    assert (found.step, found.data, found.damaged) == (1, {"next": 1}, ())


def test_metrics_on_full_disk_raise_one_sentence_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    metrics = Metrics(tmp_path, None, tensorboard=True)
    metrics.log("train", 1, {"loss": 1.0})
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError) as caught:
        metrics.flush()
    assert str(caught.value) == (
        f"{tmp_path / 'metrics.jsonl'}: the metrics cannot be written: No space left on device"
    )
    metrics.close()


def test_non_finite_loss_error_names_data_rows(
    place: Path, lives: Lives, whole: subprocess.CompletedProcess[str]
) -> None:
    write_artifact(place / "poisoned", prelude=POISONED)
    folder = place / "poisoned" / "checkpoints"
    shutil.copytree(place / "whole" / "checkpoints", folder)
    shutil.rmtree(folder / "10")
    life = train(lives, place, "poisoned", "--resume", artifact="poisoned")
    assert life.status == 1
    error = error_of(life, place, "poisoned")
    start = "error: step 9: the loss is inf; micro-batch 17 holds "
    assert error[0].startswith(start) and error[0].endswith("; kept: the checkpoint of step 8")
    rows = error[0].removeprefix(start).rpartition(";")[0].split(", ")
    assert len(rows) == 4 and len(set(rows)) == 4
    assert all(int(row.removeprefix("train.jsonl:")) in range(1, 51) for row in rows)
    assert error[1:] == [
        "  = help: look at these rows, then lower train.optimizer.learning_rate or set max_grad_norm"
    ]
    assert steps(folder) == [8]
    last = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][-1]
    assert (last["step"], last["loss"]) == (9, "Infinity")
