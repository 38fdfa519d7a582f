"""Runs of several processes, and what befalls one: it dies, hangs, is slow, told to stop, or cut off."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.crew_preludes import AHEAD, FULL, PACED, PREFERENCES, WAITS, WITHIN
from tests.hosts import conftest as shared
from tests.hosts.crews import (
    DUMPED,
    PATIENT,
    PEER,
    CrewOfLives,
    begun,
    dumped_rows,
    kill_all,
    light,
    losses,
    start,
)
from tests.ports import free_port
from tests.runtime.artifacts import assert_equal, saved, steps, train, write_artifact
from tests.runtime.lives import Lives
from tests.runtime.surviving import SLOW
from tests.waiting import gone

pytestmark = pytest.mark.e2e
place, lives = shared.place, shared.lives

STEPS = 4
MANY, KILLS = 24, 6
PAIR = {"fsdp": 2, "tp": 1}


@pytest.fixture(scope="module")
def slow(place: Path, lives: Lives) -> Path:
    """An artifact of two processes whose steps take two seconds, and what it comes to undisturbed."""
    write_artifact(place / "slow", prelude=light(PAIR, more=SLOW.format(seconds=2)), steps=STEPS, every=1)
    write_artifact(place / "quick", prelude=light(PAIR), steps=STEPS, every=1)
    assert train(lives, place, "undisturbed", artifact="quick").status == 0
    return place


def same_end(place: Path, output: str) -> None:
    """Checks that a run came to what the undisturbed one came to."""
    assert losses(place / output / "checkpoints") == losses(place / "undisturbed" / "checkpoints")
    assert_equal(place, "undisturbed", output, STEPS)


def resumed(lives: Lives, place: Path, output: str, port: int | None = None) -> None:
    """Starts all again; the run comes to its end as if nothing had been."""
    again = start(lives, place, output, 2, "--resume", artifact="slow", port=port, peer=PATIENT)
    assert again.wait() == [0, 0], again.said()
    same_end(place, output)


def clean(crew: CrewOfLives) -> None:
    assert "Traceback" not in crew.said() and "Fatal" not in crew.said(), crew.said()


def services(pid: int) -> list[int]:
    """JAX's services that a process has started."""
    found = subprocess.run(["pgrep", "-f", "hosts/service.py"], capture_output=True, text=True, check=False)
    return [int(one) for one in found.stdout.split() if f"PPid:\t{pid}\n" in _status(int(one))]


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("name", "count", "axes", "more"),
    [
        ("full", 2, {"fsdp": 1, "tp": 2}, FULL + AHEAD),
        ("slices", 4, {"dcn": 2, "fsdp": 1, "tp": 2}, ""),
        ("pairs", 2, {"dcn": 2, "fsdp": 2, "tp": 1}, PREFERENCES),
    ],
)
def test_several_processes_compute_the_numbers_of_one(
    place: Path,
    lives: Lives,
    name: str,
    count: int,
    axes: Mapping[str, int],
    more: str,
) -> None:
    """Weights cut over processes; slices; preferences; a clock that is an hour ahead."""
    write_pairs(place / "pairs.jsonl")
    write_artifact(place / name, prelude=light(axes, more=more + DUMPED), steps=2)
    whole = train(lives, place, f"{name}-one", artifact=name)
    assert whole.status == 0, whole.stderr
    crew = start(lives, place, f"{name}-all", count, artifact=name, peer=PATIENT)
    assert crew.wait() == [0] * count, crew.said()
    one, all_ = (losses(place / f"{name}-{which}" / "checkpoints") for which in ("one", "all"))
    assert len(one) == len(all_)
    for expected, found in zip(one, all_, strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
    for item in ("model_params", "optimizer_state"):
        arrays, others = (saved(place, f"{name}-{which}", 2, item) for which in ("one", "all"))
        assert arrays.keys() == others.keys()
        for path in arrays:
            np.testing.assert_allclose(others[path], arrays[path], rtol=1e-5, atol=1e-6)
    assert dumped_rows(place / f"{name}-one", 1) == dumped_rows(place / f"{name}-all", count)


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


def test_a_run_whose_process_0_is_killed_ends_and_goes_on(slow: Path, lives: Lives) -> None:
    """The other one names it. JAX's service goes after it, and the port is free at once."""
    crew = start(lives, slow, "headless", 2, artifact="slow")
    crew.until(lambda: steps(slow / "headless" / "checkpoints") != [])
    (service,) = services(crew[0].pid)
    crew[0].send(signal.SIGKILL)
    assert crew.wait() == [-9, 75], crew.said()
    (error,) = crew.errors()[1]
    assert re.search(rf"process 0 of 2 \(.*, pid {crew[0].pid}\) is gone: it ended without a word$", error)
    clean(crew)
    resumed(lives, slow, "headless", crew.port)
    assert gone(service), "JAX's service stays behind"


def test_a_run_whose_process_0_goes_with_its_service_ends_and_goes_on(slow: Path, lives: Lives) -> None:
    """As where a machine or a container ends: JAX's service is no longer there to outlive it."""
    crew = start(lives, slow, "beheaded", 2, artifact="slow")
    crew.until(lambda: steps(slow / "beheaded" / "checkpoints") != [])
    (service,) = services(crew[0].pid)
    for pid in (service, crew[0].pid):
        os.kill(pid, signal.SIGKILL)
    assert crew.wait() == [-9, 75], crew.said()
    (error,) = crew.errors()[1]
    assert re.search(rf"process 0 of 2 \(.*, pid {crew[0].pid}\) is gone: it ended without a word$", error)
    clean(crew)
    resumed(lives, slow, "beheaded", crew.port)


def test_a_run_killed_at_random_moments_ends_as_one_that_was_not(place: Path, lives: Lives) -> None:
    """Now one process, now two; one of them is killed wherever it may be, and others go on from there."""
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
        crew = start(lives, place, "random", count, *["--resume"] * (number > 0), artifact="paced")
        time.sleep(wait)
        crew[who].send(signal.SIGKILL)
        statuses = crew.wait()
        print(f"process {who} of {count} killed after {wait:.1f} s: {statuses}, steps {steps(folder)}")
        assert statuses[who] in (-9, 0), crew.said()
        assert [status for n, status in enumerate(statuses) if n != who] in ([], [75], [0]), crew.said()
        clean(crew)
    again = start(lives, place, "random", 2, "--resume", artifact="paced")
    assert again.wait() == [0, 0], again.said()
    assert losses(folder) == losses(place / "paced-whole" / "checkpoints")
    assert_equal(place, "paced-whole", "random", MANY)


@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_hangs_is_named_by_the_others(slow: Path, lives: Lives, who: int) -> None:
    crew = start(lives, slow, f"hangs-{who}", 2, artifact="slow")
    try:
        crew.until(lambda: begun(slow, f"hangs-{who}", 1, who))
        crew[who].send(signal.SIGSTOP)
        stopped = time.monotonic()
        other = crew[1 - who]
        assert other.wait() == 75, crew.said()
        assert PEER - 2 < time.monotonic() - stopped < PEER + 20
        (error,) = crew.errors()[1 - who]
        assert re.search(rf"process {who} of 2 \(.*\) is gone: nothing was heard of it for \d+ s$", error)
        crew[who].send(signal.SIGCONT)
        assert crew[who].wait() == 75, "it finds itself alone"
        clean(crew)
    finally:
        kill_all(crew)


def test_a_process_that_is_slow_is_waited_for(slow: Path, lives: Lives) -> None:
    """Slower than a silent process may be: it lives, and is waited for, and named."""
    write_artifact(slow / "waits", prelude=light(PAIR, more=WAITS), steps=STEPS, every=1)
    crew = start(lives, slow, "waits-out", 2, artifact="waits")
    assert crew.wait() == [0, 0], crew.said()
    assert re.search(
        rf"note: process 1 of 2 \(.*, pid {crew[1].pid}\) keeps the others waiting, for \d s now: its part "
        "of a micro-batch of step 3 is not ready",
        crew[0].stderr,
    ), crew.said()
    same_end(slow, "waits-out")


def test_what_differs_between_hosts_is_refused(slow: Path, lives: Lives, tmp_path: Path) -> None:
    """Other data, another artifact, a file that is not there: by name, and nothing is written."""
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
        crew = CrewOfLives([*one.members, *two.members], port)
        statuses = crew.wait()
        clean(crew)
        change.write_text(before)
        return crew.said(), statuses

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


def test_a_signal_to_all_saves_and_one_while_loading_stops_them(slow: Path, lives: Lives) -> None:
    crew = start(lives, slow, "all-told", 2, artifact="slow")
    crew.until(lambda: begun(slow, "all-told", 1))
    crew.send(signal.SIGINT)
    assert crew.wait() == [130, 130], crew.said()
    clean(crew)
    early = start(lives, slow, "all-told", 2, "--resume", artifact="slow")
    log = slow / "all-told" / "logs" / "process-1.log"
    before = log.read_text().count("process 1 of 2 on ")
    early.until(lambda: log.read_text().count("process 1 of 2 on ") > before)
    early[1].send(signal.SIGTERM)
    assert early.wait() == [143, 143], early.said()
    clean(early)
    resumed(lives, slow, "all-told")


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces, joined by a cable: 10.77.0.1 and 10.77.0.2."""
    names = f"ra{os.getpid()}", f"rb{os.getpid()}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    assert os.geteuid() == 0, "network namespaces need root: run this test as root"
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", names[1], "netns", names[1])
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def test_a_run_over_a_network_ends_by_name_where_the_cable_is_cut(
    slow: Path, lives: Lives, machines: tuple[str, str]
) -> None:
    """A run between two machines is as any; where the cable is cut, each names the other one and ends."""
    for name, seconds in (("wired", 0), ("cut", 2)):
        more = WITHIN + (SLOW.format(seconds=seconds) if seconds else "")
        write_artifact(slow / name, prelude=light(PAIR, more=more), steps=STEPS, every=1)
    own = {
        n: {
            "NAMESPACE": name,
            "OWN_ADDRESS": f"10.77.0.{n + 1}",
            "JAX_COORDINATOR_ADDRESS": "10.77.0.1:8476",
        }
        for n, name in enumerate(machines)
    }
    crew = start(lives, slow, "wired-out", 2, artifact="wired", own=own)
    assert crew.wait() == [0, 0], crew.said()
    same_end(slow, "wired-out")
    crew = start(lives, slow, "cut-out", 2, artifact="cut", own=own)
    crew.until(lambda: begun(slow, "cut-out", 1))
    subprocess.run(["ip", "-n", machines[1], "link", "set", machines[1], "down"], check=True)
    cut = time.monotonic()
    assert crew.wait() == [75, 75], crew.said()
    assert time.monotonic() - cut < PEER + 20
    for number, errors in enumerate(crew.errors()):
        (error,) = errors
        assert f"process {1 - number} of 2" in error and " is gone: " in error
    clean(crew)


def test_a_full_disk_of_one_host_ends_all_with_its_name(slow: Path, lives: Lives) -> None:
    crew = start(lives, slow, "cramped", 2, artifact="slow")
    folder = slow / "cramped" / "checkpoints"
    crew.until(lambda: steps(folder) != [])
    resource.prlimit(crew[1].pid, resource.RLIMIT_FSIZE, (4096, 4096))
    assert crew.wait() == [1, 1], crew.said()
    first, second = crew.errors()
    assert "a checkpoint could not be written: File too large" in second[0], second
    assert re.search(r"process 1 of 2 \(.*\) has stopped: .*could not be written: File too large", first[0])
    clean(crew)
    before = steps(folder)
    assert before[-1] < STEPS
    resumed(lives, slow, "cramped")
