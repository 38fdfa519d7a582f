"""A stand-in for the vLLM server of a run: its adapters, and completions of tokens that are drawn uniformly.

The answers have the form of vLLM 0.32's, which tests/e2e/test_vllm_rollouts.py sees in the real server.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class StandIn:
    """What the server does, and what it was asked. A test may change it while it runs.

    Attributes:
        vocabulary: the number of tokens that are drawn.
        logp: the log-probability of each of them that is reported; None for the true one.
        model: the served model's name and root.
        max_model_len: in tokens.
        runtime_adapters: whether adapters may be loaded while it runs.
        lora: whether it takes adapters.
        max_rank: of an adapter.
        processed: whether reported log-probabilities count the temperature.
        sees: whether it sees the folders of adapters.
        faults: called before each answer to completions, with its number; it may return a status, or -1 to
            break the connection.
        port: 0 before the first start; later the same one.
        adapters: folders of the loaded adapters by name.
        loaded: names of all adapters that were loaded, in order, with the arrays' file.
        bodies: the bodies of completions that were asked for, without those of the check.
    """

    vocabulary: int = 500
    logp: float | None = None
    model: str = "recipec/tiny-gemma4"
    max_model_len: int = 4096
    runtime_adapters: bool = True
    lora: bool = True
    max_rank: int = 64
    processed: bool = True
    sees: bool = True
    faults: Callable[[int], int | None] = lambda number: None
    port: int = 0
    adapters: dict[str, str] = field(default_factory=dict)
    loaded: dict[str, bytes] = field(default_factory=dict)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    _server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, without any adapter."""
        self.adapters.clear()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(*stand_in.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*stand_in.post(self.path, body))

            def _send(self, status: int, answer: Any) -> None:
                if status < 0:
                    self.close_connection = True
                    return
                data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> StandIn:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/health":
            return 200, ""
        base = {"id": self.model, "root": self.model, "parent": None, "max_model_len": self.max_model_len}
        adapters = [{"id": name, "root": root, "parent": "base"} for name, root in self.adapters.items()]
        return 200, {"data": [base, *adapters]}

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if path == "/v1/completions":
            return self._completions(body)
        if not self.runtime_adapters:
            return 404, {"detail": "Not Found"}
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            return (200, "Success") if self.adapters.pop(name, None) else (404, _error("cannot be found"))
        if not self.lora:
            return 500, _error("Call to add_lora method failed: LoRA is not enabled.")
        folder = Path(body["lora_path"])
        if not self.sees or not (folder / "adapter_model.safetensors").is_file():
            return 404, _error(f"Loading lora {name} failed: No adapter found for {folder}")
        rank = json.loads((folder / "adapter_config.json").read_text())["r"]
        if rank > self.max_rank:
            return 500, _error(f"LoRA rank {rank} is greater than max_lora_rank {self.max_rank}.")
        self.adapters[name] = str(folder)
        self.loaded[name] = (folder / "adapter_model.safetensors").read_bytes()
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def _completions(self, body: Mapping[str, Any]) -> tuple[int, Any]:
        if body.get("logprobs") == 1:  # the check of log-probabilities
            divisor = body["temperature"] if self.processed else 1.0
            return 200, {"choices": [{"logprobs": {"top_logprobs": [{"a": -2.0 / divisor}]}}]}
        self.bodies.append(dict(body))
        status = self.faults(len(self.bodies))
        if status is not None:
            return status, _error("the engine is dead")
        if body["model"] not in self.adapters:
            return 404, _error(f"The model `{body['model']}` does not exist.")
        return 200, {"choices": [self._choice(body, number) for number in reversed(range(body["n"]))]}

    def _choice(self, body: Mapping[str, Any], number: int) -> dict[str, Any]:
        tokens: list[int] = []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
            tokens.append(random.SystemRandom().randrange(self.vocabulary))
        ended = tokens[-1] in body["stop_token_ids"]
        logp = -math.log(self.vocabulary) if self.logp is None else self.logp
        return {
            "index": number,
            "token_ids": tokens,
            "finish_reason": "stop" if ended else "length",
            "logprobs": {"token_logprobs": [logp] * len(tokens)} if "logprobs" in body else None,
        }


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}
