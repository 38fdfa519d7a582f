"""Process 0's side: knows every process of the run, and tells each of them what became of the others."""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..errors import printable, say
from . import wire
from .wire import BEAT, ENDED, SECRET, SENSELESS, STRANGE, Message, broken, packed, processes, unpacked

NOTE_AFTER = 30.0
"""Seconds after which it is said for whom the others wait."""
FAREWELL = 3.0
"""Seconds that process 0 waits at most for the others to hear why it ends."""
UNKNOWN = 64
"""Connections beyond those of the run that may wait to say who they are."""


@dataclass
class Member:
    """A process that has come.

    Attributes:
        step: the last step that it has begun.
        brought: micro-batches that it has brought to its devices.
        heard: time.monotonic() of its last sign of life.
        here: whether it is still a part of the run.
    """

    writer: asyncio.StreamWriter
    host: str
    pid: int
    heard: float
    step: int = 0
    brought: int = 0
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
        self._connected: set[int] = set()
        self._unknown, self._strangers = 0, set[str]()
        self._roster_told = self._given_up = False
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(lambda _, context: _say(f"process 0: {context['message']}"))
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread once all that was said is delivered."""
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(2 * BEAT)

    def leave(self, status: int, reason: str) -> None:
        """Tells the others that process 0 ends, and why; returns when they have, or after some seconds."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._gone, 0, status, reason)
        self.see_off()

    def see_off(self) -> None:
        """Waits until the others have heard what they were told, which makes them end, but not for long."""
        until = time.monotonic() + FAREWELL
        while self._connected - {0} and time.monotonic() < until:
            time.sleep(BEAT / 50)
        self.close()

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
                self._given_up = True
                self._tell_all({"absent": self._absent()})
                return
            self._tell_all({"waiting": self._absent()})
            if now - noted > NOTE_AFTER:
                noted = now
                _say(f"waiting for {processes(self._absent(), self._count)}")
        while True:
            before = time.monotonic()
            await asyncio.sleep(BEAT)
            now = time.monotonic()
            if now - before > 2 * BEAT:
                # This process stood still, and what the others have said meanwhile is not read yet.
                for member in self._members.values():
                    member.heard += now - before
            for number, member in self._members.items():
                silent = now - member.heard
                if member.here and silent > wire.peer_timeout():
                    self._gone(number, None, f"nothing was heard of it for {silent:.0f} s")
            self._tell_all({"alive": [self._members[n].step for n in range(self._count)]})
            self._note_the_slowest(now)

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One process, from its coming to its end."""
        self._unknown += 1
        number = None
        if self._unknown <= self._count + UNKNOWN:
            number = await self._welcome(reader, writer)
        self._unknown -= 1
        if number is None:
            writer.close()
            return
        member = self._members[number]
        reason = ENDED
        try:
            while line := await reader.readline():
                member.heard = time.monotonic()
                self._take(number, unpacked(line))
        except OSError as error:
            reason = broken(error)
        except SENSELESS:
            reason = STRANGE
        self._connected.discard(number)
        if not self._roster_told:
            del self._members[number]  # it may come again
            if not self._given_up:
                _say(f"process {number} of {self._count} ({member.host}, pid {member.pid}) came, and is gone")
        elif not self._end.is_set():
            self._gone(number, None, reason)

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        challenge, line = secrets.token_hex(16), b""
        try:
            writer.write(packed({"challenge": challenge}))
            line = await asyncio.wait_for(reader.readline(), wire.peer_timeout())
            hello = unpacked(line)
            number, of, pid = (int(hello[key]) for key in ("hello", "of", "pid"))
            proof = str(hello["proof"]).encode()
        except OSError:
            return None  # something that looks for open ports
        except SENSELESS as error:
            if line or isinstance(error, ValueError):  # too long a line
                self._note_a_stranger(writer)
            return None
        refused = ""
        if not hmac.compare_digest(proof, wire.proof(challenge, number).encode()):
            self._note_a_stranger(writer)
            refused = f"its {SECRET} is not that of process 0"
        elif of != self._count:
            refused = f"it counts {of} processes, and process 0 counts {self._count}"
        elif not 0 <= number < of:
            refused = f"{number} is no number of {of} processes"
        elif number in self._members:
            there = self._members[number]
            refused = f"process {number} is there already: {there.host}, pid {there.pid}"
        if refused:
            writer.write(packed({"refused": refused}))
            return None
        host = printable(str(hello.get("host", "?")))[:255]
        self._members[number] = Member(writer, host, pid, time.monotonic())
        self._connected.add(number)
        if len(self._members) == self._count:
            self._roster_told = True
            for member in self._members.values():
                member.heard = time.monotonic()  # from here on it gives signs of life
            roster = [[self._members[n].host, self._members[n].pid] for n in range(self._count)]
            self._tell_all({"roster": roster, "port": self._jax_port})
        return number

    def _take(self, number: int, message: Message) -> None:
        """What a process says."""
        member = self._members[number]
        if "beat" in message:
            member.step, member.brought = (int(count) for count in message["beat"])
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
            self._connected.discard(number)
            self._tell_all({"gone": [number, status, reason]})

    def _note_the_slowest(self, now: float) -> None:
        """Says who keeps the others waiting: for long it has not brought a micro-batch that others have."""
        counts = {n: m.brought for n, m in self._members.items() if m.here}
        if not counts or min(counts.values()) == max(counts.values()):
            self._behind = (-1, -1, now)
            return
        last = min(counts, key=lambda n: (counts[n], n))
        if self._behind[:2] != (last, counts[last]):
            self._behind = (last, counts[last], now)
        elif now - self._behind[2] > NOTE_AFTER:
            waited = now - self._behind[2]
            self._behind = (last, counts[last], now + 1e9)  # once for a micro-batch
            slow = self._members[last]
            _say(
                f"process {last} of {self._count} ({slow.host}, pid {slow.pid}) keeps the others waiting, "
                f"for {waited:.0f} s now: its part of a micro-batch of step {slow.step} is not ready"
            )

    def _note_a_stranger(self, writer: asyncio.StreamWriter) -> None:
        """Says once for each address that somebody came who is none of the run."""
        host = str((writer.get_extra_info("peername") or ["?"])[0])
        if host not in self._strangers and len(self._strangers) < UNKNOWN:
            self._strangers.add(host)
            _say(f"{host} came to process 0, and is no process of this run")

    def _absent(self) -> list[int]:
        return sorted(set(range(self._count)) - self._members.keys())

    def _tell_all(self, message: Message) -> None:
        data = packed(message)
        # Process 0 last: it may end by what it hears, and this thread with it.
        for _, member in sorted(self._members.items(), reverse=True):
            if not member.writer.is_closing():
                member.writer.write(data)


def _say(text: str) -> None:
    say(f"note: {text}")


@cache
def own_address(name: str) -> str:
    """The address of this machine that others know by a name or address; "" where that cannot be told.

    It cannot where the name is one of several addresses, of another machine that passes connections on, or
    of the loopback, which it may be on its own machine alone.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        address = min(found)
        alone = name == "localhost" or (len(found) == 1 and (name == address or not on_loopback(address)))
        with socket.create_server((address, 0), family=_family(address)):
            return address if alone else ""
    except (OSError, UnicodeError):
        return ""


def on_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections on an address of this machine, or on every one where it is "".

    Raises:
        OSError: when the port is taken.
    """
    made: Any = None
    if not address and socket.has_dualstack_ipv6():
        try:
            made = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
        except OSError as error:
            if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):  # no IPv6 here after all
                raise
    return made or socket.create_server((address, port), family=_family(address), backlog=1024)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
