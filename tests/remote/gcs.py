"""A fake of Google Cloud Storage's JSON API on this machine, which fails on request.

It has the parts that gcsfs, tensorstore and google-cloud-storage use: buckets; lists with prefix, delimiter
and pages; media, multipart and resumable uploads; ranged reads; generations and their preconditions; rewrite,
move, compose and delete. It is consistent like the real API: an object appears whole when its upload ends.
https://cloud.google.com/storage/docs/json_api/v1
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
    """A fault of some requests.

    Attributes:
        on: a pattern for "METHOD /path?query", with the unquoted path.
        do: an HTTP status; a number of seconds (float) to wait before the work; "reset": the connection ends
            within the request; "lost": the work is done and the answer never arrives; "cut": half of the
            answer's body arrives.
        times: the number of requests that fail.
        after: the number of requests that pass before.
    """

    on: str
    do: int | float | str
    times: int = 1
    after: int = 0


@dataclass
class Request:
    """A request in the log. Its status is None if no answer was sent."""

    line: str
    status: int | None = None


class Refused(Exception):
    """An answer that refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class Gcs:
    """The server, in threads of this process.

    Attributes:
        buckets: objects by bucket and name.
        faults: may be changed at any time.
        log: all requests.
        page: the most names in one answer to a list.
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
        """Return the variables that direct gcsfs, google-cloud-storage and tensorstore here."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "TENSORSTORE_GCS_HTTP_URL": self.url,
            # gcsfs would ask for a bucket's kind by gRPC, which this server lacks. There are no credentials.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
            "FSSPEC_GS_TOKEN": "anon",
            "GCE_METADATA_ROOT": "localhost:1",
        }

    def fail(self, on: str, do: int | float | str, times: int = 1, after: int = 0) -> Fault:
        """Let requests fail from now on."""
        fault = Fault(on, do, times, after)
        with self.lock:
            self.faults.append(fault)
        return fault

    def put(self, bucket: str, name: str, data: bytes) -> Stored:
        """Write an object."""
        with self.lock:
            if bucket not in self.buckets:
                raise Refused(404, "The specified bucket does not exist.")
            self._generation += 1
            stored = Stored(data, self._generation, time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()))
            self.buckets[bucket][name] = stored
            return stored

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """Return the names of a bucket's objects."""
        with self.lock:
            return sorted(name for name in self.buckets[bucket] if name.startswith(prefix))

    def seen(self, pattern: str) -> list[Request]:
        """Return the requests whose line matches a pattern."""
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
    """Run a server with empty buckets until the block ends."""
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
