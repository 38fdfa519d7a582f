"""How a process becomes one of a run's: it goes to process 0, and waits there until all have come."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress
from typing import Any

from ..errors import PASSING, UserError, say
from . import service, wire
from .crew import ALONE, Alone, Crew
from .discovery import ADDRESS, Place, discover
from .leader import Leader, listen, on_loopback, own_address
from .wire import SECRET, Message, packed, processes, unpacked

RETRY = 0.25
"""Seconds between two tries to reach process 0."""


def join(hosts: int) -> Alone | Crew:
    """Finds the other processes of a run and connects JAX with theirs; a single process is there at once.

    Args:
        hosts: machines that the recipe's mesh spans.

    Raises:
        UserError: naming who is missing, or what is in the way.
    """
    place = discover(hosts)
    if place is None:
        return ALONE
    limit = wire.start_timeout()
    deadline = time.monotonic() + limit
    leader = _lead(place) if place.number == 0 else None
    sock = _reach(place, deadline, limit)
    welcome, rest = _welcome(place, sock, limit)
    crew = Crew(sock, place.number, place.count, welcome["roster"], rest, leader)
    service.connect(_host(place), int(welcome["port"]), place.count, place.number, limit)
    return crew


def _lead(place: Place) -> Leader:
    address = own_address(place.coordinator)
    if not os.environ.get(SECRET) and not (address and on_loopback(address)):
        who = f"whoever reaches port {place.port} of this machine can take the place of a process of this run"
        say(f"note: {SECRET} is not set: {who}")
    try:
        listening = listen(address, place.port)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {place.port}: {os.strerror(error.errno or 0)}",
            f"end what listens there, or take another port in {ADDRESS}",
        ) from None
    try:
        port = service.start(place.count, address)
    except OSError as error:
        raise UserError(str(error), "see what it printed above") from None
    leader = Leader(listening, place.count, port)
    leader.start()
    return leader


def _host(place: Place) -> str:
    """Where process 0 is; its own machine need not know the name that the others use."""
    return place.coordinator if place.number else own_address(place.coordinator) or "127.0.0.1"


def _reach(place: Place, deadline: float, limit: float) -> socket.socket:
    while True:
        try:
            sock = socket.create_connection((_host(place), place.port), timeout=min(10.0, limit / 4))
            if sock.getsockname() == sock.getpeername():  # nobody listens, and loopback has met itself
                sock.close()
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        except OSError as error:
            if time.monotonic() < deadline:
                time.sleep(RETRY)
                continue
            raise UserError(
                f"process {place.number} of {place.count} cannot reach process 0 at {place.coordinator}:"
                f"{place.port}: {error.strerror or error}, for {limit:.0f} s",
                f"start process 0; check {ADDRESS}, and that nothing between the hosts blocks the port",
                PASSING,
            ) from None


def _welcome(place: Place, sock: socket.socket, limit: float) -> tuple[Message, bytes]:
    """The list of all processes, and what has been read behind it."""
    here, there = f"process {place.number} of {place.count}", f"{place.coordinator}:{place.port}"
    stranger = UserError(f"what listens at {there} is no process 0 of a training run", f"check {ADDRESS}")
    hello = {"hello": place.number, "of": place.count, "host": socket.gethostname(), "pid": os.getpid()}
    buffer, heard = b"", False
    sock.settimeout(wire.peer_timeout())
    while True:
        while b"\n" not in buffer:
            why = wire.ENDED
            try:
                data: Any = sock.recv(1 << 16)
            except TimeoutError:
                data, why = b"", f"nothing was heard of it for {wire.peer_timeout():.0f} s"
            except OSError as error:
                data, why = b"", wire.broken(error)
            if not data and heard:
                raise UserError(
                    f"{here} lost process 0 at {there} while it waited for the others: {why}",
                    "see the log of process 0",
                    PASSING,
                )
            if not data:
                raise stranger
            buffer += data
        line, _, buffer = buffer.partition(b"\n")
        message = unpacked(line)
        if "challenge" in message:
            proof = wire.proof(str(message["challenge"]), place.number)
            with suppress(OSError):  # the next read finds the same, and says so
                sock.sendall(packed(hello | {"proof": proof}))
            continue
        if "roster" in message:
            return message, buffer
        if "absent" in message:
            raise UserError(
                f"{processes(message['absent'], place.count)} did not come within {limit:.0f} s",
                "start the script on every host; RECIPEC_START_TIMEOUT gives more seconds",
                PASSING,
            )
        if "refused" in message:
            raise UserError(
                f"process 0 at {there} refuses {here}: {message['refused']}",
                f"give each process of the run a number of its own, the same count and the same {SECRET}",
            )
        if "waiting" not in message:
            raise stranger
        heard = True
