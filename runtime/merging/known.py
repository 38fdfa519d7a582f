"""Check a base's weights against hashes from other sources while the weights are read.

Four sources give the sha256 of a safetensors file: Hugging Face's cache and its downloads into a folder (the
hub names large files by it), a SHA256SUMS, and the record of a merge that made the base. The check needs no
extra reading: the merge passes on the bytes that it reads anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import UNREADABLE, Spoiled, UserError
from ..interrupts import held
from ..weights.contradictions import AGAIN
from .behind import Behind

SUMS = "SHA256SUMS"
RECORD = "merge.json"
DOWNLOADS = Path(".cache", "huggingface", "download")
"""Where huggingface_hub keeps FILE.metadata in a folder that it downloaded into: commit, etag, time."""
DIGEST = re.compile(r"[0-9a-f]{64}")
GNU_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
BSD_LINE = re.compile(r"SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
LINKS = 8
"""The most symbolic links that are followed from a file to the blob of a cache."""

PIECE = 1 << 25
"""Bytes that are hashed at a time; hashing can be stopped between two pieces."""
AHEAD = 8
"""Number of blocks in the queue before `feed` waits."""


class KnownHash(str):
    """A sha256 in 64 lower-case hexadecimal digits.

    Attributes:
        source: where the hash comes from, for messages.
        help: how to get the right file again.
    """

    source: str
    help: str

    def __new__(cls, digest: str, source: str = "its record", help: str = AGAIN) -> KnownHash:
        out = super().__new__(cls, digest.lower())
        out.source, out.help = source, help
        return out


def known_hashes(directory: Path) -> dict[str, str]:
    """Return the known sha256 of a checkpoint's safetensors files, by their names.

    Raises:
        UserError: when a source of hashes is damaged, or two sources contradict each other.
    """
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    sums, record = _sums(directory), _record(directory)
    out: dict[str, str] = {}
    for name in names:
        found = [
            known
            for known in (
                _cached(directory / name),
                _downloaded(directory, name),
                sums.get(name),
                record.get(name),
            )
            if known is not None
        ]
        for other in found[1:]:
            if other != found[0]:
                raise UserError(
                    f"{directory / name}: {found[0].source} and {other.source} give different hashes for it",
                    "one of them belongs to another file: remove that one, or download the checkpoint again",
                )
        if found:
            out[name] = found[0]
    return out


def _cached(path: Path) -> KnownHash | None:
    """Return the hash of a file in Hugging Face's cache: snapshots/REVISION/FILE links to blobs/ETAG.

    An etag of 64 digits is a large file's sha256; an etag of 40 digits is git's id of a small file. A blob
    may itself link to a store that all repositories share. Its files are named by another hash of 64 digits.
    So links are followed one by one, and the first blob counts.
    """
    link = path
    for _ in range(LINKS):
        try:
            link = link.parent / os.readlink(link)
        except OSError:
            return None  # a regular file, or no file
        if link.parent.name == "blobs" and DIGEST.fullmatch(link.name):
            return KnownHash(
                link.name,
                "Hugging Face's cache",
                f"remove {os.path.realpath(link)}, and the next run downloads it again",
            )
    return None


def _downloaded(directory: Path, name: str) -> KnownHash | None:
    """Return the hash of a file that huggingface_hub downloaded into the folder.

    It counts even if the file is newer than its download, because copying a folder also makes it newer.
    """
    metadata = directory / DOWNLOADS / f"{name}.metadata"
    try:
        lines = metadata.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    etag = lines[1].strip() if len(lines) > 1 else ""
    if not DIGEST.fullmatch(etag):
        return None
    return KnownHash(
        etag,
        f"{DOWNLOADS.as_posix()}/{metadata.name}",
        "remove it and download it again; if it was changed on purpose, remove that .metadata file",
    )


def _sums(directory: Path) -> dict[str, KnownHash]:
    """Return the hashes of the files in a SHA256SUMS, in sha256sum's format."""
    path = directory / SUMS
    if not path.is_file():
        return {}
    out: dict[str, KnownHash] = {}
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        if gnu := GNU_LINE.fullmatch(line):
            digest, name = gnu[2], gnu[3]
            if gnu[1]:
                name = name.replace("\\n", "\n").replace("\\\\", "\\")
        elif bsd := BSD_LINE.fullmatch(line):
            digest, name = bsd[2], bsd[1]
        else:
            raise UserError(
                f"{path}:{number}: not a line of sha256sum",
                f"copy the file again; without a {SUMS} the weights are not checked",
            )
        name = name.removeprefix("./")
        known = KnownHash(digest, SUMS)
        if out.setdefault(name, known) != known:
            raise UserError(f"{path}:{number}: a second hash of {name}", "copy the file again")
    return out


def _record(directory: Path) -> dict[str, KnownHash]:
    """Return the hashes of the files that a merge wrote into the folder, from its record."""
    path = directory / RECORD
    if not path.is_file():
        return {}
    try:
        record = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})", AGAIN) from error
    if not isinstance(record, dict) or "merge" not in record:
        return {}  # another program's record, or of a version without hashes
    try:
        return {name: _recorded(entry["sha256"]) for name, entry in record["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its list of files is damaged", AGAIN) from error


def _recorded(digest: str) -> KnownHash:
    if not DIGEST.fullmatch(digest):
        raise ValueError(digest)
    return KnownHash(digest, RECORD)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", UNREADABLE) from error
    except ValueError as error:
        raise UserError(f"{path}: not text", AGAIN) from error


class BaseSums:
    """Compare a base's files with their known hashes on a separate thread, while they are read.

    Files without a known hash cost nothing. Hashing releases Python's lock; `feed` waits if it falls behind.

    Args:
        known: sha256 by file name, from `known_hashes`.
        name: the base's name in messages.
    """

    def __init__(self, known: Mapping[str, str], name: str) -> None:
        self._known = dict(known)
        self._name = name
        self._behind = Behind(self._take, AHEAD)
        self._off = threading.Event()
        self._fed: dict[str, int] = {}
        self._digests: dict[str, hashlib._Hash] = {}
        self._computed: dict[str, str] = {}

    def feed(self, file: str, data: memoryview | bytes, done: Callable[[], object] | None = None) -> None:
        """Take the next bytes of a file. All of the file has to come in order, including its header.

        Args:
            data: must not change until it is hashed.
            done: called after that, on the thread: hashing maps a file's pages into memory
                again, even if they were released before.

        Raises:
            UserError: when an earlier finished file does not match its hash.
        """
        if file not in self._known:
            return
        view = memoryview(data).cast("B")
        self._fed[file] = self._fed.get(file, 0) + len(view)
        self._behind.put((file, view, done))

    def finish_file(self, file: str, size: int | None = None) -> None:
        """Record that all of a file was fed; the thread compares the hash later.

        Args:
            size: the file's size, as a check.

        Raises:
            UserError: as `feed`.
        """
        if file not in self._known:
            return
        fed = self._fed.pop(file, 0)
        if size is not None and fed != size:
            raise AssertionError(f"{file}: {fed} of {size} bytes were fed")
        self._behind.put((file, None, None))

    def close(self) -> dict[str, str]:
        """Wait for the thread; return the sha256 of the finished files.

        Raises:
            UserError: as `feed`.
        """
        self._behind.close()
        self._behind.check()
        return dict(self._computed)

    def abandon(self) -> None:
        """Stop without a result, when the merge fails for another reason."""
        with held():
            self._off.set()
        self._behind.close()

    def _take(self, item: tuple[str, memoryview | None, Callable[[], object] | None]) -> None:
        """Hash bytes of a file, or compare its hash at its end."""
        file, data, done = item
        digest = self._digests.setdefault(file, hashlib.sha256())
        if data is not None:
            for start in range(0, len(data), PIECE):
                if self._off.is_set():
                    return
                digest.update(data[start : start + PIECE])
            if done is not None:
                done()
        elif not self._off.is_set():
            known, found = self._known[file], digest.hexdigest()
            if found != known:
                known = known if isinstance(known, KnownHash) else KnownHash(known)
                raise Spoiled(
                    f"{self._name}/{file}: is not the file that its hash names: {known.source} says "
                    f"{known[:12]}..., its content has {found[:12]}...",
                    known.help,
                )
            self._computed[file] = found
