"""A stand-in for Google Cloud Storage's JSON API on this machine, which fails when it is told to.

It holds what gcsfs, tensorstore and google-cloud-storage ask for: buckets; lists with prefix, delimiter and
pages; media, multipart and resumable uploads; ranged reads; generations and their preconditions; rewrite,
move, compose and delete. As the real one is, it is consistent: an object is there whole once its upload
ended, and not before. https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer


@dataclass(frozen=True)
class Stored:
    """An object: its bytes, and a number that grows with every write."""

    data: bytes
    generation: int
    updated: str


@dataclass
class Fault:
    """What goes wrong with some requests.

    Attributes:
        on: a pattern that is looked for in "METHOD /path?query", the path as it is written, unquoted.
        do: an HTTP status; a number of seconds (float) to wait before the work; "reset": the connection ends
            within the request; "lost": the work is done and the answer never arrives; "cut": half of the
            answer's body arrives.
        times: how many requests it takes.
        after: how many it lets pass before.
    """

    on: str
    do: int | float | str
    times: int = 1
    after: int = 0


@dataclass
class Request:
    """One that was made, as the log has it: its status is None where no answer was sent."""

    line: str
    status: int | None = None


class Refused(Exception):
    """What a request is answered with in place of what it asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Gcs:
    """The server, in threads of this process.

    Attributes:
        buckets: objects by bucket and name.
        faults: may be changed at any time.
        log: of all requests.
        page: names that one answer to a list holds at most.
    """

    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    log: list[Request] = field(default_factory=list)
    page: int = 1000
    url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.RLock()
        self.sessions: dict[str, tuple[str, str, bytearray, dict[str, str]]] = {}
        self._generation = time.time_ns() // 1000

    @property
    def environment(self) -> Mapping[str, str]:
        """What sends the clients here: gcsfs and google-cloud-storage, then tensorstore."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            # The kind of a bucket is asked for by gRPC, which is not spoken here; there are no credentials.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GS_TOKEN": "anon",
            "GCE_METADATA_ROOT": "localhost:1",
        }

    def fail(self, on: str, do: int | float | str, times: int = 1, after: int = 0) -> Fault:
        """Lets requests fail from now on."""
        fault = Fault(on, do, times, after)
        with self.lock:
            self.faults.append(fault)
        return fault

    def put(self, bucket: str, name: str, data: bytes) -> Stored:
        """Writes an object."""
        with self.lock:
            if bucket not in self.buckets:
                raise Refused(404, "The specified bucket does not exist.")
            self._generation += 1
            stored = Stored(data, self._generation, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
            self.buckets[bucket][name] = stored
            return stored

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Of the objects that are there."""
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def seen(self, pattern: str) -> list[Request]:
        """The requests whose line a pattern is found in."""
        return [request for request in list(self.log) if re.search(pattern, request.line)]

    def fault_of(self, line: str) -> int | float | str | None:
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.on, line):
                    if fault.after > 0:
                        fault.after -= 1
                        continue
                    fault.times -= 1
                    return fault.do
        return None


@contextmanager
def serving(*buckets: str) -> Iterator[Gcs]:
    """A server with empty buckets, while the block runs."""
    from tests.remote.gcs_requests import Handler

    gcs = Gcs({bucket: {} for bucket in buckets})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"gcs": gcs}))
    server.daemon_threads = True
    gcs.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield gcs
    finally:
        server.shutdown()
        server.server_close()
