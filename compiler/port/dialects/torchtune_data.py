"""torchtune's data sets and tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.catalog import Model
from compiler.port import known
from compiler.port.dialects import trl_data
from compiler.port.keys import Keys, keeps
from compiler.port.meaning import alpaca, datasets, templates
from compiler.port.meaning.conversion import FILE, FUNCTION
from compiler.wording import listing

PREFIX = "torchtune.datasets."

KINDS: Mapping[str, str] = {
    "alpaca_dataset": "alpaca",
    "alpaca_cleaned_dataset": "alpaca",
    "instruct_dataset": "pairs",
    "samsum_dataset": "pairs",
    "grammar_dataset": "pairs",
    "chat_dataset": "chat",
    "slimorca_dataset": "chat",
    "text_completion_dataset": "text",
    "wikitext_dataset": "text",
    "cnn_dailymail_articles_dataset": "text",
    "preference_dataset": "preference",
    "hh_rlhf_helpful_dataset": "preference",
}
"""Builders of data sets, by what their rows hold."""

COLUMNS = {"samsum_dataset": ("dialogue", "summary"), "cnn_dailymail_articles_dataset": ("article", "")}
"""Columns of builders for one data set: what is asked and answered."""

SOURCE_KEYS = (
    *("source", "data_files", "split", "name", "subset", "data_dir", "cache_dir", "streaming", "num_proc"),
    "trust_remote_code",
)

SOURCES = {"alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}

TRANSFORM = f"{FILE}:{FUNCTION}"

TEMPLATES = {"llama3": "llama3", "qwen2": "chatml", "qwen3": "chatml"}
"""Families to the template whose marks torchtune's own tokenizer writes around messages."""


def speak(keys: Keys, model: Model | None, objective: str) -> None:
    """Says what becomes of `dataset`, `dataset_val` and `tokenizer`."""
    entries = _entries(keys, "dataset")
    if not entries:
        help = "dataset: {_component_: torchtune.datasets.alpaca_dataset}"
        keys.refuse("dataset", "E1143", "the file names no data set", help)
    made, settings = _read(keys, entries, objective, {}, "data.train")
    if made:
        keys.ledger.set("data.train", made)
    _validation(keys, objective, settings)
    for path, value in settings.items():
        keys.ledger.set(path, value)
    keys.ledger.set("data.packing", bool(settings.get("data.packing")))
    _tokenizer(keys, model, settings)


def _read(
    keys: Keys, entries: list[Keys], objective: str, settings: dict[str, Any], path: str
) -> tuple[list[Any], dict[str, Any]]:
    """The sources of some data sets, and the settings that they share with those of before.

    Args:
        path: of the recipe that the sources go to.
    """
    made: list[Any] = []
    alike: list[Keys] = []
    for entry in entries:
        found = _one(keys, entry, objective, path)
        if found is None:
            continue
        source, its = found
        made.append(source)
        if settings and its != settings:
            message = "data sets of two kinds cannot be mixed: a recipe's rows are all alike"
            help = keeps(entries[0].prefix.partition("[")[0].rstrip("."), [_whole(each) for each in alike])
            if path == "data.eval":
                help = "--set run_val_every_n_steps=null ports the run without its evaluation"
            entry.refuse("_component_", "E1142", message, help)
        else:
            alike.append(entry)
        settings = settings or its
        entry.same("_component_", note="how rows become what is learnt: data.format and data.loss_on")
    return made, settings


def _whole(entry: Keys) -> Any:
    return entry.source.get(entry.prefix.rstrip("."))


def _validation(keys: Keys, objective: str, settings: dict[str, Any]) -> None:
    """`dataset_val`, which is gone through every `run_val_every_n_steps`."""
    every = keys.integer("run_val_every_n_steps")
    if not every or every < 0:
        note = "run_val_every_n_steps is not set: nothing is evaluated"
        keys.passive(("dataset_val", "run_val_every_n_steps", "batch_size_val"), note)
        return
    entries = _entries(keys, "dataset_val")
    if not entries:
        message = "torchtune stops on run_val_every_n_steps without dataset_val"
        help = "dataset_val: {_component_: torchtune.datasets.alpaca_dataset, split: 'train[95%:]'}"
        keys.refuse("run_val_every_n_steps", "E1145", message, help)
    made, _ = _read(keys, entries, objective, settings, "data.eval")
    if made:
        keys.ledger.set("data.eval", made)
        keys.same("run_val_every_n_steps", {"train.eval_every": every})
    keys.passive(("run_val_every_n_steps", "batch_size_val"), "how it evaluates, which trains nothing")


def _entries(keys: Keys, key: str) -> list[Keys]:
    """The data sets of a key; one of another type than theirs has none."""
    found = keys.value(key)
    if isinstance(found, dict) and str(found.get("_component_", "")).endswith("ConcatDataset"):
        keys.below(key).same("_component_", note="the data sets one after the other")
        inner = found.get("datasets")
        return [
            keys.below(f"{key}.datasets[{n}]") for n in range(len(inner) if isinstance(inner, list) else 0)
        ]
    if isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        return [keys.below(f"{key}[{n}]") for n in range(len(found))]
    return [keys.below(key)] if isinstance(found, dict) else []


def _one(keys: Keys, entry: Keys, objective: str, path: str) -> tuple[Any, dict[str, Any]] | None:
    component = entry.text("_component_") or ""
    builder = component.removeprefix(PREFIX)
    kind = KINDS.get(builder)
    if kind is None:
        code, message = "E1143", f"the data set {component or 'without _component_'} has no counterpart"
        if "multimodal" in component:
            code, message = "E1150", f"{component} is of images and text"
        names = listing([name for name in KINDS], "or")
        entry.refuse("_component_", code, message, f"one of {PREFIX}: {names}")
        return None
    if (kind == "preference") != (objective == "dpo"):
        message = f"{builder} does not go with the loss: {objective} learns from other rows"
        entry.refuse("_component_", "E1145", message, "make dataset and loss agree")
        return None
    entry.defaults = {**known.defaults("torchtune", PREFIX + builder), "split": "train"}
    if builder in SOURCES:
        entry.defaults["source"] = SOURCES[builder]
    source = _source(entry, path)
    settings = _SETTINGS[kind](keys, entry, builder)
    if kind == "text":
        settings["data.loss_on"] = "all"
        entry.same("train_on_input", note="all of a text is learnt")
    elif kind == "preference":
        entry.unless("train_on_input", (False,), "the prompt carries no loss in dpo")
    else:
        settings["data.loss_on"] = "all" if entry.flag("train_on_input") else "assistant"
        entry.say("train_on_input", {"data.loss_on": settings["data.loss_on"]})
    if kind != "preference":
        settings["data.packing"] = entry.flag("packed")
        entry.say("packed", {"data.packing": settings["data.packing"]})
    entry.unless(
        "filter_fn", (None,), "all rows are read here: a data.transform that returns None leaves one out"
    )
    return (source, settings) if source is not None else None


def _source(entry: Keys, path: str) -> Any:
    name, files = entry.text("source"), entry.value("data_files")
    place = datasets.place(name or "", files if isinstance(files, str | list) else None)
    if name is None or place.path is None:
        note = place.note or "it names no source"
        entry.refuse(
            "source", "E1143", f"it cannot be a source: {note}", "source: OWNER/NAME, or json with data_files"
        )
        entry.passive(SOURCE_KEYS, "of a source that cannot be read")
        return None
    hub = place.path.startswith("hf://")
    split = entry.text("split")
    config = entry.text("name") or entry.text("subset")
    made = datasets.source(place.path, split if hub and split != "train" else None, config if hub else None)
    if not entry.given("source"):
        entry.say("source", {path: [made]})
    if not hub and split not in (None, "train"):
        entry.unless("split", (), "a file has no splits: all of it is read")
    entry.passive(("source", "data_files", "split", "name", "subset"), f"part of {path}")
    entry.unless("data_dir", (None,), "a folder of a repository: name its files as data_files")
    entry.passive(
        ("cache_dir", "streaming", "num_proc", "trust_remote_code"), "how it is read, not what it holds"
    )
    return made


def _columns(entry: Keys) -> dict[str, str]:
    found = {str(key): str(value) for key, value in entry.mapping("column_map").items()}
    entry.passive(("column_map",), "the columns' names")
    return found


def _alpaca(keys: Keys, entry: Keys, builder: str) -> dict[str, Any]:
    columns = {
        key: name for key, name in _columns(entry).items() if key in ("instruction", "input", "output")
    }
    keys.ledger.files[FILE] = alpaca.messages(alpaca.prompt(columns), "Alpaca's prompts")
    return {"data.format": "chat", "data.transform": TRANSFORM}


def _pairs(keys: Keys, entry: Keys, builder: str) -> dict[str, Any]:
    asked, answered = COLUMNS.get(builder, ("input", "output"))
    columns = _columns(entry)
    system = entry.text("new_system_prompt")
    entry.passive(("new_system_prompt",), "the first message of each row")
    made = alpaca.pairs(columns.get("input", asked), columns.get("output", answered), system)
    keys.ledger.files[FILE] = made
    return {"data.format": "chat", "data.transform": TRANSFORM}


def _chat(keys: Keys, entry: Keys, builder: str) -> dict[str, Any]:
    column = entry.text("conversation_column") or _columns(entry).get("conversations")
    style = entry.text("conversation_style")
    if style not in (None, "openai", "sharegpt"):
        help = "conversation_style: openai"
        entry.refuse("conversation_style", "E1160", f"the conversation style {style} is not known", help)
    entry.passive(("conversation_column", "conversation_style", "column_map"), "messages, of either spelling")
    entry.unless("new_system_prompt", (None,), "each row keeps its own system message here")
    made: dict[str, Any] = {"data.format": "chat"}
    if column not in (None, "messages", "conversations"):
        made["data.fields"] = {"messages": column}
    return made


def _text(keys: Keys, entry: Keys, builder: str) -> dict[str, Any]:
    column = entry.text("column") or COLUMNS.get(builder, ("text", ""))[0]
    column = "page" if builder == "wikitext_dataset" else column
    entry.passive(("column",), "the column of text")
    entry.unless("add_eos", (True,), "the end of text ends each sample here")
    if entry.flag("packed") and entry.flag("split_across_pack"):
        note = "a sample that does not fit into a row is cut off here; there it goes on in the next"
        entry.say("split_across_pack", {}, note)
    entry.passive(("split_across_pack",), "no packing")
    most = entry.integer("max_seq_len")
    entry.say("max_seq_len", {"data.max_length": most} if most else None)
    made: dict[str, Any] = {"data.format": "text"}
    return made if column == "text" else {**made, "data.fields": {"text": column}}


def _preference(keys: Keys, entry: Keys, builder: str) -> dict[str, Any]:
    columns = _columns(entry)
    entry.unless("new_system_prompt", (None,), "each row keeps its own system message here")
    fields = {key: columns[key] for key in ("chosen", "rejected") if columns.get(key, key) != key}
    made: dict[str, Any] = {"data.format": "preference"}
    return {**made, "data.fields": fields} if fields else made


_SETTINGS = {"alpaca": _alpaca, "pairs": _pairs, "chat": _chat, "text": _text, "preference": _preference}


def _tokenizer(keys: Keys, model: Model | None, settings: Mapping[str, Any]) -> None:
    form, whole = settings.get("data.format"), settings.get("data.loss_on") == "all"
    section = keys.below("tokenizer", {"max_seq_len": None})
    if keys.ledger.value("data.max_length") is None or section.given("max_seq_len"):
        trl_data.length(section, "max_seq_len")
    section.passive(("path", "merges_file", "special_tokens_path"), "the tokenizer of model.id")
    if form in ("chat", "preference") and model is not None:
        name = TEMPLATES.get(model.family.name)
        if name is not None:
            made = templates.written(templates.LLAMAFACTORY[name])
            lost = "no end-of-text token after the last" + (
                "" if whole else ", and no loss on an answer's first"
            )
            note = f"torchtune's marks around messages, though {lost}"
            section.say("_component_", {"data.chat_template": made}, note)
        else:
            for path, value in templates.own(model).sets.items():
                keys.ledger.set(path, value)
            section.say(
                "_component_", {}, "the model's chat template here; there the texts alone follow each other"
            )
    section.same("_component_", note="the tokenizer of model.id")
    section.unless(
        "prompt_template", (None,), "nothing is written around a message but the chat template's marks"
    )
    section.passive(("truncation_type",), "the end is cut off")
