"""Tests of the folder that a merge writes: files are complete or absent, and errors say what to do."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from recipec.runtime.errors import UserError
from recipec.runtime.merging.job import output_folder
from recipec.runtime.merging.output_folder import OutputFolder, RemoteFolder, stale
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


@pytest.fixture(params=["file://", "bucket"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> OutputFolder:
    """Return a folder that does not exist yet, two levels below one that may exist."""
    if request.param == "bucket":
        return RemoteFolder("s3://bucket/a/b", Bucket(skip_instance_cache=True), "bucket/a/b")
    return output_folder(f"file://{tmp_path}/a/b")


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
def test_failed_write_leaves_no_file_and_keeps_an_old_one(
    folder: OutputFolder, kind: type[BaseException]
) -> None:
    folder.write("old", b"kept")
    for name in ("old", "new"):
        with pytest.raises(kind), folder.create(name) as file:
            file.write(b"a part of it")
            raise kind("enough")
    assert folder.names() == ["old"] and folder.read("old") == b"kept"


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


def test_folder_is_written_without_flock_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with OutputFolder(tmp_path / "out").locked():
        OutputFolder(tmp_path / "out").write("x", b"")


def test_read_only_folder_gives_one_sentence_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse at each system call, because root may write anywhere."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for name in ("open", "unlink", "mkdir"):
        monkeypatch.setattr(Path, name, refuse)
    for action in (
        lambda: OutputFolder(tmp_path / "new").locked().__enter__(),
        lambda: OutputFolder(tmp_path).write("journal", b""),
        lambda: OutputFolder(tmp_path).create("shard").__enter__(),
        lambda: OutputFolder(tmp_path).remove("there"),
    ):
        error = refusal(action)
        assert "cannot be written: Permission denied" in error.message
        assert str(tmp_path) in error.message and "--output" in str(error.help)


def test_unwritable_output_addresses_are_refused_with_help(no_buckets: None) -> None:
    assert refusal(lambda: output_folder("gs://bucket/out")).help == "pip install gcsfs"
    assert refusal(lambda: output_folder("s3://bucket/out")).help == "pip install s3fs"
    assert "nowhere" in refusal(lambda: output_folder("nowhere://bucket/out")).message
    archive = output_folder("data://out")
    error = refusal(lambda: archive.write("x", b""))
    assert "data://out: cannot be written" in error.message and error.help
