"""Find a model's checkpoint: a folder, a bucket, or a repository of Hugging Face's hub."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..addresses import is_address
from ..errors import UserError, first_line
from ..locks import alone
from ..settings import ModelSettings
from ..stores import failed
from .checkpoint import HFCheckpoint
from .files import name_of

VERSIONS = ("generation", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""Entries by which fsspec's file systems show that a file was rewritten; the first that exists is used."""
DOWNLOAD = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")
"""The files to download from a repository."""


def locate_model(model: ModelSettings, override: Path | str | None = None, option: str = "--model") -> Path:
    """Return the local folder of a model's checkpoint; download it if necessary.

    Args:
        model: `id` is a Hugging Face id, a folder ("./...", "/...", "~/...") or a bucket ("gs://...").
        override: a folder or bucket to use instead.
        option: the script's argument that gives it.

    Raises:
        UserError: when the folder does not exist, or the model cannot be downloaded.
    """
    address = str(override) if override is not None else model.id
    if is_address(address):
        return fetch_bucket(address)
    if override is not None or address.startswith((".", "/", "~")):
        directory = Path(address).expanduser()
        if not directory.is_dir():
            raise UserError(
                f"{address}: no such folder",
                f"{option} DIR gives the folder of the checkpoint on this machine",
            )
        return directory
    return _download(model.id, model.revision, option)


def open_base(model: ModelSettings, override: Path | str | None = None) -> HFCheckpoint:
    """Open the checkpoint of a model for merging, as `locate_model`; an address is read in place.

    Raises:
        UserError: when it does not exist, cannot be downloaded, or is not a checkpoint.
    """
    address = str(override) if override is not None else model.id
    base = HFCheckpoint.open(address if is_address(address) else locate_model(model, override))
    return base.grown(model.vocab_size)


def _download(repository: str, revision: str | None, option: str) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{repository} ({revision})" if revision else repository
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(DOWNLOAD))
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{where}: Hugging Face asks for its terms to be accepted",
            f"accept them on https://huggingface.co/{repository}, then set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{where}: Hugging Face has no such model, or it is private",
            f"check its id; set HF_TOKEN for a private model; or give a folder with {option} DIR",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where}: no such revision on Hugging Face", "check its revision") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: could not be downloaded ({first_line(error)})",
            f"check the connection, or give a downloaded folder with {option} DIR",
        ) from error


def fetch_bucket(url: str) -> Path:
    """Copy a checkpoint from a bucket into the user's cache; unchanged copies are kept.

    Several processes of one machine take turns; the first one copies.
    """
    from fsspec.core import url_to_fs

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recipec"
    target = cache / f"{url.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        system, root = url_to_fs(url)
        entries = [entry for entry in system.ls(root, detail=True) if entry["type"] == "file"]
        target.mkdir(parents=True, exist_ok=True)
        with alone(target):
            copies = _Copies(system, target)
            copies.keep_only(entries)
            for entry in sorted(entries, key=lambda entry: str(entry["name"])):
                copies.bring(entry)
    except Exception as error:  # an error of any library behind the address
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{target}: the copy of {url} does not fit: {error.strerror}",
                "free disk space there, or set XDG_CACHE_HOME to a folder on a larger disk",
            ) from error
        raise failed(url, "copied", error) from error
    return target


class _Copies:
    """Copies of files, and a record next to their folder of each file's version."""

    def __init__(self, system: Any, folder: Path) -> None:
        self._system, self._folder = system, folder
        self._record = folder.with_name(f"{folder.name}.json")
        self._versions: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            self._versions = dict(json.loads(self._record.read_text()))

    def keep_only(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Remove copies of files that the bucket no longer has: an old model.safetensors would be loaded
        instead of new files."""
        names = {name_of(entry) for entry in entries}
        for copy in self._folder.iterdir():
            if copy.name not in names:
                copy.unlink()

    def bring(self, entry: Mapping[str, Any]) -> None:
        """Copy a file, unless it was copied before and has not changed since."""
        name = name_of(entry)
        copy, part = self._folder / name, self._folder / f".{name}.part"
        # Retrained weights have the same size as the old ones.
        version = next((str(entry[key]) for key in VERSIONS if entry.get(key) is not None), "")
        same = self._versions.get(name, version) == version
        if same and copy.is_file() and copy.stat().st_size == entry["size"]:
            return
        with self._system.open(entry["name"], "rb") as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 24)
        if part.stat().st_size != entry["size"]:
            raise EOFError(f"{name} ends before byte {entry['size']}")
        copy.unlink(missing_ok=True)
        self._versions[name] = version
        self._record.write_text(json.dumps(self._versions, indent=1))
        part.replace(copy)
