"""The record of what made a checkpoint: the artifact's recipe.lock.json, kept beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import UserError

LOCK = "recipe.lock.json"

PASSIVE = (
    "name",
    "extends",
    "checkpoint",
    "merge",
    "serve",
    "benchmark",
    "evaluate",
    "launch",
    "cost",
    "train.log",
)
"""What may change in a recipe between a run and its continuation: it does not touch the numbers."""

LOGGING = "packages.logging"
"""The packages that go with train.log."""

COMPARED = ("recipe", "model", "packages", "runtime")
"""Entries of the record that must be the artifact's for a run to be continued."""


def write_record(directory: str | Path, artifact: Path) -> None:
    """Puts the artifact's record into a checkpoint directory, whole or not at all.

    Args:
        directory: local, or gs://; it is created.
        artifact: folder of the generated script.
    """
    from etils import epath

    content = _lock_bytes(artifact)
    target = epath.Path(directory)
    try:
        target.mkdir(parents=True, exist_ok=True)
        temporary = target / f".{LOCK}.partial"
        temporary.write_bytes(content)
        temporary.replace(target / LOCK)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {error.strerror or error}",
            "choose another checkpoint.directory, or --output",
        ) from error


def read_record(directory: str | Path) -> dict[str, Any]:
    """The record beside a run's checkpoints.

    Raises:
        UserError: when there is none, or it is not one.
    """
    from etils import epath

    path = epath.Path(directory) / LOCK
    try:
        content = path.read_text()
    except FileNotFoundError:
        raise UserError(
            f"{path}: there is no record of the recipe beside the checkpoints",
            "give the directory that train.py wrote; without its record the checkpoint's rank and "
            "alpha are unknown",
        ) from None
    return _parse(content, str(path))


def check_record(directory: str | Path, artifact: Path) -> None:
    """Checks that the run in a directory was made by this artifact, so that it can be continued.

    Raises:
        UserError: naming what differs.
    """
    recorded = read_record(directory)
    current = _parse(_lock_bytes(artifact).decode(), str(artifact / LOCK))
    differences = [
        line
        for key in COMPARED
        for line in _differences(recorded.get(key), current.get(key), key)
        if not any(_within(line, path) for path in (LOGGING, *(f"recipe.{passive}" for passive in PASSIVE)))
    ]
    if differences:
        more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise UserError(
            f"{directory} holds a run of another artifact: {'; '.join(differences[:5])}{more}",
            "continue it with the artifact that began it, or choose another checkpoint.directory",
        )


def _lock_bytes(artifact: Path) -> bytes:
    try:
        return (artifact / LOCK).read_bytes()
    except OSError as error:
        raise UserError(
            f"{artifact / LOCK}: {error.strerror}", "the artifact is incomplete; build the recipe again"
        ) from None


def _parse(content: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error})", "the file was changed or cut off") from None
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), dict):
        raise UserError(f"{where}: not a recipe's record", "the file was changed or cut off")
    return record


def _differences(recorded: Any, current: Any, path: str) -> Iterator[str]:
    """ "path: old -> new" for every leaf that is not the same."""
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        for key in sorted(recorded.keys() | current.keys()):
            yield from _differences(recorded.get(key), current.get(key), f"{path}.{key}")
    elif recorded != current:
        yield f"{path} was {_short(recorded)}, now {_short(current)}"


def _within(line: str, section: str) -> bool:
    path = line.partition(" ")[0]
    return path == section or path.startswith(f"{section}.")


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
