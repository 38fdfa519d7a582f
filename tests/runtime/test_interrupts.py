"""Tests of Ctrl-C with other threads: it may interrupt any of Python's locks and queues without a deadlock.

Python checks for signals at a function's start and after each call, in its own library too, and raises the
handler's exception there. The tests send the signal at each of these points within threading, queue and
concurrent.futures, one after the other.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from recipec.runtime import interrupts
from recipec.runtime.interrupts import Interrupted, Interrupts, held
from recipec.runtime.merging import writer
from recipec.runtime.merging.writer import Behind
from recipec.runtime.thread_pool import in_order
from recipec.runtime.untrusted import limit
from tests.conftest import ROOT
from tests.waiting import until

SECONDS = 30.0
"""The time after which a wait counts as endless."""
CAUGHT_UP = 0.005
"""Seconds after which a thread that got an item waits for the next one."""
SHARED = (threading.__file__, queue.__file__, os.path.dirname(concurrent.futures.__file__))


@contextmanager
def ctrl_c_at(number: int) -> Iterator[list[str]]:
    """Send SIGINT to this thread at one point in SHARED, and yield the list of all points so far."""
    points: list[str] = []

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event in ("call", "c_return") and code.co_filename.startswith(SHARED):
            points.append(f"{event} {os.path.basename(code.co_filename)}:{frame.f_lineno}")
            if len(points) == number + 1:
                signal.raise_signal(signal.SIGINT)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        yield points
    finally:
        sys.setprofile(before)


def write_file(folder: Path) -> None:
    with (folder / "file").open("wb") as file, writer.Sink(file) as sink:
        for _ in range(3):
            sink.write(b"abc")
            time.sleep(CAUGHT_UP)


def work_in_order(folder: Path) -> None:
    jobs: list[tuple[int, Callable[[], None]]] = [(number, partial(time.sleep, 0.002)) for number in range(4)]
    with ThreadPoolExecutor(2) as pool:
        for expected, (number, _) in enumerate(in_order(pool, jobs, 3)):
            assert number == expected


@pytest.mark.parametrize("work", [write_file, work_in_order])
def test_ctrl_c_at_any_point_of_a_lock_or_queue_ends_the_work(
    work: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = Behind.close

    def close_later(behind: Any) -> None:
        time.sleep(CAUGHT_UP)
        close(behind)

    monkeypatch.setattr(Behind, "close", close_later)
    ended = 0
    for number in itertools.count():
        with limit(SECONDS), Interrupts():
            try:
                with ctrl_c_at(number) as points:
                    work(tmp_path)
            except Interrupted as interrupted:
                assert interrupted.signum == signal.SIGINT
                ended += 1
        if len(points) <= number:
            break
    assert ended >= number - 2, "a signal as good as at the end may end nothing"
    assert number > 50


def test_signal_in_held_block_takes_effect_once_at_block_end() -> None:
    done = []
    with Interrupts() as handling:
        with pytest.raises(Interrupted):
            try:
                with held():
                    signal.raise_signal(signal.SIGTERM)
                    with held():
                        done.append("within")
                    done.append("after")
                done.append("too late")
            finally:
                with held():
                    done.append("put away")
                done.append("whole")
        assert handling.requested == signal.SIGTERM
    assert done == ["within", "after", "put away", "whole"]


class Freed:
    pass


def test_signal_with_discarded_exception_takes_effect_at_next_held_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    freed = Freed()
    reference = weakref.ref(freed, lambda _: signal.raise_signal(signal.SIGINT))
    with Interrupts(), pytest.raises(Interrupted):
        del freed
        assert reference() is None
        with held():
            pass
    assert capsys.readouterr().err == ""


def test_error_in_held_block_is_raised_instead_of_signal() -> None:
    with Interrupts(), pytest.raises(OSError, match="disk"), held():
        signal.raise_signal(signal.SIGINT)
        raise OSError("disk")


def test_held_block_in_deferred_work_only_records_signal() -> None:
    with Interrupts() as handling:
        handling.deferred = True
        with held():
            signal.raise_signal(signal.SIGTERM)
        assert handling.requested == signal.SIGTERM


def test_held_block_does_not_delay_signal_without_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)
        time.sleep(SECONDS)
    with Interrupts():
        assert interrupts._active is not None
        with Interrupts() as inner:
            assert interrupts._active is inner
    assert interrupts._active is None


SCRIPT = """
import signal, time
from runtime.interrupts import Interrupts, held

with Interrupts(lambda signum: f"left at {signum}", (signal.SIGINT,)) as interrupts:
    WORK
"""
HELD = """with held():
        print("works", flush=True)
        time.sleep(600)"""
DEFERRED = """interrupts.deferred = True
    print("works", flush=True)
    time.sleep(600)"""


@pytest.mark.parametrize(
    ("work", "first"),
    [(HELD, ""), (DEFERRED, "\nstopping after this step; interrupt again to stop at once\n")],
    ids=["held", "deferred"],
)
def test_second_ctrl_c_ends_held_or_deferred_work_immediately(work: str, first: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.replace("WORK", work)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "works\n"

        def again() -> bool:
            process.send_signal(signal.SIGINT)  # of two simultaneous signals, the process sees one
            time.sleep(0.1)
            return process.poll() is not None

        until(again)
        assert process.returncode == 130
        assert process.stderr.read() == f"{first}\nleft at 2\n"
