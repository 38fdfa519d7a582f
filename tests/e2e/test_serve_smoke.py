"""smoke against the real vLLM on CPU: an adapter, one that is a no-op, keys; and the fake server's JSON.

The other tests of clients trust tests/serving/fake_vllm.py, whose answers are held against the real ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from runtime.checkpoint import BaseCheckpoint
from runtime.serving import smoke
from runtime.serving.client import KEY_VARIABLE, Client, ServerError
from tests.e2e import vllm_cpu
from tests.e2e.test_vllm import make_gemma4, merged_in_float32
from tests.runtime.runs import lora_section, save_run
from tests.serving.fake_vllm import FakeVllm

pytestmark = pytest.mark.e2e

KEY = "sesame-4711"

VERSION = "0.32.0"


@dataclass(frozen=True)
class Served:
    """A server of "base" and its adapters, "tuned" and "untrained", that asks for a key."""

    url: str
    merged: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("smoke")
    make_gemma4(folder / "base")
    opened = BaseCheckpoint.open(folder / "base")
    adapters = {}
    for name, scale in (("tuned", 0.1), ("untrained", 0.0)):
        save_run(folder / name, opened, lora_section(), scale=scale)
        merged, adapters[name] = merged_in_float32(
            folder / "base", "gemma4", folder / name, folder / f"out-{name}"
        )
    with vllm_cpu.serve(folder / "base", "smoke", "--api-key", KEY, adapters=adapters) as server:
        yield Served(server.url, merged)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY)


def run(served: Served, model: str, *arguments: str) -> int:
    options = ["--url", served.url, "--model", model, "--base", "base", "--vllm", VERSION, "--api-key"]
    return smoke.main([*options, *arguments])


def test_an_adapter(served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(served, "tuned", "--json", str(tmp_path / "smoke.json"), "--must-differ", "Who are you?")
    output = capfd.readouterr().out
    print(output)
    assert status == 0
    assert "answers to 1 of 1 prompt, " in output and "API key               " in output and KEY not in output
    record = json.loads((tmp_path / "smoke.json").read_text("utf-8"))
    assert {check["state"] for check in record["checks"]} == {"ok"}
    assert record["figures"]["logprob_distance"] > 0.01
    assert 0 < record["figures"]["ttft_seconds"] < 60 and record["figures"]["tokens_per_second"] > 0.1


def test_an_adapter_that_is_a_no_op(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(served, "untrained", "--text") == 1
    output = capfd.readouterr().out
    print(output)
    assert "the adapter is a no-op: untrained answers as base does, with the same log probabilities" in output
    assert "1 of 9 checks FAILED" in output


def test_the_key_is_demanded(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "tahini")
    assert run(served, "tuned") == 1
    assert "the server has another key than VLLM_API_KEY" in capfd.readouterr().out


IDS = [2, 30, 31, 32]
CHAT = {"messages": [{"role": "user", "content": "What is the sea?"}], "max_tokens": 4, "temperature": 0}
TEXT = {"prompt": IDS, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
TOKENS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
USAGE = {"stream_options": {"include_usage": True}}

REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "models": ("/v1/models", None),
    "version": ("/version", None),
    "chat": ("/v1/chat/completions", CHAT),
    "chat with ids and logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    ),
    "chat with the prompt's logprobs": ("/v1/chat/completions", {**CHAT, "prompt_logprobs": 0}),
    "chat stream": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat stream with usage and ids": (
        "/v1/chat/completions",
        {**CHAT, **USAGE, "return_token_ids": True, "stream": True},
    ),
    "completion": ("/v1/completions", TEXT),
    "completion with ids and logprobs": ("/v1/completions", {**TEXT, **TOKENS, "logprobs": 2}),
    "completion with the prompt's logprobs": ("/v1/completions", {**TEXT, "prompt_logprobs": 0}),
    "completion that echoes": ("/v1/completions", {**TEXT, **TOKENS, "logprobs": 1, "echo": True}),
    "completions of two texts": ("/v1/completions", {**TEXT, "prompt": ["one", "two"]}),
    "completion stream": ("/v1/completions", {**TEXT, **TOKENS, **USAGE, "logprobs": 1, "stream": True}),
    "tokens": ("/tokenize", {"prompt": "The sea"}),
    "tokens of a chat": ("/tokenize", {"messages": CHAT["messages"]}),
    "text of tokens": ("/detokenize", {"tokens": IDS}),
    "no such model": ("/v1/chat/completions", {**CHAT, "model": "nobody"}),
    "too long": ("/v1/completions", {**TEXT, "prompt": [30] * 300}),
    "no such path": ("/v1/nothing", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_fakes_json_is_that_of_the_real_one(served: Served, name: str) -> None:
    path, body = REQUESTS[name]
    with FakeVllm(["tuned", "untrained", "base"], key=KEY, max_model_len=256) as fake:
        answers = [answer(url, path, body) for url in (served.url, fake.url)]
    assert same(*answers), f"{json.dumps(answers[0])}\n{json.dumps(answers[1])}"


def answer(url: str, path: str, body: dict[str, Any] | None) -> Any:
    """What a server answers: JSON, the last events of a stream with its first one, or an error."""
    client = Client(url)
    try:
        if path == "/v1/models":
            return sorted(client.get(path)["data"], key=lambda card: card["id"])
        if body is None:
            return client.get(path)
        body = {"model": "tuned", **body}
        if not body.get("stream"):
            return client.post(path, body)
        events = list(client.stream(path, body))
        return [events[:2], events[-1:]]
    except ServerError as error:
        return [
            error.kind,
            error.status,
            re.sub(r"(?s)\. (Please|Valid).*", "", error.message).replace(url, "URL"),
        ]


def same(real: Any, fake: Any) -> bool:
    """Whether two pieces of JSON have the same keys, and values of the same kinds.

    Lists are compared as far as the shorter one goes. Of permissions, which are OpenAI's, the fake has a few.
    """
    if isinstance(real, dict) and isinstance(fake, dict):
        if all(re.fullmatch(r"(token_id:)?\d+", key) for key in (*real, *fake)):
            return same(list(real.values()), list(fake.values()))
        if real.get("object") == "model_permission":
            return fake.keys() <= real.keys()
        return real.keys() == fake.keys() and all(same(real[key], fake[key]) for key in real)
    if isinstance(real, list) and isinstance(fake, list):
        # Of the prompt's tokens the first has no log probability.
        real, fake = ([item for item in items if item is not None] for items in (real, fake))
        if all(isinstance(item, int) for item in (*real, *fake)):
            # Tokens and bytes; a token that is part of a character has none.
            return True
        return bool(real) == bool(fake) and all(same(a, b) for a, b in zip(real, fake, strict=False))
    if isinstance(real, str) and isinstance(fake, str) and " " in real and "URL" in real:
        return real == fake
    if real is None or fake is None:
        return real is fake
    return isinstance(fake, float) if isinstance(real, float) else type(real) is type(fake)
