"""Compare a base's weights with the hashes that the hub names them by, while a merge runs.

Hugging Face's cache names a large file's blob by its sha256, and a download into a folder notes it. Otherwise
a file that a disk or a copy has changed becomes part of the merged weights without a word.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ..errors import Spoiled
from ..weights.checkpoint import HFCheckpoint

DOWNLOADS = Path(".cache", "huggingface", "download")
"""Where huggingface_hub keeps FILE.metadata in a folder that it downloaded into: commit, etag, time."""
DIGEST = re.compile(r"[0-9a-f]{64}")
LINKS = 8
"""The most symbolic links that are followed from a file to the blob of a cache."""
PIECE = 1 << 25
"""Bytes that are hashed at a time; hashing can be stopped between two pieces."""


def known_hash(path: Path) -> str | None:
    """Return the sha256 that the hub gives a file, None if it is not known.

    In a cache, snapshots/REVISION/FILE links to blobs/ETAG, which may itself link to a store of other names:
    the first blob counts. An etag of 64 digits is a sha256; one of 40 digits is git's id of a small file.
    """
    link = path
    for _ in range(LINKS):
        try:
            link = link.parent / os.readlink(link)
        except OSError:
            break  # a regular file, or no file
        if link.parent.name == "blobs" and DIGEST.fullmatch(link.name):
            return link.name
    try:
        lines = (path.parent / DOWNLOADS / f"{path.name}.metadata").read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return None
    etag = lines[1].strip() if len(lines) > 1 else ""
    return etag if DIGEST.fullmatch(etag) else None


@contextmanager
def compared(base: HFCheckpoint) -> Iterator[None]:
    """Hash the base's files on a thread while the block runs.

    Raises:
        Spoiled: at the end of the block, when a file does not have its known hash.
    """
    folder = base.directory
    if not isinstance(folder, Path):
        yield
        return
    known = {folder / file: digest for file in base.headers if (digest := known_hash(folder / file))}
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="hash") as pool:
        wrong = pool.submit(_first_other, known, stop)
        try:
            yield
            if path := wrong.result():
                raise Spoiled(
                    f"{base.name}/{path.name}: is not the file that the hub has, whose sha256 is "
                    f"{known[path][:12]}...",
                    f"remove {os.path.realpath(path)} and download it again",
                )
        finally:
            stop.set()


def _first_other(known: Mapping[Path, str], stop: threading.Event) -> Path | None:
    """Return the first file with another hash than its known one; None if there is none, or after `stop`."""
    for path, expected in known.items():
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(PIECE):
                if stop.is_set():
                    return None
                digest.update(piece)
        if digest.hexdigest() != expected:
            return path
    return None
