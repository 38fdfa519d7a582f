"""The client: answers, and one sentence for each way of not getting one."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.errors import UserError
from runtime.serving.client import (
    BROKEN,
    GARBAGE,
    KEY_VARIABLE,
    NO_HOST,
    REFUSED,
    SILENT,
    STATUS,
    Client,
    ServerError,
    pick,
)
from tests.serving.fake_vllm import FakeVllm, Faults

Start = Callable[..., FakeVllm]

CHAT = {
    "model": "tuned",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 12,
    "temperature": 0,
}


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def failing(client: Client, call: Callable[[Client], Any]) -> tuple[str, str | None, str, int | None]:
    """What a call's ServerError says, with the server's address as URL."""
    with pytest.raises(ServerError) as caught:
        call(client)
    error = caught.value
    return error.message.replace(client.url, "URL"), error.help, error.kind, error.status


def stream(client: Client) -> list[dict[str, Any]]:
    return list(client.stream("/v1/chat/completions", CHAT))


def test_answers(fake: Start) -> None:
    server = fake(["tuned", "tuned-base"])
    client = Client(server.url)
    assert client.healthy()
    assert client.models() == ["tuned", "tuned-base"]
    assert client.version() == "0.32.0"
    assert 'vllm:num_requests_running{engine="0",model_name="tuned-base"} 0.0' in client.text("/metrics")
    answer = client.post("/v1/chat/completions", CHAT)
    text = answer["choices"][0]["message"]["content"]
    deltas = [event["choices"][0]["delta"].get("content") for event in stream(client)]
    assert len(deltas) > 3 and "".join(deltas) == text
    assert server.bodies("/v1/chat/completions")[1]["stream"] is True
    assert client.post("/tokenize", {"prompt": "hé"})["count"] == 4


FAULTS: dict[str, tuple[Faults, Callable[[Client], Any], tuple[str, str | None, str, int | None]]] = {
    "an error in vLLM's words": (
        Faults(fail={"/v1/models": 500}),
        Client.models,
        (
            "URL/v1/models answers 500 Internal Server Error: EngineCore encountered an issue.",
            "look at the server's log",
            STATUS,
            500,
        ),
    ),
    "a proxy's page": (
        Faults(html_errors={"/v1/models"}),
        Client.models,
        (
            "URL/v1/models answers 502 Bad Gateway: 502 Bad Gateway nginx",
            "look at the server's log",
            STATUS,
            502,
        ),
    ),
    "a page in place of JSON": (
        Faults(html={"/v1/models"}),
        Client.models,
        (
            "URL/v1/models answers with something that is not JSON: "
            "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>",
            "is this vLLM's address?",
            GARBAGE,
            None,
        ),
    ),
    "a page in place of a stream": (
        Faults(html={"/v1/chat/completions"}),
        stream,
        (
            "URL/v1/chat/completions answers with text/html in place of a stream of events: "
            "<!DOCTYPE html><html><body><h1>Welcome</h1></body></html>",
            "is this vLLM's address?",
            GARBAGE,
            None,
        ),
    ),
    "JSON of another shape": (
        Faults(shape={"/v1/models": {"data": [{"name": "x"}]}}),
        Client.models,
        ("/v1/models answers without a proper `id`", "is this vLLM's address?", GARBAGE, None),
    ),
    "a list of models that is none": (
        Faults(shape={"/v1/models": [1]}),
        Client.models,
        ("/v1/models answers without a proper `data`", "is this vLLM's address?", GARBAGE, None),
    ),
    "no HTTP": (
        Faults(nonsense={"/v1/models"}),
        Client.models,
        ("what listens at URL does not speak HTTP", None, GARBAGE, None),
    ),
    "an answer that ends in its middle": (
        Faults(half={"/v1/models"}),
        Client.models,
        (
            "the connection to URL/v1/models ended before the answer: a part of it came",
            "the server may have died: look at its log",
            BROKEN,
            None,
        ),
    ),
    "a redirect": (
        Faults(redirect={"/v1/models": "http://elsewhere/"}),
        Client.models,
        (
            "URL/v1/models answers 307 Temporary Redirect: it points to http://elsewhere/",
            "give the address that the server itself has; redirects are not followed",
            STATUS,
            307,
        ),
    ),
    "a stream that is cut": (
        Faults(cut_stream=3),
        stream,
        (
            "the stream of URL/v1/chat/completions ended after 3 events without [DONE]",
            "the server stopped in mid-answer: look at its log",
            BROKEN,
            None,
        ),
    ),
    "a stream without its end": (
        Faults(no_done=True),
        stream,
        (
            "the stream of URL/v1/chat/completions ended after 10 events without [DONE]",
            "the server stopped in mid-answer: look at its log",
            BROKEN,
            None,
        ),
    ),
    "a stream that reports an error": (
        Faults(fail_stream=2),
        stream,
        (
            "URL/v1/chat/completions failed in mid-answer: EngineCore encountered an issue.",
            "look at the server's log",
            BROKEN,
            None,
        ),
    ),
    "a server that dies in the middle": (
        Faults(die_after=0),
        stream,
        (
            "the stream of URL/v1/chat/completions ended after 2 events without [DONE]",
            "the server stopped in mid-answer: look at its log",
            BROKEN,
            None,
        ),
    ),
    "a server that dies before its answer": (
        Faults(die_after=0),
        lambda client: client.post("/v1/chat/completions", CHAT),
        (
            "the connection to URL/v1/chat/completions ended before the answer: the server closed the "
            "connection",
            "the server may have died: look at its log",
            BROKEN,
            None,
        ),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_in_one_sentence(name: str, fake: Start) -> None:
    faults, call, said = FAULTS[name]
    client = Client(fake(faults=faults).url)
    if name == "a stream without its end":
        said = (said[0].replace("10", str(len(stream(Client(fake().url))))), *said[1:])
    assert failing(client, call) == said


def test_an_unknown_model(fake: Start) -> None:
    client = Client(fake().url)
    said = failing(client, lambda c: c.post("/v1/chat/completions", {**CHAT, "model": "nobody"}))
    assert said[0].endswith("answers 404 Not Found: The model `nobody` does not exist. Valid aliases: tuned.")


def test_nothing_listens() -> None:
    client = Client(f"http://127.0.0.1:{closed_port()}")
    said = ("nothing listens at URL", "start the server, or wait until it has loaded", REFUSED, None)
    assert failing(client, Client.models) == said
    assert not client.healthy()


def test_an_unknown_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*arguments: Any, **keywords: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    said = failing(Client("http://no-such-host.invalid:8000"), Client.models)
    assert said == ("no host is called no-such-host.invalid", None, NO_HOST, None)


def test_a_silent_server(fake: Start) -> None:
    client = Client(fake(faults=Faults(pause=1.0)).url, timeout=0.1)
    assert failing(client, Client.models) == ("URL/v1/models gave no answer within 0.1 s", None, SILENT, None)


def test_tls_where_there_is_none(fake: Start) -> None:
    client = Client(fake().url.replace("http:", "https:"))
    message, _, kind, _ = failing(client, Client.models)
    assert message.startswith("no TLS connection to URL: ") and kind == GARBAGE


@pytest.fixture
def raw() -> Iterator[Callable[[bytes], str]]:
    """A server that gives the same bytes to whoever connects."""
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


def test_a_stream_with_comments_and_other_fields(raw: Callable[[bytes], str]) -> None:
    """Kept alive by comments (vLLM's --sse-keep-alive-interval), with lines that end as on Windows."""
    url = raw(EVENTS + b': keep-alive\n\nevent: x\r\ndata: {"a": 1}\r\n\r\ndata:{"a": 2}\n\ndata: [DONE]\n\n')
    assert list(Client(url).stream("/v1/completions", {})) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (b"data: {oh\n\n", "something that is not JSON: {oh"),
        (b"data: 7\n\n", "an event that is no object: 7"),
        (b"data: \xff\n\n", "something that is not JSON: \N{REPLACEMENT CHARACTER}"),
    ],
)
def test_events_that_are_none(event: bytes, words: str, raw: Callable[[bytes], str]) -> None:
    with pytest.raises(ServerError) as caught:
        list(Client(raw(EVENTS + event)).stream("/v1/completions", {}))
    assert caught.value.message.endswith(f"/v1/completions answers with {words}")


def test_what_a_server_says_cannot_move_the_cursor(raw: Callable[[bytes], str]) -> None:
    body = b"\x1b[2J\x07gone\r\nrewritten" + b"x" * 500
    answer = b"HTTP/1.1 500 Oh\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with pytest.raises(ServerError) as caught:
        Client(raw(answer)).models()
    said = caught.value.message.partition(": ")[2]
    assert said.isprintable() and "\x1b" not in said
    assert len(said) < 300 and said.endswith("...")


def test_deep_json_is_no_traceback(raw: Callable[[bytes], str]) -> None:
    body = b"[" * 200_000
    url = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(ServerError, match="something that is not JSON"):
        Client(url).models()


def test_the_key_goes_along(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake(key="sesame")
    said = failing(Client(server.url), Client.models)
    help = f"export {KEY_VARIABLE} with the server's key"
    assert said == ("URL/v1/models answers 401 Unauthorized: Unauthorized", help, STATUS, 401)
    said = failing(Client(server.url, "other"), Client.models)
    assert said[1] == f"the server has another key than {KEY_VARIABLE}"
    monkeypatch.setenv(KEY_VARIABLE, "sesame")
    client = Client(server.url)
    assert client.has_key and client.models() == ["tuned"]
    assert client.within(1).models() == ["tuned"]
    assert failing(client.without_key(), Client.models)[3] == 401


def test_the_key_is_not_printed(fake: Start) -> None:
    """Some servers repeat in an error what they were sent."""
    client = Client(fake(faults=Faults(fail={"/v1/models": 500}, repeat_key=True)).url, "sesame")
    message = failing(client, Client.models)[0]
    assert message.endswith("EngineCore encountered an issue to Bearer ***.")


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_keys_that_no_header_carries(key: str) -> None:
    with pytest.raises(UserError) as caught:
        Client("http://127.0.0.1:8000", key)
    assert KEY_VARIABLE in caught.value.message and key not in caught.value.message


def test_proxies_get_nothing(fake: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key and the prompts are for the server alone."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port()}")
    assert Client(fake().url).models() == ["tuned"]


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
def test_addresses(given: str, url: str) -> None:
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
def test_addresses_that_are_none(given: str) -> None:
    with pytest.raises(UserError) as caught:
        Client(given)
    assert caught.value.message == f"{given!r} is not the address of a server"
    assert caught.value.help == "write it as http://HOST:PORT"


def test_an_address_with_a_password() -> None:
    with pytest.raises(UserError) as caught:
        Client("http://me:sesame@tpu:8000")
    assert "sesame" not in caught.value.message and KEY_VARIABLE in (caught.value.help or "")


def test_a_path_before_the_api(raw: Callable[[bytes], str]) -> None:
    body = json.dumps({"data": [{"id": "tuned"}]}).encode()
    url = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert Client(f"{url}/models/one").models() == ["tuned"]


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


def test_a_server_that_tells_no_version(raw: Callable[[bytes], str]) -> None:
    url = raw(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
    assert Client(url).version() is None


def test_pick() -> None:
    value = {"choices": [{"text": "a"}], "empty": []}
    assert pick(value, "it", "choices", 0, "text", kind=str) == "a"
    for path, name in (
        (("choices", 1), "choices[1]"),
        (("choices", "text"), "choices.text"),
        (("empty", 0), "empty[0]"),
        (("choices", 0, "text"), "choices[0].text"),
    ):
        with pytest.raises(ServerError) as caught:
            pick(value, "it", *path, kind=int)
        assert caught.value.message == f"it answers without a proper `{name}`"
