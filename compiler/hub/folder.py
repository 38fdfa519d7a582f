"""Write a fetched model next to recipes. The write is atomic: a kill leaves all of its files or none."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from recipec.compiler.artifacts.whole import changing, digest
from recipec.compiler.artifacts.writing import cannot_be_written
from recipec.compiler.errors import ArtifactError
from recipec.compiler.hub.fetch import Fetched
from recipec.compiler.lowering import added


def write(fetched: Fetched, models: Path) -> Path:
    """Write a model's folder into `models`, replacing the files of an earlier commit, and return it.

    Raises:
        ArtifactError: when a folder of this name was not written by recipec, or writing fails.
    """
    name = added.folder_name(fetched.id)
    target = models / name
    try:
        models.mkdir(parents=True, exist_ok=True)
        with changing(models) as change:
            before = _files_of(target, fetched.id)
            for file, content in fetched.files.items():
                change.write(f"{name}/{file}", content)
            for file in before - fetched.files.keys():
                if (target / file).is_file():
                    change.remove(f"{name}/{file}")
            change.write(f"{name}/{added.LOCK}", _lock(fetched))  # last: it marks the folder complete
    except OSError as error:
        raise cannot_be_written(target, error) from error
    return target


def _files_of(target: Path, model_id: str) -> set[str]:
    """Return the files that an earlier command wrote."""
    found = None
    with suppress(added.NotWhole):
        found = added.read(target, model_id, str(target))
    if found is None and not (target / added.LOCK).exists() and target.exists() and any(os.scandir(target)):
        raise ArtifactError(
            f"{target} exists, and `recipe models add` did not write it",
            "move it, or choose another with -o",
        )
    return set(found.files) if found else set()


def _lock(fetched: Fetched) -> bytes:
    lock = {
        "lock": added.LOCK_VERSION,
        "id": fetched.id,
        "revision": fetched.revision,
        "commit": fetched.commit,
        "files": {file: digest(content) for file, content in sorted(fetched.files.items())},
    }
    return (json.dumps(lock, indent=2) + "\n").encode()
