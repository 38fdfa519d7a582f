"""Tests of runs of several processes of which one dies, differs, is told to stop, or has a full disk."""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.hosts.processes import DUMPED, PATIENT, PEER, Processes, begun, dumped_rows, light, losses, start
from tests.ports import free_port
from tests.runtime.artifacts import SLOW, assert_equal, copy_place, saved, steps, train, write_artifact
from tests.runtime.lives import Lives

pytestmark = pytest.mark.e2e

STEPS = 4
MANY, KILLS = 24, 6
PAIR = {"fsdp": 2, "tp": 1}

AHEAD = """
import os
import time

if os.environ.get("JAX_PROCESS_ID") == "1":
    right = time.time
    time.time = lambda: right() + 3600
"""
"""Code of an artifact in which process 1's clock is an hour ahead."""

FULL = """
LORA = None
"""

PREFERENCES = """
DATA = dataclasses.replace(
    DATA, train=("pairs.jsonl",), eval=(), format="preference", loss_on="completion", max_length=48
)
TRAIN = dataclasses.replace(TRAIN, objective="dpo")
"""

PACED = """
import time

from runtime.training import trainer

quick = trainer.Trainer._step


def paced(self, *arguments):
    time.sleep(0.4)
    return quick(self, *arguments)


trainer.Trainer._step = paced
"""
"""Code of an artifact whose run spends most of its time on steps."""


@pytest.fixture(scope="module")
def shared_slow(shared_place: Path, lives: Lives, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an artifact of two processes with steps of two seconds, and the result of an undisturbed run."""
    place = copy_place(shared_place, tmp_path_factory.mktemp("slow") / "place")
    write_artifact(place / "slow", prelude=light(PAIR, more=SLOW.format(seconds=2)), steps=STEPS, every=1)
    write_artifact(place / "quick", prelude=light(PAIR), steps=STEPS, every=1)
    assert train(lives, place, "undisturbed", artifact="quick").status == 0
    return place


@pytest.fixture
def slow(shared_slow: Path, tmp_path: Path) -> Path:
    """Copy these into a test's own folder."""
    return copy_place(shared_slow, tmp_path / "slow")


def same_end(place: Path, output: str) -> None:
    """Check that a run has the result of the undisturbed run."""
    assert losses(place / output / "checkpoints") == losses(place / "undisturbed" / "checkpoints")
    assert_equal(place, "undisturbed", output, STEPS)


def resumed(lives: Lives, place: Path, output: str, port: int | None = None) -> None:
    """Restart all processes, and check that the run ends like the undisturbed run."""
    again = start(lives, place, output, 2, "--resume", artifact="slow", port=port, peer=PATIENT)
    assert again.wait() == [0, 0], again.said()
    same_end(place, output)


def clean(group: Processes) -> None:
    assert "Traceback" not in group.said() and "Fatal" not in group.said(), group.said()


@pytest.mark.parametrize(
    ("name", "count", "axes", "more"),
    [
        ("full", 2, {"fsdp": 1, "tp": 2}, FULL + AHEAD),
        ("slices", 4, {"dcn": 2, "fsdp": 1, "tp": 2}, ""),
        ("pairs", 2, {"dcn": 2, "fsdp": 2, "tp": 1}, PREFERENCES),
    ],
)
def test_multi_process_run_matches_single_process_run(
    place: Path, lives: Lives, name: str, count: int, axes: Mapping[str, int], more: str
) -> None:
    """Cover weights sharded over processes, slices, preferences, and a clock that is an hour ahead."""
    write_pairs(place / "pairs.jsonl")
    write_artifact(place / name, prelude=light(axes, more=more + DUMPED), steps=2)
    whole = train(lives, place, f"{name}-one", artifact=name)
    assert whole.status == 0, whole.stderr
    group = start(lives, place, f"{name}-all", count, artifact=name, peer=PATIENT)
    assert group.wait() == [0] * count, group.said()
    assert_close(place, f"{name}-one", f"{name}-all", 2)
    assert dumped_rows(place / f"{name}-one", 1) == dumped_rows(place / f"{name}-all", count)


def assert_close(place: Path, one: str, other: str, step: int) -> None:
    """Check that two runs have equal numbers, except for the order of sums."""
    folders = (place / one / "checkpoints", place / other / "checkpoints")
    for expected, found in zip(*map(losses, folders), strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for item in ("model_params", "optimizer_state"):
        arrays, others = (saved(place, output, step, item) for output in (one, other))
        assert arrays.keys() == others.keys()
        for path in arrays:
            np.testing.assert_allclose(others[path], arrays[path], rtol=1e-5, atol=1e-6)


def write_pairs(path: Path) -> None:
    words = ["one", "two", "three", "four", "five"]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{words[n % 5]} {words[n % 3]}"}],
            "chosen": [{"role": "assistant", "content": words[(n + 1) % 5]}],
            "rejected": [{"role": "assistant", "content": words[(n + 2) % 5]}],
        }
        for n in range(19)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_killed_process_is_named_by_the_other_three_and_run_resumes(place: Path, lives: Lives) -> None:
    """Kill one of four processes, and continue from the last saved step."""
    prelude = light({"dcn": 2, "fsdp": 2, "tp": 1})
    write_artifact(place / "four", prelude=prelude + SLOW.format(seconds=2), steps=STEPS, every=1)
    write_artifact(place / "four-quick", prelude=prelude, steps=STEPS, every=1)
    assert train(lives, place, "four-whole", artifact="four-quick").status == 0
    folder = place / "four-out" / "checkpoints"
    group = start(lives, place, "four-out", 4, artifact="four")
    group.until(lambda: steps(folder) == [1])
    group[2].send(signal.SIGKILL)
    moment = time.monotonic()
    assert group.wait() == [75, 75, -9, 75], group.said()
    assert time.monotonic() - moment < 4 * PEER
    gone = rf"process 2 of 4 \(.*, pid {group[2].pid}\) is gone: JAX's service had no heartbeat for {PEER} s$"
    for number in (0, 1, 3):
        (error,) = group.errors()[number]
        assert re.search(gone, error), error
    clean(group)
    state = json.loads((folder / "state.json").read_text())
    assert state["state"] == "failed" and "process 2 of 4" in state["reason"]
    again = start(lives, place, "four-out", 4, "--resume", artifact="four", peer=PATIENT)
    assert again.wait() == [0] * 4, again.said()
    assert_close(place, "four-whole", "four-out", STEPS)


def test_killed_process_0_ends_the_run_with_jaxs_error_and_run_resumes(slow: Path, lives: Lives) -> None:
    """Check that JAX's service ends with process 0, and that its port is free at once."""
    group = start(lives, slow, "headless", 2, artifact="slow")
    group.until(lambda: steps(slow / "headless" / "checkpoints") != [])
    group[0].send(signal.SIGKILL)
    assert group.wait() == [-9, 75], group.said()
    assert "Either the leader task was preempted/died" in group[1].stderr
    assert group.errors()[1] == [
        "error: JAX's service has ended process 1 of 2: see above which process is missing"
    ]
    assert "Traceback" not in group.said(), group.said()
    resumed(lives, slow, "headless", group.port)


def test_randomly_killed_run_ends_like_an_undisturbed_run(place: Path, lives: Lives) -> None:
    """Alternate between one process and two, kill one of them at any moment, and continue from there."""
    seed = random.randrange(10_000)
    choose = random.Random(seed)
    print(f"seed {seed}")
    write_artifact(place / "paced", prelude=light(PAIR, more=PACED), steps=MANY, every=1)
    begun_at = time.monotonic()
    assert train(lives, place, "paced-whole", artifact="paced").status == 0
    whole = time.monotonic() - begun_at
    folder = place / "random" / "checkpoints"
    for number in range(KILLS):
        count = choose.choice((1, 2, 2))
        who, wait = choose.randrange(count), choose.uniform(0.1, 0.3) * whole
        group = start(lives, place, "random", count, *["--resume"] * (number > 0), artifact="paced")
        time.sleep(wait)
        group[who].send(signal.SIGKILL)
        statuses = group.wait()
        print(f"process {who} of {count} killed after {wait:.1f} s: {statuses}, steps {steps(folder)}")
        assert statuses[who] in (-9, 0), group.said()
        assert [status for n, status in enumerate(statuses) if n != who] in ([], [75], [0]), group.said()
        assert "Traceback" not in group.said(), group.said()
    again = start(lives, place, "random", 2, "--resume", artifact="paced")
    assert again.wait() == [0, 0], again.said()
    assert losses(folder) == losses(place / "paced-whole" / "checkpoints")
    assert_equal(place, "paced-whole", "random", MANY)


def test_different_data_or_artifact_between_hosts_is_refused(
    slow: Path, lives: Lives, tmp_path: Path
) -> None:
    """Refuse other data, another artifact and a missing file by name, and write nothing."""
    other = tmp_path / "other"
    shutil.copytree(slow / "model", other / "model")
    shutil.copytree(slow / "quick", other / "artifact")
    for name in ("train.jsonl", "eval.jsonl"):
        shutil.copy(slow / name, other / name)

    def run(output: str, change: Path, text: str | None) -> tuple[str, list[int]]:
        before = change.read_text()
        if text is None:
            change.unlink()
        else:
            change.write_text(text)
        port = free_port()
        one = start(lives, slow, output, 2, artifact="quick", port=port, numbers=[0])
        two = start(lives, other, output, 2, artifact="artifact", port=port, numbers=[1])
        group = Processes([*one.members, *two.members], port)
        statuses = group.wait()
        clean(group)
        change.write_text(before)
        return group.said(), statuses

    lines = (other / "train.jsonl").read_text().splitlines(keepends=True)
    said, statuses = run("other-data", other / "train.jsonl", "".join(lines[1:] + lines[:1]))
    assert statuses == [1, 1] and said.count("reads other data than process 0") == 2, said
    lock = (other / "artifact" / "recipe.lock.json").read_text()
    said, statuses = run("other-lock", other / "artifact" / "recipe.lock.json", lock + " ")
    assert statuses == [1, 1] and said.count("runs another artifact than process 0") == 2, said
    said, statuses = run("no-data", other / "train.jsonl", None)
    assert statuses == [1, 1] and "train.jsonl" in said and "has stopped: " in said, said
    for output in ("other-data", "other-lock", "no-data"):
        assert not (slow / output / "checkpoints").exists()


def test_signals_to_all_or_one_process_stop_all_and_run_resumes(slow: Path, lives: Lives) -> None:
    group = start(lives, slow, "all-told", 2, artifact="slow")
    group.until(lambda: begun(slow, "all-told", 1))
    group.send(signal.SIGINT)
    assert group.wait() == [130, 130], group.said()
    clean(group)
    early = start(lives, slow, "all-told", 2, "--resume", artifact="slow")
    log = slow / "all-told" / "logs" / "process-1.log"
    before = log.read_text().count("process 1 of 2 on ")
    early.until(lambda: log.read_text().count("process 1 of 2 on ") > before)
    early[1].send(signal.SIGTERM)
    assert early.wait() == [143, 143], early.said()
    clean(early)
    resumed(lives, slow, "all-told")


def test_full_disk_on_one_host_stops_all_and_names_that_host(slow: Path, lives: Lives) -> None:
    group = start(lives, slow, "cramped", 2, artifact="slow")
    folder = slow / "cramped" / "checkpoints"
    group.until(lambda: steps(folder) != [])
    resource.prlimit(group[1].pid, resource.RLIMIT_FSIZE, (2048, 2048))
    assert group.wait() == [1, 1], group.said()
    first, second = group.errors()
    assert "a checkpoint could not be written: File too large" in second[0], second
    assert re.search(r"process 1 of 2 \(.*\) has stopped: .*could not be written: File too large", first[0])
    clean(group)
    before = steps(folder)
    assert before[-1] < STEPS
    resumed(lives, slow, "cramped")
