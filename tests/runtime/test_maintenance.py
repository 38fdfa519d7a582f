"""Tests of maintenance notices from a fake of Google Cloud's metadata server."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest

from recipec.runtime.interrupts import Interrupted, Interrupts
from recipec.runtime.training import ending
from tests.ports import free_port
from tests.runtime.artifacts import assert_equal, script, steps, train, write_artifact
from tests.runtime.lives import Lives
from tests.waiting import until

TERMINATE = "TERMINATE_ON_HOST_MAINTENANCE"
HELD = """
from runtime.training import trainer

quick = trainer.Trainer._step


def slow(self, *arguments):
    if 2 <= self._train_steps < 9 and "--resume" not in sys.argv:
        time.sleep(0.4)
    return quick(self, *arguments)


trainer.Trainer._step = slow
"""
"""Code of an artifact with slow steps, except for the first two and those of a resumed run."""


class Metadata:
    """A fake metadata server, which holds an answer back until its value changes, as Google's does."""

    def __init__(self) -> None:
        self.values = {"maintenance-event": "NONE", "preempted": "FALSE"}
        self.refuses = 0
        self.asked: list[str] = []
        self.changed = threading.Condition()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, address: object) -> None:
                pass  # the client has ended

        self.server = Server(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        address = urlparse(handler.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        prefix, _, key = address.path.rpartition("/")
        with self.changed:
            self.asked.append(handler.path)
            refused, self.refuses = self.refuses > 0, max(0, self.refuses - 1)
            if query.get("wait_for_change") == "true" and not refused:
                self.changed.wait_for(
                    lambda: self.values[key] != query["last_etag"], float(query["timeout_sec"])
                )
            value = self.values.get(key, "")
        if refused and self.refuses % 2:
            handler.wfile.write(b"an answer of another program\r\n\r\n")
            return
        found = prefix == "/computeMetadata/v1/instance" and key in self.values
        allowed = handler.headers.get("Metadata-Flavor") == "Google"
        handler.send_response(503 if refused else 404 if not found else 200 if allowed else 403)
        handler.send_header("Metadata-Flavor", "Google")
        handler.send_header("ETag", value)
        handler.end_headers()
        handler.wfile.write(value.encode())

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def close(self) -> None:
        self.set("maintenance-event", "")
        self.set("preempted", "")
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    server = Metadata()
    monkeypatch.setenv("GCE_METADATA_HOST", server.host)
    monkeypatch.setattr(ending, "PAUSE", 0.05)
    yield server
    server.close()


@contextmanager
def deferred() -> Iterator[Interrupts]:
    with Interrupts() as interrupts:
        interrupts.deferred = True
        yield interrupts


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("maintenance-event", TERMINATE, "this machine will be stopped for maintenance"),
        ("preempted", "TRUE", "this machine is being preempted"),
    ],
)
def test_maintenance_notice_sends_one_sigterm(
    metadata: Metadata, capfd: pytest.CaptureFixture[str], key: str, value: str, line: str
) -> None:
    """Ignore further notices, and do not count the system's own signal as a second one."""
    with deferred() as interrupts, ending.watching(interrupts, "tpu"):
        until(lambda: sum("wait_for_change" in path for path in metadata.asked) == 2)
        metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        time.sleep(0.2)
        assert interrupts.requested is None, "a migration leaves the machine running"
        metadata.set(key, value)
        until(lambda: interrupts.requested is not None)
        assert interrupts.requested == signal.SIGTERM
        interrupts.requested = None
        metadata.set("preempted", "TRUE")
        metadata.set("maintenance-event", TERMINATE)
        time.sleep(0.2)
        assert interrupts.requested is None
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: interrupts.requested == signal.SIGTERM)
    error = capfd.readouterr().err
    assert error.count("notice from Google Cloud") == 1 and f"notice from Google Cloud: {line}\n" in error


def test_notice_before_run_start_stops_run(metadata: Metadata) -> None:
    metadata.set("preempted", "TRUE")
    with Interrupts() as interrupts, pytest.raises(Interrupted), ending.watching(interrupts, "tpu"):
        time.sleep(10)


def test_notice_is_received_after_metadata_server_outage(metadata: Metadata) -> None:
    with deferred() as interrupts, ending.watching(interrupts, "cpu"):
        until(lambda: sum("wait_for_change" in path for path in metadata.asked) == 2)
        metadata.refuses = 6
        metadata.set("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE")
        until(lambda: metadata.refuses == 0)
        metadata.set("maintenance-event", TERMINATE)
        until(lambda: interrupts.requested is not None)


def test_missing_metadata_server_prints_one_note(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Print one line and leave no thread running. On a CPU, send no request."""
    host = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(ending, "PAUSE", 0.02)
    monkeypatch.setattr(ending, "DEFAULT", host)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)

    # A thread of the test before may still read its last answer.
    before = set(threading.enumerate())

    def watchers() -> list[threading.Thread]:
        started = set(threading.enumerate()) - before
        return [thread for thread in started if thread.name.startswith("notices of")]

    with deferred() as interrupts, ending.watching(interrupts, "cpu"):
        assert not watchers()
    with deferred() as interrupts, ending.watching(interrupts, "tpu"):
        until(lambda: not watchers())
        assert interrupts.requested is None
    assert (
        capfd.readouterr().err
        == f"note: {host} does not answer: this run does not watch for maintenance notices\n"
    )


@pytest.mark.e2e
def test_run_stopped_by_notice_resumes_exactly(
    place: Path, lives: Lives, metadata: Metadata, whole: object
) -> None:
    """Send the machine's SIGTERM during the save, as in a shutdown."""
    prelude = f"import os\nimport time\n\nos.environ['GCE_METADATA_HOST'] = {metadata.host!r}\n{HELD}"
    write_artifact(place / "noticed", every=100, prelude=prelude)
    life = lives.begin(*script(place, "noticed", artifact="noticed"))
    assert life.until(lambda: "step 2/10: loss" in life.stderr)
    metadata.set("maintenance-event", TERMINATE)
    assert life.until(lambda: "stopping after this step" in life.stderr)
    life.send(signal.SIGTERM)
    assert life.wait() == 143, life.stderr
    folder = place / "noticed" / "checkpoints"
    assert "notice from Google Cloud: this machine will be stopped for maintenance\n" in life.stderr
    (step,) = steps(folder)
    assert 2 < step < 10
    assert life.stderr.splitlines()[-1] == (
        f"stopped by SIGTERM; kept: the checkpoint of step {step} in {folder}; --resume continues from it"
    )
    metadata.set("maintenance-event", "NONE")
    assert train(lives, place, "noticed", "--resume", artifact="noticed").status == 0
    assert_equal(place, "whole", "noticed", 10)
