"""Tests of the client on servers that answer with any bytes: it returns an answer or an error."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from recipec.runtime.serving.client import Client, ServerError, pick


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


def test_deeply_nested_json_gives_one_sentence_error(raw: Callable[[bytes], str]) -> None:
    body = b"[" * 200_000
    url = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    with pytest.raises(ServerError, match="something that is not JSON"):
        Client(url).cards()


def test_url_path_prefix_is_kept(raw: Callable[[bytes], str]) -> None:
    body = json.dumps({"data": [{"id": "tuned"}]}).encode()
    url = raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    assert Client(f"{url}/models/one").cards().keys() == {"tuned"}


def test_missing_version_route_returns_none(raw: Callable[[bytes], str]) -> None:
    url = raw(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
    assert Client(url).version() is None


def test_answer_field_of_the_wrong_type_is_named_in_the_error() -> None:
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
