"""Tests of the folder that a merge writes: files are complete or absent, and errors say what to do."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from recipec.runtime.errors import UserError
from recipec.runtime.merging.folder import LocalFolder, OutputFolder, RemoteFolder, output_folder, stale
from tests.refusals import refusal


class Bucket(MemoryFileSystem):
    """A fake object store: a closed file appears whole, and folders are never created.

    Attributes:
        broken: the exception of the next part of an upload.
        discarded: paths of aborted uploads.
    """

    broken: Exception | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(global_store=False, **options)
        self.discarded: list[str] = []

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise AssertionError("would make a bucket")

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode)
        return Upload(self, path, mode, block_size=4)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        super()._open(path, "wb", data=value)


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        if self.fs.broken is not None:
            raise self.fs.broken
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.pipe_file(self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        self.fs.discarded.append(self.path)


@pytest.fixture(params=["file://", "memory://", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OutputFolder]:
    """Return a folder that does not exist yet, two levels below one that may exist."""
    if request.param == "bucket":
        yield RemoteFolder("s3://bucket/a/b", Bucket(skip_instance_cache=True), "bucket/a/b")
        return
    if request.param == "memory://":
        yield output_folder(f"memory://{tmp_path.name}/a/b/")
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)
        return
    local = output_folder(f"file://{tmp_path}/a/b")
    assert isinstance(local, LocalFolder)
    yield local


def test_folder_reads_back_written_files(folder: OutputFolder) -> None:
    with folder.locked():
        assert folder.names() == [] and folder.size("x") is None
        with folder.create("below/large.bin") as file:
            for part in (b"one, ", memoryview(b"two, "), b"three"):
                file.write(part)
        folder.write("small.json", b"{}")
        folder.write("small.json", b"{1}")
    assert folder.names() == ["below/large.bin", "small.json"]
    assert folder.read("below/large.bin") == b"one, two, three" and folder.read("small.json") == b"{1}"
    assert folder.size("below/large.bin") == 15 and folder.size("below") in (None, folder.size("below"))
    assert folder.sha256("below/large.bin") == hashlib.sha256(b"one, two, three").hexdigest()
    with pytest.raises(FileNotFoundError):
        folder.read("absent")
    folder.remove("small.json")
    folder.remove("small.json")
    assert folder.names() == ["below/large.bin"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, UserError])
def test_failed_write_leaves_no_file(folder: OutputFolder, kind: type[BaseException]) -> None:
    folder.write("other", b"kept")
    with pytest.raises(kind), folder.create("new") as file:
        file.write(b"a part of it")
        raise kind("enough")
    assert folder.names() == ["other"]


def test_failed_overwrite_keeps_old_file(folder: OutputFolder) -> None:
    folder.write("file", b"first")
    with pytest.raises(ValueError, match="enough"), folder.create("file") as file:
        file.write(b"second, and longer")
        raise ValueError("enough")
    assert folder.read("file") == b"first"


def test_file_appears_only_when_complete(folder: OutputFolder) -> None:
    with folder.create("new") as file:
        file.write(b"a part of it")
        assert folder.size("new") is None
        assert stale(folder.names()) == folder.names()
    assert folder.names() == ["new"]


def test_broken_bucket_upload_raises_oserror_and_leaves_no_file() -> None:
    bucket = Bucket(skip_instance_cache=True)
    folder = RemoteFolder("gs://bucket/out", bucket, "bucket/out")

    def write() -> None:
        with folder.create("shard") as file:
            file.write(b"the first part")
            bucket.broken = RuntimeError("503 Service Unavailable")
            file.write(b"the second part")

    with pytest.raises(OSError, match="RuntimeError: 503"):
        write()
    bucket.broken = None
    assert folder.names() == [] and bucket.discarded == ["/bucket/out/shard"]


def test_bucket_refusing_last_part_gives_error_with_help() -> None:
    bucket = Bucket(skip_instance_cache=True)
    folder = RemoteFolder("gs://bucket/out", bucket, "bucket/out")

    def write() -> None:
        with folder.create("shard") as file:
            bucket.broken = PermissionError("403: Forbidden")
            file.write(b"x")

    error = refusal(write)
    assert "gs://bucket/out cannot be opened: 403" in error.message and "may write it" in str(error.help)
    assert folder.names() == []


def test_stale_lists_only_partial_files_of_killed_process() -> None:
    names = [".env", ".model.safetensors.partial", "a.partial", "below/.x.partial", "model.safetensors"]
    assert stale(names) == [".model.safetensors.partial", "below/.x.partial"]


def test_folder_is_written_without_flock_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with LocalFolder(tmp_path / "out").locked():
        LocalFolder(tmp_path / "out").write("x", b"")


@contextlib.contextmanager
def without_rights() -> Iterator[None]:
    """Drop root's rights, if this process has them."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def readable() -> Iterator[Path]:
    """Make a folder that everyone may read and only root may write."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "there").write_bytes(b"kept")
        folder.chmod(0o555)
        yield folder
        folder.chmod(0o755)


def test_read_only_folder_gives_one_sentence_error(readable: Path) -> None:
    with without_rights():
        for action in (
            lambda: LocalFolder(readable / "new").locked().__enter__(),
            lambda: LocalFolder(readable).write("journal", b""),
            lambda: LocalFolder(readable).create("shard").__enter__(),
            lambda: LocalFolder(readable).remove("there"),
        ):
            error = refusal(action)
            assert "cannot be written: Permission denied" in error.message
            assert str(readable) in error.message and "--output" in str(error.help)
    assert LocalFolder(readable).names() == ["there"]


def test_unwritable_output_addresses_are_refused_with_help(no_buckets: None) -> None:
    assert refusal(lambda: output_folder("gs://bucket/out")).help == "pip install gcsfs"
    assert refusal(lambda: output_folder("s3://bucket/out")).help == "pip install s3fs"
    assert "nowhere" in refusal(lambda: output_folder("nowhere://bucket/out")).message
    archive = output_folder("data://out")
    error = refusal(lambda: archive.write("x", b""))
    assert "data://out: cannot be written" in error.message and error.help


def test_several_files_are_written_at_once(folder: OutputFolder) -> None:
    def write(number: int) -> None:
        with folder.create(f"{number}") as file:
            barrier.wait()
            file.write(bytes([number]) * 10)

    barrier = threading.Barrier(4)
    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [folder.read(str(number)) for number in range(4)] == [bytes([n]) * 10 for n in range(4)]
