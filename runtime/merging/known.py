"""The hashes of a base's weights, where something beside them knows them, and their check in passing.

Four things know the sha256 of a safetensors file: Hugging Face's cache and its downloads into a folder (the
hub names large files by it), a SHA256SUMS, and the record of a merge that made the base. The check costs no
reading of its own: the merge passes on what it reads anyway.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import UNREADABLE, Spoiled, UserError
from ..interrupts import held
from ..weights.contradictions import AGAIN

SUMS = "SHA256SUMS"
RECORD = "merge.json"
DOWNLOADS = Path(".cache", "huggingface", "download")
"""Where huggingface_hub keeps FILE.metadata in a folder that it downloaded into: commit, etag, time."""
DIGEST = re.compile(r"[0-9a-f]{64}")
GNU_LINE = re.compile(r"(\\?)([0-9a-fA-F]{64}) [ *](.+)")
BSD_LINE = re.compile(r"SHA256 \((.+)\) = ([0-9a-fA-F]{64})")
LINKS = 8
"""Symbolic links that are followed from a file to the blob of a cache."""

PIECE = 1 << 25
"""Bytes that are hashed at a time; between two pieces, hashing can be called off."""
AHEAD = 8
"""Blocks that wait to be hashed before `feed` waits."""


class KnownHash(str):
    """A sha256 in 64 lower-case hexadecimal digits.

    Attributes:
        source: what knows it, as messages call it.
        help: how to come by the right file again.
    """

    source: str
    help: str

    def __new__(cls, digest: str, source: str = "its record", help: str = AGAIN) -> KnownHash:
        out = super().__new__(cls, digest.lower())
        out.source, out.help = source, help
        return out


def known_hashes(directory: Path) -> dict[str, str]:
    """The sha256 of a checkpoint's safetensors files by their names, of those whose sha256 is known.

    Raises:
        UserError: when what should know them is damaged, or two that do contradict each other.
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
                    f"{directory / name}: {found[0].source} and {other.source} know it by different hashes",
                    "one of them is of another file: remove that one, or download the checkpoint again",
                )
        if found:
            out[name] = found[0]
    return out


def _cached(path: Path) -> KnownHash | None:
    """Of a file in Hugging Face's cache, snapshots/REVISION/FILE, a link to blobs/ETAG.

    An etag of 64 digits is a large file's sha256; those of 40 are git's ids of small files. A blob may itself
    be a link to a store that all repositories share, in which files are named by another hash of 64 digits:
    so links are followed one by one, and the first blob counts.
    """
    link = path
    for _ in range(LINKS):
        try:
            link = link.parent / os.readlink(link)
        except OSError:
            return None  # a file, or nothing
        if link.parent.name == "blobs" and DIGEST.fullmatch(link.name):
            return KnownHash(
                link.name,
                "Hugging Face's cache",
                f"remove {os.path.realpath(link)}, and the next run downloads it again",
            )
    return None


def _downloaded(directory: Path, name: str) -> KnownHash | None:
    """Of a file that huggingface_hub downloaded into the folder.

    Counted even when the file is newer than its download: copying a folder makes it so as well.
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
    """Of the files that a SHA256SUMS lists, as sha256sum writes it."""
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
                f"copy the file again; without a {SUMS} the weights are taken as they are",
            )
        name = name.removeprefix("./")
        known = KnownHash(digest, SUMS)
        if out.setdefault(name, known) != known:
            raise UserError(f"{path}:{number}: a second hash of {name}", "copy the file again")
    return out


def _record(directory: Path) -> dict[str, KnownHash]:
    """Of the files that a merge wrote into the folder, by its record."""
    path = directory / RECORD
    if not path.is_file():
        return {}
    try:
        record = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})", AGAIN) from error
    if not isinstance(record, dict) or "merge" not in record:
        return {}  # another program's, or of a version that recorded no hashes
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


@dataclass(frozen=True)
class _Block:
    """Bytes of a file, or its end, and whom to tell."""

    file: str
    data: memoryview | None = None
    done: Callable[[], object] | None = None


class BaseSums:
    """Holds the files of a base against their known hashes, on a thread of its own, while they are read.

    Files of unknown hash cost nothing. Hashing lets go of Python's lock; `feed` waits where it falls behind.

    Args:
        known: sha256 by file name, of `known_hashes`.
        name: of the base, as messages call it.
    """

    def __init__(self, known: Mapping[str, str], name: str) -> None:
        self._known = dict(known)
        self._name = name
        self._blocks: queue.Queue[_Block | None] = queue.Queue(AHEAD)
        self._thread: threading.Thread | None = None
        self._off = threading.Event()
        self._error: BaseException | None = None
        self._fed: dict[str, int] = {}
        self._computed: dict[str, str] = {}

    def feed(self, file: str, data: memoryview | bytes, done: Callable[[], object] | None = None) -> None:
        """Takes the next bytes of a file: all of it has to come, its header included, in order.

        Args:
            data: stays as it is until it is hashed.
            done: called after that, on the thread: what is mapped from a file takes up memory from being
                hashed on, even if it was released before.

        Raises:
            UserError: when a file that was finished before is not the one that its hash names.
        """
        if file not in self._known:
            return
        view = memoryview(data).cast("B")
        self._fed[file] = self._fed.get(file, 0) + len(view)
        self._put(_Block(file, view, done))

    def finish_file(self, file: str, size: int | None = None) -> None:
        """Says that all of a file was fed; the comparison is made when the thread comes to it.

        Args:
            size: of the file, to make sure of it.

        Raises:
            UserError: as `feed`.
        """
        if file not in self._known:
            return
        fed = self._fed.pop(file, 0)
        if size is not None and fed != size:
            raise AssertionError(f"{file}: {fed} of {size} bytes were fed")
        self._put(_Block(file))

    def close(self) -> dict[str, str]:
        """Waits for the thread; gives the sha256 of the files that were finished.

        Raises:
            UserError: as `feed`.
        """
        self._end()
        self._raise()
        return dict(self._computed)

    def abandon(self) -> None:
        """Stops without a verdict, when the merge fails for another reason."""
        with held():
            self._off.set()
        self._end()

    def _end(self) -> None:
        """Waits for the thread."""
        with held():
            if self._thread is not None:
                self._blocks.put(None)
                self._thread.join()
                self._thread = None

    def _put(self, block: _Block) -> None:
        self._raise()
        with held():
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="base-sums", daemon=True)
                self._thread.start()
            self._blocks.put(block)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """Until None comes; after an error, blocks are taken and dropped, so that nobody waits for ever."""
        digests: dict[str, hashlib._Hash] = {}
        while (block := self._blocks.get()) is not None:
            if self._error is not None or self._off.is_set():
                continue
            try:
                self._take(digests, block)
                if block.done is not None:
                    block.done()
            except BaseException as error:  # it is raised where the caller hears it
                self._error = error

    def _take(self, digests: dict[str, hashlib._Hash], block: _Block) -> None:
        digest = digests.setdefault(block.file, hashlib.sha256())
        if block.data is not None:
            for piece in _pieces(block.data):
                if self._off.is_set():
                    return
                digest.update(piece)
            return
        del digests[block.file]
        found, expected = digest.hexdigest(), self._known[block.file]
        if found != expected:
            raise mismatch(f"{self._name}/{block.file}", expected, found)
        self._computed[block.file] = found


def mismatch(path: str, expected: str, found: str) -> Spoiled:
    """The error of a base file whose content is not what its hash says."""
    known = expected if isinstance(expected, KnownHash) else KnownHash(expected)
    return Spoiled(
        f"{path}: is not the file that its hash names: {known.source} says {known[:12]}..., "
        f"its content has {found[:12]}...",
        known.help,
    )


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
