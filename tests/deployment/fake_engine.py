"""A fake Docker engine: an HTTP server on a socket that answers the SDK's few requests from a plan."""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

VERSION = {"ApiVersion": "1.45", "MinAPIVersion": "1.24", "Version": "28.2.2"}


@dataclass
class FakeEngine:
    """What the engine has and how it answers.

    Attributes:
        host: DOCKER_HOST's value.
        info: fields of `docker info`.
        images: names that it has.
        registry: the digest and the platforms of each published name; or a status and a message.
        pulled: the progress messages of a pull.
        states: the states of a container, of which the last one stays.
        log: of the container.
        requests: method and path of each request but those for a version, without the API's version.
    """

    host: str
    info: dict[str, Any] = field(default_factory=dict)
    images: set[str] = field(default_factory=set)
    registry: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    pulled: list[dict[str, Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    requests: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, query: dict[str, list[str]]) -> tuple[int, Any]:
        """Return the status and the body: JSON, bytes, or the chunks of a stream."""
        if path == "/version":
            return 200, VERSION
        self.requests.append(f"{method} {path}")
        kind, _, name = path.strip("/").partition("/")
        if path == "/info":
            return 200, {"ServerVersion": "28.2.2", "MemTotal": 1 << 40, "DockerRootDir": "/", **self.info}
        if kind == "distribution":
            digest, more = self.registry.get(name.removesuffix("/json"), (404, "manifest unknown"))
            if isinstance(digest, int):
                return digest, {"message": more}
            platforms = [dict(zip(("os", "architecture"), text.split("/"), strict=True)) for text in more]
            return 200, {"Descriptor": {"digest": digest, "size": 1}, "Platforms": platforms}
        if path == "/images/create":
            self.images.add(f"{query['fromImage'][0]}:{query['tag'][0]}")
            return 200, [json.dumps(message).encode() + b"\r\n" for message in self.pulled]
        if kind == "images":
            has = name.removesuffix("/json") in self.images
            return (200, {"Id": "sha256:1"}) if has else (404, {"message": f"No such image: {name}"})
        if path.endswith("/logs"):
            written = self.log.encode()
            return 200, struct.pack(">BxxxL", 1, len(written)) + written
        if path.endswith("/update"):
            return 200, {"Warnings": []}
        if not self.states:
            return 404, {"message": f"No such container: {name}"}
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return 200, {"Id": "1" * 64, "Config": {"Tty": False}, "State": state}


class _Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True


@contextmanager
def fake_engine() -> Iterator[FakeEngine]:
    """Run an engine until the block ends."""
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir="/tmp"))  # a socket's path has at most 107 letters
    engine = FakeEngine(f"unix://{folder}/docker.sock")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            address = urlsplit(self.path)
            path = unquote(address.path)
            path = path if path == "/version" else f"/{path.split('/', 2)[2]}"
            status, body = engine.answer(self.command, path, parse_qs(address.query))
            self.send_response(status)
            if isinstance(body, list):
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for chunk in (*body, b""):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                return
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = respond

        def log_message(self, *_: object) -> None: ...

        def address_string(self) -> str:
            return "a socket"

    server = _Server(f"{folder}/docker.sock", Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        shutil.rmtree(folder)
