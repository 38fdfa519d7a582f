"""What merge.json, beside merged weights, says about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime.serving.findings import Failed, Finding

RECORD = "merge.json"


def merged(folder: Path, name: str) -> Finding:
    """What was merged into the weights in `folder`.

    Args:
        name: of the recipe that is served.

    Raises:
        Failed: nothing was merged, or merge.json is not what merge.py writes.
    """
    path = folder / RECORD
    try:
        record = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return Finding(f"{path} is not there: nothing is known of the weights", made=False)
    except OSError as error:
        return Finding(f"{path} is not readable: {error.strerror}", made=False)
    except (ValueError, RecursionError):
        raise _wrong(path) from None
    try:
        tensors, step, recipe = record["tensors"], record["checkpoint"]["step"], record["recipe"]["name"]
        changed, kept = int(tensors["merged"]), int(tensors["kept"])
        described = _described(record["lora"])
        same = _same_files(record)
        scale = record["lora"] is None or record["lora"]["alpha"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _wrong(path) from None
    if not changed:
        raise Failed(f"{path}: no tensor was merged, so the weights are the base's", "merge again: merge.py")
    if not scale:
        raise Failed(f"{path}: lora.alpha is 0, so the weights are the base's", "train with an alpha above 0")
    if same:
        raise Failed(
            f"{path}: the files of the weights are the base's, byte for byte",
            "was the right checkpoint merged? an untrained adapter changes nothing",
        )
    warnings = []
    if recipe is not None and recipe != name:
        warnings.append(f"the weights were merged for the recipe `{recipe}`, and `{name}` is served")
    text = f"step {step}'s {described} merged into {changed} tensors, {kept} kept (merge.json)"
    return Finding(text, warnings=tuple(warnings), figures={"merged": changed, "kept": kept, "step": step})


def _described(lora: dict[str, Any] | None) -> str:
    return "weights" if lora is None else f"adapters (rank {lora['rank']}, alpha {lora['alpha']:g})"


def _same_files(record: dict[str, Any]) -> bool:
    """Whether every file of the base's weights is there unchanged; False where hashes are not known."""
    base, files = record["base"]["files"], record["files"]
    return bool(base) and all(
        "sha256" in known and files.get(file, {}).get("sha256") == known["sha256"]
        for file, known in base.items()
    )


def _wrong(path: Path) -> Failed:
    return Failed(f"{path} is not what merge.py writes", "merge again, or take the file away")
