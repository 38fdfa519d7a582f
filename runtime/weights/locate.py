"""Finds a model's checkpoint: a folder, a bucket, or what Hugging Face's hub has."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..addresses import failed, is_address
from ..errors import UserError
from ..settings import ModelSettings
from .checkpoint import HFCheckpoint

DOWNLOAD = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")
"""What is downloaded of a repository."""

VERSIONS = ("generation", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""By what file systems of fsspec tell that a file was written anew; the first that one has is taken."""


def locate_model(model: ModelSettings, override: Path | str | None = None) -> Path:
    """The folder of a model's checkpoint on this machine; downloads it when need be.

    Args:
        model: `id` is a Hugging Face id, a folder ("./...", "/...", "~/...") or a bucket ("gs://...").
        override: a folder or bucket that is used instead (--model).

    Raises:
        UserError: when there is no such folder, or it cannot be downloaded.
    """
    given = str(override) if override is not None else model.id
    if is_address(given):
        return _fetch_bucket(given)
    if override is not None or given.startswith((".", "/", "~")):
        directory = Path(given).expanduser()
        if not directory.is_dir():
            raise UserError(
                f"{given}: no such folder", "--model DIR says where the base checkpoint lies on this machine"
            )
        return directory
    return _download(model.id, model.revision)


def open_base(model: ModelSettings, override: Path | str | None = None) -> HFCheckpoint:
    """The checkpoint of a model, for merging: as `locate_model`, but an address is read where it is.

    Raises:
        UserError: when there is none, it cannot be downloaded, or it is no checkpoint.
    """
    given = str(override) if override is not None else model.id
    found = HFCheckpoint.open(given if is_address(given) else locate_model(model, override))
    return found.grown(model.vocab_size)


def _download(repository: str, revision: str | None) -> Path:
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
            "check model.id; set HF_TOKEN for a private model; or give a folder with --model DIR",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where}: no such revision on Hugging Face", "check model.revision") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where}: could not be downloaded ({str(error).splitlines()[0]})",
            "check the connection, or give a downloaded folder with --model DIR",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: could not be downloaded ({error})", "give a downloaded folder with --model DIR"
        ) from error


def _fetch_bucket(url: str) -> Path:
    """Copies a checkpoint from a bucket into the user's cache; files that are there as they are now are kept.

    Several processes of one machine take turns: the first copies.
    """
    from fsspec.core import url_to_fs

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recipec"
    target = cache / f"{url.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        system, root = url_to_fs(url)
        entries = [entry for entry in system.ls(root, detail=True) if entry["type"] == "file"]
        target.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            copies = _Copies(system, target)
            for entry in sorted(entries, key=lambda entry: str(entry["name"])):
                copies.bring(entry)
    except Exception as error:  # of whatever library reads the address
        raise failed(url, "copied", error) from error
    return target


class _Copies:
    """Copies of files, and beside their folder which version of each they are."""

    def __init__(self, system: Any, folder: Path) -> None:
        self._system, self._folder = system, folder
        self._record = folder.with_name(f"{folder.name}.json")
        self._versions: dict[str, str] = {}
        with suppress(OSError, ValueError, RecursionError):
            self._versions = json.loads(self._record.read_text())

    def bring(self, entry: Mapping[str, Any]) -> None:
        """Copies a file, unless it was copied before and has not changed since."""
        name = str(entry["name"]).rpartition("/")[2]
        copy, part = self._folder / name, self._folder / f".{name}.part"
        # Weights that are trained anew have the size of those before them.
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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Within it, no other process of this machine is in here, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
