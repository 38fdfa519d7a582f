"""Tests of the client: its answers, and one sentence for each way to fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.serving.client import (
    BROKEN,
    GARBAGE,
    KEY_VARIABLE,
    NO_HOST,
    REFUSED,
    SILENT,
    STATUS,
    Client,
    ServerError,
)
from tests.ports import free_port
from tests.serving.fake_faults import Faults
from tests.serving.fake_vllm import Start

CHAT = {
    "model": "tuned",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 12,
    "temperature": 0,
}


def failing(client: Client, call: Callable[[Client], Any]) -> tuple[str, str | None, str | int]:
    """Return a call's error, with URL for the server's address: message, help, and HTTP status or kind."""
    with pytest.raises(ServerError) as caught:
        call(client)
    error = caught.value
    assert (error.kind == STATUS) is (error.status is not None)
    return error.message.replace(client.url, "URL"), error.help, error.status or error.kind


def stream(client: Client) -> list[dict[str, Any]]:
    return list(client.stream("/v1/chat/completions", CHAT))


def test_client_reads_answers_streams_models_and_metrics(fake: Start) -> None:
    server = fake(["tuned", "tuned-base"])
    client = Client(server.url)
    assert client.healthy()
    assert list(client.cards()) == ["tuned", "tuned-base"]
    assert client.version() == "0.32.0"
    assert 'vllm:num_requests_running{engine="0",model_name="tuned-base"} 0.0' in client.text("/metrics")
    answer = client.post("/v1/chat/completions", CHAT)
    text = answer["choices"][0]["message"]["content"]
    deltas = [event["choices"][0]["delta"].get("content") for event in stream(client)]
    assert len(deltas) > 3 and "".join(deltas) == text
    assert server.bodies("/v1/chat/completions")[1]["stream"] is True


FAULTS: dict[str, tuple[Faults, Callable[[Client], Any], str, str | None, str | int]] = {
    "an error in vLLM's words": (
        Faults(fail={"/v1/models": 500}),
        Client.cards,
        "URL/v1/models answers 500 Internal Server Error: EngineCore encountered an issue.",
        "look at the server's log",
        500,
    ),
    "a proxy's page": (
        Faults(html_errors={"/v1/models"}),
        Client.cards,
        "URL/v1/models answers 502 Bad Gateway: 502 Bad Gateway nginx",
        "look at the server's log",
        502,
    ),
    "a page in place of JSON": (
        Faults(html={"/v1/models"}),
        Client.cards,
        "URL/v1/models answers with something that is not JSON: "
        "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>",
        "check that this is vLLM's address",
        GARBAGE,
    ),
    "a page in place of a stream": (
        Faults(html={"/v1/chat/completions"}),
        stream,
        "URL/v1/chat/completions answers with text/html in place of a stream of events: "
        "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>",
        "check that this is vLLM's address",
        GARBAGE,
    ),
    "JSON of another shape": (
        Faults(shape={"/v1/models": {"data": [{"name": "x"}]}}),
        Client.cards,
        "/v1/models answers without a proper `id`",
        "check that this is vLLM's address",
        GARBAGE,
    ),
    "a list of models that is none": (
        Faults(shape={"/v1/models": [1]}),
        Client.cards,
        "/v1/models answers without a proper `data`",
        "check that this is vLLM's address",
        GARBAGE,
    ),
    "no HTTP": (
        Faults(nonsense={"/v1/models"}),
        Client.cards,
        "what listens at URL does not speak HTTP",
        None,
        GARBAGE,
    ),
    "an answer that ends in its middle": (
        Faults(half={"/v1/models"}),
        Client.cards,
        "the connection to URL/v1/models ended before the answer: a part of it came",
        "the server may have died: look at its log",
        BROKEN,
    ),
    "a redirect": (
        Faults(redirect={"/v1/models": "http://elsewhere/"}),
        Client.cards,
        "URL/v1/models answers 307 Temporary Redirect: it points to http://elsewhere/",
        "give the address that the server itself has; redirects are not followed",
        307,
    ),
    "a stream that is cut": (
        Faults(cut_stream=3),
        stream,
        "the stream of URL/v1/chat/completions ended after 3 events without [DONE]",
        "the server stopped in mid-answer: look at its log",
        BROKEN,
    ),
    "a stream without its end": (
        Faults(no_done=True),
        stream,
        "the stream of URL/v1/chat/completions ended after 10 events without [DONE]",
        "the server stopped in mid-answer: look at its log",
        BROKEN,
    ),
    "a stream that reports an error": (
        Faults(fail_stream=2),
        stream,
        "URL/v1/chat/completions failed in mid-answer: EngineCore encountered an issue.",
        "look at the server's log",
        BROKEN,
    ),
    "a server that dies in the middle": (
        Faults(die_after=0),
        stream,
        "the stream of URL/v1/chat/completions ended after 2 events without [DONE]",
        "the server stopped in mid-answer: look at its log",
        BROKEN,
    ),
    "a server that dies before its answer": (
        Faults(die_after=0),
        lambda client: client.post("/v1/chat/completions", CHAT),
        "the connection to URL/v1/chat/completions ended before the answer: the server closed the connection",
        "the server may have died: look at its log",
        BROKEN,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_server_fault_gives_a_one_sentence_error(name: str, fake: Start) -> None:
    faults, call, message, *said = FAULTS[name]
    if name == "a stream without its end":
        message = message.replace("10", str(len(stream(Client(fake().url)))))
    assert failing(Client(fake(faults=faults).url), call) == (message, *said)


def test_unknown_model_error_repeats_the_server_message(fake: Start) -> None:
    client = Client(fake().url)
    said = failing(client, lambda c: c.post("/v1/chat/completions", {**CHAT, "model": "nobody"}))
    assert said[0].endswith("answers 404 Not Found: The model `nobody` does not exist. Valid aliases: tuned.")


def test_closed_port_gives_one_sentence_error() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    said = ("nothing listens at URL", "start the server, or wait until it has loaded", REFUSED)
    assert failing(client, Client.cards) == said
    assert not client.healthy()


def test_unknown_host_gives_one_sentence_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*arguments: Any, **keywords: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    said = failing(Client("http://no-such-host.invalid:8000"), Client.cards)
    assert said == ("no host is called no-such-host.invalid", None, NO_HOST)


@pytest.mark.parametrize("host", ["a..b", f"{'a' * 64}.example"])
def test_host_name_that_no_host_can_have_gives_one_sentence_error(host: str) -> None:
    said = failing(Client(f"http://{host}:8000"), Client.cards)
    assert said == (f"no host is called {host}", None, NO_HOST)


def test_silent_server_gives_a_timeout_error(fake: Start) -> None:
    client = Client(fake(faults=Faults(pause=1.0)).url, timeout=0.1)
    assert failing(client, Client.cards) == ("URL/v1/models gave no answer within 0.1 s", None, SILENT)


def test_https_url_of_a_plain_http_server_gives_one_sentence_error(fake: Start) -> None:
    client = Client(fake().url.replace("http:", "https:"))
    message, _, kind = failing(client, Client.cards)
    assert message.startswith("no TLS connection to URL: ") and kind == GARBAGE


def test_client_sends_the_api_key_and_explains_401(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake(key="sesame")
    said = failing(Client(server.url), Client.cards)
    help = f"export {KEY_VARIABLE} with the server's key"
    assert said == ("URL/v1/models answers 401 Unauthorized: Unauthorized", help, 401)
    help = f"the server has another key than {KEY_VARIABLE}"
    assert failing(Client(server.url, "other"), Client.cards) == (said[0], help, 401)
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    client = Client(server.url)
    assert client.has_key and client.cards().keys() == {"tuned"}
    assert client.within(1).cards().keys() == {"tuned"}
    assert failing(client.with_key(""), Client.cards)[2] == 401


def test_api_key_in_a_server_error_is_hidden(fake: Start) -> None:
    """Hide the key, which some servers repeat in an error."""
    client = Client(fake(faults=Faults(fail={"/v1/models": 500}, repeat_key=True)).url, "sesame")
    message = failing(client, Client.cards)[0]
    assert message.endswith("EngineCore encountered an issue to Bearer ***.")


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_api_key_invalid_in_a_header_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(UserError) as caught:
        Client("http://127.0.0.1:8000", key)
    assert KEY_VARIABLE in caught.value.message and key not in caught.value.message


def test_client_ignores_proxy_environment_variables(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send the key and the prompts only to the server, and not to a proxy."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    assert Client(fake().url).cards().keys() == {"tuned"}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://tpu/", "http://tpu:80"),
        ("http://tpu:8000/v1/", "http://tpu:8000"),
        ("https://tpu/models/one/v1", "https://tpu:443/models/one"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_server_urls_are_normalized(given: str, url: str) -> None:
    assert Client(given).url == url
    assert Client(Client(given).url).url == url


@pytest.mark.parametrize(
    "given",
    [
        "",
        "tpu:8000",
        "ftp://tpu",
        "http://",
        "http://tpu:0x1",
        "http://tpu:99999",
        "http://a b",
        "http://tpu/?x=1",
    ],
)
def test_invalid_server_urls_are_refused(given: str) -> None:
    with pytest.raises(UserError) as caught:
        Client(given)
    assert caught.value.message == f"{given!r} is not the address of a server"
    assert caught.value.help == "write it as http://HOST:PORT"


def test_url_with_a_password_is_refused_and_the_password_not_shown() -> None:
    with pytest.raises(UserError) as caught:
        Client("http://me:sesame@tpu:8000")
    assert "sesame" not in caught.value.message and KEY_VARIABLE in (caught.value.help or "")


def test_threads_share_a_client(fake: Start) -> None:
    server = fake(faults=Faults(token_seconds=0.001))
    client = Client(server.url)
    counts: list[int] = []

    def work() -> None:
        counts.extend(len(stream(client)) for _ in range(5))

    threads = [threading.Thread(target=work) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 80 and len(set(counts)) == 1
