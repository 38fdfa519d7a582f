"""A trained model's folder: complete weights in transformers' format, or a PEFT adapter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.artifacts.artifact import LOCK
from recipec.compiler.artifacts.whole import complete
from recipec.compiler.errors import ArtifactError
from recipec.runtime.data.reasoning import VARIABLES
from recipec.runtime.merging.journal import JOURNAL, RECORD

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MERGE = "run merge.py again: it continues after the complete files"


@dataclass(frozen=True)
class Trained:
    """A complete folder of a trained model.

    Attributes:
        adapter: adapter_config.json of a PEFT adapter, None for complete weights.
        record: merge.json if merge.py wrote the folder, otherwise None.
    """

    folder: Path
    adapter: Mapping[str, Any] | None
    record: Mapping[str, Any] | None


def open_trained(folder: Path) -> Trained:
    """Read the folder of a merge, a Hugging Face model or a PEFT adapter. For an artifact's folder, read the
    output of its merge.py.

    Raises:
        ArtifactError: when the folder is none of these, or is incomplete.
    """
    if not folder.is_dir():
        raise ArtifactError(
            f"there is no folder {folder}", "name a folder that merge.py wrote: generated/NAME"
        )
    trained = any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG, JOURNAL))
    return _whole(folder if trained or not (folder / LOCK).is_file() else _output(folder))


def _output(artifact: Path) -> Path:
    """Return the folder in which an artifact's merge.py writes."""
    complete(artifact.parent)
    output = str(read_json(artifact / LOCK).get("recipe", {}).get("merge", {}).get("output", "merged"))
    merged = artifact / Path(output).expanduser()
    if "://" in output:
        raise ArtifactError(f"{artifact} is merged to {output}", "copy it to a folder, and name the folder")
    if not (merged / CONFIG).is_file():
        state = "is incomplete" if merged.is_dir() else "is not there"
        raise ArtifactError(
            f"{artifact}: its merged model, {merged}, {state}", f"cd {artifact} && python merge.py"
        )
    return merged


def _whole(folder: Path) -> Trained:
    if (folder / JOURNAL).exists():
        raise ArtifactError(f"{folder} holds a merge that did not finish", MERGE)
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else None
    for name, entry in (record or {}).get("files", {}).items():
        size = _size(folder / name)
        if size != entry["size"]:
            fault = "is missing" if size is None else f"has {size} bytes, not {entry['size']}"
            raise ArtifactError(
                f"{folder} is incomplete: {name} {fault}", "remove the folder, and merge again"
            )
    if (folder / ADAPTER_CONFIG).is_file():
        return Trained(_with_weights(folder, [ADAPTER_WEIGHTS]), read_json(folder / ADAPTER_CONFIG), record)
    if not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"{folder} has neither {CONFIG} nor {ADAPTER_CONFIG}",
            "name a folder that merge.py, or save_pretrained of transformers or PEFT, wrote",
        )
    if (folder / INDEX).is_file():
        weights = sorted(set(map(str, read_json(folder / INDEX).get("weight_map", {}).values())))
    else:
        weights = [path.name for path in folder.glob("*.safetensors")][:1]
    return Trained(_with_weights(folder, weights or ["model.safetensors"]), None, record)


def _with_weights(folder: Path, names: list[str]) -> Path:
    missing = next((name for name in names if _size(folder / name) is None), None)
    if missing:
        raise ArtifactError(f"{folder} is incomplete: {missing} is missing", "copy or write the folder again")
    return folder


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ArtifactError: when the file holds something else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not an object")
        return content
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}", "copy or write the folder again") from None


def template_variables(folder: Path) -> dict[str, bool]:
    """Return the variables that the run gave its chat template, by the record in its folder."""
    record = read_json(folder / LOCK) if (folder / LOCK).is_file() else {}
    return VARIABLES.get(record.get("recipe", {}).get("data", {}).get("reasoning") or "", {})
