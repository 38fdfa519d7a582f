"""The record of what made a checkpoint: the artifact's recipe.lock.json, stored next to the checkpoints. A
run continues only with a recipe that agrees with it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..addresses import is_address, path_of, reached, write_whole
from ..errors import UNREADABLE, UserError, first_line
from ..model.older_names import of_older_version, older_run
from ..model.partition_rules import data_parallel
from ..stores import failed, passing
from ..training.objectives import OBJECTIVES, Objective
from .new_length import LENGTH, RATES, Longer, longer_run

LOCK = "recipe.lock.json"
UNTIL = "recipe.lock.until-{}.json"
"""The record of a run's steps up to the one at which its length or schedule changed."""
OTHER_RUN = "the checkpoint and the recipe.lock.json next to it must be of the same run"
"""The help if the record and the artifact do not fit."""
EARLIER = "choose an earlier --step"

PASSIVE = (
    *("name", "extends", "checkpoint", "merge", "serve", "benchmark", "evaluate", "launch", "cost", "cache"),
    *("budget", "train.log", "train.generations", "reward_limits"),
    *(f"rollout.{key}" for key in ("url", "adapter_path", "server_adapter_path", "wait_seconds")),
)
"""Keys of a recipe that may change between a run and its continuation: they do not affect the numbers."""

ELASTIC = (
    *("mesh", "sharding", "remat", "train.micro_batch_size", "train.early_stopping"),
    *("rollout.engine", "rollout.axes", "rollout.rows"),
)
"""Keys that may change too, with a note: they affect only how and where the numbers are computed, in which
parts, and until when."""

LOGGING = "packages.logging"
"""The packages that train.log needs."""

RENAMED = {
    "lora.train_also": "lora.modules_to_save",
    "lora.train_tokens": "lora.trainable_tokens",
    "lora.plus_ratio": "lora.loraplus_lr_ratio",
    "lora.quantize": "model.quantization",
    "lora.products": "model.quantized_matmul",
    "train.only": "train.trainable_modules",
    "train.samples": "train.generations",
}
"""Keys of recipes in records of older versions, with their places of today."""

COMPARED = ("recipe", "model", "packages", "runtime")
"""Entries of the record that must equal the artifact's for a run to be continued."""


def check_data_state(checkpoint: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that a run reads the data that a checkpoint was trained on.

    Args:
        checkpoint: its name in the message.
        saved, current: the state of the data at the checkpoint's step, as it was and as it is read now.

    Raises:
        UserError: naming what differs.
    """
    changed = sorted(key for key in saved.keys() | current.keys() if saved.get(key) != current.get(key))
    if changed:
        raise UserError(
            f"{checkpoint} was trained on other data: "
            + "; ".join(f"{key} was {saved.get(key)}, now {current.get(key)}" for key in changed),
            "give that run's data with --data-dir and continue, or start a new run in another --output",
        )


def write_record(directory: str | Path, artifact: Path) -> None:
    """Write the artifact's record into a checkpoint directory, as `write_next_to` does."""
    write_next_to(directory, LOCK, _lock_bytes(artifact))


def renew_record(directory: str | Path, artifact: Path, step: int) -> None:
    """Replace the record of a run whose length or schedule changes after a step, and keep the earlier one."""
    root = path_of(directory)
    with reached(directory):
        before = (root / LOCK).read_bytes()
        kept = (root / UNTIL.format(step)).exists()
    if not kept and before != _lock_bytes(artifact):
        write_next_to(directory, UNTIL.format(step), before)
    write_record(directory, artifact)


def write_next_to(directory: str | Path, name: str, content: bytes) -> None:
    """Write a file next to a run's checkpoints, completely or not at all.

    Args:
        directory: local, or gs://; it is created.

    Raises:
        UserError: when it cannot be written.
    """
    try:
        write_whole(directory, name, content)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written: {error.strerror or error}",
            "choose another checkpoint.directory, or --output",
        ) from error


def read_record(directory: str | Path) -> dict[str, Any]:
    """Read the record next to a run's checkpoints.

    Raises:
        UserError: when there is no record, it cannot be read, or the file is not a record.
    """
    path = path_of(directory) / LOCK
    try:
        with reached(directory):
            content = path.read_text()
    except FileNotFoundError:
        if not path.parent.exists():
            raise UserError(
                f"{path.parent}: there is no run yet",
                "run train.py first, or name with --checkpoint the directory that it wrote",
            ) from None
        raise UserError(
            f"{path}: there is no record of the recipe next to the checkpoints",
            "give the directory that train.py wrote; without its record the checkpoint's rank and "
            "alpha are unknown",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"{path}: cannot be read: {reason}", UNREADABLE) from error
    return _parse(content, str(path))


def first_record(directory: str | Path) -> dict[str, Any]:
    """Read the record of a run's first start, which is kept when the run's length changes.

    Raises:
        UserError: as `read_record`.
    """
    root, (before, after) = path_of(directory), UNTIL.split("{}")
    with reached(directory):
        names = [path.name for path in root.iterdir()] if root.exists() else []
        steps = [name.removeprefix(before).removesuffix(after) for name in names if name.startswith(before)]
        numbers = [int(step) for step in steps if step.isdecimal()]
        if not numbers:
            return read_record(directory)
        path = root / UNTIL.format(min(numbers))
        return _parse(path.read_text(), str(path))


def placement(record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the mesh axes and the sharding rules of a recipe, for `runtime.model.partition_rules.Placement`;
    None if the record does not have them."""
    axes = record["recipe"].get("mesh", {}).get("axes")
    return {"axes": axes, "rules": record["recipe"].get("sharding", {}).get("rules", ())} if axes else None


def record_digest(directory: str | Path) -> str | None:
    """Return the SHA-256 of the record next to a run's checkpoints, None if there is no record."""
    path = path_of(directory) / LOCK
    with reached(directory):
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def unreadable(path: str, error: Exception) -> UserError:
    """Explain an error of Orbax or tensorstore, which raise many kinds: the saved tree at `path` is damaged,
    or its store did not answer."""
    if is_address(path) and passing(error):
        return failed(path, "read", error)
    return UserError(f"{path}: cannot be read ({first_line(error)[:200]})", EARLIER)


def check_record(directory: str | Path, artifact: Path, newest: int | None = None) -> Longer | None:
    """Check that this artifact made the run in a directory, so that it can continue the run.

    Print a note if it continues on another mesh.

    Args:
        newest: step of the newest checkpoint, None if there is none.

    Returns:
        The change of the run's length or schedule, or None. The record is to be renewed then.

    Raises:
        UserError: naming what differs.
    """
    recorded = read_record(directory)
    if of_older_version(recorded):
        raise older_run(str(directory))
    current = _parse(_lock_bytes(artifact).decode(), str(artifact / LOCK))
    free = (LOGGING, *(f"recipe.{path}" for path in (*PASSIVE, *ELASTIC)))
    differences = [
        line
        for key in COMPARED
        for line in _differences(*_compared(key, recorded, current), key)
        if not any(_within(line, path) for path in free)
    ]
    rates = [f"recipe.{path}" for path in (*LENGTH, *RATES)]
    changed = [line for line in differences if any(_within(line, path) for path in rates)]
    if len(differences) > len(changed):
        more = f", and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise UserError(
            f"{directory} holds a run of another artifact: {'; '.join(differences[:5])}{more}",
            "continue it with the artifact that started it, or choose another checkpoint.directory",
        )
    longer = None
    if changed:
        began, now = (record["recipe"].get("train", {}) for record in (recorded, current))
        lines = [line.removeprefix("recipe.") for line in changed]
        longer = longer_run(str(directory), lines, began, now, newest)
    _check_mesh(str(directory), recorded["recipe"], current["recipe"])
    return longer


def _compared(key: str, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return an entry of both records; for the runtime, only the files that both have: others may differ."""
    before, now = recorded.get(key), current.get(key)
    if key == "runtime" and isinstance(before, Mapping) and isinstance(now, Mapping):
        both = before.keys() & now.keys()
        return {path: before[path] for path in both}, {path: now[path] for path in both}
    return before, now


def _check_mesh(directory: str, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Print the keys of ELASTIC that differ between two recipes; refuse rows that change the loss."""
    changed = [
        line.removeprefix("recipe.")
        for line in _differences(began, now, "recipe")
        if any(_within(line, f"recipe.{path}") for path in ELASTIC)
    ]
    if not changed:
        return
    train = now.get("train", {})
    judged = train.get("objective", "sft") not in ("sft", "grpo")
    if judged or train.get("loss_normalization") == "micro_batches" or train.get("router_aux_loss_coef"):
        check_rows(directory, began, now)
    meshes = [_mesh(recipe) for recipe in (began, now)]
    other = [line for line in changed if not line.startswith("mesh.")]
    if meshes[0] != meshes[1]:
        other.insert(0, f"the run began on {meshes[0]} and continues on {meshes[1]}")
    print(f"note: {'; '.join(other or changed)}", file=sys.stderr)


def _mesh(recipe: Mapping[str, Any]) -> str:
    """Describe the mesh: "fsdp 4 x tp 2 of v5e-8"."""
    mesh = recipe.get("mesh", {})
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.get("axes", {}).items())
    return f"{axes} of {mesh.get('accelerator') or mesh.get('topology')}"


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
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({error})", "the file was changed or truncated") from None
    if not isinstance(record, dict) or not isinstance(record.get("recipe"), dict):
        raise UserError(f"{where}: not a recipe's record", "the file was changed or truncated")
    return record | {"recipe": renamed(record["recipe"])}


def renamed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded recipe with the keys' names and sections of today."""
    today: dict[str, Any] = {
        key: dict(value) if isinstance(value, Mapping) else value for key, value in recipe.items()
    }
    for old, new in RENAMED.items():
        (before, name), (section, key) = old.split("."), new.split(".")
        if isinstance(today.get(before), dict) and name in today[before]:
            value = today[before].pop(name)
            if isinstance(today.get(section), dict):
                today[section].setdefault(key, value)
    return today


def _differences(recorded: Any, current: Any, path: str) -> Iterator[str]:
    """Yield "path: old -> new" for every leaf that differs."""
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        for key in sorted(recorded.keys() | current.keys()):
            yield from _differences(recorded.get(key), current.get(key), f"{path}.{key}")
    elif recorded != current:
        yield f"{path} was {short(recorded)}, now {short(current)}"


def _within(line: str, section: str) -> bool:
    path = line.partition(" ")[0]
    return path == section or path.startswith(f"{section}.")


def short(value: Any) -> str:
    """Return a value as JSON, cut if it is long."""
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


MICRO_BATCHES = "micro_batches"


def check_rows(directory: str, began: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Compare the rows of micro-batches of two recipes.

    Raises:
        UserError: when they differ, and the loss depends on them.
    """
    train = now.get("train", {})
    objective, cause = OBJECTIVES.get(train.get("objective", "sft")), None
    if train.get("loss_normalization") == MICRO_BATCHES:
        cause = f"train.loss_normalization: {MICRO_BATCHES}"
    elif objective is not None and objective.likelihood and _weight(objective, train):
        cause = f"train.objective: {train['objective']}"
    elif train.get("router_aux_loss_coef"):
        cause = f"train.router_aux_loss_coef: {train['router_aux_loss_coef']:g}"
    before, after = _rows(began), _rows(now)
    if objective is not None and train.get("loss_type") in objective.mismatched:
        cause = f"train.objective: {train['objective']}"
        if (size := began.get("train", {}).get("micro_batch_size")) != train.get("micro_batch_size"):
            raise UserError(
                f"{directory}: with {cause} each prompt is also paired with another row's answer; the "
                f"run began with micro-batches of {size} rows a device, and this artifact has "
                f"{train.get('micro_batch_size')}",
                f"set train.micro_batch_size: {size}",
            )
    if cause is not None and before != after:
        raise UserError(
            f"{directory}: with {cause} the loss depends on the rows of a micro-batch; the run began with "
            f"{before}, and this artifact has {after}",
            f"choose train.micro_batch_size so that micro_batch_size x dcn x fsdp x ep is {before} again",
        )


def _weight(objective: Objective, train: Mapping[str, Any]) -> float:
    """Return the weight of the likelihood in an objective's loss."""
    return float(train.get("cpo_alpha", 1.0)) if "cpo_alpha" in objective.settings else 1.0


def _rows(recipe: Mapping[str, Any]) -> int:
    """Return the rows of a micro-batch on all devices together."""
    size: int = recipe.get("train", {}).get("micro_batch_size", 1)
    return size * data_parallel(recipe.get("mesh", {}).get("axes", {}))
