"""A registry on this machine with small images, whose programs print a line, and wait or end."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import random
import ssl
import struct
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"

LINE = b"ValueError: no TPU\n"
STATUS = 7

BASE = 0x400000
HEADERS = 64 + 56
CODE = 48
"""Bytes of a program's instructions, after which its text lies."""


def program(status: int, waits: bool) -> bytes:
    """Return an ELF program for x86-64 that writes LINE to its standard error.

    Args:
        status: with which it ends.
        waits: whether it first waits for a signal.
    """
    code = b"".join(
        [
            b"\xbf" + struct.pack("<I", 2),  # mov edi, 2
            b"\xbe" + struct.pack("<I", BASE + HEADERS + CODE),  # mov esi, LINE
            b"\xba" + struct.pack("<I", len(LINE)),  # mov edx, its length
            b"\xb8\x01\x00\x00\x00\x0f\x05",  # mov eax, write; syscall
            b"\xb8\x22\x00\x00\x00\x0f\x05" if waits else b"",  # mov eax, pause; syscall
            b"\xbf" + struct.pack("<I", status),  # mov edi, status
            b"\xb8\x3c\x00\x00\x00\x0f\x05",  # mov eax, exit; syscall
        ]
    )
    text = code.ljust(CODE, b"\x90") + LINE
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, BASE + HEADERS, 64, 0, 0, 64, 56, 1, 64, 0, 0)
    size = HEADERS + len(text)
    return head + struct.pack("<IIQQQQQQ", 1, 5, 0, BASE, BASE, size, size, 0x1000) + text


@dataclass
class Registry:
    """What the registry serves.

    Attributes:
        address: "127.0.0.1:PORT".
        blobs: by digest.
        manifests: media type and bytes, by tag and by digest.
    """

    address: str
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def publish(self, tag: str, seed: int, size: int = 3_000_000, healthy: bool = False) -> str:
        """Publish an image for linux/amd64 under an index, and return the index's digest.

        Args:
            seed: of the bytes that fill the image, so that another seed gives another digest.
            size: how many bytes they are.
            healthy: whether its server runs and passes its health check. Otherwise it ends with STATUS.
        """
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            for name, data, mode in (
                ("usr/bin/vllm", program(STATUS, waits=healthy), 0o755),
                ("usr/bin/python3", program(0, waits=False), 0o755),
                ("filling", random.Random(seed).randbytes(size), 0o644),
            ):
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), mode
                tar.addfile(info, io.BytesIO(data))
        layer = gzip.compress(archive.getvalue(), 1, mtime=0)
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [digest(archive.getvalue())]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": self._blob(CONFIG, json.dumps(config).encode()),
            "layers": [self._blob(LAYER, layer)],
        }
        inner = json.dumps(manifest).encode()
        self.manifests[digest(inner)] = (MANIFEST, inner)
        platform = {"os": "linux", "architecture": "amd64"}
        described = {"mediaType": MANIFEST, "digest": digest(inner), "size": len(inner), "platform": platform}
        index = json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [described]}).encode()
        self.manifests[tag] = self.manifests[digest(index)] = (INDEX, index)
        return digest(index)

    def _blob(self, kind: str, data: bytes) -> dict[str, Any]:
        self.blobs[digest(data)] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return the status, the media type and the body."""
        if path == "/v2/":
            return 200, "application/json", b"{}"
        kind, reference = path.split("/")[-2:]
        if kind == "manifests" and reference in self.manifests:
            return 200, *self.manifests[reference]
        if kind == "blobs" and reference in self.blobs:
            return 200, "application/octet-stream", self.blobs[reference]
        errors = [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]
        return 404, "application/json", json.dumps({"errors": errors}).encode()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


@contextmanager
def registry() -> Iterator[Registry]:
    """Run a registry until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            status, kind, body = running.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", digest(body))
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = respond

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with tempfile.TemporaryDirectory() as folder:
        # The engine would do without TLS, `docker manifest inspect` does not.
        key, certificate = f"{folder}/key.pem", f"{folder}/certificate.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        command += ["-nodes", "-subj", "/CN=127.0.0.1", "-keyout", key, "-out", certificate]
        subprocess.run(command, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    running = Registry(f"127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield running
    finally:
        server.shutdown()
        server.server_close()
