"""The models that a recipe can name: by Hugging Face id, or by a directory with a config.json.

data/models.json holds, for each id, its family, whether it is tuned for chat, and the keys of its
config.json that the family reads. A directory's own config.json wins: it is what will be loaded.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from runtime.families import FAMILIES, Architecture, Family, UnsupportedCheckpoint, family_of

DATA = Path(__file__).parent / "data" / "models.json"

MAX_CONFIG = 1 << 22
"""Bytes of a config.json; a few thousand are usual."""


FAMILY_TITLES = {
    "gemma2": "Gemma 2",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "llama3": "Llama 3",
    "qwen2": "Qwen 2.5",
    "qwen3": "Qwen 3",
}
"""What to call the families in a message."""


class UnknownModel(ValueError):
    """A model whose config.json is neither in the catalogue nor readable.

    Attributes:
        code: of the diagnostic.
        help: what to write instead.
    """

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code = code
        self.help = help


@dataclass(frozen=True)
class Model:
    """A model that the compiler knows the sizes of.

    Attributes:
        id: as in the recipe.
        title: for messages: "Gemma 4 31B".
        family, architecture: what Tunix's model looks like.
        origin: "catalogue", or the config.json that was read.
        chat: whether it is tuned for chat; None when only its config.json is known.
    """

    id: str
    title: str
    family: Family
    architecture: Architecture
    origin: str
    chat: bool | None


@functools.cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """data/models.json: {id: {"family": ..., "chat": ..., "config": {...}}}.

    A model that is known by name alone has {"unsupported": why} instead.
    """
    data: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def is_directory(model_id: str) -> bool:
    """Whether `model.id` names a directory rather than a Hugging Face id."""
    return model_id in (".", "..") or model_id.startswith(("./", "../", "/", "~"))


def find(model_id: str, folder: Path) -> Model:
    """The model that a recipe in `folder` names.

    Raises:
        UnknownModel: when there is no such id, or no readable config.json.
        UnsupportedCheckpoint: when its family's Tunix model does not do what its config asks for.
    """
    if is_directory(model_id):
        return _local(model_id, folder)
    if model_id.startswith("gs://"):
        raise UnknownModel(
            "E0804",
            f"the config.json of `{model_id}` cannot be read while compiling",
            "write the Hugging Face id, or a directory with its config.json, as model.id; "
            "train.py and merge.py take the checkpoint's place with --model",
        )
    entry = entries().get(model_id)
    if entry is None:
        raise UnknownModel("E0801", f"`{model_id}` is not in the catalogue", _nearest(model_id))
    if "unsupported" in entry:
        raise UnsupportedCheckpoint(entry["unsupported"])
    family = FAMILIES[entry["family"]]
    architecture = family.architecture(entry["config"])
    return Model(model_id, title(model_id), family, architecture, "catalogue", entry.get("chat"))


def family_name(model_id: str, folder: Path) -> str | None:
    """The family of an id or directory, None where it cannot be told."""
    try:
        return find(model_id, folder).family.name
    except (UnknownModel, UnsupportedCheckpoint):
        return None


def title(model_id: str) -> str:
    """What to call a model in a sentence: "google/gemma-4-31B-it" is "Gemma 4 31B"."""
    if match := re.fullmatch(r"(?:google/)?gemma-(\d+)-(.+?)(?:-(?:it|pt))?", model_id):
        return f"Gemma {match[1]} {match[2].upper()}"
    if match := re.fullmatch(r"(?:meta-llama/)?(?:Meta-)?Llama-([\d.]+)-(\w+)(?:-Instruct)?", model_id):
        return f"Llama {match[1]} {match[2]}"
    if match := re.fullmatch(r"(?:Qwen/)?Qwen([\d.]+)-(.+?)(?:-(?:Instruct|Base))?", model_id):
        return f"Qwen {match[1]} {match[2].replace('-', ' ')}"
    return model_id


def _local(model_id: str, folder: Path) -> Model:
    config = _read_config(model_id, folder)
    family = family_of(config)
    try:
        architecture = family.architecture(config)
        sizes = {n for parameter in family.parameters(architecture) for n in parameter.shape}
        if not all(isinstance(n, int) and n > 0 for n in sizes):
            raise TypeError("a size is no positive whole number")
    except UnsupportedCheckpoint:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedCheckpoint(f"config.json: a value is of the wrong type: {error}") from None
    return Model(model_id, model_id, family, architecture, f"{model_id.rstrip('/')}/config.json", None)


def _read_config(model_id: str, folder: Path) -> dict[str, Any]:
    """The config.json of a directory."""
    again = "copy it again from the model's repository"
    try:
        path = folder / Path(model_id).expanduser() / "config.json"
        if not folder.is_dir():  # of a recipe that is yet to be written: there is no way back out of it
            path = Path(os.path.normpath(path))
        if path.is_file() and path.stat().st_size > MAX_CONFIG:
            raise ValueError(f"it has more than {MAX_CONFIG:,} bytes")
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnknownModel(
            "E0802",
            f"there is no config.json in `{model_id}`",
            "model.id names a checkpoint's directory, relative to the recipe's own; "
            "its config.json is read while compiling",
        ) from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: ~user unknown, or nested too deeply
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UnknownModel("E0802", f"`{model_id}/config.json` cannot be read: {reason}", again) from None
    if not isinstance(config, dict):
        raise UnknownModel("E0802", f"`{model_id}/config.json` is not a JSON object", again)
    return config


def _nearest(model_id: str) -> str:
    names = list(entries())
    folded = {name.lower(): name for name in names}
    close = get_close_matches(model_id.lower(), list(folded), n=1, cutoff=0.6)
    if not close:
        bare = {name.lower().rpartition("/")[2]: name for name in names}
        close = [
            bare[found].lower() for found in get_close_matches(model_id.lower(), list(bare), n=1, cutoff=0.6)
        ]
    hint = f"did you mean `{folded[close[0]]}`? " if close else ""
    return (
        f"{hint}for a model that is not in it, download it and write its directory as model.id, "
        "for example ./checkpoint: its config.json is read then"
    )
