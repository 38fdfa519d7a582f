"""Paths and addresses: what stands before "://", and what a file system's refusal means for the user."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from runtime.errors import UserError

CREDENTIALS = (
    "it takes credentials that may {} it; for gs://, `gcloud auth application-default login` or the "
    "variable GOOGLE_APPLICATION_CREDENTIALS gives them"
)

PACKAGES = {
    **{"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "abfs": "adlfs", "az": "adlfs"},
    **{"http": "aiohttp requests", "https": "aiohttp requests"},
}
"""What fsspec opens an address's protocol with."""

_REFUSED = re.compile(
    r"credential|anonymous|unauthori[sz]ed|forbidden|access denied|\b40[13]\b", re.IGNORECASE
)

PIECE = 1 << 24
"""Bytes of one ranged read."""
AT_ONCE = 8
"""Ranged reads that a file system may have under way together."""


def is_address(text: str | Path) -> bool:
    """Whether something is meant for fsspec, rather than a path on this machine."""
    return "://" in str(text)


def protocol_of(address: str) -> str:
    """ "gs" for "gs://bucket/folder"."""
    return address.partition("://")[0]


def open_address(address: str | Path) -> Path | tuple[Any, str]:
    """A path on this machine, or fsspec's file system of an address and the path on it.

    Raises:
        UserError: when no file system is known for the address, what opens it is not installed, or access
            is refused.
    """
    if not is_address(address):
        return Path(address).expanduser()
    from fsspec.core import url_to_fs

    try:
        system, root = url_to_fs(str(address))
    except Exception as error:  # of whatever library the protocol belongs to
        raise failed(str(address), "opened", error) from error
    if is_local(system):
        return Path(root)
    return system, root.rstrip("/")


def is_local(system: Any) -> bool:
    """Whether a file system's paths are those of this machine."""
    protocol = system.protocol
    return "file" in ((protocol,) if isinstance(protocol, str) else protocol)


def failed(address: str, done: str, error: Exception) -> UserError:
    """What an exception of a file system means for the user.

    Args:
        done: what cannot be done with it: "opened", "read", "written" or "copied".
    """
    found = unavailable(address, error, "write" if done == "written" else "read")
    if found is not None:
        return found
    which = "" if isinstance(error, (OSError, ValueError, EOFError)) else f"{type(error).__name__}: "
    # Of what is missing, file systems give the path or a request's address at best.
    missing = isinstance(error, FileNotFoundError)
    reason = "no such file, folder or bucket" if missing else f"{which}{first_line(error)}"
    return UserError(f"{address}: cannot be {done}: {reason}", "check the address and your access")


def unavailable(address: str, error: Exception, act: str = "read") -> UserError | None:
    """The error where a package is missing or access is refused; None for another reason.

    Args:
        act: what was tried, "read" or "write".
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
    """Bytes [start:end) of a file, in pieces that are read side by side where the file system can.

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
    """An exception's message, its first line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
