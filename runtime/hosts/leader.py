"""Process 0's side: knows every process of the run, and tells each of them what became of the others."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from runtime.hosts import wire
from runtime.hosts.wire import BEAT, Message, packed, processes, unpacked

NOTE_AFTER = 30.0
"""Seconds after which it is said for whom the others wait."""


@dataclass
class Member:
    """A process that has come.

    Attributes:
        step: the last step that it has begun.
        heard: time.monotonic() of its last sign of life.
        here: whether it is still a part of the run.
    """

    writer: asyncio.StreamWriter
    host: str
    pid: int
    step: int
    heard: float
    here: bool = True


class Leader:
    """Serves the processes of a run from a thread of its own.

    Args:
        listening: where they come.
        count: how many there are.
        jax_port: where JAX's own service is, which they are told.
    """

    def __init__(self, listening: socket.socket, count: int, jax_port: int) -> None:
        self._listening, self._count, self._jax_port = listening, count, jax_port
        self._members: dict[int, Member] = {}
        self._reached: dict[str, set[int]] = {}
        self._stopping: tuple[int, int] | None = None
        self._at: dict[int, int] = {}
        self._behind: tuple[int, int, float] = (-1, -1, 0.0)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once all that was said is delivered."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(2 * BEAT)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._attend, sock=self._listening, limit=wire.LONGEST)
        clock = asyncio.ensure_future(self._clock())
        await self._end.wait()
        clock.cancel()
        server.close()
        for member in self._members.values():
            with suppress(OSError):
                await asyncio.wait_for(member.writer.drain(), BEAT / 2)
            member.writer.close()
        await asyncio.sleep(0)

    async def _clock(self) -> None:
        """Signs of life, and who gives none."""
        begun, noted = time.monotonic(), time.monotonic()
        while len(self._members) < self._count:
            await asyncio.sleep(BEAT / 4)
            now = time.monotonic()
            if now - begun > wire.start_timeout():
                self._tell_all({"absent": self._absent()})
                return
            if now - noted > NOTE_AFTER:
                noted = now
                _say(f"waiting for {processes(self._absent(), self._count)}")
        while True:
            await asyncio.sleep(BEAT)
            now = time.monotonic()
            for number, member in self._members.items():
                silent = now - member.heard
                if member.here and silent > wire.peer_timeout():
                    self._gone(number, None, f"nothing was heard of it for {silent:.0f} s")
            self._tell_all({"alive": [self._members[n].step for n in range(self._count)]})
            self._note_the_slowest(now)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process, from its coming to its end."""
        number = await self._welcome(reader, writer)
        if number is None:
            writer.close()
            return
        member = self._members[number]
        try:
            while line := await reader.readline():
                member.heard = time.monotonic()
                self._take(number, unpacked(line))
        except (OSError, ValueError):
            pass  # its connection broke, or it sends more than any message has
        if not self._end.is_set():
            self._gone(number, None, "it ended without a word")

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        try:
            hello = unpacked(await asyncio.wait_for(reader.readline(), wire.peer_timeout()))
        except (OSError, ValueError):
            return None
        number, of = hello.get("hello"), hello.get("of")
        if not isinstance(number, int) or not isinstance(of, int):
            return None
        refused = ""
        if of != self._count:
            refused = f"it counts {of} processes, and process 0 counts {self._count}"
        elif number in self._members:
            there = self._members[number]
            refused = f"process {number} is there already: {there.host}, pid {there.pid}"
        if refused:
            writer.write(packed({"refused": refused}))
            return None
        host, pid = str(hello.get("host", "?")), int(hello.get("pid", 0))
        self._members[number] = Member(writer, host, pid, 0, time.monotonic())
        if len(self._members) == self._count:
            roster = [[self._members[n].host, self._members[n].pid] for n in range(self._count)]
            self._tell_all({"roster": roster, "port": self._jax_port})
        return number

    def _take(self, number: int, message: Message) -> None:
        """What a process says."""
        member = self._members[number]
        if "beat" in message:
            member.step = int(message["beat"])
        elif "stop" in message and self._stopping is None:
            self._stopping = (int(message["stop"]), number)
            self._tell_all({"freeze": True})
        elif "at" in message:
            self._at[number] = int(message["at"])
            if self._stopping is not None and len(self._at) == self._count:
                # The last step that any has begun: it needs all the others.
                self._tell_all({"stop_after": [max(self._at.values()), *self._stopping]})
        elif "reached" in message:
            self._barrier(str(message["reached"]), number)
        elif "tell" in message:
            self._tell_all({"told": message["tell"]})
        elif "leave" in message:
            status, reason = message["leave"]
            if status == 0:
                member.here = False
            else:
                self._gone(number, status, str(reason))

    def _barrier(self, name: str, number: int) -> None:
        there = self._reached.setdefault(name, set())
        there.add(number)
        missing = sorted(set(range(self._count)) - there)
        self._tell_all({"barrier": name, "missing": missing})

    def _gone(self, number: int, status: int | None, reason: str) -> None:
        member = self._members[number]
        if member.here:
            member.here = False
            self._tell_all({"gone": [number, status, reason]})

    def _note_the_slowest(self, now: float) -> None:
        """Says who keeps the others waiting: it has not begun a step for long that others are beyond."""
        steps = {n: m.step for n, m in self._members.items() if m.here}
        if not steps or min(steps.values()) == max(steps.values()):
            self._behind = (-1, -1, now)
            return
        last = min(steps, key=lambda n: (steps[n], n))
        if self._behind[:2] != (last, steps[last]):
            self._behind = (last, steps[last], now)
        elif now - self._behind[2] > NOTE_AFTER:
            self._behind = (last, steps[last], now + 1e9)  # once for a step
            host = self._members[last].host
            _say(
                f"process {last} of {self._count} ({host}) keeps the others waiting: it is in step "
                f"{steps[last]}, they are in step {max(steps.values())}"
            )

    def _absent(self) -> list[int]:
        return sorted(set(range(self._count)) - self._members.keys())

    def _tell_all(self, message: Message) -> None:
        data = packed(message)
        for member in self._members.values():
            if not member.writer.is_closing():
                member.writer.write(data)


def _say(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


def listen(port: int) -> socket.socket:
    """A socket that takes connections on every address of this machine.

    Raises:
        OSError: when the port is taken.
    """
    made: Any = None
    if socket.has_dualstack_ipv6():
        try:
            made = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if error.errno not in (97, 99):  # no IPv6 here after all
                raise
    return made or socket.create_server(("", port), backlog=1024)
