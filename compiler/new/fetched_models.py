"""The model of a new recipe, fetched from the hub if neither the catalog nor a folder has it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from recipec.compiler import catalog
from recipec.compiler.catalog import E0801
from recipec.compiler.catalog.added import MODELS
from recipec.compiler.errors import ArtifactError
from recipec.compiler.hub.fetch import Fetched, fetch, write
from recipec.compiler.hub.hub_errors import HubNotReached
from recipec.runtime.model.families import UnsupportedCheckpoint


def completed(text: str) -> str:
    """Complete an id given by its last part, or in another case, if one model of the catalog matches."""
    known = catalog.entries()
    if text in known or catalog.is_directory(text) or os.path.isdir(text):
        return text
    lower = text.lower()
    same = [name for name in known if lower in (name.lower(), name.lower().rpartition("/")[2])]
    return same[0] if len(same) == 1 else text


class NewModels:
    """Models needed while a recipe is made, before the recipe has a folder.

    Args:
        scratch: a temporary folder.
        folders: folders in which the recipe may be written.
    """

    def __init__(self, scratch: Path, folders: Sequence[Path]) -> None:
        self._scratch, self._folders = scratch, folders
        self._fetched: dict[str, Fetched] = {}

    def folder(self, model_id: str) -> Path:
        """Return a folder next to which the model is found, after fetching it there if necessary.

        Raises:
            ArtifactError: when neither the catalog nor the hub has it, or the hub cannot be reached.
        """
        for folder in self._folders:
            if not _is_unknown(model_id, folder):
                return folder
        if _is_unknown(model_id, self._scratch):
            write(self._fetch(model_id), self._scratch / MODELS)
        return self._scratch

    def settle(self, model_id: str, folder: Path) -> str | None:
        """Write the model next to a recipe in `folder`, unless it is known there; return what was written.

        Raises:
            ArtifactError: as for `folder`, or when it cannot be written.
        """
        if not _is_unknown(model_id, folder):
            return None
        fetched = self._fetch(model_id)
        return f"{write(fetched, folder / MODELS)}: {fetched}"

    def _fetch(self, model_id: str) -> Fetched:
        if model_id in self._fetched:
            return self._fetched[model_id]
        close = catalog.nearest(model_id)
        hint = f"did you mean `{close}`? " if close else ""
        try:
            fetched = self._fetched[model_id] = fetch(model_id)
        except HubNotReached as error:
            message = f"`{model_id}` is not in the catalog, and {error.reason}"
            raise ArtifactError(message, f"{hint}{error.help}") from error
        except ArtifactError as error:
            raise ArtifactError(str(error), f"{hint}{error.help}") from error
        return fetched


def _is_unknown(model_id: str, folder: Path) -> bool:
    """Return whether only the hub can know the id. A model known to be untrainable is not fetched."""
    try:
        catalog.find(model_id, folder)
    except UnsupportedCheckpoint:
        return False
    except catalog.UnknownModel as error:
        return error.code == E0801 and "/" in model_id and "://" not in model_id
    return False
