"""A fake Docker engine without containers: the part of its HTTP API that `recipe serve` uses, on a socket.

The SDK and everything above it are real. A container is a script: its output, when its server answers, and
how it ends.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

STDOUT, STDERR = 1, 2

CUT: dict[str, Any] = {"cut": True}
"""In place of a line: the engine closes the connection."""


@dataclass
class Script:
    """The behavior of the engine and its container.

    Attributes:
        images: the engine's images.
        pull: the lines that answer a pull; None hangs.
        build: the lines that answer a build; None hangs.
        start: the status and message that answer a start; None starts it.
        output: the container's first output: stream and bytes.
        ready: seconds until /health answers; None for never.
        exit: seconds until it ends by itself, its status, and whether memory ran out; None if it does not
            end.
        stop: seconds until it ends after SIGTERM; None if it must be killed.
        vanish: whether the engine closes all connections and stops listening after the start.
        create_seconds: the seconds that the engine takes to create the container.
    """

    images: tuple[str, ...] = ("base:1",)
    pull: list[dict[str, Any]] | None = field(default_factory=list)
    build: list[dict[str, Any]] | None = field(default_factory=list)
    start: tuple[int, str] | None = None
    output: list[tuple[int, bytes]] = field(default_factory=list)
    ready: float | None = 0.0
    exit: tuple[float, int, bool] | None = None
    stop: float | None = 0.0
    vanish: bool = False
    create_seconds: float = 0.0


@dataclass
class Container:
    """A created container."""

    id: str
    config: dict[str, Any]
    name: str
    status: str = "created"
    code: int = 0
    out_of_memory: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    attached: list[socket.socket] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None
    restart: str = ""


@dataclass
class Request:
    """A received request."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    headers: dict[str, str]


class FakeDocker:
    """A fake engine that listens on a socket within a folder until its `with` block ends."""

    def __init__(self, folder: Path, script: Script | None = None) -> None:
        self.socket = folder / "docker.sock"
        self.host = f"unix://{self.socket}"
        self.script = script or Script()
        self.requests: list[Request] = []
        self.containers: dict[str, Container] = {}
        self.volumes: dict[str, dict[str, str]] = {}
        self.hanging, self.creating = threading.Event(), threading.Event()
        self._closing = threading.Event()

    def __enter__(self) -> FakeDocker:
        engine = self

        class Handler(_Handler):
            fake = engine

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_UNIX
            daemon_threads = True

            def server_bind(self) -> None:
                self.socket.bind(str(engine.socket))

            def handle_error(self, *_: object) -> None:
                pass

        self._server = Server(str(self.socket), Handler)  # type: ignore[arg-type]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self.socket.unlink(missing_ok=True)
        for container in list(self.containers.values()):
            self.end(container, 137)

    def find(self, name: str) -> Container | None:
        for container in self.containers.values():
            if name in (container.id, container.name):
                return container
        return None

    def sent(self, method: str, end: str) -> list[Request]:
        """Return the requests whose path has this end."""
        return [
            request for request in self.requests if request.method == method and request.path.endswith(end)
        ]

    def add(self, name: str, status: str = "running", **labels: str) -> Container:
        """Add an existing container."""
        container = Container(f"id-{name}", {"Labels": labels}, name, status)
        self.containers[container.id] = container
        return container

    def run(self, container: Container) -> None:
        """Play the script of a started container."""
        container.status = "running"
        for stream, data in self.script.output:
            for connection in container.attached:
                with suppress(OSError):
                    connection.sendall(struct.pack(">BxxxL", stream, len(data)) + data)
            time.sleep(0.01)
        if self.script.vanish:
            self._server.shutdown()
            self._server.server_close()
            self.socket.unlink()
            for connection in container.attached:
                connection.shutdown(socket.SHUT_RDWR)
            container.ended.set()
            return
        if self.script.ready is not None and not container.ended.wait(self.script.ready):
            container.server = _answering(int(container.config["Labels"]["recipec.port"]))
        if self.script.exit is not None:
            seconds, code, out_of_memory = self.script.exit
            container.out_of_memory = out_of_memory
            if not container.ended.wait(seconds):
                self.end(container, code)

    def end(self, container: Container, code: int) -> None:
        """End a container."""
        if container.ended.is_set():
            return
        container.code, container.status = code, "exited"
        container.ended.set()
        if container.server is not None:
            container.server.shutdown()
            container.server.server_close()
        for connection in container.attached:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _answering(port: int) -> ThreadingHTTPServer:
    """Start a server that answers every request with 200."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    fake: FakeDocker
    protocol_version = "HTTP/1.1"

    def address_string(self) -> str:
        return "socket"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def do_DELETE(self) -> None:
        self._handle("DELETE")

    def _handle(self, method: str) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        path = path[path.index("/", 1) :] if path.startswith("/v1.") else path
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.fake.requests.append(Request(method, path, query, self._body(), dict(self.headers)))
        words = path.strip("/").split("/")
        if path == "/version":
            self._json(200, {"ApiVersion": "1.41", "MinAPIVersion": "1.12", "Version": "fake"})
        elif words[0] == "images":
            self._images("/".join(words[1:-1]), words[-1])
        elif path == "/build":
            self._stream(self.fake.script.build)
        elif words[0] == "volumes":
            self._volumes(method, words[1])
        elif path == "/containers/json":
            self._json(200, [_listed(item) for item in self.fake.containers.values()])
        elif path == "/containers/create":
            self._create(query["name"])
        elif words[0] == "containers":
            self._container(method, words[1], words[2] if len(words) > 2 else "", query)
        else:
            self._json(404, {"message": f"no {path}"})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            out = b""
            while length := int(self.rfile.readline(), 16):
                out += self.rfile.read(length)
                self.rfile.readline()
            self.rfile.readline()
            return out
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _images(self, name: str, what: str) -> None:
        if what == "create":
            self._stream(self.fake.script.pull)
        elif name in self.fake.script.images:
            self._json(200, {"Id": f"sha256:{name}"})
        else:
            self._json(404, {"message": f"No such image: {name}"})

    def _volumes(self, method: str, name: str) -> None:
        if method == "POST":
            asked = json.loads(self.fake.requests[-1].body)
            self.fake.volumes.setdefault(asked["Name"], asked["Labels"])
            self._json(201, {"Name": asked["Name"]})
        elif self.fake.volumes.pop(name, None) is None:
            self._json(404, {"message": f"no such volume: {name}"})
        else:
            self._empty(204)

    def _create(self, name: str) -> None:
        if self.fake.find(name) is not None:
            self._json(409, {"message": f'Conflict. The container name "/{name}" is already in use'})
            return
        self.fake.creating.set()
        time.sleep(self.fake.script.create_seconds)
        made = Container(f"{len(self.fake.containers):064d}", json.loads(self.fake.requests[-1].body), name)
        self.fake.containers[made.id] = made
        self._json(201, {"Id": made.id, "Warnings": []})

    def _container(self, method: str, name: str, what: str, query: dict[str, str]) -> None:
        found, script = self.fake.find(name), self.fake.script
        if found is None:
            self._json(404, {"message": f"No such container: {name}"})
        elif what == "json":
            self._json(200, _inspected(found))
        elif what == "attach":
            self._attach(found)
        elif what == "start" and script.start is not None:
            self._json(script.start[0], {"message": script.start[1]})
        elif what == "start":
            threading.Thread(target=self.fake.run, args=(found,), daemon=True).start()
            self._empty(204)
        elif what == "wait":
            found.ended.wait()
            self._json(200, {"StatusCode": found.code})
        elif what == "stop":
            if script.stop is None:
                self.fake.hanging.set()
                found.ended.wait(int(query["t"]))
            else:
                time.sleep(script.stop)
            self.fake.end(found, 0)
            self._empty(204)
        elif what == "kill":
            self.fake.end(found, 137)
            self._empty(204)
        elif what == "update":
            found.restart = json.loads(self.fake.requests[-1].body)["RestartPolicy"]["Name"]
            self._json(200, {"Warnings": None})
        elif method == "DELETE":
            self.fake.end(found, 137)
            del self.fake.containers[found.id]
            self._empty(204)

    def _attach(self, container: Container) -> None:
        self.send_response(101, "UPGRADED")
        self.send_header("Content-Type", "application/vnd.docker.raw-stream")
        self.send_header("Connection", "Upgrade")
        self.send_header("Upgrade", "tcp")
        self.end_headers()
        self.wfile.flush()
        container.attached.append(self.connection)
        container.ended.wait()
        self.close_connection = True

    def _stream(self, events: list[dict[str, Any]] | None) -> None:
        """Send JSON objects one after another; None hangs after the first one."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        first = {"stream": "Step 1/2 : FROM base\n", "status": "Waiting"}
        for event in [first] if events is None else events:
            if event == CUT:
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            data = json.dumps(event).encode() + b"\r\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
        if events is None:
            self.fake.hanging.set()
            self.fake._closing.wait()
        with suppress(OSError):
            self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _inspected(container: Container) -> dict[str, Any]:
    state = {
        "Status": container.status,
        "Running": container.status == "running",
        "ExitCode": container.code,
        "OOMKilled": container.out_of_memory,
        "Error": "",
    }
    config = {"Labels": container.config.get("Labels") or {}, "Tty": False}
    return {"Id": container.id, "Name": f"/{container.name}", "State": state, "Config": config}


def _listed(container: Container) -> dict[str, Any]:
    labels = container.config.get("Labels") or {}
    return {"Id": container.id, "Names": [f"/{container.name}"], "State": container.status, "Labels": labels}
