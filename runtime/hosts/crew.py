"""A process's side: what it knows of the others of its run, and its end when one of them is gone."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import PASSING, UserError, printable, say
from . import service, wire
from .log import ProcessLog
from .wire import BEAT, ENDED, STRANGE, Message, broken, packed, processes, unpacked

if TYPE_CHECKING:
    from .leader import Leader


END = "end"
"""The barrier that all come to when the work is done."""
LAST_WORDS = 15.0
"""Seconds that a process takes at most to say why it ends."""


class Alone:
    """The run of a single process.

    Attributes:
        number, count, first: as of `Crew`.
        stopped_by: the signal that it stops for.
    """

    number, count, first = 0, 1, True

    def __init__(self) -> None:
        self.stopped_by: int | None = None

    def may_begin(self, step: int, requested: int | None) -> bool:
        """As of `Crew`."""
        self.stopped_by = requested
        return requested is None

    def brings(self) -> None:
        """Nothing: nobody waits for it."""

    def agree(self, name: str, value: Callable[[], Any]) -> Any:
        """The value."""
        return value()

    def same(self, name: str, value: Any, what: str, help: str) -> None:
        """Nothing: there is no other."""

    def barrier(self, name: str) -> None:
        """Nothing."""

    def keep_log(self, folder: Path) -> None:
        """Nothing: what a single process does is on its terminal."""

    def log(self, text: str) -> None:
        """Nothing."""


ALONE = Alone()


class Crew:
    """One of several processes of a run. A thread of its own gives signs of life and hears what became of the
    others; when one is gone it ends this process, which may be waiting in a collective for ever.

    Args:
        sock: connected to process 0, which has welcomed this one.
        number, count: of this process, and of all.
        roster: host and pid of each.
        rest: bytes that have been read behind the welcome.
        leader: of process 0.

    Attributes:
        number, count: as above.
        first: whether this is process 0, which writes for all.
        stopped_by: the signal that the run stops for, once that is settled.
        at_loss: called with a sentence before the process ends because another one is gone.
    """

    def __init__(
        self,
        sock: socket.socket,
        number: int,
        count: int,
        roster: list[list[Any]],
        rest: bytes = b"",
        leader: Leader | None = None,
    ) -> None:
        self.number, self.count = number, count
        self.stopped_by: int | None = None
        self.at_loss: list[Callable[[str], None]] = []
        self._sock, self._roster, self._buffer, self._leader = sock, roster, rest, leader
        self._state = threading.Condition()
        self._sending = threading.Lock()
        self._begun, self._brought, self._asked, self._frozen = 0, 0, False, False
        self._stop_after: int | None = None
        self._told: dict[str, Any] = {}
        self._missing: dict[str, list[int]] = {}
        self._closed = False
        self._log = ProcessLog()
        self._thread = threading.Thread(target=self._listen, name="crew", daemon=True)
        self._thread.start()

    @property
    def first(self) -> bool:
        return self.number == 0

    def name(self, number: int) -> str:
        """ "process 1 of 2 (host-b, pid 77)"."""
        host, pid = self._roster[number]
        return f"process {number} of {self.count} ({printable(str(host))}, pid {pid})"

    def keep_log(self, folder: Path) -> None:
        """Writes the process's own file from here on: FOLDER/logs/process-N.log."""
        self._log.open(folder, self.number, self.count)
        if not self.first:
            # What would stand on each host's terminal a second time.
            sys.stderr = sys.stdout = self._log

    def log(self, text: str) -> None:
        """Writes a line to the process's own file."""
        self._log.say(text)

    def may_begin(self, step: int, requested: int | None) -> bool:
        """Whether an optimizer step may begin; False once the run is to stop, at the same step everywhere.

        Args:
            requested: the signal that asked this process to stop, if any did.
        """
        if requested is not None and not self._asked:
            self._asked = True
            self._send({"stop": requested})
        with self._state:
            while self._frozen and self._stop_after is None:
                self._state.wait(BEAT)
            if self._stop_after is not None and step > self._stop_after:
                return False
            self._begun = step
        return True

    def brings(self) -> None:
        """Notes that this process has the next micro-batch ready for its devices."""
        self._brought += 1

    def agree(self, name: str, value: Callable[[], Any]) -> Any:
        """What process 0 finds, a JSON value, for all."""
        if self.first:
            self._send({"tell": [name, value()]})
        self._wait(name, lambda: name in self._told, lambda: [0])
        return self._told[name]

    def same(self, name: str, value: Any, what: str, help: str) -> None:
        """Checks that a JSON value is what process 0 has.

        Args:
            what: the sentence that follows the process's name where it is not.

        Raises:
            UserError: where it differs.
        """
        if self.agree(name, lambda: value) != value:
            raise UserError(f"{self.name(self.number)} {what}", help)
        self.barrier(f"same {name}")

    def barrier(self, name: str) -> None:
        """Waits until every process has come here.

        Raises:
            UserError: naming who has not, after wire.barrier_timeout() seconds.
        """
        self._send({"reached": name})
        everyone = list(range(self.count))
        missing = lambda: self._missing.get(name, everyone)  # noqa: E731
        self._wait(name, lambda: not missing(), missing)

    def fail(self, status: int, reason: str) -> NoReturn:
        """Ends this process, whatever its threads do, and tells the others why.

        JAX would wait at its exit for those who go on.
        """
        self._closed = True
        _end_at_last(status)
        self.log(f"ends with status {status}: {reason}")
        if self._leader is None:
            self._send({"leave": [status, reason]})
        else:
            self._leader.leave(status, reason)
        _flush()
        os._exit(status)

    def give_up(self, error: UserError) -> NoReturn:
        """Says what went wrong on this process, and ends it."""
        out = sys.__stderr__
        say(f"error: {self.name(self.number)}: {printable(error.message)}", out)
        if error.help:
            say(f"  = help: {printable(error.help)}", out)
        self.fail(error.exit_status, error.message)

    def end(self) -> None:
        """Leaves a run that all processes are done with."""
        self.barrier(END)
        self._closed = True
        service.disconnect()
        self.log("ends")
        if self._leader is not None:
            self._leader.close()
        self._sock.close()

    def wait_for_news(self, seconds: float) -> None:
        """Waits whether another process is gone, which would explain a failure here: then this one ends."""
        time.sleep(seconds)

    def _wait(self, name: str, done: Callable[[], bool], missing: Callable[[], list[int]]) -> None:
        """Raises UserError after the time that processes wait for each other."""
        limit, begun = wire.barrier_timeout(), time.monotonic()
        with self._state:
            while not done():
                if time.monotonic() - begun > limit:
                    late = processes(missing(), self.count)
                    hosts = ", ".join(str(self._roster[number][0]) for number in missing())
                    raise UserError(
                        f"{late} ({hosts}) did not come to `{name}` within {limit:.0f} s",
                        "see its log; RECIPEC_BARRIER_TIMEOUT gives more seconds",
                    )
                self._state.wait(BEAT)

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                self._sock.sendall(packed(message))
        except OSError:
            return  # the thread that listens finds the same, and says whose end it is

    def _listen(self) -> None:
        self._sock.settimeout(BEAT)
        heard = beaten = time.monotonic()
        while not self._closed:
            now = time.monotonic()
            if now - beaten >= BEAT:
                beaten = now
                self._send({"beat": [self._begun, self._brought]})
            try:
                data = self._sock.recv(1 << 16)
            except TimeoutError:
                if time.monotonic() - heard > wire.peer_timeout():
                    self._lost(0, None, f"nothing was heard of it for {time.monotonic() - heard:.0f} s")
                continue
            except OSError as error:
                self._lost(0, None, broken(error))
                return
            if not data:
                self._lost(0, None, ENDED)
                return
            heard = time.monotonic()
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            try:
                for line in lines:
                    self._take(unpacked(line))
            except wire.SENSELESS:
                self._lost(0, None, STRANGE)

    def _take(self, message: Message) -> None:
        with self._state:
            if "freeze" in message:
                self._frozen = True
                self._send({"at": self._begun})
            elif "stop_after" in message:
                self._stop_after, self.stopped_by, number = message["stop_after"]
                why = "" if number == self.number else f", as {self.name(number)} was told to"
                self.log(f"stops after step {self._stop_after}{why}")
            elif "told" in message:
                name, value = message["told"]
                self._told[name] = value
            elif "barrier" in message:
                self._missing[message["barrier"]] = message["missing"]
                if message["barrier"] == END and not message["missing"]:
                    self._closed = True  # from here on the others may go
            elif "gone" in message and message["gone"][0] != self.number:
                self._lost(*message["gone"])
            self._state.notify_all()

    def _lost(self, number: int, status: int | None, reason: str) -> None:
        """Ends this process, for the run cannot go on without the other one."""
        if self._closed:
            return
        self._closed = True
        ends = 1 if status in (1, 2) else PASSING if status is None or status < 128 else status
        _end_at_last(ends)
        what = "is gone" if status is None else "has stopped"
        line = f"{self.name(number)} {what}: {printable(reason)}"
        try:
            self.log(f"{line}; ends with status {ends}")
            out = sys.__stderr__
            say(f"error: {self.name(self.number)}: {line}", out)
            for tell in self.at_loss:
                tell(line)
            if ends == PASSING:
                say("  = help: start all processes again with --resume", out)
        finally:
            _flush()
            if self._leader is not None:
                self._leader.see_off()
            os._exit(ends)


def _end_at_last(status: int) -> None:
    """Ends this process some seconds from now, if it has not by itself: a terminal or a bucket may not take
    what is still to be said."""
    at_last = threading.Timer(LAST_WORDS, os._exit, (status,))
    at_last.daemon = True
    at_last.start()


def _flush() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
