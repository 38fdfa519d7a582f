"""A fake of vLLM 0.32's server: its JSON, a language model of hashes, and switches for faults.

with FakeVllm(["tuned", "tuned-base"]) as server:
    server.faults.fail_stream = 3
    Client(server.url)...
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.clients.fake_answers import Answers
from tests.clients.fake_language import Language


@dataclass
class Faults:
    """The faults of a fake server. A test may set them while it runs.

    Attributes:
        unready: the number of /health requests that are answered with 503.
        fail: a status by path, answered with vLLM's JSON for an error.
        html: paths that answer 200 with a page.
        html_errors: paths that answer 502 with a proxy's page.
        redirect: the new address, by path.
        nonsense: paths whose answer is bytes that are not HTTP.
        half: paths whose answer ends in its middle.
        shape: other JSON, by path.
        fail_stream: events after which a stream reports an error, as vLLM does when its engine dies.
        no_done: streams end without [DONE].
        lump: a stream comes in one piece, after its answer is complete.
        wobble: tokens after which a streamed answer differs from one that is not streamed.
        no_usage: answers report no usage.
        accept_all: any model's name is accepted.
        repeat_key: an error repeats the key that was sent.
        pause: seconds before any answer.
        pauses: seconds before an answer, by path.
        token_seconds: seconds between a stream's events.
        die_after: answered requests, after which the server dies in the middle of the next one.
    """

    unready: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    html: set[str] = field(default_factory=set)
    html_errors: set[str] = field(default_factory=set)
    redirect: dict[str, str] = field(default_factory=dict)
    nonsense: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    shape: dict[str, Any] = field(default_factory=dict)
    fail_stream: int | None = None
    no_done: bool = False
    lump: bool = False
    wobble: int | None = None
    no_usage: bool = False
    accept_all: bool = False
    repeat_key: bool = False
    pause: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    die_after: int | None = None


@dataclass(frozen=True)
class Asked:
    """A received request. `body` is None if it has none."""

    method: str
    path: str
    body: Any
    authorization: str | None


class FakeVllm:
    """A server on its own port, until the `with` block ends.

    Args:
        models: the served names. If there are several, the last one is the base of the others, which are
            adapters. The server lists them in this order, where vLLM lists the base first.
        key: the key that requests below /v1 must carry.
        port: 0 chooses a free port.

    Attributes:
        asked: the received requests, in order.
        faults: the current faults.
    """

    def __init__(
        self,
        models: Sequence[str] = ("tuned",),
        *,
        key: str | None = None,
        language: Language | None = None,
        version: str = "0.32.0",
        max_model_len: int = 4096,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: Faults | None = None,
    ) -> None:
        self.models = list(models)
        self.key = key
        self.language = language or Language()
        self.version = version
        self.max_model_len = max_model_len
        self.faults = faults or Faults()
        self.asked: list[Asked] = []
        self.answers = 0
        self.running = 0
        self.tokens = {"prompt": 0, "generation": 0}
        self.lock = threading.Lock()
        self.dead = False
        self._server = _Server((host, port), _Handler)
        self._server.fake = self
        self.host, self.port = self._server.server_address[:2]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeVllm:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()
        self._thread.join()

    def die(self) -> None:
        """End at once with all connections, as a killed process does."""
        with self.lock:
            if self.dead:
                return
            self.dead = True
        self._server.socket.close()
        self._server.cut_all()
        # serve_forever may run in another thread than the caller's, so that shutdown would block here.
        threading.Thread(target=self._server.shutdown, daemon=True).start()

    def bodies(self, path: str) -> list[Any]:
        return [asked.body for asked in self.asked if asked.path == path]


Start = Callable[..., FakeVllm]
"""Starts a server with FakeVllm's arguments; it ends with the test."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256
    fake: FakeVllm

    def __init__(self, *arguments: Any) -> None:
        self.open: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.discard(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report no error for a connection that ended."""


class _Died(Exception):
    """The server must die in the middle of this request."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    @property
    def fake(self) -> FakeVllm:
        return self.server.fake

    def do_GET(self) -> None:
        self._handle("GET")

    def do_POST(self) -> None:
        self._handle("POST")

    def _handle(self, method: str) -> None:
        fake, faults = self.fake, self.fake.faults
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        authorization = self.headers.get("Authorization")
        try:
            body = json.loads(data) if data else None
        except ValueError:
            body = data
        with fake.lock:
            fake.asked.append(Asked(method, self.path, body, authorization))
        if pause := faults.pauses.get(self.path, faults.pause):
            time.sleep(pause)
        try:
            if not self._fault(authorization):
                self._route(method, body, authorization)
        except (_Died, OSError):
            self.close_connection = True

    def _fault(self, authorization: str | None) -> bool:
        """Answer with a fault, and return whether there was one."""
        faults, path = self.fake.faults, self.path
        if path in faults.nonsense:
            self.wfile.write(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            self.close_connection = True
        elif path in faults.half:
            self._head(200, "application/json", {"Content-Length": "1000"})
            self.wfile.write(b'{"object":"li')
            self.close_connection = True
        elif path in faults.shape:
            self._json(faults.shape[path])
        elif path in faults.html:
            self._send(200, "text/html", b"<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>")
        elif path in faults.html_errors:
            page = b"<html><head><title>502 Bad Gateway</title></head><body><hr>nginx</body></html>"
            self._send(502, "text/html", page)
        elif path in faults.redirect:
            self._head(307, "text/plain", {"Content-Length": "0", "Location": faults.redirect[path]})
        elif path in faults.fail:
            said = f" to {authorization}" if faults.repeat_key else ""
            self._error(faults.fail[path], f"EngineCore encountered an issue{said}.", "InternalServerError")
        else:
            return False
        return True

    def _route(self, method: str, body: Any, authorization: str | None) -> None:
        fake = self.fake
        guarded = self.path.startswith(("/v1", "/v2", "/inference", "/cohere"))
        if fake.key and guarded and authorization != f"Bearer {fake.key}":
            self._json({"error": "Unauthorized"}, 401)
            return
        routes: dict[tuple[str, str], Callable[[Any], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): lambda _: self._json({"version": fake.version}),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): lambda body: self._json({"count": len(body["prompt"])}),
            ("POST", "/v1/completions"): self._answer,
            ("POST", "/v1/chat/completions"): self._answer,
        }
        route = routes.get((method, self.path))
        if route is None:
            known = any(path == self.path for _, path in routes)
            self._json({"detail": "Method Not Allowed" if known else "Not Found"}, 405 if known else 404)
            return
        route(body)

    def _health(self, _: Any) -> None:
        asked = sum(one.path in ("/health", "/ping") for one in self.fake.asked)
        ready = asked > self.fake.faults.unready
        self._head(200 if ready else 503, None, {"Content-Length": "0"})

    def _models(self, _: Any) -> None:
        fake = self.fake
        base = fake.models[-1]
        cards = [
            {
                "id": name,
                "object": "model",
                "created": int(time.time()),
                "owned_by": "vllm",
                "root": "/model" if name == base else "/adapter",
                "parent": None if name == base else base,
                "max_model_len": fake.max_model_len if name == base else None,
                "permission": [{"id": "modelperm-0", "object": "model_permission", "allow_sampling": True}],
            }
            for name in fake.models
        ]
        self._json({"object": "list", "data": cards})

    def _metrics(self, _: Any) -> None:
        fake = self.fake
        label = f'engine="0",model_name="{fake.models[-1]}"'
        figures = {
            "num_requests_running": ("gauge", fake.running),
            "num_requests_waiting": ("gauge", 0),
            "kv_cache_usage_perc": ("gauge", 0.0),
            "prompt_tokens_total": ("counter", fake.tokens["prompt"]),
            "generation_tokens_total": ("counter", fake.tokens["generation"]),
        }
        lines = []
        for name, (kind, value) in figures.items():
            lines += [f"# TYPE vllm:{name} {kind}", f"vllm:{name}{{{label}}} {float(value)}"]
        self._send(200, "text/plain; version=1.0.0; charset=utf-8", "\n".join([*lines, ""]).encode())

    def _answer(self, body: Any) -> None:
        """Answer a completion or a chat completion."""
        fake = self.fake
        if not isinstance(body, dict):
            self._error(400, "The body is not an object.", "BadRequestError")
            return
        model = body.get("model") or fake.models[0]
        if model not in fake.models and not fake.faults.accept_all:
            aliases = fake.models[-1]
            message = f"The model `{model}` does not exist. Valid aliases: {aliases}."
            self._error(404, message, "NotFoundError", "model")
            return
        with fake.lock:
            number = fake.answers
            fake.answers += 1
            fake.running += 1
        try:
            answers = Answers(fake, model, body, self.path)
            longest = len(answers.prompt)
            if longest > fake.max_model_len:
                message = (
                    f"This model's maximum context length is {fake.max_model_len} tokens. However, your "
                    f"prompt contains {longest} input tokens, which exceeds this limit even without any "
                    "output tokens. Please reduce the length of the input prompt."
                )
                self._error(400, message, "BadRequestError", "input_tokens")
                return
            dies = fake.faults.die_after is not None and number >= fake.faults.die_after
            if dies and not body.get("stream"):
                fake.die()
                raise _Died
            if body.get("stream"):
                self._stream(answers, 2 if dies else None)
            else:
                self._json(answers.whole())
        finally:
            with fake.lock:
                fake.running -= 1

    def _stream(self, answers: Answers, dies_after: int | None) -> None:
        faults = self.fake.faults
        self._head(200, "text/event-stream; charset=utf-8", {"Transfer-Encoding": "chunked"})
        events = answers.events()
        if faults.lump:
            time.sleep(faults.token_seconds * len(events))
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            self._chunk(data + b"data: [DONE]\n\n")
            self._chunk(b"")
            return
        for number, event in enumerate(events):
            if number == dies_after:
                self.fake.die()
                raise _Died
            if number == faults.fail_stream:
                error = error_body(500, "EngineCore encountered an issue.", "InternalServerError")
                self._chunk(b"data: " + json.dumps(error).encode() + b"\n\n")
                break
            self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            if faults.token_seconds:
                time.sleep(faults.token_seconds)
        if not faults.no_done:
            self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _error(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        self._json(error_body(status, message, kind, param), status)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, "application/json", json.dumps(value, separators=(",", ":")).encode())

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self._head(status, kind, {"Content-Length": str(len(data))})
        self.wfile.write(data)

    def _head(self, status: int, kind: str | None, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def error_body(status: int, message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
