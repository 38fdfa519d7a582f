"""Tests of a run whose model, data and checkpoints are in a bucket: killed, continued, watched and merged."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from recipec.compiler.cli.main import app
from recipec.runtime.checkpoints.adapter_reader import restore_tree, saved_steps, unfinished
from tests.remote.gcs import Gcs
from tests.runtime import artifacts
from tests.runtime.lives import Life, Lives

pytestmark = pytest.mark.nightly

MODEL = 'ModelSettings(id="gs://bucket/model", family="gemma4", dtype="float32", remat="none")'
SOURCES = 'train=("gs://bucket/data/train.jsonl",), eval=("gs://bucket/data/eval.jsonl",)'
DATA = f"DataSettings({SOURCES}, max_length=48, packing=False)"
STUCK = 600.0


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, gcs: Gcs) -> Path:
    """Make a folder with artifacts that train from a bucket into it, and fill the bucket."""
    place = tmp_path_factory.mktemp("bucket")
    artifacts.write_place(place)
    gcs.buckets["bucket"] = {}
    for path in (place / "model").iterdir():
        gcs.put("bucket", f"model/{path.name}", path.read_bytes())
    for name in ("train.jsonl", "eval.jsonl"):
        gcs.put("bucket", f"data/{name}", (place / name).read_bytes())
    for name in ("run", "refused"):
        checkpoint = f'CheckpointSettings(directory="gs://bucket/{name}", every_steps=2, keep=2)'
        prelude = f"MODEL = {MODEL}\nDATA = {DATA}\nCHECKPOINT = {checkpoint}\n"
        artifacts.write_artifact(place / name, prelude=prelude)
    return place


@pytest.fixture(scope="module")
def lives(place: Path, gcs: Gcs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    environment = (
        dict(artifacts.environment(place)) | gcs.environment | {"XDG_CACHE_HOME": str(place / "cache")}
    )
    lives = Lives(environment, tmp_path_factory.mktemp("lives"))
    yield lives
    lives.close()


def begin(lives: Lives, place: Path, artifact: str, *options: str) -> Life:
    return lives.begin(place / artifact / "train.py", "--output", place / "here" / artifact, *options)


def kill_at(gcs: Gcs, life: Life, request: str) -> None:
    """Kill a process during a request, before its answer."""
    fault = gcs.fail(request, STUCK)
    assert life.until(lambda: fault.times == 0)
    life.send(signal.SIGKILL)
    assert life.wait() == -signal.SIGKILL
    gcs.faults.remove(fault)


def test_a_run_in_a_bucket_survives_kills_and_a_busy_store(place: Path, gcs: Gcs, lives: Lives) -> None:
    run = "gs://bucket/run"
    kill_at(gcs, begin(lives, place, "run"), r"POST .*name=run/4/commit_success\.txt")
    assert saved_steps(run) == [2] and unfinished(run) == [4]
    seen = CliRunner().invoke(app, ["watch", run, "--once"])
    assert seen.exit_code == 0, seen.output

    kill_at(gcs, begin(lives, place, "run", "--resume"), r"POST .*name=run/8/optimizer_state/ocdbt")
    assert saved_steps(run) == [4, 6] and unfinished(run) == [8]

    for request, fault in (("alt=media", "cut"), ("/o[?]", 503), ("upload_id", 429), ("POST", "reset")):
        gcs.fail(f"{request}.*", fault, after=5)
    life = begin(lives, place, "run", "--resume")
    assert life.wait() == 0, life.stderr
    assert "the save of step 8 did not finish: it is removed" in life.stderr
    assert "continuing after step 6 of 10" in life.stderr and "Traceback" not in life.stderr
    assert saved_steps(run) == [8, 10] and unfinished(run) == []
    assert all(fault.times == 0 for fault in gcs.faults)

    whole = artifacts.train(lives, place, "whole")
    assert whole.status == 0, whole.stderr
    for item in ("model_params", "optimizer_state"):
        expected, found = artifacts.saved(place, "whole", 10, item), restore_tree(f"{run}/10/{item}")
        assert expected.keys() == found.keys()
        for path in expected:
            np.testing.assert_array_equal(found[path], expected[path])
    logged = [json.loads(line) for line in gcs.buckets["bucket"]["run/metrics.jsonl"].data.splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in logged if "loss" in entry}
    assert losses == {
        entry["step"]: entry["loss"]
        for entry in artifacts.entries(place / "whole" / "checkpoints")
        if "loss" in entry
    }
    starts = json.loads(gcs.buckets["bucket"]["run/run.json"].data)["starts"]
    assert [start["after"] for start in starts] == [0, 2, 6]
    assert json.loads(gcs.buckets["bucket"]["run/state.json"].data)["state"] == "done"


def test_a_run_in_a_bucket_is_watched_and_reported(place: Path, gcs: Gcs) -> None:
    gcs.faults.clear()
    run = "gs://bucket/run"
    seen = CliRunner().invoke(app, ["watch", run, "--once"])
    assert seen.exit_code == 0 and "10" in seen.output
    written = CliRunner().invoke(app, ["report", run, "-o", str(place / "report.html")])
    assert written.exit_code == 0, written.output
    assert "19.55" in (place / "report.html").read_text()


def test_unwritable_bucket_ends_run_with_one_sentence_error(place: Path, gcs: Gcs, lives: Lives) -> None:
    gcs.fail("POST .*refused/", 403, times=10_000)
    life = begin(lives, place, "refused")
    assert life.wait() == 1
    assert re.search(r"^error: gs://bucket/refused.*Forbidden", life.stderr, re.MULTILINE), life.stderr
    assert "GOOGLE_APPLICATION_CREDENTIALS" in life.stderr and "Traceback" not in life.stderr
    assert gcs.names("bucket", "refused/") == []
