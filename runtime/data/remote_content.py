"""Identify what is at an address without reading it, for the keys of cached data."""

from __future__ import annotations

from typing import Any

from ..settings import Source
from .places import HUB, TOLD, address_of, kind_of


def remote_content(source: Source) -> Any:
    """Return an identification of the content of a source at an address.

    Raises:
        ValueError: its file system tells neither a checksum nor a time.
    """
    if source.path.startswith(HUB) and kind_of(source.path) is None:
        from huggingface_hub import HfApi

        name, revision = address_of(source.path)
        return HfApi().dataset_info(name, revision=revision).sha
    import fsspec

    system, path = fsspec.core.url_to_fs(source.path)
    names = sorted(system.find(path)) if system.isdir(path) else [path]
    told = (*TOLD, "mtime", "updated", "LastModified")
    infos = [(name, system.info(name)) for name in names]
    if not all(any(info.get(item) for item in told[1:]) for _, info in infos):
        raise ValueError("its file system gives neither a checksum nor a time")
    return [[name, *(str(info.get(item)) for item in told)] for name, info in infos]
