"""Tests of checkpoints on a host's local disk between the shared ones, and of resuming from them."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.runtime.checkpoints import manifest, saving
from recipec.runtime.checkpoints.resuming import ResumePoint, describe
from recipec.runtime.checkpoints.saving import LocalCheckpoints, StepArrays
from recipec.runtime.sections import LocalCheckpoint
from tests.runtime.artifacts import STEPS, assert_equal, entries, script, steps, train, write_artifact
from tests.runtime.lives import Lives

PRELUDE = """
import time
from dataclasses import replace

from runtime.training import trainer
from runtime.sections import LocalCheckpoint

CHECKPOINT = replace(CHECKPOINT, every_steps=4, local=LocalCheckpoint({directory!r}, 1))
quick = trainer.Trainer._step


def slow(self, *arguments):
    time.sleep(600 if self._train_steps == 7 and "--resume" not in sys.argv else 0)
    return quick(self, *arguments)


trainer.Trainer._step = slow
"""
"""Code of an artifact that saves every fourth step, and every second one locally. Step 8 does not end."""


@pytest.mark.nightly
def test_killed_run_resumes_from_local_checkpoint(
    place: Path, lives: Lives, whole: object, tmp_path: Path
) -> None:
    """Resume from the newest complete checkpoint, or from the shared ones on a new disk.

    A new run ignores both.
    """
    local = tmp_path / "disk"
    write_artifact(place / "saves-locally", prelude=PRELUDE.format(directory=str(local)))
    life = lives.begin(*script(place, "local", artifact="saves-locally"))

    def newest() -> list[int]:
        return steps(next(local.glob("*/process-0"), local))

    assert life.until(lambda: newest() == [6, 7])
    life.send(signal.SIGKILL)
    assert life.wait() == -signal.SIGKILL
    folder = place / "local" / "checkpoints"
    assert steps(folder) == [4]
    shutil.copytree(place / "local", place / "moved")
    (own,) = local.glob("*/process-0")
    torn = max((own / "7" / "model_params").rglob("d/*"), key=lambda path: path.stat().st_size)
    torn.write_bytes(torn.read_bytes()[:-7])

    last = train(lives, place, "local", "--resume", artifact="saves-locally")
    assert last.status == 0, last.stderr
    note = (
        f"note: the run continues from step 6 of {own}; the newest of the shared checkpoints is of step 4\n"
    )
    assert note in last.stderr and "continuing after step 6 of 10" in last.stderr
    assert_equal(place, "whole", "local", STEPS)
    assert entries(folder) == entries(place / "whole" / "checkpoints")
    assert steps(own) == [7, 9], "what was torn is saved again; where a shared one is saved, none is"

    # Another output has another key, so that its disk is empty.
    other = train(lives, place, "moved", "--resume", "--steps", "5", artifact="saves-locally")
    assert other.status == 0 and "continuing after step 4 of 10" in other.stderr, other.stderr

    shutil.rmtree(place / "local")
    new = train(lives, place, "local", "--resume", "--steps", "1", artifact="saves-locally")
    assert new.status == 0, new.stderr
    assert "note: the run continues" not in new.stderr and "continuing" not in new.stderr
    assert steps(own) == []


def test_full_local_disk_stops_only_local_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))
    settings = LocalCheckpoint(str(tmp_path), 2)
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    placed = jax.device_put(jnp.arange(8.0).reshape(4, 2), NamedSharding(mesh, PartitionSpec("fsdp")))
    model.kernel = nnx.LoRAParam(placed)
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.LoRAParam)
    local = LocalCheckpoints(settings, "gs://bucket/run", mesh, "a", begins=True)
    arrays = StepArrays(model, optimizer, lora_only=True)
    local.write(2, arrays, describe({"rows": 2}))
    local.finish()

    def full(folder: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", full)
        for step in (4, 6, 8):
            local.write(step, arrays, describe({"rows": step}))
        local.finish()
    assert capsys.readouterr().err == (
        f"note: {local.directory} cannot be written (No space left on device): this run saves no more "
        "checkpoints locally\n"
    )

    def found(record: str, shared: int) -> ResumePoint:
        again = LocalCheckpoints(settings, "gs://bucket/run", mesh, record, begins=False)
        return again.newer(ResumePoint(shared, {"rows": shared}))

    assert found("another", 1).step == 1, "of a run with another record"
    assert (
        LocalCheckpoints(settings, "gs://bucket/other", mesh, "a", begins=False).newer(ResumePoint()).step
        is None
    )
    local = LocalCheckpoints(settings, "gs://bucket/run", mesh, "a", begins=False)
    arrays = StepArrays(model, optimizer, lora_only=True)
    local.write(2, arrays, describe({"rows": 2}))
    local.finish()
    assert (found("a", 1).step, found("a", 1).data) == (2, {"rows": 2})
    assert found("a", 2).step == 2 and found("a", 2).data == {"rows": 2}
    model.kernel.set_value(placed * 0)
    local = LocalCheckpoints(settings, "gs://bucket/run", mesh, "a", begins=False)
    assert local.newer(ResumePoint()).step == 2 == local.chosen
    local.restore(2, arrays)
    assert np.array_equal(model.kernel.get_value(), placed)
    assert model.kernel.get_value().sharding == placed.sharding
    assert (
        LocalCheckpoints(settings, "gs://bucket/run", mesh, "a", begins=True).newer(ResumePoint()).step
        is None
    )


def test_local_step_that_cannot_be_read_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(folder: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(saving, "examine", denied)
    (tmp_path / "3").mkdir()
    local = object.__new__(saving.LocalCheckpoints)
    local.directory = str(tmp_path)
    assert local._whole(0) == {}
