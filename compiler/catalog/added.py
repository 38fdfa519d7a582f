"""Models that `recipe models add` saved in models/OWNER--NAME next to a recipe. Recipes name them by id.

Such a folder holds what compiling needs from a checkpoint, without the weights: config.json, the tokenizer's
files, a list of all tensors, and a lock that records the hub commit of these files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.catalog.tensor_list import Listed
from recipec.compiler.json_value import json_value
from recipec.runtime.weights.headers import Tensor
from recipec.spec.load import display

MODELS = "models"
"""The name of the folder, next to a recipe."""
LOCK = "model.lock.json"
TENSORS = "tensors.json"
"""{file: {tensor: [type, shape]}}, with types as safetensors names them."""
LOCK_VERSION = 1

MAX_FILE = 1 << 27
"""The largest size in bytes that is read from a file of such a folder. A tokenizer.json has up to 40 MB."""


class NotWhole(ValueError):
    """A folder differs from what `recipe models add` wrote. The text is a clause that begins with a name."""


@dataclass(frozen=True)
class Added:
    """The folder of an added model.

    Attributes:
        place: the folder's path.
        name: the path relative to the recipe's folder: "models/Qwen--Qwen3-8B".
        id: the model's id on the hub.
        revision: the requested revision, None for the main branch.
        commit: the commit that the files are from.
        files: sha256 of each file except the lock.
    """

    place: Path
    name: str
    id: str
    revision: str | None
    commit: str
    files: Mapping[str, str]

    def read(self, file: str) -> bytes:
        """Return the content of a file, checked against the lock.

        Raises:
            NotWhole: the file is missing, cannot be read, or has changed.
        """
        content = _read(self.place / file, f"{self.name}/{file}")
        if hashlib.sha256(content).hexdigest() != self.files.get(file):
            raise NotWhole(f"{self.name}/{file} is not the file that {LOCK} names: it was changed")
        return content

    def has_template(self) -> bool:
        """Return whether the tokenizer has a chat template.

        Raises:
            NotWhole: as for `read`.
        """
        config = "tokenizer_config.json"
        return "chat_template.jinja" in self.files or (
            config in self.files and b'"chat_template"' in self.read(config)
        )


def folder_name(model_id: str) -> str:
    """Return the name of a model's folder in models/: "Qwen--Qwen3-8B". It includes the owner because several
    owners may use the same model name."""
    return model_id.replace("/", "--")


def models_folder() -> Path:
    """Return the default folder for added models: next to the recipes that `recipe new` writes."""
    return Path("recipes", MODELS) if Path("recipes").is_dir() else Path(MODELS)


def add_command(model_id: str, folder: Path, revision: str | None = None) -> str:
    """Return the command that adds a model for the recipes of a folder, as messages show it."""
    target = folder / MODELS
    words = ["recipe", "models", "add", model_id]
    words += ["--revision", revision] if revision else []
    if os.path.abspath(target) != os.path.abspath(models_folder()):
        words += ["-o", display(target)]
    return f"`{shlex.join(words)}`"


def again(model_id: str, folder: Path) -> str:
    """Return the help for a folder that is incomplete or changed: add the model again."""
    revision = None
    with suppress(NotWhole):
        model = find(model_id, folder)
        revision = model.revision if model else None
    return (
        f"{add_command(model_id, folder, revision)} adds it again; to compile a folder that you changed, "
        f"write id: ./{MODELS}/{folder_name(model_id)}"
    )


def find(model_id: str, folder: Path) -> Added | None:
    """Return the added model with an id, for a recipe in `folder`; None if it was not added.

    Raises:
        NotWhole: its lock cannot be read, or belongs to another model.
    """
    name = folder_name(model_id)
    if "/" in name or "\0" in name or name in ("", ".", ".."):
        return None
    return added_at(folder / MODELS / name, model_id, f"{MODELS}/{name}")


def added_at(place: Path, model_id: str, name: str) -> Added | None:
    """Return the added model in a folder; None if the folder has no lock.

    Args:
        name: the folder's name in messages.

    Raises:
        NotWhole: as for `find`.
    """
    if not os.path.isfile(place / LOCK):  # False, too, where the name is too long
        return None
    lock = json_value(_read(place / LOCK, f"{name}/{LOCK}"))
    if not isinstance(lock, dict) or lock.get("lock") != LOCK_VERSION:
        raise NotWhole(f"{name}/{LOCK} is not a model's lock of a version that this compiler knows")
    if lock.get("id") != model_id:
        raise NotWhole(f"{name}/{LOCK} is of the model {lock.get('id')!r}")
    files, commit, revision = lock.get("files"), lock.get("commit"), lock.get("revision")
    if (
        not isinstance(files, dict)
        or not isinstance(commit, str)
        or not all(isinstance(text, str) for text in (*files.values(), revision or ""))
        or "config.json" not in files
    ):
        raise NotWhole(f"{name}/{LOCK} lacks keys of a lock")
    return Added(place, name, model_id, revision, commit, files)


def tensors(model: Added) -> dict[str, Listed] | None:
    """Return every tensor of the checkpoint by its full name; None if the folder has no list of tensors.

    Raises:
        NotWhole: the list cannot be read, or has changed.
    """
    if TENSORS not in model.files:
        return None
    listed = json_value(model.read(TENSORS))
    try:
        return dict(_listed(listed))
    except (AttributeError, TypeError, ValueError):
        raise NotWhole(f"{model.name}/{TENSORS} is not a list of tensors") from None


def tensors_text(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the text of TENSORS: one line per tensor, so that a diff between commits is readable."""
    files: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        line = f"{json.dumps(name)}: {json.dumps([tensor.dtype, list(tensor.shape)])}"
        files.setdefault(tensor.file, []).append(f"  {line}")
    parts = [f" {json.dumps(file)}: {{\n" + ",\n".join(lines) + "\n }" for file, lines in files.items()]
    return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


def lock_text(model_id: str, revision: str | None, commit: str, files: Mapping[str, bytes]) -> bytes:
    """Return the text of LOCK for the contents of a folder's other files."""
    lock = {
        "lock": LOCK_VERSION,
        "id": model_id,
        "revision": revision,
        "commit": commit,
        "files": {file: hashlib.sha256(content).hexdigest() for file, content in sorted(files.items())},
    }
    return (json.dumps(lock, indent=2) + "\n").encode()


def _listed(listed: Any) -> Iterator[tuple[str, Listed]]:
    for file, held in listed.items():
        for tensor, (dtype, shape) in held.items():
            yield tensor, Listed(str(file), str(dtype), tuple(int(size) for size in shape))


def _read(file: Path, name: str) -> bytes:
    try:
        if file.stat().st_size > MAX_FILE:
            raise NotWhole(f"{name} has more than {MAX_FILE:,} bytes")
        if not file.is_file():
            raise NotWhole(f"{name} is not a regular file")
        return file.read_bytes()
    except FileNotFoundError:
        raise NotWhole(f"{name} is missing") from None
    except OSError as error:
        raise NotWhole(f"{name} cannot be read: {error.strerror or error}") from None
