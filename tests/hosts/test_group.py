"""Tests of what a run's processes do with JAX's distributed service."""

from __future__ import annotations

import random
import re
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.hosts import group as module
from recipec.runtime.hosts.group import ProcessGroup, listens_at
from tests.hosts.processes import Processes, place_of
from tests.ports import free_port
from tests.runtime.lives import Lives

MEMBER = Path(__file__).with_name("member.py")


def members(
    lives: Lives, *scripts: str, count: int | None = None, port: int | None = None, **limits: int
) -> Processes:
    """Start a member for each of `scripts`, which runs the steps in its words.

    Args:
        count: the run's processes, if some do not start.
        limits: START, PEER and BARRIER, in seconds.
    """
    port = port or free_port()
    more = {f"RECIPEC_{name}_TIMEOUT": str(value) for name, value in limits.items()}
    started = [
        lives.begin(MEMBER, *script.split(), environment=place_of(n, count or len(scripts), port) | more)
        for n, script in enumerate(scripts)
    ]
    return Processes(started, port)


def errors(group: Processes) -> list[str]:
    """Return each process's error, without host names and process ids."""
    assert "Traceback" not in group.said(), group.said()
    found = ["".join(line.removeprefix("error: ") for line in lines) for lines in group.errors()]
    return [re.sub(r"\([^()]*, pid \d+\)", "(HOST)", text) for text in found]


def test_process_with_other_data_is_named_and_all_processes_end(lives: Lives) -> None:
    group = members(lives, "same", "other")
    assert group.wait() == [1, 1], group.said()
    differs = "process 1 of 2 (HOST) reads other data than process 0"
    stopped = f"process 0 of 2 (HOST): process 1 of 2 (HOST) has stopped: {differs}"
    assert errors(group) == [stopped, f"process 1 of 2 (HOST): {differs}"]


def test_error_of_process_0_is_reported_by_every_process(lives: Lives) -> None:
    group = members(lives, "barrier fail", "barrier wait", "barrier wait")
    assert group.wait() == [1, 1, 1], group.said()
    stopped = "process 0 of 3 (HOST) has stopped: its disk is full"
    assert errors(group)[1:] == [f"process {n} of 3 (HOST): {stopped}" for n in (1, 2)]


@pytest.mark.nightly
def test_process_that_does_not_start_is_named(lives: Lives) -> None:
    group = members(lives, "wait", "wait", count=3, START=3)
    assert group.wait() == [75, 75], group.said()
    for process in group.members:
        assert "# of tasks that reached the barrier: 2/3" in process.stderr
        assert "Some timed out task names:\n2\n" in process.stderr


@pytest.mark.nightly
def test_process_that_does_not_reach_a_barrier_is_named(lives: Lives) -> None:
    group = members(lives, "barrier", "wait", BARRIER=2)
    assert group.wait() == [1, 1], group.said()
    late = "process 1 of 2 (HOST) did not reach `barrier 0` within 2 s"
    assert errors(group)[0] == f"process 0 of 2 (HOST): {late}"


@pytest.mark.e2e
@pytest.mark.parametrize("act", ["kill", "stop"])
@pytest.mark.parametrize("who", [0, 1])
def test_killed_or_hanging_process_ends_the_others_with_an_error(lives: Lives, who: int, act: str) -> None:
    """Let JAX name process 0, whose service ends with it."""
    group = members(lives, *(f"barrier {act if n == who else 'wait'}" for n in range(3)), PEER=6)
    others = [group[n] for n in range(3) if n != who]
    assert [life.wait() for life in others] == [75, 75], group.said()
    group[who].send(signal.SIGKILL)
    if who == 1:
        gone = "process 1 of 3 (HOST) is gone: JAX's service had no heartbeat for 6 s"
        assert errors(group)[::2] == [f"process {n} of 3 (HOST): {gone}" for n in (0, 2)]
    else:
        for life in others:
            assert "JAX's service has ended process" in life.stderr and "CoordinationService/" in life.stderr


def test_process_0_listens_on_loopback_or_on_all_interfaces() -> None:
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    found = {name: listens_at(name) for name in ("localhost", "127.0.0.2", "host-a", "192.0.2.7")}
    assert found == {
        "localhost": "127.0.0.1",
        "127.0.0.2": "127.0.0.2",
        "host-a": everywhere,
        "192.0.2.7": everywhere,
    }


class Client:
    """A fake client of a service in this process.

    Args:
        values: the values that all processes have set.
        everyone: the barrier of all processes.
    """

    def __init__(self, values: dict[str, str], everyone: threading.Barrier) -> None:
        self._values, self._everyone = values, everyone

    def key_value_set(self, key: str, value: str) -> None:
        self._values.setdefault(key, value)

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in list(self._values.items()) if key.startswith(folder)]

    def wait_at_barrier(self, name: str, milliseconds: int) -> None:
        self._everyone.wait(milliseconds / 1000)

    def get_live_nodes(self, numbers: list[int]) -> dict[int, int]:
        return dict.fromkeys(numbers, 1)


def test_all_processes_stop_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop one of four processes, or several at once: no process begins a step after the last one."""
    monkeypatch.setattr(module, "BEAT", 0.002)
    choose = random.Random(5)
    for round_ in range(20):
        values: dict[str, str] = {}
        everyone = threading.Barrier(4)
        told = choose.sample(range(4), choose.choice((1, 1, 2, 4)))
        when = choose.uniform(0, 0.03)
        seeds = [choose.random() for _ in range(4)]
        begun: dict[int, int] = dict.fromkeys(range(4), 0)
        groups: dict[int, ProcessGroup] = {}

        def train(
            number: int, values: Any = values, everyone: Any = everyone, told: Any = told, when: float = when,
            seeds: Any = seeds, begun: Any = begun, groups: Any = groups,
        ) -> None:  # fmt: skip
            group = groups[number] = ProcessGroup(Client(values, everyone), number, 4)
            pace, start = random.Random(seeds[number]), time.monotonic()
            for step in range(1, 10_000):
                time.sleep(pace.uniform(0, 0.004))
                asked = number in told and time.monotonic() - start > when
                if not group.may_begin(step, signal.SIGTERM if asked else None):
                    break
                begun[number] = step
            group._over = True

        threads = [threading.Thread(target=train, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), (round_, told, begun)
        assert len(set(begun.values())) == 1, (round_, told, begun)
        assert [group.stopped_by for group in groups.values()] == [signal.SIGTERM] * 4


@pytest.mark.parametrize(
    ("reason", "seconds", "status"),
    [("No space left on device", module.NEWS, 1), ("UNKNOWN: Gloo AllGather failed: reset", 68.0, 75)],
)
def test_communication_error_waits_longer_for_news_of_lost_processes(
    reason: str, seconds: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wait so that the error names the other process. If no process is gone, the run may be restarted."""
    monkeypatch.setenv("RECIPEC_PEER_TIMEOUT", "66")
    group = ProcessGroup(Client({}, threading.Barrier(1)), 0, 1)
    done: list[float] = []
    monkeypatch.setattr(group, "wait_for_news", done.append)
    monkeypatch.setattr(group, "fail", lambda status, reason: done.append(status))
    group.give_up(UserError(f"a checkpoint could not be written: {reason}"))
    group._over = True
    assert done == [seconds, status]


def test_broken_barrier_is_a_user_error_with_status_75() -> None:
    class Broken(Client):
        def wait_at_barrier(self, name: str, milliseconds: int) -> None:
            if name == "begin":
                raise RuntimeError("UNAVAILABLE: Task 1 heartbeat timeout.\nRPC: Barrier")

    group = ProcessGroup(Broken({}, threading.Barrier(1)), 0, 2)
    with pytest.raises(UserError) as caught:
        group.barrier("begin")
    group._over = True
    assert caught.value.exit_status == 75
    assert caught.value.message == (
        "the processes did not meet at `begin`: UNAVAILABLE: Task 1 heartbeat timeout."
    )
