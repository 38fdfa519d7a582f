"""A fake hub on this machine: the Hugging Face hub's protocol for downloads and uploads, and its CDN.

It redirects large files to another host and port, as the hub redirects to its CDN. A file's faults are set by
its name.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OLDER = "89abcdef0123456789abcdef0123456789abcdef"
LARGE = (".safetensors", "tokenizer.json")
"""Endings of the files on the CDN."""

CUT, CUT_ONCE, WHOLE = "cut", "cut once", "whole"
"""Faults of a body: it ends before it begins, ends in its middle once, or is the whole file instead of a
part."""


@dataclass
class Repository:
    """A model of the hub.

    Attributes:
        files: contents by name.
        revisions: commits by branch or tag.
        gated: whether its files need the token.
        private: whether everything needs the token.
        faults: what goes wrong with a file.
        sizes: wrong sizes that the hub reports.
    """

    files: dict[str, bytes]
    revisions: Mapping[str, str] = field(default_factory=lambda: {"main": COMMIT, "v1": OLDER})
    gated: bool = False
    private: bool = False
    faults: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


class Refused(Exception):
    """The status and the code of a refused request."""


@dataclass
class Hub:
    """The hub's state and its requests.

    Attributes:
        requests: (server, method, path, headers) of each request.
        uploaded: contents by SHA-256.
    """

    address: str
    models: dict[str, Repository] = field(default_factory=dict)
    token: str = "hf_right"
    requests: list[tuple[str, str, str, dict[str, str]]] = field(default_factory=list)
    cut: set[str] = field(default_factory=set)
    uploaded: dict[str, bytes] = field(default_factory=dict)

    def asked(self, server: str, method: str = "GET") -> list[str]:
        """Return the paths of a server's requests."""
        return [path for where, how, path, _ in self.requests if (where, how) == (server, method)]


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback among what the client prints, if it closes its connection early."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving() -> Iterator[Hub]:
    """Run a hub at 127.0.0.1 whose CDN is "localhost": another host with another port."""
    hub = Hub("")
    servers = [_Server(("127.0.0.1", 0), _handler(hub, which)) for which in ("hub", "cdn")]
    hub.address = f"http://127.0.0.1:{servers[0].server_port}"
    hub_cdn = f"http://localhost:{servers[1].server_port}"
    for server in servers:
        server.cdn = hub_cdn  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield hub
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(hub: Hub, which: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise, each answer waits for the client's acknowledgment

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.requests.append((which, self.command, self.path, dict(self.headers)))
            path = self.path.partition("?")[0]
            if which == "cdn":
                model, name = path.strip("/").split("//")
                self._body(hub.models[model], name, {})
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self._info(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(*match.groups())
            else:
                self._refuse(404, "RepoNotFound")

        def _info(self, model: str, revision: str) -> None:
            repository = self._open(model, revision, files=False)
            if repository is None:
                return
            siblings = [
                {"rfilename": name, "size": repository.sizes.get(name, len(content))}
                for name, content in repository.files.items()
            ]
            commit = repository.revisions.get(revision, revision)
            self._tell({"id": model, "sha": commit, "siblings": siblings, "private": repository.private})

        def _tell(self, told: Mapping[str, Any]) -> None:
            self._send(200, {"Content-Type": "application/json"}, json.dumps(told).encode())

        def do_PUT(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            hub.uploaded[hashlib.sha256(content).hexdigest()] = content
            self._send(200, {}, b"")

        def do_POST(self) -> None:
            hub.requests.append((which, self.command, self.path, dict(self.headers)))
            body = self.rfile.read(int(self.headers["Content-Length"]))
            try:
                if self.headers.get("Authorization") != f"Bearer {hub.token}":
                    raise Refused(403, "")
                self._tell(self._written(body))
            except Refused as refused:
                self._refuse(*refused.args)

        def _written(self, body: bytes) -> dict[str, Any]:
            """Answer a request of an upload. A branch has the repository's files."""
            if self.path == "/api/validate-yaml":
                return {"errors": [], "warnings": []}
            if self.path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                hub.models[name] = Repository(
                    {".gitattributes": b""}, private=asked["visibility"] == "private"
                )
                return {"url": f"{hub.address}/{name}", "name": name}
            match = re.fullmatch(r"(?:/api/models)?/([^/]+/[^/.]+)(?:/|\.git/info/)([^/]+)/(.+)", self.path)
            assert match, self.path
            repository = hub.models[match[1]]
            match match[2]:
                case "branch":
                    repository.revisions = {**repository.revisions, match[3]: COMMIT}
                    return {}
                case "preupload":
                    files = json.loads(body)["files"]
                    modes = {
                        file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in files
                    }
                    told = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]
                    return {"files": told}
                case "lfs":
                    put = {"upload": {"href": f"{hub.address}/put"}}
                    return {"objects": [{**one, "actions": put} for one in json.loads(body)["objects"]]}
            assert match[2] == "commit"
            return self._committed(match[1], match[3], [json.loads(line) for line in body.splitlines()])

        def _committed(self, model: str, branch: str, lines: list[Any]) -> dict[str, Any]:
            repository = hub.models[model]
            parent = lines[0]["value"].get("parentCommit")
            if parent not in (None, repository.revisions[branch]):
                raise Refused(412, "")
            for line in lines[1:]:
                value = line["value"]
                large = line["key"] == "lfsFile"
                made = hub.uploaded[value["oid"]] if large else base64.b64decode(value["content"])
                repository.files[value["path"]] = made
            commit = hashlib.sha1(repr(lines).encode()).hexdigest()
            repository.revisions = {**repository.revisions, branch: commit}
            return {"commitUrl": f"{hub.address}/{model}/commit/{commit}", "commitOid": commit}

        def _file(self, model: str, revision: str, name: str) -> None:
            repository = self._open(model, revision, files=True)
            if repository is None:
                return
            if name not in repository.files:
                self._refuse(404, "EntryNotFound")
                return
            content = repository.files[name]
            about = {
                "X-Repo-Commit": repository.revisions.get(revision, revision),
                "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
            }
            if name.endswith(LARGE):
                about |= {
                    "X-Linked-Size": str(repository.sizes.get(name, len(content))),
                    "X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                    "Location": f"{self.server.cdn}/{model}//{name}",  # type: ignore[attr-defined]
                }
                self._send(302, about, b"")
            else:
                self._body(repository, name, about)

        def _body(self, repository: Repository, name: str, headers: dict[str, str]) -> None:
            content, fault, status = repository.files[name], repository.faults.get(name), 200
            match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if match and fault != WHOLE and content:
                first, last = int(match[1]), min(int(match[2] or len(content)), len(content) - 1)
                headers |= {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
                content, status = content[first : last + 1], 206
            once = fault == CUT_ONCE and name not in hub.cut and self.command == "GET"
            if once:
                hub.cut.add(name)
            length, sent = len(content), content
            if once or (fault == CUT and self.command == "GET"):
                sent = content[: len(content) // 2 if once else 0]
            self._send(status, {**headers, "Content-Length": str(length)}, sent)
            if len(sent) != length:
                self.close_connection = True

        def _open(self, model: str, revision: str, files: bool) -> Repository | None:
            repository = hub.models.get(model)
            known = self.headers.get("Authorization") == f"Bearer {hub.token}"
            if repository is None or (repository.private and not known):
                self._refuse(401, "RepoNotFound")
            elif files and repository.gated and not known:
                asked = "Authorization" in self.headers
                self._refuse(403 if asked else 401, "GatedRepo")
            elif revision not in {*repository.revisions, *repository.revisions.values()}:
                self._refuse(404, "RevisionNotFound")
            else:
                return repository
            return None

        def _refuse(self, status: int, code: str) -> None:
            self._send(status, {"X-Error-Code": code} if code else {}, b"{}")

        def _send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


def reached_by(hub: Hub, setting: Callable[[Any, str, Any], None], cache: str) -> None:
    """Direct huggingface_hub in this process to this hub, by the values that it reads on import.

    Args:
        setting: sets an attribute for a test.
    """
    from huggingface_hub import constants

    setting(constants, "ENDPOINT", hub.address)
    template = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    setting(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    setting(constants, "HF_HUB_OFFLINE", False)
    setting(constants, "HF_HUB_CACHE", cache)
    setting(constants, "HF_HUB_DISABLE_XET", True)
