"""The output of another backend's run: a PEFT adapter, or a checkpoint of all weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..addresses import write_whole
from ..checkpoints.trained_weights import Delta
from ..data.stops import GENERATION, files_of, with_stops, with_stops_for_adapter
from ..errors import UserError
from ..model.adapters import PARTS, LoraSettings, Matrices
from ..model.initial import joined, plain
from ..peft.adapter import ROWS
from ..peft.exporting import adapter_config, config_bytes, write_weights
from ..peft.peft_names import ADAPTER_CONFIG, WEIGHTS
from ..settings import ModelSettings
from ..weights.checkpoint import CONFIG, HFCheckpoint
from ..weights.safetensors_files import write_arrays
from .peft_model import Pairs

ADAPTER = "adapter"
"""Folder of the trained adapter, below --output."""
MODEL = "model"
"""Folder of the trained model, below --output, after full fine-tuning."""


def save_adapter(
    folder: Path,
    base: HFCheckpoint,
    model: ModelSettings,
    lora: LoraSettings,
    values: Pairs,
    initial: Pairs | None = None,
    rows: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors as merge.py does.

    Args:
        folder: is created; an existing adapter is replaced once the new one is complete.
        values: A [rank, in], B [out, rank] and for DoRA the magnitudes [out], by module within the decoder.
        initial: their initial values, if these are a part of the base's weights.
        rows: the embedding's trained rows by their tensor's name.

    Raises:
        UserError: they cannot be written.
    """
    if initial is not None:
        lora, values = plain(lora), joined(values, initial)
    deltas = {name: Delta(a, b, lora.scale_of(name), *m) for name, (a, b, *m) in values.items()}

    def write(target: Path) -> None:
        with (target / WEIGHTS).open("wb") as file:
            write_weights(file, base, lora, deltas, rows)
        (target / ADAPTER_CONFIG).write_bytes(config_bytes(adapter_config(base, model, lora, deltas)))

    _replace(folder, write)


def save_stops(folder: Path, base: HFCheckpoint, ends: Sequence[int]) -> None:
    """Write generation_config.json next to an adapter, as merge.py does.

    Args:
        folder: of the adapter.
        ends: the tokens with which training ends an answer.

    Raises:
        UserError: it cannot be written.
    """
    try:
        write_whole(folder, GENERATION, with_stops_for_adapter(*files_of(base), ends))
    except OSError as error:
        raise _refused(folder, error) from error


def save_model(
    folder: Path, base: HFCheckpoint, values: Mapping[str, np.ndarray], ends: Sequence[int] = ()
) -> None:
    """Write a checkpoint of all weights: the base's files, with the trained tensors replacing theirs.

    Args:
        folder: is created; an existing one is replaced once the new one is complete.
        values: the trained tensors by their names in the checkpoint; the other tensors come from the base.
        ends: the tokens with which training ends an answer.

    Raises:
        UserError: they cannot be written.
    """

    def write(target: Path) -> None:
        for name in base.side_files:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(base.config_file() if name == CONFIG else base.side_file(name))
        if (stops := with_stops(*files_of(base), ends)) is not None:
            (target / GENERATION).write_bytes(stops)
        for name, header in base.headers.items():
            tensors = [(key, values[key] if key in values else base.read(key)) for key in header.tensors]
            with (target / name).open("wb") as file:
                write_arrays(file, tensors, {**header.metadata, "format": "pt"})
        if base.index is not None:
            index = json.loads(base.side_file(base.index))
            index.get("metadata", {}).pop("total_size", None)
            (target / base.index).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    _replace(folder, write)


def pairs(values: Mapping[str, Any]) -> dict[str, Matrices]:
    """Return A, B and magnitudes by module, from arrays with a trace's names, such as "MODULE.lora_A"."""
    modules = dict.fromkeys(name.rpartition(".")[0] for name in values if not name.endswith(ROWS))
    names = {module: [f"{module}.lora_{part}" for part in PARTS] for module in modules}
    return {
        module: tuple(values[name] for name in parameters if name in values)
        for module, parameters in names.items()
    }


def _replace(folder: Path, write: Any) -> None:
    """Write a folder under a temporary name next to its place, then move it there."""
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.replace(folder)
    except OSError as error:
        raise _refused(folder, error) from error


def _refused(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"{folder}: cannot be written: {error.strerror or error}",
        "free disk space or allow writing to the folder, and continue with --resume",
    )
