"""Paths and addresses: what comes before "://", and what a file system's error means for the user."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError

CREDENTIALS = (
    "it needs credentials that may {} it; for gs://, `gcloud auth application-default login` or the "
    "variable GOOGLE_APPLICATION_CREDENTIALS provides them"
)

PACKAGES = {
    **{"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"},
    **{"http": "aiohttp requests", "https": "aiohttp requests"},
}
"""The package with which fsspec opens an address, by protocol."""

_REFUSED = re.compile(
    r"credential|anonymous|unauthori[sz]ed|forbidden|access denied|permission_denied|\b40[13]\b",
    re.IGNORECASE,
)

_PASSING = re.compile(
    r"\b(?:408|429|50[0-4])\b|unavailable|deadline|timed? ?out|temporar|connection|disconnected",
    re.IGNORECASE,
)

BREAKS_UPLOADS = ((3, 12, 0), (3, 12, 1))
"""Versions of Python that crash with a segmentation fault while gcsfs uploads: they may free a buffer that a
BytesIO still lends (https://github.com/python/cpython/issues/111211)."""

PIECE = 1 << 24
"""Bytes of one ranged read."""
AT_ONCE = 8
"""Number of ranged reads that a file system may run in parallel."""


def is_address(text: str | Path) -> bool:
    """Return whether a value is an address for fsspec rather than a path on this machine."""
    return "://" in str(text)


def folder_or_address(text: str) -> Path | str:
    """Parse an argument of a script: a folder, or an unchanged address."""
    return text if is_address(text) else Path(text)


def folder(text: str) -> Path:
    """Parse an argument of a script: a folder of this machine, not an address."""
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text} is an address; give a folder on this machine")
    return Path(text)


def protocol_of(address: str) -> str:
    """Return an address's protocol: "gs" for "gs://bucket/folder"."""
    return address.partition("://")[0]


def read_by_orbax(directory: str | Path) -> bool:
    """Return whether Orbax itself reads and writes checkpoints at an address.

    A bucket has no renames: a step has its final name from the beginning, and its last file marks it as
    complete (`manifest.COMMITTED`).
    """
    return protocol_of(str(directory)) == "gs"


def check_uploads(*addresses: str | Path | None) -> None:
    """Refuse addresses that this version of Python cannot write to; local paths and None are accepted.

    Raises:
        UserError: naming the first such address.
    """
    version = sys.version_info[:3]
    for address in addresses:
        uploaded = is_address(address or "") and PACKAGES.get(protocol_of(str(address))) == "gcsfs"
        if version in BREAKS_UPLOADS and uploaded:
            raise UserError(
                f"{address}: Python {'.'.join(map(str, version))} crashes while gcsfs writes to a bucket",
                "run it with Python 3.12.2 or newer, or with 3.11",
            )


def path_of(directory: str | Path) -> Any:
    """Return a folder as etils.epath's path.

    Listings of a bucket are not cached: tensorstore and other hosts also write there, unknown to gcsfs.
    """
    from etils import epath

    if read_by_orbax(directory):
        from fsspec.config import conf

        conf.setdefault("gs", {}).setdefault("use_listings_cache", False)
        _silence()
    return epath.Path(directory)


@contextmanager
def reached(directory: str | Path, done: str = "read") -> Iterator[None]:
    """Turn errors of an address's file system within the block into errors for the user.

    Errors of this machine's file systems pass unchanged and, while reading, those for missing files.

    Args:
        done: as in `failed`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # an error of any library behind the address
        missing = isinstance(error, FileNotFoundError) and done == "read"
        if missing or not is_address(directory):
            raise
        raise failed(str(directory), done, error) from error


def write_whole(directory: str | Path, name: str, content: bytes) -> None:
    """Write a file into a folder, completely or not at all; create the folder.

    Raises:
        UserError: when an address cannot be written.
        OSError: when a folder of this machine cannot be written.
    """
    target = path_of(directory)
    with reached(directory, "written"):
        target.mkdir(parents=True, exist_ok=True)
        if is_address(directory):
            (target / name).write_bytes(content)  # an object exists only after its upload has ended
            return
        temporary = target / f".{name}.partial"
        temporary.write_bytes(content)
        temporary.replace(target / name)


def open_address(address: str | Path) -> Path | tuple[Any, str]:
    """Return a path on this machine, or fsspec's file system of an address and the path on it.

    Raises:
        UserError: when no file system is known for the address, its package is missing, or access is refused.
    """
    if not is_address(address):
        return Path(address).expanduser()
    from fsspec.core import url_to_fs

    _silence()
    try:
        system, root = url_to_fs(str(address))
    except Exception as error:  # an error of any library behind the protocol
        raise failed(str(address), "opened", error) from error
    if is_local(system):
        return Path(root)
    return system, root.rstrip("/")


def _silence() -> None:
    """Keep gcsfs from logging tracebacks of failed requests: failures are reported once, as errors."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def is_local(system: Any) -> bool:
    """Return whether a file system's paths are those of this machine."""
    protocol = system.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def failed(address: str, done: str, error: Exception) -> UserError:
    """Explain a file system's exception to the user.

    Args:
        done: what failed: "opened", "read", "written" or "copied".
    """
    found = unavailable(address, error, "write" if done == "written" else "read")
    if found is not None:
        return found
    which = "" if isinstance(error, (OSError, ValueError, EOFError)) else f"{type(error).__name__}: "
    # For missing files, file systems give at best the path or a request's address.
    missing = isinstance(error, FileNotFoundError)
    reason = "no such file, folder or bucket" if missing else f"{which}{first_line(error)}"
    again = "the store gave an unexpected answer: try again later"
    way_out = again if not missing and passing(error) else "check the address and your access"
    return UserError(f"{address}: cannot be {done}: {reason}", way_out)


def passing(error: BaseException) -> bool:
    """Return whether a store's error may be temporary: the store was busy, or could not be reached."""
    kinds = " ".join(kind.__name__ for kind in type(error).__mro__)
    return isinstance(error, (ConnectionError, TimeoutError)) or bool(
        _PASSING.search(f"{kinds} {first_line(error)}")
    )


def unavailable(address: str, error: Exception, act: str = "read") -> UserError | None:
    """Return the error for a missing package or refused access; None for another reason.

    Args:
        act: the attempted action, "read" or "write".
    """
    reason = first_line(error)
    if isinstance(error, ImportError):
        package = PACKAGES.get(protocol_of(address)) or (error.name or "").partition(".")[0]
        return UserError(
            f"{address} cannot be opened: {reason}", f"pip install {package}" if package else None
        )
    if is_address(address) and _REFUSED.search(f"{type(error).__name__} {reason}"):
        return UserError(f"{address} cannot be opened: {reason}", CREDENTIALS.format(act))
    return None


def read_range(system: Any, path: str, start: int, end: int) -> bytearray:
    """Read the bytes [start:end) of a file, in parallel pieces if the file system supports it.

    Raises:
        EOFError: when the file ends before `end`.
    """
    data = bytearray(end - start)
    for first in range(start, end, PIECE * AT_ONCE):
        starts = list(range(first, min(end, first + PIECE * AT_ONCE), PIECE))
        ends = [min(end, begin + PIECE) for begin in starts]
        pieces = system.cat_ranges([path] * len(starts), starts, ends, on_error="raise")
        for begin, stop, piece in zip(starts, ends, pieces, strict=True):
            if len(piece) != stop - begin:
                raise EOFError(f"ends before byte {stop}")
            data[begin - start : stop - start] = piece
    return data


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
