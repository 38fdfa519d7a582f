"""Tests of the client: its answers, and one sentence for each way to fail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from recipec.runtime.clients.client import (
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
from recipec.runtime.errors import UserError
from tests.clients.fake_vllm import Faults, Start
from tests.ports import free_port

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


def test_closed_port_gives_one_sentence_error() -> None:
    client = Client(f"http://127.0.0.1:{free_port()}")
    said = ("nothing listens at URL", "start the server, or wait until it has loaded", REFUSED)
    assert failing(client, Client.cards) == said
    assert not client.healthy()


def test_unknown_host_gives_one_sentence_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = failing(Client("http://a..b:8000"), Client.cards)
    assert said == ("no host is called a..b", None, NO_HOST)

    def nobody(*arguments: Any, **keywords: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    said = failing(Client("http://no-such-host.invalid:8000"), Client.cards)
    assert said == ("no host is called no-such-host.invalid", None, NO_HOST)


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


@pytest.mark.parametrize("key", ["line\nbreak", "schlüssel"])
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
    "given", ["tpu:8000", "ftp://tpu", "http://tpu:99999", "http://a b", "http://tpu/?x=1"]
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


@pytest.fixture
def raw() -> Iterator[Callable[[bytes], str]]:
    """Return a function that starts a server, which sends the same bytes to every client."""
    sockets = []

    def start(data: bytes) -> str:
        listening = socket.create_server(("127.0.0.1", 0))
        sockets.append(listening)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(data)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listening.getsockname()[1]}"

    yield start
    for listening in sockets:
        listening.close()


EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


def test_a_stream_with_comments_and_other_fields_is_read(raw: Callable[[bytes], str]) -> None:
    """Read a stream with keep-alive comments (vLLM's --sse-keep-alive-interval) and Windows line ends."""
    url = raw(EVENTS + b': keep-alive\n\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:{"a": 2}\n\ndata: [DONE]\n\n')
    assert list(Client(url).stream("/v1/completions", {})) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (b"data: {oh\n\n", "something that is not JSON: {oh"),
        (b"data: 7\n\n", "an event that is not an object: 7"),
        (b"data: \xff\n\n", "something that is not JSON: \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_malformed_stream_events_give_one_sentence_error(
    event: bytes, words: str, raw: Callable[[bytes], str]
) -> None:
    with pytest.raises(ServerError) as caught:
        list(Client(raw(EVENTS + event)).stream("/v1/completions", {}))
    assert caught.value.message.endswith(f"/v1/completions answers with {words}")


def test_control_characters_in_server_errors_are_removed(raw: Callable[[bytes], str]) -> None:
    body = b"\x1b[2J\x07gone\r\nrewritten" + b"x" * 500
    answer = b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(ServerError) as caught:
        Client(raw(answer)).cards()
    said = caught.value.message.partition(": ")[2]
    assert said.isprintable() and "\x1b" not in said
    assert len(said) < 300 and said.endswith("...")
