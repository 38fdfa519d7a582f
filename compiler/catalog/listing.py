"""The catalog: models by their Hugging Face ids, and the families that cannot be trained.

data/models.json holds one entry for each id: its family, whether it is tuned for chat, and the keys of its
config.json that the family reads. Instead, an entry may name another id and list only the differences. A copy
by another publisher (unsloth/Qwen3-8B) is recognized as its original.
data/other_models.json holds the families that cannot be trained, each with prefixes of its ids' last parts.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "models.json"

OTHERS = DATA.with_name("other_models.json")

CAUSAL = DATA.with_name("causal_models.json")

_QUANTIZED = re.compile(
    r"-(?:unsloth-bnb-4bit|(?:bnb-)?[48]bit|(?:linearized-)?bnb-nf4(?:-bf16)?"
    r"|(?:aqlm|awq|exl2|fp8|gguf|gptq|hqq|int[48]|mxfp4|nvfp4|quantized|w\d+a\d+)(?:[-.].*)?)$",
    re.IGNORECASE,
)
"""Suffixes of names of copies that their publisher quantized."""

_TUNED = re.compile(r"(?:-(?:base|bf16|chat|hf|instruct|it|pt))+$", re.IGNORECASE)
"""Suffixes of model names that the title leaves out."""


@functools.cache
def entries() -> Mapping[str, Mapping[str, Any]]:
    """Return data/models.json as {id: {"family": ..., "chat": ..., "config": {...}}}.

    An entry with `like` takes its missing values from the entry named there.
    """
    data: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return {name: whole(entry, data) for name, entry in data.items()}


def whole(entry: dict[str, Any], data: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an entry of data/models.json with the values of the entry that it is like."""
    if "like" not in entry:
        return entry
    other = data[entry["like"]]
    differences = {key: value for key, value in entry.items() if key != "like"}
    config = {**other["config"], **entry.get("config", {})}
    if "text_config" in other["config"]:
        config["text_config"] = {**other["config"]["text_config"], **config["text_config"]}
    return {**other, **differences, "config": config}


def is_directory(model_id: str) -> bool:
    """Return whether `model.id` names a directory rather than a Hugging Face id."""
    return model_id in (".", "..") or model_id.startswith(("./", "../", "/", "~"))


def entry_of(model_id: str) -> Mapping[str, Any] | None:
    """Return the entry in `entries` of an id, or of the original of a copy; None if both are missing, and for
    directories."""
    return entries().get(model_id) or entries().get(_copied(model_id) or "")


def _copied(model_id: str) -> str | None:
    """Return the original of an id that belongs to another publisher or to a quantized copy."""
    original = original_of(model_id) if re.fullmatch(r"\w[\w.-]*/[\w.-]+", model_id) else None
    same_owner = original is not None and _owner(original) == _owner(model_id)
    return None if same_owner and not is_quantized(model_id) else original


def _owner(model_id: str) -> str:
    return model_id.partition("/")[0].lower()


def original_of(name: str) -> str | None:
    """Return the catalog's id that a copy's name, quantized or not, ends with; None if there is none.

    The name may contain the original's publisher: google-gemma-2-9b for google/gemma-2-9b.
    """
    whole = _QUANTIZED.sub("", name.rpartition("/")[2]).lower()
    bare = whole.removeprefix("meta-").removesuffix("-hf")
    spellings = {f"{before}{bare}{after}" for before in ("", "meta-") for after in ("", "-hf")}
    originals = [
        known
        for known in entries()
        if known.rpartition("/")[2].lower() in spellings or known.replace("/", "-").lower() == whole
    ]
    return originals[0] if len(originals) == 1 else None


def is_quantized(name: str) -> bool:
    """Return whether a copy's name says that its publisher quantized it."""
    return _QUANTIZED.search(name) is not None


@functools.cache
def _others() -> Mapping[str, re.Pattern[str]]:
    data: dict[str, list[str]] = json.loads(OTHERS.read_text(encoding="utf-8"))
    return {family: re.compile("|".join(starts), re.IGNORECASE) for family, starts in data.items()}


def untrainable_families(name: str) -> list[str]:
    """Return the families known to be untrainable that match a part of their name or a model's id."""
    bare = name.rpartition("/")[2].removeprefix("Meta-")
    return [
        family
        for family, starts in _others().items()
        if bare and (starts.match(bare) or bare.lower() in family.lower())
    ]


def untrainable(model_id: str) -> str | None:
    """Return the untrainable family that an id belongs to, whoever publishes it; None for other ids."""
    bare = model_id.rpartition("/")[2].removeprefix("Meta-")
    return next((family for family, starts in _others().items() if starts.match(bare)), None)


def title(model_id: str) -> str:
    """Return a model's name for a sentence: "google/gemma-4-31B-it" becomes "Gemma 4 31B".

    The suffix that says how it is tuned is left out. A model that is not in the catalog, or is one of our
    own, is called by its id.
    """
    original = model_id if model_id in entries() else _copied(model_id)
    if original is None or original.startswith("recipec/"):
        return model_id
    name = _TUNED.sub("", re.sub(r"^(?:Meta|c4ai)-", "", original.rpartition("/")[2]))
    name = re.sub(r"^([A-Za-z]{3,})(?=\d)", r"\1 ", name)  # Qwen2.5
    name = re.sub(r"(?<=\d)_(?=\d)", ".", name)  # phi-1_5
    words = re.split(r"[ _]|(?<!gpt)-(?![Aa]\d+[BbMm])", name)  # 30B-A3B stays one word
    words = [word.upper() if re.fullmatch(r"[\d.]+[bm](-a\d+[bm])?", word) else word for word in words]
    first = words[0] if "-" in words[0] else words[0][:1].upper() + words[0][1:]
    return " ".join([first, *words[1:]])


def causal_models() -> Mapping[str, bool]:
    """Return the model types for which transformers itself has a causal model in the layout that is read
    here, and whether that model keeps samples that share a row apart."""
    packed: dict[str, bool] = _causal()["packed"]
    return packed


def default_positions() -> Mapping[str, int]:
    """Return the positions of transformers' config classes, by model type, for a config.json that says
    none."""
    positions: dict[str, int] = _causal()["positions"]
    return positions


@functools.cache
def _causal() -> Mapping[str, Any]:
    data: dict[str, Any] = json.loads(CAUSAL.read_text(encoding="utf-8"))
    return data


def nearest(model_id: str) -> str | None:
    """Return the catalog's most similar id of the same publisher, None if there is none."""
    owner, _, bare = model_id.lower().rpartition("/")
    names = {name.rpartition("/")[2].lower(): name for name in entries()}
    near = {bare: name for bare, name in names.items() if not owner or _alike(owner, name.partition("/")[0])}
    close = get_close_matches(bare, near, n=1, cutoff=0.8)
    return near[close[0]] if close else None


def _alike(owner: str, known: str) -> bool:
    return bool(get_close_matches(owner, [known.lower()], cutoff=0.8))
