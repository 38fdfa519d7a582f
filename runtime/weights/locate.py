"""Find a model's checkpoint: a folder, a bucket, or a repository of Hugging Face's hub."""

from __future__ import annotations

from pathlib import Path

from ..addresses import is_address
from ..errors import UserError, first_line
from ..settings import ModelSettings
from .checkpoint import HFCheckpoint

DOWNLOAD = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")
"""The files to download from a repository."""


def locate_model(model: ModelSettings, override: Path | str | None = None) -> Path:
    """Return the local folder of a model's checkpoint; download it if necessary.

    Args:
        model: `id` is a Hugging Face id, a folder ("./...", "/...", "~/...") or a bucket ("gs://...").
        override: a folder or bucket to use instead (--model).

    Raises:
        UserError: when the folder does not exist, or the model cannot be downloaded.
    """
    given = str(override) if override is not None else model.id
    if is_address(given):
        from .remote import fetch_bucket

        return fetch_bucket(given)
    if override is not None or given.startswith((".", "/", "~")):
        directory = Path(given).expanduser()
        if not directory.is_dir():
            raise UserError(
                f"{given}: no such folder",
                "--model DIR gives the folder of the base checkpoint on this machine",
            )
        return directory
    return _download(model.id, model.revision)


def open_base(model: ModelSettings, override: Path | str | None = None) -> HFCheckpoint:
    """Open the checkpoint of a model for merging, as `locate_model`; an address is read in place.

    Raises:
        UserError: when it does not exist, cannot be downloaded, or is not a checkpoint.
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
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: could not be downloaded ({first_line(error)})",
            "check the connection, or give a downloaded folder with --model DIR",
        ) from error
