"""A fake of Google Cloud Storage's JSON API on this machine, which fails on request.

It has the parts that gcsfs, tensorstore and google-cloud-storage use: buckets; lists with prefix, delimiter
and pages; media, multipart and resumable uploads; ranged reads; generations and their preconditions; rewrite,
move, compose and delete. It is consistent like the real API: an object appears whole when its upload ends.
https://cloud.google.com/storage/docs/json_api/v1
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c


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


QUANTUM = 1 << 18
"""Except for the last part, the parts of a resumable upload are multiples of this many bytes."""


class Handler(BaseHTTPRequestHandler):
    """The handler of one connection. A subclass sets `gcs`."""

    gcs: Gcs
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *arguments: Any) -> None:
        """Log nothing, because the server's log has the requests."""

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        self.query = dict(parse_qsl(parts.query, keep_blank_values=True))
        self.request_line = f"{self.command} {unquote(self.path)}"
        request = Request(self.request_line)
        self.gcs.log.append(request)
        fault = self.gcs.fault_of(self.request_line)
        if fault == "reset":
            self.rfile.read1(QUANTUM)
            return self._reset()
        self.body = self._read_body()
        if isinstance(fault, float):
            time.sleep(fault)
        try:
            if isinstance(fault, int):
                raise Refused(fault, "as the test says")
            status, headers, body = self._answer([unquote(part) for part in parts.path.split("/")[1:]])
        except Refused as refused:
            status, headers = refused.status, {"Content-Type": "application/json"}
            body = json.dumps({"error": {"code": status, "message": str(refused)}}).encode()
        if fault == "lost":
            return self._reset()
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            return self._reset()
        self.wfile.write(b"" if self.command == "HEAD" or status == 304 else body)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _handle

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        size = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(size)
        if len(data) != size:
            raise ConnectionResetError
        return data

    def _reset(self) -> None:
        """End the connection as a machine that disappears does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _answer(self, path: list[str]) -> tuple[int, dict[str, str], bytes]:
        upload = path[0] == "upload"
        if path[0] in ("upload", "download"):
            path = path[1:]
        if path[:3] != ["storage", "v1", "b"]:
            raise Refused(404, f"no such method: {path}")
        match path[3:], self.command:
            case [[], "GET"]:
                items = [_bucket(name) for name in sorted(self.gcs.buckets)]
                return _json({"kind": "storage#buckets", "items": items})
            case [[name], "GET"]:
                self._bucket(name)
                return _json(_bucket(name))
            case [[bucket, "o"], "GET"]:
                return _json(self._list(bucket))
            case [[bucket, "o"], _] if upload:
                return self._upload(bucket)
            case [[bucket, "o", name], "GET"]:
                return self._read(bucket, name)
            case [[bucket, "o", name], "DELETE"]:
                self._object(bucket, name)
                self._check(bucket, name, self.query)
                del self.gcs.buckets[bucket][name]
                return 204, {}, b""
            case [[bucket, "o", name, "rewriteTo", "b", other, "o", target], "POST"]:
                data = self._object(bucket, name).data
                resource, size = _resource(other, target, self.gcs.put(other, target, data)), str(len(data))
                sizes = {"totalBytesRewritten": size, "objectSize": size}
                return _json({"kind": "storage#rewriteResponse", "done": True, **sizes, "resource": resource})
            case [[bucket, "o", name, "moveTo", "o", target], "POST"]:
                with self.gcs.lock:
                    stored = self.gcs.put(bucket, target, self._object(bucket, name).data)
                    del self.gcs.buckets[bucket][name]
                return _json(_resource(bucket, target, stored))
            case [[bucket, "o", name, "compose"], "POST"]:
                sources = json.loads(self.body)["sourceObjects"]
                data = b"".join(self._object(bucket, source["name"]).data for source in sources)
                return _json(_resource(bucket, name, self._write(bucket, name, data, self.query)))
        raise Refused(404, f"no such method: {self.request_line}")

    def _bucket(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self.gcs.buckets:
            raise Refused(404, "The specified bucket does not exist.")
        return self.gcs.buckets[bucket]

    def _object(self, bucket: str, name: str) -> Stored:
        stored = self._bucket(bucket).get(name)
        if stored is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        return stored

    def _check(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        """Check a request's preconditions: a generation that must match, or must not; 0 means no object."""
        stored = self._bucket(bucket).get(name)
        generation = str(stored.generation) if stored else "0"
        if query.get("ifGenerationMatch", generation) != generation:
            raise Refused(412, "conditionNotMet")
        if query.get("ifGenerationNotMatch") == generation:
            raise Refused(304 if self.command == "GET" else 412, "conditionNotMet")

    def _write(self, bucket: str, name: str, data: bytes, query: Mapping[str, str]) -> Stored:
        with self.gcs.lock:
            self._check(bucket, name, query)
            return self.gcs.put(bucket, name, data)

    def _list(self, bucket: str) -> dict[str, Any]:
        query = self.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter")
        page = min(self.gcs.page, int(query.get("maxResults") or self.gcs.page))
        with self.gcs.lock:
            objects = dict(self._bucket(bucket))
        after, first, end = query.get("pageToken"), query.get("startOffset"), query.get("endOffset")
        items: list[dict[str, Any]] = []
        prefixes: list[str] = []
        found = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        last = ""
        for name in sorted(objects):
            rest = name.removeprefix(prefix)
            folder = (
                prefix + rest.partition(delimiter)[0] + delimiter if delimiter and delimiter in rest else None
            )
            shown = folder or name
            if not name.startswith(prefix) or (after is not None and shown <= after) or shown == last:
                continue
            if (first and name < first) or (end and name >= end):
                continue
            if len(items) + len(prefixes) == page:
                return found | {"nextPageToken": last}
            last = shown
            if folder:
                prefixes.append(folder)
            else:
                items.append(_resource(bucket, name, objects[name]))
        return found

    def _read(self, bucket: str, name: str) -> tuple[int, dict[str, str], bytes]:
        stored = self._object(bucket, name)
        if self.query.get("generation", str(stored.generation)) != str(stored.generation):
            raise Refused(404, f"No such object: {bucket}/{name}")
        self._check(bucket, name, self.query)
        if self.query.get("alt") != "media":
            return _json(_resource(bucket, name, stored))
        data = stored.data
        headers = {
            "Content-Type": "application/octet-stream",
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Hash": f"crc32c={_crc32c(data)},md5={_md5(data)}",
            "ETag": f'"{stored.generation}"',
        }
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if found is None:
            return 200, headers, data
        first, last = found.groups()
        begin = int(first) if first else max(0, len(data) - int(last))
        end = min(len(data), int(last) + 1) if first and last else len(data)
        if begin >= end:
            raise Refused(416, "The requested range cannot be satisfied: InvalidRange")
        return 206, headers | {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}, data[begin:end]

    def _upload(self, bucket: str) -> tuple[int, dict[str, str], bytes]:
        self._bucket(bucket)
        query = self.query
        if "upload_id" in query:
            return self._resume(query["upload_id"])
        kind, name = query.get("uploadType"), query.get("name", "")
        if kind == "media":
            return _json(_resource(bucket, name, self._write(bucket, name, self.body, query)))
        if kind == "multipart":
            metadata, data = _parts(self.body, self.headers["Content-Type"])
            name = metadata.get("name", name)
            return _json(_resource(bucket, name, self._write(bucket, name, data, query)))
        name = name or json.loads(self.body)["name"]
        session = hashlib.sha256(f"{name}{time.time_ns()}".encode()).hexdigest()[:32]
        self.gcs.sessions[session] = (bucket, name, bytearray(), query)
        where = f"{self.gcs.url}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={session}"
        return 200, {"Location": where}, b""

    def _resume(self, session: str) -> tuple[int, dict[str, str], bytes]:
        """Accept a part of a resumable upload, or report the received size."""
        if session not in self.gcs.sessions:
            raise Refused(410, "the upload is gone")
        bucket, name, data, query = self.gcs.sessions[session]
        if self.command == "DELETE":
            del self.gcs.sessions[session]
            return 499, {}, b""
        found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers.get("Content-Range") or "")
        if found is None:
            data[:], total = self.body, str(len(self.body))
        else:
            first, _, total = found.groups()
            if first is not None:
                begin = int(first)
                if begin > len(data):
                    raise Refused(503, "a part is missing")
                if total == "*" and len(self.body) % QUANTUM:
                    raise Refused(400, f"parts have a multiple of {QUANTUM} bytes")
                data[begin:] = self.body
        if total == "*" or len(data) < int(total):
            return 308, {"Range": f"bytes=0-{len(data) - 1}"} if data else {}, b""
        stored = self._write(bucket, name, bytes(data), query)
        del self.gcs.sessions[session]
        return _json(_resource(bucket, name, stored))


def _json(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _bucket(name: str) -> dict[str, Any]:
    return {"kind": "storage#bucket", "id": name, "name": name, "location": "US", "storageClass": "STANDARD"}


def _resource(bucket: str, name: str, stored: Stored) -> dict[str, Any]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{stored.generation}",
        "name": name,
        "bucket": bucket,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "md5Hash": _md5(stored.data),
        "crc32c": _crc32c(stored.data),
        "contentType": "application/octet-stream",
        "storageClass": "STANDARD",
        "timeCreated": stored.updated,
        "updated": stored.updated,
    }


def _parts(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes]:
    """Return an object's metadata and data from a multipart upload with any line ends."""
    mark = b"--" + content_type.partition("boundary=")[2].strip("'\"").encode()
    line_end = b"\r\n" if body.startswith(mark + b"\r\n") else b"\n"
    _, first, second = body.split(mark + line_end, 2)
    metadata = first.partition(line_end * 2)[2]
    data = second.partition(line_end * 2)[2]
    return json.loads(metadata), data[: data.rindex(line_end + mark + b"--")]


def _md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
