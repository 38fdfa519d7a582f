"""Finds a model's checkpoint: a folder, a bucket, or what Hugging Face's hub has."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from runtime.addresses import is_address, unavailable
from runtime.checkpoint import BaseCheckpoint
from runtime.errors import UserError
from runtime.settings import ModelSettings

DOWNLOAD = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")
"""What is downloaded of a repository."""


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


def open_base(model: ModelSettings, override: Path | str | None = None) -> BaseCheckpoint:
    """The checkpoint of a model, for merging: as `locate_model`, but an address is read where it is.

    Raises:
        UserError: when there is none, it cannot be downloaded, or it is no checkpoint.
    """
    given = str(override) if override is not None else model.id
    return BaseCheckpoint.open(given if is_address(given) else locate_model(model, override))


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
    """Copies a checkpoint from a bucket into the user's cache; files that are there whole are kept."""
    import fsspec

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recipec"
    target = cache / f"{url.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        system, root = fsspec.core.url_to_fs(url)
        entries = [entry for entry in system.ls(root, detail=True) if entry["type"] == "file"]
        target.mkdir(parents=True, exist_ok=True)
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            name = str(entry["name"]).rpartition("/")[2]
            copy = target / name
            if copy.is_file() and copy.stat().st_size == entry["size"]:
                continue
            part = target / f".{name}.part"
            with system.open(entry["name"], "rb") as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 24)
            part.replace(copy)
    except Exception as error:  # of whatever library reads the address
        found = unavailable(url, error)
        raise found or UserError(
            f"{url}: could not be copied ({error})", "check the address and your access"
        ) from error
    return target
