"""The processes of a run: how they join, what they agree on through JAX's service, and how they end."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import ipaddress
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ..errors import PASSING, UserError, printable, say
from ..interrupts import Interrupted, Interrupts, name_of
from .discovery import Place, discover
from .log import ProcessLog
from .single import ADDRESS, SINGLE, SingleProcess

BEAT = 0.5
"""Seconds between two checks of the other processes."""
NEWS = 2.0
"""Seconds that a process waits before it reports a failure: another process's failure may be the cause."""
LAST_WORDS = 15.0
"""The most seconds that a process takes to say why it ends, and that process 0 waits for the others' end."""


def _seconds(name: str, default: float) -> int:
    """Read a duration from the environment, in whole seconds, as JAX's service takes them."""
    try:
        return min(max(2, int(float(os.environ.get(name, default)))), 1_000_000)
    except (ValueError, OverflowError):
        return int(default)


def start_timeout() -> int:
    """Return the seconds that the processes of a run have to find each other."""
    return _seconds("RECIPEC_START_TIMEOUT", 600)


def peer_timeout() -> int:
    """Return the seconds without a heartbeat after which a process counts as gone."""
    return _seconds("RECIPEC_PEER_TIMEOUT", 60)


def barrier_timeout() -> int:
    """Return the seconds that the processes of a run wait for each other, for instance for slow data."""
    return _seconds("RECIPEC_BARRIER_TIMEOUT", 3600)


class ProcessGroup:
    """One of several processes of a run, connected by JAX's distributed service.

    Its own threads check whether another process has no heartbeat, has failed, or was told to stop. They end
    this process if another one is gone: the main thread may be waiting in a collective forever.

    Args:
        client: of JAX's service.
        number, count: the number of this process, and the number of all processes.

    Attributes:
        number, count: as above.
        first: whether this is process 0, which writes for all.
        stopped_by: the signal that the run stops for, once the processes agree on the step.
        at_loss: called with a sentence before this process ends because another one is gone.
    """

    def __init__(self, client: Any, number: int, count: int) -> None:
        self.number, self.count, self.first = number, count, number == 0
        self.stopped_by: int | None = None
        self.at_loss: list[Callable[[str], None]] = []
        self._client = client
        self._state = threading.Condition()
        self._begun, self._asked, self._frozen = 0, False, False
        self._closed = self._over = False
        self._stop_after: int | None = None
        self._log = ProcessLog()
        self._set(f"process/{number}", [socket.gethostname(), os.getpid()])
        self._where: dict[str, list[Any]] = {}
        self.barrier("processes")
        self._where = self._all("process")
        watches = (self._watch_heartbeats, self._watch_news)
        self._watches = [threading.Thread(target=watch, daemon=True) for watch in watches]
        for thread in self._watches:
            thread.start()

    def name(self, *numbers: int) -> str:
        """Name processes: "process 1 of 2 (host-b, pid 77)"."""
        words = []
        for number in numbers:
            host, pid = self._where.get(str(number), ["?", "?"])
            words.append(f"process {number} of {self.count} ({printable(str(host))}, pid {pid})")
        return " and ".join(words)

    def keep_log(self, folder: Path) -> None:
        """Start writing this process's own file: FOLDER/logs/process-N.log."""
        self._log.open(folder, self.number, self.count)
        if not self.first:
            # Lines that would otherwise appear on every host's terminal.
            sys.stderr = sys.stdout = self._log

    def log(self, text: str) -> None:
        """Write a line to this process's own file."""
        self._log.say(text)

    def may_begin(self, step: int, requested: int | None) -> bool:
        """Return whether an optimizer step may begin; False once the run stops, at the same step everywhere.

        Args:
            requested: the signal that asked this process to stop, if any did.
        """
        if requested is not None and not self._asked:
            self._asked = True
            self._set("news/stop", [requested, self.number])
        with self._state:
            while self._frozen and self._stop_after is None:
                self._state.wait(1.0)
            if self._stop_after is not None and step > self._stop_after:
                return False
            self._begun = step
        return True

    def agree(self, name: str, value: Callable[[], Any]) -> Any:
        """Return for all processes the JSON value that process 0 finds."""
        if self.first:
            self._set(f"agreed/{name}", value())
        limit = barrier_timeout()
        try:
            return json.loads(self._client.blocking_key_value_get(f"agreed/{name}", limit * 1000))
        except RuntimeError as error:
            raise self._late([0], name, limit, error) from None

    def same(self, name: str, value: Any, what: str, help: str) -> None:
        """Check that a JSON value equals process 0's.

        Args:
            what: the rest of the sentence that begins with the process's name, if the values differ.

        Raises:
            UserError: when the values differ.
        """
        if self.agree(name, lambda: value) != value:
            raise UserError(f"{self.name(self.number)} {what}", help)
        self.barrier(f"same {name}")

    def same_inputs(self, lock: Path, data: str, steps: int | None) -> None:
        """Check that this process has the artifact, the data and the arguments of process 0.

        Args:
            lock: the artifact's recipe.lock.json, which may be missing.
            data: a digest of what was read.
            steps: --steps.

        Raises:
            UserError: when they differ.
        """
        artifact = hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None
        self.same(
            "artifact",
            artifact,
            "runs another artifact than process 0",
            "put the same artifact on every host",
        )
        everywhere = "put the same files on every host, or at an address that all of them read"
        self.same("data", data, "reads other data than process 0", everywhere)
        self.same("steps", steps, "was given other --steps", "start all processes with the same arguments")

    def barrier(self, name: str) -> None:
        """Wait until every process has called this; each name can be used for one barrier of a run.

        Raises:
            UserError: naming the processes that have not come after barrier_timeout() seconds.
        """
        limit = barrier_timeout()
        try:
            self._client.wait_at_barrier(name, limit * 1000)
        except RuntimeError as error:
            # JAX lists the numbers of the missing processes in separate lines.
            missing = [int(number) for number in re.findall(r"^\d+$", str(error), re.MULTILINE)]
            raise self._late(missing, name, limit, error) from None

    def fail(self, status: int, reason: str) -> NoReturn:
        """End this process, whatever its threads do, and tell the others why.

        At a normal exit JAX would wait for the processes that continue.
        """
        self._closed = True
        _end_at_last(status)
        self.log(f"ends with status {status}: {reason}")
        self._set("news/failed", [self.number, status, reason])
        self._leave(status)

    def give_up(self, error: UserError) -> NoReturn:
        """Report an error of this process and end it, unless another process's end explains the error."""
        follows = broken(error)
        self.wait_for_news(peer_timeout() + NEWS if follows else NEWS)
        out = sys.__stderr__
        say(f"error: {self.name(self.number)}: {printable(error.message)}", out)
        if error.help:
            say(f"  = help: {printable(error.help)}", out)
        self.fail(PASSING if follows else error.exit_status, error.message)

    def end(self) -> None:
        """Leave a run that all processes have finished; process 0, which runs the service, leaves last."""
        import jax

        self.barrier("end")
        self._closed = self._over = True
        self.barrier("over")  # from here on a process that leaves does not count as lost
        for thread in self._watches:
            thread.join()
        while self.first and len(self._client.get_live_nodes(list(range(self.count)))) > 1:
            time.sleep(0.05)
        jax.distributed.shutdown()
        self.log("ends")

    def wait_for_news(self, seconds: float) -> None:
        """Wait in case another process is gone, which would explain a failure here; then this one ends."""
        time.sleep(seconds)

    def _late(self, numbers: list[int], name: str, limit: int, error: RuntimeError) -> UserError:
        if "DEADLINE_EXCEEDED" not in str(error) or not numbers:
            message = str(error).splitlines()[0]
            return UserError(f"the processes did not meet at `{name}`: {message}", exit_status=PASSING)
        return UserError(
            f"{self.name(*numbers)} did not reach `{name}` within {limit} s",
            "see its log; RECIPEC_BARRIER_TIMEOUT gives more seconds",
        )

    def _set(self, key: str, value: Any) -> None:
        """Store a JSON value for all processes; a key keeps its first value."""
        with suppress(RuntimeError):
            self._client.key_value_set(key, json.dumps(value))

    def _all(self, folder: str) -> dict[str, Any]:
        """Return the values of the keys FOLDER/NAME, by their names."""
        entries = self._client.key_value_dir_get(f"{folder}/")
        return {key.rpartition("/")[2]: json.loads(value) for key, value in entries}

    def _watch_heartbeats(self) -> None:
        everyone = list(range(self.count))
        with suppress(RuntimeError):  # process 0 is gone, and JAX ends this process: see `_end_with_jax`
            while not self._over:
                alive = self._client.get_live_nodes(everyone)  # returns when all that live have asked
                if gone := [number for number in everyone if number not in alive]:
                    self._lost(gone, None, f"JAX's service had no heartbeat for {peer_timeout()} s")
                time.sleep(BEAT)

    def _watch_news(self) -> None:
        with suppress(RuntimeError):  # as above
            while not self._over:
                news = self._all("news")
                if failed := news.get("failed"):
                    self._lost(failed[:1], *failed[1:])
                if "stop" in news and self._stop_after is None:
                    self._settle(*news["stop"])
                time.sleep(BEAT)

    def _settle(self, signum: int, number: int) -> None:
        """Find the step after which all stop: the last one that any process has begun."""
        with self._state:
            if not self._frozen:
                self._frozen = True
                self._set(f"begun/{self.number}", self._begun)
        begun = self._all("begun")
        if len(begun) == self.count:
            with self._state:
                self._stop_after, self.stopped_by = max(begun.values()), signum
                self._state.notify_all()
            why = "" if number == self.number else f", as {self.name(number)} was told to"
            self.log(f"stops after step {self._stop_after}{why}")

    def _lost(self, numbers: Sequence[int], status: int | None, reason: str) -> None:
        """End this process, because the run cannot continue without the others."""
        with self._state:
            if self._closed:
                return
            self._closed = True
        ends = 1 if status in (1, 2) else PASSING if status is None or status < 128 else status
        _end_at_last(ends)
        what = "is gone" if status is None else "has stopped"
        line = f"{self.name(*numbers)} {what}: {printable(reason)}"
        try:
            self.log(f"{line}; ends with status {ends}")
            out = sys.__stderr__
            say(f"error: {self.name(self.number)}: {line}", out)
            for tell in self.at_loss:
                tell(line)
            if ends == PASSING:
                say(HELP, out)
        finally:
            self._leave(ends, len(numbers) if status is None else 0)

    def _leave(self, status: int, gone: int = 0) -> NoReturn:
        """End this process. Process 0 ends last, because JAX aborts the others when its service ends.

        Args:
            gone: number of processes that can no longer report their end.
        """
        _flush()
        self._set(f"left/{self.number}", status)
        with suppress(RuntimeError):
            while self.first and len(self._all("left")) + gone < self.count:
                time.sleep(BEAT / 10)
        os._exit(status)


HELP = "  = help: start all processes again with --resume"


def broken(error: BaseException) -> bool:
    """Return whether a device connection failed: another process may be gone, which shows later."""
    return type(error).__name__ == "JaxRuntimeError" or "Gloo " in str(error)


def together(
    hosts: int, interrupts: Interrupts, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    """Run the work of a script as one of the run's processes, and end together with the others.

    Args:
        hosts: machines that the recipe's mesh spans.

    Returns:
        The status that `work` returns.
    """
    others = join(hosts)
    if isinstance(others, SingleProcess):
        return work(interrupts, others)
    try:
        status = work(interrupts, others)
    except Interrupted as interrupted:
        if others.stopped_by is None:  # the others do not know yet, and may wait for this one
            others.fail(128 + interrupted.signum, f"it was stopped by {name_of(interrupted.signum)}")
        others.end()
        raise
    except UserError as error:
        others.give_up(error)
    except Exception as error:
        others.wait_for_news(peer_timeout() + NEWS)
        traceback.print_exc(file=sys.__stderr__)
        others.fail(PASSING if broken(error) else 1, f"{type(error).__name__}: {error}".splitlines()[0])
    others.end()
    return status


def join(hosts: int) -> SingleProcess | ProcessGroup:
    """Find the other processes of a run, and connect JAX with theirs; return at once for a single process.

    Like jax.distributed.initialize, but with a time limit after which it names the processes that have not
    come. Nothing may ask JAX for devices before this.

    Args:
        hosts: machines that the recipe's mesh spans.

    Raises:
        UserError: when process 0 cannot be reached, or cannot listen.
    """
    place = discover(hosts)
    if place is None:
        return SINGLE
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax
    from jax._src import distributed
    from jax._src.lib import _jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state: Any = distributed.global_state
    state.process_id, state.num_processes = place.number, place.count
    limit, beats = start_timeout(), peer_timeout()
    if place.number == 0:
        address = listens_at(place.coordinator)
        _check_port(address, place.port)
        state.service = _jax.get_distributed_runtime_service(
            _at(address, place.port),
            place.count,
            heartbeat_timeout=beats,
            cluster_register_timeout=limit,
            shutdown_timeout=60,
            recoverable=True,  # or JAX aborts all processes if one is gone
        )
    state.coordinator_address = _at(_reach(place, limit), place.port)
    state.client = _jax.get_distributed_runtime_client(
        state.coordinator_address,
        place.number,
        init_timeout=limit + 60,  # the service gives up first, and names the missing processes
        shutdown_timeout=60,
        heartbeat_timeout=beats,
        use_compression=True,
    )
    _end_with_jax(place)
    state.client.connect()
    return ProcessGroup(state.client, place.number, place.count)


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(signum: int) -> None:
    try:
        say(f"error: JAX's service has ended {_ended_as}: see above which process is missing", sys.__stderr__)
        say(HELP, sys.__stderr__)
    finally:
        os._exit(PASSING)


_ended_as = ""


def _end_with_jax(place: Place) -> None:
    """Turn an abort by JAX into the exit status of a process that may be started again.

    JAX aborts if process 0 and its service are gone, or if a process has not come in time; its output says
    which. It cannot call Python instead (`missed_heartbeat_callback` ends in a bad cast), and Python's own
    signal handlers run too late for an abort.
    """
    global _ended_as
    _ended_as = f"process {place.number} of {place.count}"
    handle = ctypes.CDLL(None).signal
    handle(signal.SIGABRT, _aborted)
    atexit.register(handle, signal.SIGABRT, None)  # Python cannot handle it any more


def _check_port(address: str, port: int) -> None:
    """Check that the port is free, because JAX crashes on a port that is taken."""
    try:
        socket.create_server((address, port), family=_family(address)).close()
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {os.strerror(error.errno or 0)}",
            f"stop the program that listens there, or choose another port in {ADDRESS}",
        ) from None


def _reach(place: Place, limit: int) -> str:
    """Wait until process 0 listens, and return its address. JAX's own waiting would end without naming it."""
    host = place.coordinator
    if place.number == 0 and listens_at(host) in ("::", "0.0.0.0"):
        host = "127.0.0.1"  # its own machine may not know the name that the others use
    deadline = time.monotonic() + limit
    while True:
        try:
            socket.create_connection((host, place.port), timeout=min(10.0, limit / 4)).close()
            return host
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"process {place.number} of {place.count} cannot reach process 0 at {place.coordinator}:"
                    f"{place.port}: {error.strerror or error}, for {limit} s",
                    f"start process 0; check {ADDRESS}, and that nothing between the hosts blocks the port",
                    PASSING,
                ) from None
            time.sleep(0.25)


def listens_at(coordinator: str) -> str:
    """Return where process 0 listens: on the given address, or on all addresses of the machine if that is a
    name, or an address of another machine, which passes connections on."""
    address = "127.0.0.1" if coordinator == "localhost" else coordinator
    with suppress(OSError, ValueError):
        ipaddress.ip_address(address)
        socket.create_server((address, 0), family=_family(address)).close()
        return address
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _end_at_last(status: int) -> None:
    """End this process after some seconds if it is still running: a terminal or a bucket may not accept its
    last messages."""
    at_last = threading.Timer(LAST_WORDS, os._exit, (status,))
    at_last.daemon = True
    at_last.start()


def _flush() -> None:
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError):
            if stream is not None:
                stream.flush()
