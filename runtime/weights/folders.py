"""Open the folder of a checkpoint or of an adapter."""

from __future__ import annotations

from pathlib import Path

from ..addresses import open_address
from .checkpoint_files import Files


def files_of(directory: Path | str) -> Files:
    """Return the files of a folder on this machine, or at an address that fsspec knows.

    Raises:
        UserError: when no file system is known for the address, its package is missing, or the folder cannot
        be listed.
    """
    opened = open_address(directory)
    if isinstance(opened, Path):
        return Files(opened)
    from .remote import RemoteFiles

    return RemoteFiles(str(directory), *opened)
