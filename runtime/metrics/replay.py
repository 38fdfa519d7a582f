"""Shared parts of the loggers of other services: the run's name in the service, kept next to the checkpoints,
and lines of an earlier process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .loggers import EVAL

if TYPE_CHECKING:
    from .services import Service

Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


def mode_of(entry: Entry) -> str:
    """Return "train" or "eval"."""
    return "eval" if "eval_loss" in entry else "train"


def last_steps(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the last step of each mode."""
    steps: dict[str, int] = {}
    for entry in entries:
        steps[mode_of(entry)] = max(entry["step"], steps.get(mode_of(entry), 0))
    return steps


def replay(service: Service, entry: Entry) -> None:
    """Log a line that an earlier process wrote."""
    values = {
        name.removeprefix("eval_").removeprefix(EVAL): float(value) if isinstance(value, str) else value
        for name, value in entry.items()
        if name != "step"
    }
    service.log(mode_of(entry), entry["step"], values)


def kept(directory: str | Path, file: str) -> dict[str, Any]:
    """Return the content of a file next to the checkpoints, or nothing if it cannot be read."""
    from etils import epath

    try:
        found = json.loads((epath.Path(directory) / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(directory: str | Path, file: str, values: Mapping[str, Any]) -> None:
    """Write such a file."""
    from etils import epath

    epath.Path(directory).mkdir(parents=True, exist_ok=True)
    (epath.Path(directory) / file).write_text(json.dumps(values, indent=2) + "\n")
