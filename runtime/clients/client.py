"""A client for OpenAI-compatible servers that describes each faulty answer in one sentence."""

from __future__ import annotations

import argparse
import http.client
import importlib
import json
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import UserError

KEY_VARIABLE = "VLLM_API_KEY"
"""The environment variable that holds the API key; vLLM's server reads the same one."""

TIMEOUT = 120.0
"""A request fails after this many seconds without a byte from the server."""

LONGEST = 2**31 // 1000
"""The longest timeout of a socket, in seconds."""

REFUSED, NO_HOST, SILENT, BROKEN, STATUS, GARBAGE = (
    "refused",
    "no host",
    "silent",
    "broken",
    "status",
    "garbage",
)
"""Kinds of ServerError: nothing listens; the host is unknown; no answer in time; the connection broke during
the answer; the HTTP status is not 200; the answer does not have the expected form."""


class ServerError(UserError):
    """A request that got no usable answer.

    Attributes:
        kind: one of the kinds above.
        status: the HTTP status; None when there was none.
    """

    def __init__(
        self, message: str, help: str | None = None, *, kind: str, status: int | None = None
    ) -> None:
        super().__init__(message, help)
        self.kind = kind
        self.status = status


class Client:
    """A server's address and key. Each request opens its own connection, so threads may share a client.

    It follows no redirects and uses no proxy, so that the key goes only to the given address.

    Args:
        url: such as "http://127.0.0.1:8000"; a path before "/v1" is kept.
        api_key: None means the environment's VLLM_API_KEY; "" sends none.
        timeout: a request fails after this many seconds without a byte.

    Raises:
        UserError: the address or the key is malformed.

    Attributes:
        local: whether the model is in this process instead of a server.
    """

    local = False

    def __init__(self, url: str, api_key: str | None = None, timeout: float = TIMEOUT) -> None:
        self._secure, self._host, self._port, self._prefix = _parts(url)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.url = f"{'https' if self._secure else 'http'}://{host}:{self._port}{self._prefix}"
        self.timeout = timeout
        key = os.environ.get(KEY_VARIABLE, "") if api_key is None else api_key
        if not re.fullmatch(r"[\x21-\x7e]*", key):
            raise UserError(
                f"the key in {KEY_VARIABLE} holds a space, a line break or another character that an "
                "HTTP header cannot hold",
                f"export {KEY_VARIABLE} with the server's key",
            )
        self._key = key

    @property
    def about(self) -> str:
        """Return what answers, in words."""
        return self.url

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def with_key(self, key: str) -> Client:
        """Return a client for the same server with another key; "" sends none."""
        return Client(self.url, key, self.timeout)

    def within(self, timeout: float) -> Client:
        """Return a client for the same server with another `timeout`, in seconds."""
        return Client(self.url, self._key, timeout)

    def get(self, path: str) -> Any:
        """Return the JSON at `path`."""
        return self._json(path, self._body(path, None))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post `body` and return the JSON that answers it."""
        return self._json(path, self._body(path, body))

    def send(self, path: str, body: Mapping[str, Any]) -> str:
        """Post `body` and return the text that answers it."""
        return self._body(path, body).decode("utf-8", "replace")

    def text(self, path: str) -> str:
        """Return the text at `path`, for example of /metrics."""
        return self._body(path, None).decode("utf-8", "replace")

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Post `body`, which has "stream": true, and yield each event as soon as it arrives.

        The request is sent when the first event is requested. Leaving the loop early closes the connection,
        and vLLM then drops the request.

        Raises:
            ServerError: also for an event that reports an error, and for a stream without its final [DONE].
        """
        with self._answer(path, {**body, "stream": True}) as response:
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise self._garbage(path, f"{kind} in place of a stream of events", response.read(400))
            count = 0
            for line in response:
                field, _, value = line.strip().partition(b":")
                if field != b"data":
                    continue
                if value.strip() == b"[DONE]":
                    return
                event = self._json(path, value)
                if not isinstance(event, dict):
                    raise self._garbage(path, "an event that is not an object", value)
                if "error" in event:
                    message = f"{self.url}{path} failed in mid-answer: {_said(value)}"
                    raise ServerError(self._hidden(message), "look at the server's log", kind=BROKEN)
                count += 1
                yield event
            raise ServerError(
                f"the stream of {self.url}{path} ended after {count} events without [DONE]",
                "the server stopped in mid-answer: look at its log",
                kind=BROKEN,
            )

    def healthy(self) -> bool:
        """Return whether the server's engine runs, by /health."""
        try:
            self.text("/health")
        except ServerError:
            return False
        return True

    def cards(self) -> dict[str, dict[str, Any]]:
        """Return the server's entry for each model, by the served name."""
        served = pick(self.get("/v1/models"), "/v1/models", "data", kind=list)
        return {pick(model, "/v1/models", "id", kind=str): model for model in served}

    def version(self) -> str | None:
        """Return vLLM's version, or None if the server does not report it."""
        try:
            return pick(self.get("/version"), "/version", "version", kind=str)
        except ServerError as error:
            if error.status == 404:
                return None
            raise

    def _body(self, path: str, body: Mapping[str, Any] | None) -> bytes:
        with self._answer(path, body) as response:
            return response.read()

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """Open the response to one request for the length of the block; describe every fault in words."""
        where = f"{self.url}{path}"
        connection = self._connection()
        try:
            headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            if body is None:
                connection.request("GET", self._prefix + path, headers=headers)
            else:
                headers["Content-Type"] = "application/json"
                connection.request("POST", self._prefix + path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise self._refusal(path, response)
            yield response
        except ConnectionRefusedError:
            raise ServerError(
                f"nothing listens at {self.url}",
                "start the server, or wait until it has loaded",
                kind=REFUSED,
            ) from None
        except (socket.gaierror, UnicodeError):  # the second for a name that no host can have
            raise ServerError(f"no host is called {self._host}", kind=NO_HOST) from None
        except TimeoutError:
            raise ServerError(f"{where} gave no answer within {self.timeout:g} s", kind=SILENT) from None
        except http.client.BadStatusLine as error:
            if isinstance(error, http.client.RemoteDisconnected):
                raise self._broken(where, "the server closed the connection") from None
            raise ServerError(f"what listens at {self.url} does not speak HTTP", kind=GARBAGE) from None
        except ssl.SSLError as error:
            reason = error.reason or type(error).__name__
            raise ServerError(f"no TLS connection to {self.url}: {reason}", kind=GARBAGE) from None
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, http.client.IncompleteRead):
                reason = "a part of it came"
            else:
                reason = str(getattr(error, "strerror", None) or type(error).__name__)
            raise self._broken(where, reason) from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self.timeout)

    def _broken(self, where: str, reason: str) -> ServerError:
        return ServerError(
            f"the connection to {where} ended before the answer: {reason}",
            "the server may have died: look at its log",
            kind=BROKEN,
        )

    def _refusal(self, path: str, response: http.client.HTTPResponse) -> ServerError:
        status = response.status
        body = _said(response.read(20_000))
        message = f"{self.url}{path} answers {status} {response.reason}".rstrip()
        help = None
        if status == 401:
            help = (
                f"the server has another key than {KEY_VARIABLE}"
                if self._key
                else f"export {KEY_VARIABLE} with the server's key"
            )
        elif status >= 500:
            help = "look at the server's log"
        elif 300 <= status < 400:
            body = f"it points to {plain(response.headers.get('Location', 'nowhere'))}"
            help = "give the address that the server itself has; redirects are not followed"
        return ServerError(
            self._hidden(f"{message}: {body}" if body else message), help, kind=STATUS, status=status
        )

    def _json(self, path: str, data: bytes) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise self._garbage(path, "something that is not JSON", data) from None

    def _garbage(self, path: str, what: str, data: bytes) -> ServerError:
        start = plain(data[:200].decode("utf-8", "replace")) or "nothing"
        return ServerError(
            self._hidden(f"{self.url}{path} answers with {what}: {start}"),
            "check that this is vLLM's address",
            kind=GARBAGE,
        )

    def _hidden(self, text: str) -> str:
        """Remove the key from a server's text, because some servers repeat it."""
        return text.replace(self._key, "***") if self._key else text


FOLDERS = "inference.folder_client"
"""The module of the runtime that answers from a folder. It needs the packages that train; a server's clients
need none, so it is imported only for a folder."""

ADAPTER_CONFIG = "adapter_config.json"


def is_folder(address: str) -> bool:
    """Return whether an address names a folder on this machine."""
    return "://" not in address and Path(address).is_dir()


def serves_base(address: str) -> bool:
    """Return whether the base may answer next to the fine-tuned model: not in a folder of merged weights."""
    return not is_folder(address) or (Path(address) / ADAPTER_CONFIG).is_file()


def connect(
    address: str, timeout: float, key: str | None = None, name: str | None = None, base: str | None = None
) -> Client:
    """Return a client of a server's address, or one that answers from a folder of weights.

    Args:
        timeout, key: of a server, as for `Client`.
        name, base: of a folder: the names that its model, and an adapter's base, answer to.

    Raises:
        UserError: the address is neither, or the folder's model cannot be loaded.
    """
    if not is_folder(address):
        if "://" not in address:
            raise UserError(
                f"{plain(address)!r} is neither the address of a server nor a folder",
                "write the address as http://HOST:PORT, or name a folder of weights",
            )
        return Client(address, key, timeout)
    try:
        folders = importlib.import_module(f"..{FOLDERS}", __package__)
    except ImportError as error:
        raise UserError(
            f"answering from a folder needs the packages that train: {error.name} cannot be imported",
            "run this with the Python that trains, or give the address of a server",
        ) from error
    client: Client = folders.open_folder(Path(address), name, base)
    return client


def served_model(client: Client, wanted: str | None, flag: str) -> str:
    """Return the name of the served model to use in requests.

    Args:
        wanted: the expected name; None takes the only served model.
        flag: the command-line flag that sets the name.

    Raises:
        UserError: the model is not served, or `wanted` is None and several models are served.
    """
    names = list(client.cards())
    if wanted is None and len(names) == 1:
        return names[0]
    listed = ", ".join(names) or "nothing"
    if wanted is None:
        raise UserError(f"{client.url} serves {listed}: which of them is meant?", f"{flag} NAME")
    if wanted not in names:
        raise UserError(
            f"{client.url} does not serve {wanted}, but {listed}",
            f"start the recipe's server there, or give the name with {flag}",
        )
    return wanted


def positive(text: str) -> int:
    """Parse a whole number above 0 on a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def timeout_seconds(text: str) -> float:
    """Parse a timeout on a command line: how long to wait for a byte."""
    value = float(text)
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {LONGEST:,}")
    return value


def pick(value: Any, what: str, *path: str | int, kind: type[Any] | tuple[type[Any], ...] = object) -> Any:
    """Return the part of an answer at `path`.

    Args:
        what: the answer's name for a message, for example "/v1/models".
        path: keys and indices.
        kind: the type that the part must have.

    Raises:
        ServerError: the answer has no such part.
    """
    for key in path:
        present = isinstance(value, dict) and key in value
        present = present or (
            isinstance(value, list) and isinstance(key, int) and -1 <= key < len(value) != 0
        )
        if not present:
            raise _lacking(what, path)
        value = value[key]
    if not isinstance(value, kind):
        raise _lacking(what, path)
    return value


def _lacking(what: str, path: tuple[str | int, ...]) -> ServerError:
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
    part = f"without a proper `{name}`" if name else "with something of another shape"
    return ServerError(f"{what} answers {part}", "check that this is vLLM's address", kind=GARBAGE)


def _parts(url: str) -> tuple[bool, str, int, str]:
    """Return whether TLS is used, the host, the port, and the path of an address without a final "/v1"."""
    wrong = UserError(f"{plain(url)!r} is not the address of a server", "write it as http://HOST:PORT")
    if not re.fullmatch(r"https?://[\x21-\x7e]+", url):
        raise wrong
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise wrong from None
    if not host or parts.query or parts.fragment:
        raise wrong
    if parts.username is not None or parts.password is not None:
        raise UserError(
            "the server's address must not hold a user and a password",
            f"export the server's key as {KEY_VARIABLE}",
        )
    secure = parts.scheme == "https"
    path = re.sub(r"/+$", "", parts.path)
    if port is None:
        port = 443 if secure else 80
    return secure, host, port, re.sub(r"/v1$", "", path)


def _said(data: bytes) -> str:
    """Return the message in an error's body: vLLM's message, FastAPI's detail, or the words of a page."""
    text = data.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        text = re.sub(r"<(style|script)\b.*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE)
        return plain(text)
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body.get("message", body)))
        body = error.get("message", error) if isinstance(error, dict) else error
    return plain(body if isinstance(body, str) else json.dumps(body))


def plain(text: str, limit: int = 200) -> str:
    """Reduce a server's text to one printable line, without control characters."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return words if len(words) <= limit else words[: limit - 3] + "..."
