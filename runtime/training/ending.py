"""How scripts that train with jax end: after their work, an error, a signal, another process's failure, or
Google Cloud's notice that the machine is about to be taken, which stops a run as SIGTERM does.

A machine's metadata server answers at instance/maintenance-event (NONE, MIGRATE_ON_HOST_MAINTENANCE,
TERMINATE_ON_HOST_MAINTENANCE) and instance/preempted (FALSE, TRUE), and holds an answer back until the value
changes: https://docs.cloud.google.com/compute/docs/metadata/getting-live-migration-notice and
https://docs.cloud.google.com/compute/docs/metadata/querying-metadata. A migration leaves the machine running.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException

import jax

from ..checkpoints.saved_steps import saved_steps
from ..errors import UserError, guarded, say
from ..hosts.group import ProcessGroup, together
from ..hosts.single import SINGLE, SingleProcess, alone
from ..interrupts import Interrupted, Interrupts, name_of


@contextmanager
def out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of the devices in this context into an error that says what to do."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError(
            f"the devices ran out of memory: {str(error).splitlines()[0][:200]}",
            "lower train.micro_batch_size or data.max_length, or set remat.policy to decoder",
        ) from error


def attended(
    gone: Callable[[int], str], hosts: int, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    """Run the work of a script, and turn errors and signals into a sentence and an exit status.

    Args:
        gone: returns the sentence for a signal, from its number.
        hosts: machines that the recipe's mesh spans.

    Returns:
        The status that `work` returns, 1 after an error that was printed, or 128 + the signal's number after
        a signal. If one of several processes fails, it ends at once, and the others end with it: with 1 if a
        person has to fix the error, with runtime.errors.PASSING if another process disappeared.
    """
    with Interrupts(gone) as interrupts:
        try:
            return guarded(lambda: _joined(hosts, interrupts, work))
        except Interrupted as interrupted:
            print(f"\n{gone(interrupted.signum)}", file=sys.stderr)
            return 128 + interrupted.signum


def _joined(
    hosts: int, interrupts: Interrupts, work: Callable[[Interrupts, SingleProcess | ProcessGroup], int]
) -> int:
    if alone(hosts):
        return work(interrupts, SINGLE)
    return together(hosts, interrupts, work)


def farewell(signum: int, directory: str) -> str:
    """Return the message about a run that a signal ends, and about the files that it leaves."""
    try:
        steps = saved_steps(directory)
    except UserError:
        return f"stopped by {name_of(signum)}; what was saved before is kept"
    if not steps:
        return f"stopped by {name_of(signum)}; no checkpoint was saved yet"
    return (
        f"stopped by {name_of(signum)}; kept: the checkpoint of step {steps[-1]} in {directory}; "
        "--resume continues from it"
    )


HOST = "GCE_METADATA_HOST"
"""The variable that names a metadata server other than Google's, as in Google's own clients."""
DEFAULT = "metadata.google.internal"
NOTICES: Mapping[str, tuple[str, str]] = {
    "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE", "this machine will be stopped for maintenance"),
    "preempted": ("TRUE", "this machine is being preempted"),
}
"""The keys to ask for, the answer of each that is a notice, and the notice's text."""
HELD = 60
"""The most seconds that the server holds an answer back."""
PATIENCE = 10.0
"""Seconds to wait for a connection, and for an answer in addition to HELD."""
TRIES = 3
"""Tries of the first question. A machine without a metadata server is then not asked again."""
PAUSE = 5.0
"""Seconds between a question that failed and the next one."""


@contextmanager
def watching(interrupts: Interrupts, platform: str) -> Iterator[None]:
    """Watch for notices in separate threads; the first notice sends SIGTERM to this process.

    The threads end with the process, hold nothing that the run needs, and stop with one line on stderr if
    there is no metadata server. Notices are watched only on TPUs, or where GCE_METADATA_HOST is set.

    Args:
        interrupts: handles the signal.
        platform: of the mesh, "tpu" or "cpu".
    """
    if platform != "tpu" and not os.environ.get(HOST):
        yield
        return
    watch = _Watch(interrupts, os.environ.get(HOST) or DEFAULT)
    for key in NOTICES:
        threading.Thread(target=watch.run, args=(key,), name=f"notices of {key}", daemon=True).start()
    try:
        yield
    finally:
        watch.ended.set()


@dataclass
class _Watch:
    """State that the threads of a run share."""

    interrupts: Interrupts
    host: str
    ended: threading.Event = field(default_factory=threading.Event)
    announced: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, key: str) -> None:
        """Ask for a key until its value is a notice, or the run has ended."""
        etag: str | None = None
        failed = 0
        while not self.ended.is_set():
            try:
                value, etag = _ask(self.host, key, etag)
            except (OSError, ValueError, HTTPException):
                failed += 1
                if etag is None and failed >= TRIES:
                    self._say(
                        f"note: {self.host} does not answer: this run does not watch for maintenance notices"
                    )
                    return
                self.ended.wait(PAUSE)
                continue
            if value == NOTICES[key][0]:
                self._notify(f"notice from Google Cloud: {NOTICES[key][1]}")
                return

    def _notify(self, line: str) -> None:
        with self.lock:
            if self.ended.is_set():
                return
            self.ended.set()
        say(f"\n{line}")
        self.interrupts.announced = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _say(self, line: str) -> None:
        with self.lock:
            silent, self.announced = self.announced, True
        if not silent:
            say(line)


def _ask(host: str, key: str, etag: str | None) -> tuple[str, str]:
    """Return a key's value and its ETag: at once if `etag` is None, else once it changes or HELD is over.

    Raises:
        OSError, ValueError, HTTPException: when there is no answer, or it is not the metadata server's.
    """
    wait = "" if etag is None else f"?wait_for_change=true&timeout_sec={HELD}&last_etag={etag}"
    request = urllib.request.Request(
        f"http://{host}/computeMetadata/v1/instance/{key}{wait}", headers={"Metadata-Flavor": "Google"}
    )
    # No proxy from the environment: the metadata server is on the machine itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=PATIENCE + (HELD if wait else 0)) as answer:
        if answer.headers.get("Metadata-Flavor") != "Google":
            raise ValueError(f"{host} is no metadata server")
        return answer.read(1000).decode().strip(), answer.headers.get("ETag") or "0"
