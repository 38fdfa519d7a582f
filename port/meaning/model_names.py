"""The model of a recipe for a model name in a tool's file."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from recipec.compiler.catalog import (
    Model,
    UnknownModel,
    entries,
    find,
    is_directory,
    is_quantized,
    original_of,
)
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys
from recipec.port.refusals import E1144
from recipec.runtime.model.families import UnsupportedCheckpoint


@dataclass(frozen=True)
class Named:
    """A model by its name.

    Attributes:
        id: the recipe's `model.id`.
        model: None if the model is unknown or cannot be trained; the recipe's checks then say why.
        note: how `id` differs from the file's name, "" if it does not.
    """

    id: str
    model: Model | None
    note: str = ""


def resolve(name: str, folder: Path) -> Named:
    """Find the model for a name that `from_pretrained` accepts.

    A copy by another publisher (unsloth/Qwen3-8B, NousResearch/Llama-3.2-1B) is replaced by its original.

    Args:
        folder: the folder that a relative path is relative to.
    """
    path = name
    if not is_directory(name) and (folder / name).is_dir() and name not in entries():
        path = f"./{name}"
    model = _found(path, folder)
    kept = is_directory(path) or path in entries() or (model is not None and model.origin != "catalog")
    if kept or (original := original_of(name)) is None:
        return Named(path, model)
    same = "quantized by its publisher" if is_quantized(name) else "the same weights and tokens"
    note = f"the original of {name}, which is a copy: {same}"
    return Named(original, _found(original, folder), note)


def of_folder(path: str, folder: Path, among: Collection[str] = ()) -> Named:
    """Find the model of a checkpoint's folder by the folder's name.

    The name counts if it is that of an id, or if the last two names are an id. The folders of the hub's and
    of ModelScope's caches count too. Nothing is guessed from any other name: `model.id` is then the path.

    Args:
        folder: the folder that a relative path is relative to.
        among: ids that count in addition to the catalog's.
    """
    cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", path)
    names = [f"{cached[1]}/{cached[2]}"] if cached else path.replace("___", ".").strip("/").split("/")
    if len(names) > 1 and names[-1] == "original":  # Meta's own files, below those of transformers
        names.pop()
    owned, last = "/".join(names[-2:]), names[-1].rpartition("/")[2]
    ids = [id for id in among if id.rpartition("/")[2].lower() == last.lower()]
    if owned in entries() or owned in ids or cached:
        return resolve(owned, folder)
    if named := ids[0] if ids else original_of(last):
        return resolve(named, folder)
    if HUB_ID.fullmatch(path) and (brought := resolve(path, folder)).model is not None:
        return brought
    return resolve(path if is_directory(path) else f"./{path}", folder)


HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""Matches an id OWNER/NAME."""


def _found(name: str, folder: Path) -> Model | None:
    try:
        return find(name, folder)
    except (UnknownModel, UnsupportedCheckpoint):
        return None


def stored(name: str | None, folder: Path) -> str:
    """Return the type of a checkpoint's weights by its config.json, "auto" if that is not at hand."""
    model = _found(name, folder) if name is not None else None
    config = model.config if model is not None else {}
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


def say_model(keys: Keys, key: str, revision: str) -> Statements[Named | None]:
    """State the keys that name a model and its revision. Return None if no model is named.

    An unknown model's id still goes into the recipe. The recipe's checks report it.
    """
    name, branch = keys.text(key), keys.text(revision)
    if not name:
        yield keys.refuse(key, E1144, "the file names no model", f"--set {key}=Qwen/Qwen3-8B")
        return None
    named = resolve(name, keys.source.path.parent)
    if named.model is None:
        named = resolve(name, keys.ledger.home)
    yield keys.say(key, {"model.id": named.id}, named.note)
    kept = branch not in (None, "main") and not named.note
    yield keys.same(revision, {"model.revision": branch} if kept else None)
    return named


def way_out(name: str, key: str) -> str | None:
    """Return the help for a checkpoint's folder that is not at hand, None for an id of the hub."""
    if not is_directory(name) and name.count("/") < 2:
        return None
    copied = original_of(name.rstrip("/").replace("___", "."))  # ModelScope's cache has no dots
    model = (
        f"{copied}, if the folder is a copy of it"
        if copied
        else "OWNER/NAME, its id on the hub (`recipe models add OWNER/NAME` adds one to the catalog)"
    )
    return f"--set {key}={model}; or name a folder with its config.json"


def say_flash(keys: Keys) -> Says:
    """State `attn_implementation` if it asks for a fused kernel."""
    if "flash" in (keys.text("attn_implementation") or ""):
        yield keys.same("attn_implementation", {"model.attention": "splash"}, "the TPU's fused kernel")


def chat_sibling(model: Model) -> str | None:
    """Return the id of the chat-tuned model of the same family and size.

    Its tokenizer has the family's template.

    Return None if the model is tuned itself, its own tokenizer has the template, or no such model exists.
    """
    if model.chat is not False:
        return None
    base = re.sub(r"-(?:pt|base|hf)$", "", model.id, flags=re.IGNORECASE)
    first, version, number = base.partition("-v")
    names = (f"{base}-it", f"{base}-Instruct", f"{base}-instruct", f"{base}-Chat", f"{base}-chat-hf", base)
    for name in (*names, f"{first}-Instruct{version}{number}"):
        if name != model.id and (entries().get(name) or {}).get("chat"):
            return name
    return None
