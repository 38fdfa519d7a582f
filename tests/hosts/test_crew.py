"""What the processes of a run tell each other: over real sockets, without JAX."""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.hosts import joining, leader, service, wire
from recipec.runtime.hosts.crew import Crew
from recipec.runtime.hosts.discovery import Place
from recipec.runtime.hosts.wire import unpacked
from tests.ports import free_port
from tests.waiting import until

MEMBER = Path(__file__).with_name("member.py")
ROOT = Path(__file__).resolve().parents[2]


class Members:
    """Processes of a run that only come, wait and go.

    Args:
        start, peer, barrier: the limits of time, in seconds.
    """

    def __init__(self, start: float = 20, peer: float = 20, barrier: float = 20) -> None:
        self.port = free_port()
        names = ("RECIPEC_START_TIMEOUT", "RECIPEC_PEER_TIMEOUT", "RECIPEC_BARRIER_TIMEOUT")
        limits = dict(zip(names, map(str, (start, peer, barrier)), strict=True))
        self._environment = os.environ | limits
        self._all: list[subprocess.Popen[str]] = []

    def start(
        self, number: int, count: int, *what: str, port: int | None = None, secret: str = ""
    ) -> subprocess.Popen[str]:
        member = subprocess.Popen(
            [sys.executable, MEMBER, str(number), str(count), str(port or self.port), *what],
            env=self._environment | {wire.SECRET: secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(member)
        return member

    def run(self, *scripts: str) -> list[subprocess.Popen[str]]:
        """Starts a member for each, which does what its words say."""
        return [self.start(n, len(scripts), *what.split()) for n, what in enumerate(scripts)]

    def until_connected(self, count: int) -> None:
        """Waits until as many processes as `count` are connected with process 0, itself among them."""
        until(lambda: sum(_established(self.port)) == count)
        time.sleep(0.5)  # for process 0 to take note

    def end(self) -> None:
        for member in self._all:
            if member.poll() is None:
                member.kill()
            member.communicate()


def _established(port: int) -> Iterator[bool]:
    """For each connection of this machine, whether it is one to a port of its loopback."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, _, remote, state = line.split()[:4]
        yield remote == f"0100007F:{port:04X}" and state == "01"


@pytest.fixture
def members() -> Iterator[Callable[..., Members]]:
    made: list[Members] = []

    def make(**limits: float) -> Members:
        made.append(Members(**limits))
        return made[-1]

    yield make
    for one in made:
        one.end()


def ends(member: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status, and the error without names of hosts and numbers of processes."""
    _, err = member.communicate(timeout=60)
    assert "Traceback" not in err, err
    errors = [line.removeprefix("error: ") for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) < 2, err
    text = "".join(errors).replace(socket.gethostname(), "HOST")
    return member.returncode, re.sub(r"pid \d+", "pid N", text)


def told(number: int, count: int, text: str) -> str:
    """What a process says that ends for another one."""
    return f"process {number} of {count} (HOST, pid N): {text}"


def test_all_come_and_all_go(members: Any) -> None:
    crew = members().run("barrier same=a", "barrier same=a", "barrier same=a")
    assert [ends(member) for member in crew] == [(0, "")] * 3


@pytest.mark.parametrize("who", [0, 1])
def test_who_is_killed_is_named(members: Any, who: int) -> None:
    """By each of the others, though process 0, which tells them, is one of those that end."""
    crew = members(peer=60).run(*("barrier kill" if n == who else "barrier wait" for n in range(3)))
    begun = time.monotonic()
    found = [ends(member) for member in crew]
    gone = f"process {who} of 3 (HOST, pid N) is gone: it ended without a word"
    assert found == [(-9, "") if n == who else (75, told(n, 3, gone)) for n in range(3)]
    assert time.monotonic() - begun < 45, "it is seen at once, not missed after a while"


@pytest.mark.parametrize("who", [0, 1])
def test_who_hangs_is_named(members: Any, who: int) -> None:
    crew = members(peer=2).run(*("barrier hang" if n == who else "barrier wait" for n in range(2)))
    status, text = ends(crew[1 - who])
    gone = rf"process {who} of 2 \(HOST, pid N\) is gone: nothing was heard of it for \d+ s"
    assert status == 75 and re.fullmatch(rf"process {1 - who} of 2 \(HOST, pid N\): {gone}", text), text


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(
    ("act", "status", "reason"),
    [("fail", 1, "its disk is full"), ("stopped", 143, "it was stopped by SIGTERM")],
)
def test_who_stops_says_why(members: Any, who: int, act: str, status: int, reason: str) -> None:
    """An error that a person has to mend ends the others as it ends the one that has it; so does a signal."""
    crew = members().run(*(f"barrier {act}" if n == who else "barrier wait" for n in range(3)))
    stopped = f"process {who} of 3 (HOST, pid N) has stopped: {reason}"
    expected = [(status, "") if n == who else (status, told(n, 3, stopped)) for n in range(3)]
    assert [ends(member) for member in crew] == expected


def test_other_data_is_refused(members: Any) -> None:
    crew = members().run("same=a", "same=b")
    (status, _), (other, text) = [ends(member) for member in crew]
    assert (other, text) == (1, "process 1 of 2 (HOST, pid N) reads other data than process 0")
    assert status == 75, "the script that has no session tells nobody why it ends"


def test_who_does_not_come_to_a_barrier_is_named(members: Any) -> None:
    crew = members(barrier=2).run("barrier", "barrier", "wait")
    for member in crew[:2]:
        status, text = ends(member)
        assert status in (1, 75)
        if status == 1:
            assert text == "process 2 of 3 (HOST) did not come to `barrier 1` within 2 s"
    assert 1 in [member.returncode for member in crew]


@pytest.mark.parametrize("noise", ["garbage", "nonsense", "endless", "flood"])
def test_lines_that_are_no_messages_are_passed_over_and_senseless_messages_end_the_run(
    members: Any, noise: str
) -> None:
    """Lines that are no messages are passed over; a message that makes no sense ends the run by name."""
    crew = members().run("barrier wait" if noise != "garbage" else "barrier", f"barrier {noise} barrier"[:-8])
    found = [ends(member) for member in crew]
    if noise == "garbage":
        assert found == [(0, "")] * 2
    else:
        gone = "process 1 of 2 (HOST, pid N) is gone: what it says cannot be understood"
        assert found[0] == (75, told(0, 2, gone))


def test_a_process_that_finds_nobody_at_process_0_says_so_and_may_be_restarted(members: Any) -> None:
    run = members(start=2)
    status, text = ends(run.start(1, 2))
    assert (status, text) == (
        75,
        f"process 1 of 2 cannot reach process 0 at 127.0.0.1:{run.port}: Connection refused, for 2 s",
    )


def test_a_process_that_never_comes_is_named(members: Any) -> None:
    run = members(start=5)
    found = [ends(member) for member in (run.start(0, 4), run.start(2, 4))]
    assert found == [(75, "processes 1 and 3 of 4 did not come within 5 s")] * 2


def test_lines_of_several_threads_are_whole() -> None:
    """Process 0's threads share its terminal; a torn line would hide an error from what looks for it."""
    script = (
        "import sys, threading; sys.setswitchinterval(1e-6); from runtime.errors import say\n"
        "def lines(): [say(f'note: {n} waits') for n in range(3000)]\n"
        "threads = [threading.Thread(target=lines) for _ in range(4)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    said = [f"note: {n} waits" for n in range(3000)] * 4
    assert sorted(run.stderr.splitlines()) == sorted(said)


def test_who_goes_while_it_waits_may_come_again(members: Any) -> None:
    run = members()
    first, early = run.start(0, 3, "barrier"), run.start(1, 3)
    run.until_connected(2)
    early.kill()
    run.until_connected(1)
    crew = [first, run.start(1, 3, "barrier"), run.start(2, 3, "barrier")]
    assert [member.wait(30) for member in crew] == [0, 0, 0]
    gone = f"process 1 of 3 ({socket.gethostname()}, pid {early.pid}) came, and is gone"
    assert first.communicate()[1] == f"note: {gone}\n"


@pytest.mark.e2e
def test_who_waits_for_long_is_alive(members: Any) -> None:
    """No sign of life is due before all have come."""
    run = members(peer=2)
    first, second = run.start(0, 3, "barrier"), run.start(1, 3, "barrier")
    run.until_connected(2)
    time.sleep(4)
    assert [ends(member) for member in (first, second, run.start(2, 3, "barrier"))] == [(0, "")] * 3


@pytest.mark.e2e
def test_the_same_number_twice_and_other_counts_are_refused(members: Any) -> None:
    run = members(start=6)
    first, second = run.start(0, 3), run.start(1, 3)
    run.until_connected(2)
    refused = f"process 0 at 127.0.0.1:{run.port} refuses process"
    status, text = ends(run.start(1, 3))
    assert status == 1
    assert text == f"{refused} 1 of 3: process 1 is there already: HOST, pid N"
    status, text = ends(run.start(1, 2))
    assert (status, text) == (1, f"{refused} 1 of 2: it counts 2 processes, and process 0 counts 3")
    late = [(75, "process 2 of 3 did not come within 6 s")] * 2
    assert [ends(first), ends(second)] == late


def test_a_port_that_is_taken_is_said_to_be(members: Any) -> None:
    run = members()
    with socket.create_server(("", run.port)):
        status, text = ends(run.start(0, 2))
    assert (status, text) == (1, f"process 0 cannot listen on port {run.port}: Address already in use")


class Refuses(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_another_server_at_process_0s_address_is_not_taken_for_it(members: Any) -> None:
    run = members(peer=2, start=10)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuses) as server, \
            socket.create_server(("127.0.0.1", 0)) as silent:  # fmt: skip
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for port in (server.server_address[1], silent.getsockname()[1]):
            member = run.start(1, 2, port=int(port))
            assert ends(member) == (
                1,
                f"what listens at 127.0.0.1:{port} is no process 0 of a training run",
            )
        server.shutdown()


def _comes(port: int) -> socket.socket:
    """A connection to process 0, which may not listen yet."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.05)


def test_strangers_do_not_disturb_and_are_one_line(members: Any) -> None:
    """Whatever they send: no traceback, no line for each of them, no seat without the run's secret."""
    run = members()
    first = run.start(0, 2, "barrier", secret="ours")
    seat = '{"hello": 1, "of": 2, "pid": 1, "host": "stranger", "proof": "%s"}\n'
    for data in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 9000 + b"\n",
        b"[" * 100_000 + b"\n",
        b"x" * (3 << 20),
        b'{"hello": 1e999, "of": 2, "pid": 1, "proof": ""}\n',
        b'{"hello": 1, "of": 2, "pid": 1}\n',
        (seat % wire.proof("", 1)).encode(),
        (seat % "\u00e9").encode(),
    ):
        with _comes(run.port) as sock, suppress(ConnectionError):
            assert unpacked(sock.recv(1 << 16))["challenge"]
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1 << 16):
                continue
    status, text = ends(run.start(1, 2, "barrier", secret="theirs"))
    refused = f"process 0 at 127.0.0.1:{run.port} refuses process 1 of 2: its RECIPEC_RUN_SECRET"
    assert (status, text) == (1, f"{refused} is not that of process 0")
    assert ends(run.start(1, 2, "barrier", secret="ours")) == (0, "")
    _, said = first.communicate(timeout=60)
    assert (first.returncode, said) == (
        0,
        "note: 127.0.0.1 came to process 0, and is no process of this run\n",
    )


def test_process_0_listens_where_the_others_look_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        "here": ["127.0.0.1"],  # as machines have it that know their own name by the loopback alone
        "both": ["127.0.0.1", "::1"],
        "two": ["127.0.0.2", "127.0.0.3"],
        "elsewhere": ["192.0.2.7"],
        "127.0.0.2": ["127.0.0.2"],
    }
    known["localhost"] = known["both"]

    def resolve(name: str, *_: Any, **__: Any) -> list[Any]:
        if name not in known:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, 0)) for address in known[name]]

    leader.own_address.cache_clear()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    found = {name: leader.own_address(name) for name in [*known, "unknown"]}
    leader.own_address.cache_clear()
    monkeypatch.undo()
    assert {name: address for name, address in found.items() if address} == {
        "127.0.0.2": "127.0.0.2",
        "localhost": "127.0.0.1",
    }
    with leader.listen("127.0.0.2", port := free_port()):
        socket.create_connection(("127.0.0.2", port), timeout=5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.3", port), timeout=5)


@pytest.mark.parametrize(
    ("host", "secret"), [("nobody.invalid", ""), ("nobody.invalid", "x"), ("127.0.0.1", "")]
)
def test_an_open_port_without_a_secret_is_said(
    host: str, secret: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(wire.SECRET, secret)
    monkeypatch.setattr(service, "start", lambda count, address: 1)
    joining._lead(Place(host, port := free_port(), 2, 0)).close()
    said = f"note: RECIPEC_RUN_SECRET is not set: whoever reaches port {port} of this machine can take "
    assert capsys.readouterr().err.startswith(said) == (host != "127.0.0.1" and not secret)


def in_one_process(count: int, monkeypatch: pytest.MonkeyPatch) -> list[Crew]:
    """The members of a run as threads of this process."""
    monkeypatch.setattr(service, "start", lambda count, address: 1)
    monkeypatch.setattr(service, "connect", lambda *arguments: None)
    monkeypatch.setattr(service, "disconnect", lambda: None)
    monkeypatch.setattr(joining, "discover", None)
    port = free_port()
    crews: dict[int, Crew] = {}

    def come(number: int) -> None:
        place = Place("127.0.0.1", port, count, number)
        head = joining._lead(place) if number == 0 else None
        sock = joining._reach(place, time.monotonic() + 20, 20)
        welcome, rest = joining._welcome(place, sock, 20)
        crews[number] = Crew(sock, number, count, welcome["roster"], rest, head)

    threads = [threading.Thread(target=come, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [crews[number] for number in range(count)]


def test_all_stop_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever one of four is told to stop, or two at once, none has begun a step beyond the last."""
    choose = random.Random(5)
    for round_ in range(20):
        crews = in_one_process(4, monkeypatch)
        told = choose.sample(range(4), choose.choice((1, 1, 2, 4)))
        when = choose.uniform(0, 0.03)
        begun: dict[int, int] = dict.fromkeys(range(4), 0)
        seeds = [choose.random() for _ in range(4)]
        start = time.monotonic()

        def train(crew: Crew, told=told, when=when, begun=begun, seeds=seeds, start=start) -> None:
            pace = random.Random(seeds[crew.number])
            for step in range(1, 10_000):
                time.sleep(pace.uniform(0, 0.004))
                asked = crew.number in told and time.monotonic() - start > when
                if not crew.may_begin(step, signal.SIGTERM if asked else None):
                    break
                begun[crew.number] = step
            crew.end()

        threads = [threading.Thread(target=train, args=(crew,)) for crew in crews]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), (round_, told, begun)
        assert len(set(begun.values())) == 1, (round_, told, begun)
        assert [crew.stopped_by for crew in crews] == [signal.SIGTERM] * 4


def test_what_process_0_finds_is_what_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    crews = in_one_process(3, monkeypatch)
    found: dict[int, Any] = {}
    value = {"step": 4, "damaged": [[6, "its folder is empty"]], "data": {"x" * 1000: "y" * 100_000}}
    json.dumps(value)

    def ask(crew: Crew) -> None:
        def look() -> Any:
            assert crew.first
            time.sleep(0.2)
            return value

        found[crew.number] = crew.agree("found", look)
        crew.end()

    threads = [threading.Thread(target=ask, args=(crew,)) for crew in crews]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(range(3), value)
