"""litgpt's data modules, and the prompts that they write."""

from __future__ import annotations

from typing import Any

from compiler.port import known
from compiler.port.dialects import trl_data
from compiler.port.keys import Keys
from compiler.port.meaning import alpaca, datasets
from compiler.port.meaning.conversion import FILE, FUNCTION, prompts
from compiler.port.meaning.models import Named
from compiler.wording import listing

SOURCES = {
    "Alpaca": "yahma/alpaca-cleaned",
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "AlpacaGPT4": "vicgalle/alpaca-gpt4",
}
"""Modules of one data set, and the same rows on the hub."""

FAMILIES = {"gemma": ("gemma2", "gemma3"), "llama3": ("llama3",), "qwen2.5": ("qwen2",), "qwen3": ("qwen3",)}
"""Prompt styles that are a family's chat template."""

DEFAULT_FRACTION = 0.05
"""Of the rows of a JSON file, which litgpt holds out where the file does not say."""


def speak(keys: Keys, train: Keys, named: Named | None) -> None:
    """Says what becomes of `data` and of the longest length."""
    found = keys.value("data")
    name = (
        found
        if isinstance(found, str)
        else (found or {}).get("class_path")
        if isinstance(found, dict | None)
        else ""
    )
    name = str(name or "litgpt.data.Alpaca").rpartition(".")[2]
    section = keys.below("data.init_args")
    section.defaults = _defaults(name)
    trl_data.length(train, "max_seq_length")
    keys.ledger.set("data.packing", False, "litgpt packs no samples when it fine-tunes")
    if name not in (*SOURCES, "JSON"):
        names = listing([f"litgpt.data.{one}" for one in ("JSON", *SOURCES)], "or")
        message = f"the data module {name} has no counterpart here"
        key = "data.class_path" if keys.stands("data.class_path") else "data"
        keys.refuse(
            key, "E1143", message, f"its rows as a file: class_path: litgpt.data.JSON; known are {names}"
        )
        return
    source = _json(section) if name == "JSON" else datasets.source(f"hf://{SOURCES[name]}")
    if isinstance(found, dict):
        note = (
            ""
            if name in ("JSON", "Alpaca2k")
            else "the hub's copy of the same rows, which may have been corrected"
        )
        keys.below("data").say("class_path", {"data.train": [source]}, note)
    else:
        keys.defaults = {**keys.defaults, "data": "litgpt.data.Alpaca"}
        keys.say("data", {"data.train": [source]}, "the hub's copy of the same rows")
    _held_out(section, name)
    _prompts(section, named)
    on = "completion" if section.flag("mask_prompt") else "all"
    section.say("mask_prompt", {"data.loss_on": on})
    seed = section.integer("seed")
    section.say("seed", {"data.shuffle_seed": seed})
    section.unless("ignore_index", (-100,), "tokens without loss have no number here")
    section.passive(("num_workers", "download_dir", "file_url", "file_name", "repo_id"), "how it is read")


def _defaults(name: str) -> dict[str, Any]:
    sections = known.tools()["litgpt"]["sections"]
    return known.defaults("litgpt", f"litgpt.data.{name}") if f"litgpt.data.{name}" in sections else {}


def _json(section: Keys) -> Any:
    path = section.text("json_path")
    if path is None:
        section.refuse("json_path", "E1143", "litgpt.data.JSON names no file", "json_path: data/train.jsonl")
        return ""
    if path.endswith((".json", ".jsonl")):
        section.same("json_path", note="data.train")
        return path
    folder = section.source.path.parent / path
    files = {}
    for split in ("train", "val"):
        ends = (
            ".jsonl"
            if (folder / f"{split}.jsonl").is_file() and not (folder / f"{split}.json").is_file()
            else ".json"
        )
        files[split] = f"{path.rstrip('/')}/{split}{ends}"
    section.same("json_path", {"data.eval": [files["val"]]}, "a folder with train and val")
    return files["train"]


def _held_out(section: Keys, name: str) -> None:
    folder = bool(section.ledger.value("data.eval"))
    if name == "JSON" and not folder and not section.given("val_split_fraction"):
        section.defaults = {**section.defaults, "val_split_fraction": DEFAULT_FRACTION}
    share = section.number("val_split_fraction")
    if folder or share is None:
        section.same("val_split_fraction", note="the folder has its own rows to evaluate on")
        return
    if not 0 < share < 1:
        message = f"val_split_fraction is {share:g}, and has to lie between 0 and 1"
        section.refuse("val_split_fraction", "E1160", message, "val_split_fraction: 0.05")
        return
    sets = {"data.eval_fraction": share, "data.eval_seed": section.integer("seed")}
    section.say("val_split_fraction", sets, "as many rows, drawn by another generator")


def _prompts(section: Keys, named: Named | None) -> None:
    """The prompt style: Alpaca's is written by a transform, a family's own by the model's chat template."""
    style = section.text("prompt_style") or "alpaca"
    if style == "alpaca":
        section.ledger.files[FILE] = prompts(alpaca.prompt(), "litgpt's alpaca style")
        made = {"data.format": "prompt_completion", "data.transform": f"{FILE}:{FUNCTION}"}
        section.say("prompt_style", made)
    elif style == "default":
        made = {"data.format": "prompt_completion"}
        fields = {"data.fields": {"prompt": "instruction", "completion": "output"}}
        section.say("prompt_style", {**made, **fields})
    elif named is not None and named.model is not None and named.model.family.name in FAMILIES.get(style, ()):
        note = "the chat template of the model's tokenizer, of which litgpt's text is a copy"
        section.say("prompt_style", {"data.format": "instruction"}, note)
    else:
        message = f"the prompt style {style} has no counterpart here"
        section.refuse("prompt_style", "E1163", message, "prompt_style: alpaca, or default")
