"""The answers of the fake Google Cloud Storage."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import google_crc32c

from tests.remote.gcs import Gcs, Refused, Request, Stored

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
