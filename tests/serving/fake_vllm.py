"""A stand-in for vLLM 0.32's server: its JSON, a language model of hashes, and faults as switches.

    with FakeVllm(["tuned", "tuned-base"]) as server:
        server.faults.cut_stream = 3
        Client(server.url)...

By itself: python tests/serving/fake_vllm.py --port 8000 tuned tuned-base
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Ranked = list[tuple[int, float]]
"""Candidates for the next token with their log probabilities, the likeliest first."""

BOS, END, TURN, TURN_END = 2, 1, 4, 5
BYTES = 16
"""Tokens from here on are bytes; from `WORDS` on they are words."""
WORDS = 300
VOCABULARY = """
one two three four five six seven eight red green blue white black grey north south east west up down left
right sun moon star rain snow wind sea hill tree leaf root bird fish bread salt milk tea house door wall roof
road bridge ship wheel clock bell book page ink song drum horn king queen child friend baker smith sailor
farmer poet judge""".split()  # noqa: SIM905 (a list would be 64 lines)


class Language:
    """A tokenizer and a language model. Give FakeVllm another with the same methods for other answers.

    Args:
        seeds: what a model's answers are drawn from, by its name; names with one seed answer alike. A model
            that is not named here has its name for a seed.
        shifts: what is added to a model's log probability of the likeliest token, by its name.
        script: an answer's text from the model, the prompt's text and the number of the sample; None leaves
            it to chance. The prompt of a chat is its last message.
    """

    def __init__(
        self,
        seeds: Mapping[str, str] | None = None,
        shifts: Mapping[str, float] | None = None,
        script: Callable[[str, str, int], str | None] | None = None,
    ) -> None:
        self.seeds = dict(seeds or {})
        self.shifts = dict(shifts or {})
        self.script = script

    def encode(self, text: str) -> list[int]:
        return [BOS, *(BYTES + byte for byte in text.encode())]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        tokens = [BOS]
        for message in messages:
            turn = f"{message['role']}\n{text_of(message['content'])}"
            tokens += [TURN, *self.encode(turn)[1:], TURN_END]
        return [*tokens, TURN, *self.encode("assistant\n")[1:]]

    def decode(self, tokens: Iterable[int]) -> str:
        """Markers are left out, as with skip_special_tokens."""
        data = b""
        for token in tokens:
            if token >= WORDS:
                data += b" " + VOCABULARY[(token - WORDS) % len(VOCABULARY)].encode()
            elif token >= BYTES:
                data += bytes([(token - BYTES) % 256])
        return data.decode("utf-8", "replace")

    def predict(self, model: str, prefix: Sequence[int]) -> Ranked:
        """What may come after `prefix`."""
        text = f"{self.seeds.get(model, model)}\0{' '.join(map(str, prefix))}"
        digest = hashlib.sha256(text.encode()).digest()
        words = dict.fromkeys(WORDS + byte % len(VOCABULARY) for byte in digest[:16])
        candidates = [END, *words] if digest[16] < 8 else [*words, END]
        first = -0.3 - digest[17] / 1000 + self.shifts.get(model, 0.0)
        return [(token, first - 0.9 * rank) for rank, token in enumerate(candidates[:8])]

    def logprob(self, model: str, prefix: Sequence[int], token: int) -> float:
        ranked = dict(self.predict(model, prefix))
        return ranked.get(token, -12.0 - token % 7)

    def answer(
        self, model: str, prompt: Sequence[int], asked: str, request: Mapping[str, Any], sample: int
    ) -> Said:
        """What is said to a request."""
        limit = request.get("max_completion_tokens") or request.get("max_tokens") or 16
        scripted = self.script(model, asked, sample) if self.script else None
        if scripted is not None:
            tokens = [*self.encode(scripted)[1:], END]
            cut = tokens[:limit]
            return Said(cut, "stop" if len(cut) == len(tokens) else "length")
        said: list[int] = []
        while len(said) < limit:
            ranked = self.predict(model, [*prompt, *said])
            chosen = 0
            if request.get("temperature", 1.0):
                draw = f"{request.get('seed')} {sample} {len(said)} {prompt}"
                chosen = hashlib.sha256(draw.encode()).digest()[0] % min(3, len(ranked))
            token = ranked[chosen][0]
            if token == END and request.get("ignore_eos"):
                token = next(other for other, _ in ranked if other != END)
            said.append(token)
            if token == END:
                return Said(said, "stop")
        return Said(said, "length")


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    finish_reason: str


def text_of(content: Any) -> str:
    """A message's text, from either of its forms."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass
class Faults:
    """What goes wrong. All may be set while the server runs.

    Attributes:
        unready: seconds from the start for which /health answers 503.
        fail: a status by path, answered with vLLM's JSON for an error.
        html: paths that answer 200 with a page.
        html_errors: paths that answer 502 with a proxy's page.
        redirect: where to, by path.
        nonsense: paths whose answer is bytes that are not HTTP.
        half: paths whose answer ends in its middle.
        shape: paths that answer with JSON of another shape, given.
        cut_stream: events after which a stream's connection ends.
        fail_stream: events after which a stream reports an error, as vLLM does when its engine dies.
        no_done: streams end without [DONE].
        lump: streams come in one piece, when all of the answer is there.
        wobble: tokens after which a streamed answer is another than one that is not streamed.
        no_usage: answers tell no usage.
        accept_all: any model's name is taken.
        ignore_key: the key is not asked for.
        repeat_key: an error repeats the key that was sent.
        pause: seconds before any answer.
        pauses: seconds before an answer, by path.
        token_seconds: between a stream's events.
        die_after: requests for an answer, after which the server dies in the middle of the next.
        stop_after: requests of any kind after which nothing listens any more.
    """

    unready: float = 0.0
    fail: dict[str, int] = field(default_factory=dict)
    html: set[str] = field(default_factory=set)
    html_errors: set[str] = field(default_factory=set)
    redirect: dict[str, str] = field(default_factory=dict)
    nonsense: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    shape: dict[str, Any] = field(default_factory=dict)
    cut_stream: int | None = None
    fail_stream: int | None = None
    no_done: bool = False
    lump: bool = False
    wobble: int | None = None
    no_usage: bool = False
    accept_all: bool = False
    ignore_key: bool = False
    repeat_key: bool = False
    pause: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    die_after: int | None = None
    stop_after: int | None = None


@dataclass(frozen=True)
class Asked:
    """A request that came. `body` is None without one."""

    method: str
    path: str
    body: Any
    authorization: str | None


class FakeVllm:
    """A server on a port of its own, until the `with` block ends.

    Args:
        models: names served; the last is the base that the others are adapters of, where there are several.
            They are listed in this order, where vLLM lists the base first.
        key: that requests below /v1 must carry.
        port: 0 takes a free one.

    Attributes:
        asked: the requests that came, in order.
        faults: what goes wrong.
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
        self.started = time.monotonic()
        self.dead = False
        self._server = _Server((host, port), _Handler)
        self._server.fake = self
        self.host, self.port = self._server.server_address[:2]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> FakeVllm:
        self.started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.die()
        self._thread.join()

    def die(self) -> None:
        """Ends at once, with all of its connections, as a killed process does."""
        with self.lock:
            if self.dead:
                return
            self.dead = True
        self._server.socket.close()
        self._server.cut_all()
        # serve_forever is waited for where it runs in another thread than the caller's.
        threading.Thread(target=self._server.shutdown, daemon=True).start()

    def bodies(self, path: str) -> list[Any]:
        """What was asked of `path`."""
        return [asked.body for asked in self.asked if asked.path == path]


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
        """A connection that ended is nothing to report."""


class _Died(Exception):
    """The server was told to die in the middle of this request."""


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
            last = faults.stop_after is not None and len(fake.asked) >= faults.stop_after
        if last:
            # Nobody is let in any more; this one is still answered.
            fake._server.socket.close()
            self.close_connection = True
        if pause := faults.pauses.get(self.path, faults.pause):
            time.sleep(pause)
        try:
            if not self._fault(authorization):
                self._route(method, body, authorization)
        except (_Died, OSError):
            self.close_connection = True

    def _fault(self, authorization: str | None) -> bool:
        """Whether a fault has answered."""
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
        if fake.key and guarded and not fake.faults.ignore_key and authorization != f"Bearer {fake.key}":
            self._json({"error": "Unauthorized"}, 401)
            return
        routes: dict[tuple[str, str], Callable[[Any], None]] = {
            ("GET", "/health"): self._health,
            ("GET", "/ping"): self._health,
            ("GET", "/version"): lambda _: self._json({"version": fake.version}),
            ("GET", "/metrics"): self._metrics,
            ("GET", "/v1/models"): self._models,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): lambda body: self._json(
                {"prompt": fake.language.decode(body["tokens"])}
            ),
            ("POST", "/v1/completions"): self._answer,
            ("POST", "/v1/chat/completions"): self._answer,
        }
        route = routes.get((method, self.path))
        if route is None:
            self._json({"detail": "Not Found"}, 404)
            return
        route(body)

    def _health(self, _: Any) -> None:
        ready = time.monotonic() - self.fake.started >= self.fake.faults.unready
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

    def _tokenize(self, body: Any) -> None:
        language = self.fake.language
        tokens = (
            language.encode_chat(body["messages"]) if "messages" in body else language.encode(body["prompt"])
        )
        self._json(
            {
                "count": len(tokens),
                "max_model_len": self.fake.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    def _answer(self, body: Any) -> None:
        """A completion or a chat completion, for one prompt or several, in `n` samples."""
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
            answers = _Answers(fake, model, body, self.path)
            longest = max(len(prompt) for prompt in answers.prompts)
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

    def _stream(self, answers: _Answers, dies_after: int | None) -> None:
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
            if number == faults.cut_stream:
                self.close_connection = True
                return
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


class _Answers:
    """The answers to one request, in the forms of its two paths."""

    def __init__(self, fake: FakeVllm, model: str, body: Mapping[str, Any], path: str) -> None:
        self.fake, self.model, self.body = fake, model, body
        self.language = fake.language
        self.fingerprint = f"vllm-{fake.version}-0"
        self.chat = path.endswith("/chat/completions")
        self.id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex[:16]}"
        self.prompts, self.texts = self._prompts()
        samples = body.get("n") or 1
        self.said = [
            self.language.answer(model, prompt, text, body, sample)
            if body.get("max_tokens") != 0
            else Said([], "length")
            for prompt, text in zip(self.prompts, self.texts, strict=True)
            for sample in range(samples)
        ]
        self.prompt_of = [prompt for prompt in self.prompts for _ in range(samples)]
        self.usage = {
            "prompt_tokens": sum(map(len, self.prompts)),
            "total_tokens": sum(map(len, self.prompts)) + sum(len(said.tokens) for said in self.said),
            "completion_tokens": sum(len(said.tokens) for said in self.said),
        }
        with fake.lock:
            fake.tokens["prompt"] += self.usage["prompt_tokens"]
            fake.tokens["generation"] += self.usage["completion_tokens"]

    def _prompts(self) -> tuple[list[list[int]], list[str]]:
        """Token ids of every prompt, and its text."""
        if self.chat:
            messages = self.body["messages"]
            return [self.language.encode_chat(messages)], [text_of(messages[-1]["content"])]
        prompt = self.body["prompt"]
        several = (
            prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        )
        tokens = [self.language.encode(one) if isinstance(one, str) else list(one) for one in several]
        return tokens, [one if isinstance(one, str) else self.language.decode(one) for one in several]

    def whole(self) -> dict[str, Any]:
        choices = [self._choice(index) for index in range(len(self.said))]
        answer = {
            "id": self.id,
            "object": "chat.completion" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self.fingerprint,
            "usage": {**self.usage, "prompt_tokens_details": None, "completion_tokens_details": None},
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }
        if self.fake.faults.no_usage:
            del answer["usage"]
        if self.chat:
            answer["prompt_logprobs"] = self._prompt_logprobs(self.prompts[0])
            answer["prompt_token_ids"] = self.prompts[0] if self.body.get("return_token_ids") else None
            answer["prompt_text"] = None
        return answer

    def _choice(self, index: int) -> dict[str, Any]:
        said, prompt = self.said[index], self.prompt_of[index]
        ids = self.body.get("return_token_ids")
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["message"] = {
                "role": "assistant",
                "content": self.language.decode(said.tokens),
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
            }
            choice["logprobs"] = self._chat_logprobs(prompt, said.tokens)
        else:
            echo = self.body.get("echo")
            start = 0 if echo else len(prompt)
            shown = self.language.decode(prompt) if echo and not ids else ""
            choice["text"] = shown + self.language.decode(said.tokens)
            choice["logprobs"] = self._logprobs([*prompt, *said.tokens], start)
        choice |= {"finish_reason": said.finish_reason, "stop_reason": None}
        choice["token_ids"] = said.tokens if ids else None
        if not self.chat:
            choice["prompt_logprobs"] = self._prompt_logprobs(prompt)
            choice["prompt_token_ids"] = prompt if ids else None
        return choice | {"routed_experts": None}

    def events(self) -> list[dict[str, Any]]:
        """Every event of a stream: one for a token, and before them, in a chat, one for the role."""
        common = {
            "id": self.id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
        }
        ids = self.body.get("return_token_ids")
        usage = (self.body.get("stream_options") or {}).get("include_usage") and not self.fake.faults.no_usage
        out: list[dict[str, Any]] = []
        for index, said in enumerate(self.said):
            prompt = self.prompt_of[index]
            if self.chat:
                delta = {"role": "assistant", "content": ""}
                choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
                first = {"prompt_token_ids": prompt if ids else None, "prompt_text": None}
                out.append({**common, "choices": [choice], **first})
            offset = 0
            for number in range(len(said.tokens)):
                choice = self._delta(index, number)
                if choice["logprobs"] and not self.chat:
                    choice["logprobs"]["text_offset"] = [offset]
                    offset += len(choice["logprobs"]["tokens"][0])
                event = {**common, "choices": [choice]}
                if choice["finish_reason"] and not usage:
                    event["system_fingerprint"] = self.fingerprint
                out.append(event)
        if usage:
            last = {"choices": [], "usage": self.usage, "system_fingerprint": self.fingerprint}
            out.append({**common, **last})
        return out

    def _delta(self, index: int, number: int) -> dict[str, Any]:
        """The choice of the event that brings one token."""
        said, prompt = self.said[index], self.prompt_of[index]
        token, wobble = said.tokens[number], self.fake.faults.wobble
        spoken = token
        if wobble is not None and number >= wobble:
            spoken = WORDS + (token + 1 - WORDS) % len(VOCABULARY)
        text = self.language.decode([spoken])
        before = [*prompt, *said.tokens[:number]]
        end = said.finish_reason if number == len(said.tokens) - 1 else None
        ids = [spoken] if self.body.get("return_token_ids") else None
        if self.chat:
            choice: dict[str, Any] = {"index": index, "delta": {"content": text}}
            choice |= {"logprobs": self._chat_logprobs(before, [token]), "finish_reason": end}
            return choice | ({"stop_reason": None} if end else {}) | {"token_ids": ids}
        choice = {"index": index, "text": text, "logprobs": self._logprobs([*before, token], len(before))}
        choice |= {"finish_reason": end, "stop_reason": None}
        choice["prompt_token_ids"] = prompt if ids and number == 0 else None
        return choice | {"token_ids": ids}

    def _name(self, token: int) -> str:
        return (
            f"token_id:{token}"
            if self.body.get("return_tokens_as_token_ids")
            else self.language.decode([token])
        )

    def _logprobs(self, tokens: Sequence[int], start: int) -> dict[str, Any] | None:
        """Of a completion, for the tokens from `start` on; None for the first of all."""
        count = self.body.get("logprobs")
        if count is None:
            return None
        names, own, tops, offsets, offset = [], [], [], [], 0
        for place in range(start, len(tokens)):
            token, name = tokens[place], self._name(tokens[place])
            names.append(name)
            offsets.append(offset)
            offset += len(name)
            if place == 0:
                own.append(None)
                tops.append(None)
                continue
            logprob = self.language.logprob(self.model, tokens[:place], token)
            ranked = self.language.predict(self.model, tokens[:place])[:count]
            own.append(logprob)
            tops.append({name: logprob, **{self._name(other): value for other, value in ranked}})
        return {"text_offset": offsets, "token_logprobs": own, "tokens": names, "top_logprobs": tops}

    def _chat_logprobs(self, prompt: Sequence[int], said: Sequence[int]) -> dict[str, Any] | None:
        if not self.body.get("logprobs"):
            return None
        content = []
        for number, token in enumerate(said):
            before = [*prompt, *said[:number]]
            ranked = self.language.predict(self.model, before)[: self.body.get("top_logprobs") or 0]
            content.append(
                {
                    **self._chat_logprob(token, self.language.logprob(self.model, before, token)),
                    "top_logprobs": [self._chat_logprob(other, value) for other, value in ranked],
                }
            )
        return {"content": content}

    def _chat_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        name = self._name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}

    def _prompt_logprobs(self, prompt: Sequence[int]) -> list[dict[str, Any] | None] | None:
        count = self.body.get("prompt_logprobs")
        if count is None and self.body.get("echo"):
            count = self.body.get("logprobs")
        if count is None:
            return None
        out: list[dict[str, Any] | None] = [None]
        for place in range(1, len(prompt)):
            own = prompt[place]
            ranked = self.language.predict(self.model, prompt[:place])
            ranks = {token: (value, rank) for rank, (token, value) in enumerate(ranked, 1)}
            shown = dict.fromkeys([own, *(token for token, _ in ranked[:count])])
            last = self.language.logprob(self.model, prompt[:place], own), 100
            out.append({str(token): self._prompt_logprob(token, *ranks.get(token, last)) for token in shown})
        return out

    def _prompt_logprob(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": logprob, "rank": rank, "decoded_token": self.language.decode([token])}


def main() -> None:
    parser = argparse.ArgumentParser(description="A stand-in for vLLM's server.")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--key")
    arguments = parser.parse_args()
    with FakeVllm(arguments.models, key=arguments.key, host=arguments.host, port=arguments.port) as server:
        print(server.url, flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
