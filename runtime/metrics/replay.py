"""What loggers of other services share: the run's name there, kept beside the checkpoints, and lines that an
earlier process wrote."""

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
    """ "train" or "eval"."""
    return "eval" if "eval_loss" in entry else "train"


def last_steps(entries: Sequence[Entry]) -> dict[str, int]:
    """The last step of each mode."""
    steps: dict[str, int] = {}
    for entry in entries:
        steps[mode_of(entry)] = max(entry["step"], steps.get(mode_of(entry), 0))
    return steps


def replay(service: Service, entry: Entry) -> None:
    """Logs a line that an earlier process wrote."""
    values = {
        name.removeprefix("eval_").removeprefix(EVAL): float(value) if isinstance(value, str) else value
        for name, value in entry.items()
        if name != "step"
    }
    service.log(mode_of(entry), entry["step"], values)


def kept(directory: str | Path, file: str) -> dict[str, Any]:
    """What a file beside the checkpoints says, nothing where there is none that can be read."""
    from etils import epath

    try:
        found = json.loads((epath.Path(directory) / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(directory: str | Path, file: str, values: Mapping[str, Any]) -> None:
    """Writes such a file."""
    from etils import epath

    epath.Path(directory).mkdir(parents=True, exist_ok=True)
    (epath.Path(directory) / file).write_text(json.dumps(values, indent=2) + "\n")
