"""Fixtures with a bucket for each test, on a local server that fails on request."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from recipec.runtime.stores import BREAKS_UPLOADS
from tests.remote.gcs import Gcs, serving


@dataclass
class Bucket:
    """An empty bucket.

    Attributes:
        server: the server with the bucket.
        name: the bucket's name.
        waits: the seconds that gcsfs would have waited between its tries; here it does not wait.
    """

    server: Gcs
    name: str
    waits: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"gs://{self.name}"

    def put(self, name: str, data: bytes | str) -> None:
        self.server.put(self.name, name, data.encode() if isinstance(data, str) else data)

    def read(self, name: str) -> bytes:
        return self.server.buckets[self.name][name].data

    def names(self, prefix: str = "") -> list[str]:
        return self.server.names(self.name, prefix)


@pytest.fixture(scope="module")
def gcs() -> Iterator[Gcs]:
    """Start the server, and direct the clients in this process to it."""
    if sys.version_info[:3] in BREAKS_UPLOADS:
        pytest.skip("this Python crashes while gcsfs writes to a bucket: cpython's issue 111211")
    import fsspec
    from fsspec.config import conf

    with serving() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        patch.setitem(conf, "gs", {"token": "anon"})
        fsspec.get_filesystem_class("gs").clear_instance_cache()
        yield server
        fsspec.get_filesystem_class("gs").clear_instance_cache()


@pytest.fixture
def bucket(gcs: Gcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    bucket = Bucket(gcs, f"bucket-{len(gcs.buckets)}")
    gcs.buckets[bucket.name] = {}

    async def wait(seconds: float) -> None:
        bucket.waits.append(seconds)

    monkeypatch.setattr("gcsfs.retry.asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": wait}))
    yield bucket
    gcs.faults.clear()
    gcs.page = 1000
