"""The file systems of addresses: object stores and others that fsspec opens, and what their errors mean."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from .errors import UserError, first_line

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


def protocol_of(address: str) -> str:
    """Return an address's protocol: "gs" for "gs://bucket/folder"."""
    return address.partition("://")[0]


def check_upload(address: str | Path) -> None:
    """Raise UserError if this version of Python cannot write to an address."""
    version = sys.version_info[:3]
    if version in BREAKS_UPLOADS and PACKAGES.get(protocol_of(str(address))) == "gcsfs":
        raise UserError(
            f"{address}: Python {'.'.join(map(str, version))} crashes while gcsfs writes to a bucket",
            "run it with Python 3.12.2 or newer, or with 3.11",
        )


def without_cache() -> None:
    """Keep gcsfs from caching listings: tensorstore and other hosts also write to buckets, unknown to it."""
    from fsspec.config import conf

    conf.setdefault("gs", {}).setdefault("use_listings_cache", False)
    silence()


def silence() -> None:
    """Keep gcsfs from logging tracebacks of failed requests: failures are reported once, as errors."""
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def opened(address: str) -> Path | tuple[Any, str]:
    """Return fsspec's file system of an address and the path on it, or a path on this machine."""
    from fsspec.core import url_to_fs

    silence()
    try:
        system, root = url_to_fs(address)
    except Exception as error:  # an error of any library behind the protocol
        raise failed(address, "opened", error) from error
    return Path(root) if protocol_of(address) in ("file", "local") else (system, root.rstrip("/"))


def failed(address: str, done: str, error: Exception) -> UserError:
    """Explain a file system's exception to the user.

    Args:
        done: what failed: "opened", "read", "written" or "copied".
    """
    explanation = unavailable(address, error, "write" if done == "written" else "read")
    if explanation is not None:
        return explanation
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
    if _REFUSED.search(f"{type(error).__name__} {reason}"):
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
