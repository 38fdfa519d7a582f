"""Tests of two processes that save checkpoints into a bucket, as several hosts do."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.checkpoints.saved_steps import saved_steps, unfinished
from recipec.runtime.checkpoints.trained_weights import restore_tree
from tests.hosts.processes import Processes, light, place_of
from tests.ports import free_port
from tests.remote.conftest import gcs
from tests.remote.gcs import Gcs
from tests.runtime import artifacts
from tests.runtime.lives import Lives

__all__ = ["gcs"]
pytestmark = pytest.mark.e2e

RUN = "gs://bucket/run"
STEPS = 8
STUCK = 600.0
CHECKPOINT = f'CHECKPOINT = CheckpointSettings(directory="{RUN}", every_steps=2, keep=2)\n'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, gcs: Gcs) -> Path:
    """Make a folder with two artifacts: one saves into the bucket, and one saves to disk."""
    place = tmp_path_factory.mktemp("hosts-bucket")
    artifacts.write_place(place)
    gcs.buckets["bucket"] = {}
    prelude = light({"fsdp": 2, "tp": 1})
    artifacts.write_artifact(place / "remote", prelude=prelude + CHECKPOINT, steps=STEPS)
    artifacts.write_artifact(place / "here", prelude=prelude, steps=STEPS)
    return place


@pytest.fixture(scope="module")
def lives(place: Path, gcs: Gcs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    own = gcs.environment | {"XDG_CACHE_HOME": str(place / "cache")}
    lives = Lives(dict(artifacts.environment(place)) | own, tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


def start(lives: Lives, place: Path, *options: str) -> Processes:
    port = free_port()
    argv = artifacts.script(place, "remote-out", *options, artifact="remote")
    return Processes([lives.begin(*argv, environment=place_of(n, 2, port)) for n in range(2)], port)


def killed_at(gcs: Gcs, group: Processes, who: int, request: str) -> None:
    """Kill a process during a request of the run. The other process must end and say why."""
    fault = gcs.fail(request, STUCK)
    group.until(lambda: fault.times == 0)
    group[who].send(signal.SIGKILL)
    statuses = group.wait()
    gcs.faults.remove(fault)
    assert statuses == [-9 if n == who else 75 for n in range(2)], group.said()
    (error,) = group.errors()[1 - who]
    assert ("process 1 of 2" in error and "is gone" in error) if who else "JAX's service has ended" in error
    assert "Traceback" not in group.said(), group.said()


def test_run_killed_during_bucket_saves_resumes_from_a_complete_step(
    place: Path, gcs: Gcs, lives: Lives
) -> None:
    """Lose a shard of one process, and then the marker of the whole step. Neither step counts as saved."""
    killed_at(gcs, start(lives, place), 1, r"POST .*run/4/model_params/ocdbt\.process_1/")
    assert saved_steps(RUN) == [2] and unfinished(RUN) == [4]
    killed_at(gcs, start(lives, place, "--resume"), 0, r"POST .*name=run/6/commit_success\.txt")
    assert saved_steps(RUN) == [2, 4] and unfinished(RUN) == [6]

    for request, fault in (("/o[?]", 503), ("upload_id", 429), ("POST", "reset")):
        gcs.fail(f"{request}.*", fault, after=5)
    group = start(lives, place, "--resume")
    assert group.wait() == [0, 0], group.said()
    assert "continuing after step 4 of 8" in group[0].stderr
    assert group.said().count("the save of step 6 did not finish: it is removed") == 1
    assert saved_steps(RUN) == [6, 8] and unfinished(RUN) == []

    whole = artifacts.train(lives, place, "whole", artifact="here")
    assert whole.status == 0, whole.stderr
    for item in ("model_params", "optimizer_state"):
        expected, found = artifacts.saved(place, "whole", STEPS, item), restore_tree(f"{RUN}/{STEPS}/{item}")
        assert expected.keys() == found.keys()
        for path in expected:
            np.testing.assert_array_equal(found[path], expected[path])
    assert logged(gcs) == [
        (entry["step"], entry["loss"])
        for entry in artifacts.entries(place / "whole" / "checkpoints")
        if "loss" in entry
    ]


def logged(gcs: Gcs) -> list[tuple[int, float]]:
    lines = gcs.buckets["bucket"]["run/metrics.jsonl"].data.splitlines()
    return [(entry["step"], entry["loss"]) for entry in map(json.loads, lines) if "loss" in entry]
