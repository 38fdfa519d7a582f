"""Classify what a recipe names by its spelling: files, data sets, templates, chats, paths out of the
folder."""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipec.spec.language import Recipe

COMPRESSIBLE = (".jsonl", ".json", ".csv")
ENDINGS = (*COMPRESSIBLE, ".parquet", ".arrow", ".array_record", ".arrayrecord")
FILE = re.compile(r"\.((jsonl|json|csv)(\.(gz|zst))?|parquet|arrow|array_?record(-\d+-of-\d+)?)", re.I)
"""The file name endings of data that can be read."""

TEXT_FORMATS = ("text", "prompt_completion")
"""Data formats without turns."""

IMPORTABLE = (".py", ".pyc", ".so", ".pyd")
"""Endings of the files that Python imports."""


def is_dataset(path: str) -> bool:
    """Return whether a source is a Hugging Face data set, on the hub or in a folder, by its name."""
    return re.search(rf"{FILE.pattern}$", path, re.I) is None


def is_inline(template: str) -> bool:
    """Return whether `data.chat_template` is the template itself rather than a file's path."""
    return "{%" in template or "{{" in template or "\n" in template


def asks_chats(recipe: Recipe) -> bool:
    """Return whether a prompt is a user's turn; otherwise it is text that the model completes."""
    return not recipe.data.formats <= set(TEXT_FORMATS)


def functions(recipe: Recipe) -> dict[str, str]:
    """Return the recipe's own Python functions, FILE:NAME, by the place that first names each."""
    rewards = {f"rewards[{i}].function": reward.function for i, reward in enumerate(recipe.rewards)}
    named = recipe.data.transforms
    for place, function in rewards.items():
        if function is not None and function not in named.values():
            named[place] = function
    return named


def schemas(recipe: Recipe) -> dict[str, str]:
    """Return the JSON Schema files of rewards by their places in the recipe."""
    rewards = {
        f"rewards[{i}].json_schema.file": reward.json_schema for i, reward in enumerate(recipe.rewards)
    }
    return {
        place: reward.file
        for place, reward in rewards.items()
        if reward is not None and reward.file is not None
    }


def inputs(recipe: Recipe) -> dict[str, str]:
    """Return what a run reads, data and the adapter to start from, by their places in the recipe."""
    data, samples, lora = recipe.data, recipe.train.generations, recipe.lora
    paths = {f"data.train[{i}].path": source.path for i, source in enumerate(data.train)}
    paths |= {f"data.eval[{i}].path": source.path for i, source in enumerate(data.eval)}
    if samples is not None:
        paths["train.generations.prompts"] = samples.prompts
    if lora is not None and lora.start_from is not None:
        paths["lora.start_from"] = lora.start_from
    return paths


def outputs(recipe: Recipe) -> dict[str, str]:
    """Return the folders that a run writes, by their places in the recipe."""
    cache = {} if recipe.cache.directory is None else {"cache.directory": recipe.cache.directory}
    return {
        "checkpoint.directory": recipe.checkpoint.directory,
        "merge.output": recipe.merge.output,
        **cache,
    }


def outside(recipe: Recipe) -> dict[str, str]:
    """Return the addresses that a run and its merge write, by their places in the recipe.

    Other recipes may use the same cache, and folders are below the artifact.
    """
    places = outputs(recipe).items()
    return {path: place.rstrip("/") for path, place in places if "://" in place and path != "cache.directory"}


def addresses(recipe: Recipe) -> list[str]:
    """Return the addresses that a run and its merge read or write."""
    model = (recipe.model.id, recipe.model.tokenizer or "")
    return [
        place for place in (*inputs(recipe).values(), *outputs(recipe).values(), *model) if "://" in place
    ]


def leads_out(folder: Path, path: str) -> bool:
    """Return whether a path below a folder leads outside it through a link."""
    root = os.path.realpath(folder)
    try:
        real = os.path.realpath(folder / path)
    except ValueError:  # a NUL character
        return False
    return os.path.commonpath([root, real]) != root


def names_nothing(address: str) -> bool:
    """Return whether an address has no bucket or host, or leaves it through `..`."""
    parts = address.partition("://")[2].split("/")
    return "://" in address and not escapes(address) and (parts[0] in ("", ".") or ".." in parts)


def escapes(path: str) -> bool:
    """Return whether a recipe's path leads out of the recipe's folder; file:// and local:// do too."""
    if "://" in path:
        return path.lower().startswith(("file:", "local:"))
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if parts and (parts[0] == "/" or parts[0].startswith("~") or re.fullmatch("[A-Za-z]:", parts[0])):
        return True
    depth = 0
    for part in parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False
