"""TRL's data: what is read, what the rows hold, their length and packing."""

from __future__ import annotations

from typing import Any

from compiler.port import known
from compiler.port.keys import Keys
from compiler.port.meaning import datasets, rows, templates, trainer
from compiler.port.meaning.models import Named
from spec.diagnostics import Diagnostic

NO_LIMIT = 4096
"""Tokens of a row where the tool has no limit: a recipe has one, and says so when a sample is longer."""


def speak(keys: Keys, objective: str, named: Named | None) -> None:
    """Says what becomes of the keys of data sets, rows and lengths."""
    evaluates = trainer.evaluation(keys)
    path = _mixture(keys) if keys.value("datasets") else _single(keys, evaluates)
    form = _format(keys, objective, path)
    if objective == "sft":
        _loss(keys, form)
        _packing(keys)
    _template(keys, form, named)
    length(keys, "max_length")
    keys.passive(
        ("shuffle_dataset", "dataset_streaming", "streaming"), "rows are shuffled anew in each epoch here"
    )
    keys.passive(
        ("pad_to_multiple_of", "pad_token", "padding_value"), "padding carries no loss and is not attended to"
    )
    keys.passive(("padding_free",), "padding is not attended to")
    kwargs = keys.mapping("dataset_kwargs")
    skipped = bool(kwargs.get("skip_prepare_dataset"))
    keys.unless(
        "dataset_kwargs", () if skipped else (kwargs,), "rows that are tokenised already cannot be read here"
    )


def length(keys: Keys, key: str) -> None:
    """A longest length at which samples are cut off."""
    most = keys.integer(key) if keys.given(key) or not keys.stands(key) else None
    if most is None:
        sets = {"data.max_length": NO_LIMIT, "data.overlong": "error"}
        note = "without a limit there; a longer sample is an error here, rather than cut"
        if keys.stands(key):
            keys.ledger.approximated(keys.source, keys.prefix + key, sets, note)
            keys.said.add(key)
        else:
            keys.say(key, sets, note)
    else:
        keys.say(key, {"data.max_length": most, "data.overlong": "truncate"})
    if str(keys.value("truncation_mode") or "keep_start") == "keep_start":
        keys.same("truncation_mode", note="the end is cut off")
    keys.unless("truncation_mode", ("keep_start",), "the end is cut off here, not the start")


def _single(keys: Keys, evaluates: bool) -> str | None:
    keys.unused(("datasets", "test_split_size"), "dataset_name is what is read")
    name = keys.text("dataset_name")
    if name is None:
        help = "--set dataset_name=OWNER/NAME, or a file"
        keys.refuse("dataset_name", "E1143", "the files name no data set", help)
        return None
    place = datasets.place(name)
    if place.path is None:
        keys.refuse(
            "dataset_name", "E1143", f"`{name}` cannot be a source: {place.note}", "name a file or a data set"
        )
        return None
    config, split = keys.text("dataset_config"), keys.text("dataset_train_split")
    hub = place.path.startswith("hf://")
    split = split if hub and split != "train" else None
    keys.say("dataset_name", {"data.train": [datasets.source(place.path, split, config if hub else None)]})
    held = keys.text("dataset_test_split") or "test"
    if evaluates and hub:
        keys.say("dataset_test_split", {"data.eval": [datasets.source(place.path, held, config)]})
    keys.passive(("dataset_config", "dataset_train_split"), "part of data.train")
    keys.unused(("dataset_test_split",), "the run does not evaluate")
    return name


def _mixture(keys: Keys) -> str | None:
    """`datasets`: the mixture, which wins over dataset_name."""
    entries = keys.value("datasets")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        keys.refuse("datasets", "E1160", "datasets is no list of mappings", "datasets: [{path: OWNER/NAME}]")
        return None
    made: list[Any] = []
    first = None
    for index, entry in enumerate(entries):
        one = keys.below(f"datasets[{index}]", {"split": "train"})
        found = _entry(one)
        if found is not None:
            made.append(found)
            first = first or str(entry.get("path"))
    keys.ledger.set("data.train", made)
    keys.unused(
        ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split"),
        "datasets wins over it",
    )
    share = keys.number("test_split_size")
    if share is None:
        keys.same("test_split_size", note="no rows are held out")
    elif 0 < share < 1:
        keys.say("test_split_size", {"data.eval_fraction": share}, "drawn without a seed there: other rows")
    else:
        keys.unless("test_split_size", (), "a number of rows cannot be held out here: give a share")
    return first


def _entry(keys: Keys) -> Any:
    path = keys.text("path")
    files = keys.value("data_files")
    listed = files if isinstance(files, str | list) else None
    place = datasets.place(path or "", listed)
    if path is None or place.path is None:
        note = place.note or "it names no path"
        keys.refuse("path", "E1143", f"it cannot be a source: {note}", "path: OWNER/NAME, or a file")
        keys.passive(known.keys("trl", "dataset"), "of a source that cannot be read")
        return None
    hub = place.path.startswith("hf://")
    split = keys.text("split")
    made = datasets.source(
        place.path, split if hub and split != "train" else None, keys.text("name") if hub else None
    )
    share = keys.number("fraction")
    if share is not None:
        made = {**(made if isinstance(made, dict) else {"path": made}), "weight": share}
        keys.say(
            "fraction", {}, "rows are drawn in these shares here; there the first rows of each are taken"
        )
    keys.passive(("path", "name", "split", "data_files"), "part of data.train")
    keys.unless("data_dir", (None,), "a folder of a repository: name its files as data_files")
    keys.passive(("columns",), "columns that are not used are passed over")
    return made


def _format(keys: Keys, objective: str, path: str | None) -> str:
    """What the rows hold: TRL tells it by their columns, which are looked at where the file is at hand."""
    if objective != "sft":
        keys.ledger.set("data.format", "preference")
        return "preference"
    row = rows.first(path, keys.source.path.parent) if path else None
    column = keys.text("dataset_text_field") or "text"
    if row is not None:
        form = _of_columns(row, column)
        why = f"by the columns of {path}" if form else ""
    elif keys.flag("assistant_only_loss"):
        form, why = "chat", "assistant_only_loss is for conversations alone"
    elif keys.value("completion_only_loss") is True:
        form, why = "prompt_completion", "completion_only_loss is for prompts and completions alone"
    elif keys.given("dataset_text_field"):
        form, why = "text", "dataset_text_field names a column of text"
    else:
        form, why = None, ""
    if form is None:
        form, why = "chat", "not known from the files: TRL goes by the columns of the data set"
    if why.startswith("not known") and path is not None:
        message = "the format of the data is a guess: TRL tells it by the columns of the data set"
        help = (
            "chat is right for a column `messages`; else set data.format and data.loss_on in the recipe: "
            "prompt_completion or text"
        )
        key = "dataset_name" if keys.stands("dataset_name") else "datasets"
        keys.ledger.diagnostics.append(Diagnostic("W1168", message, key, help, keys.source.span(key)))
    keys.ledger.set("data.format", form, why)
    if form == "text" and column != "text":
        keys.say("dataset_text_field", {"data.fields": {"text": column}})
    keys.same("dataset_text_field", note="the column of text, where the rows hold text")
    return form


def _of_columns(row: dict[str, Any], column: str) -> str | None:
    if "messages" in row or "conversations" in row:
        return "chat"
    if "prompt" in row and "completion" in row:
        return "prompt_completion"
    return "text" if column in row else None


def _loss(keys: Keys, form: str) -> None:
    """Which tokens carry loss."""
    assistant, completion = keys.flag("assistant_only_loss"), keys.value("completion_only_loss")
    if form == "chat":
        keys.say("assistant_only_loss", {"data.loss_on": "assistant" if assistant else "all"})
        if completion is True:
            message = "completion_only_loss is for prompts and completions, and the rows are conversations"
            keys.refuse("completion_only_loss", "E1145", message, "assistant_only_loss: true")
        keys.same("completion_only_loss", note="for prompts and completions alone")
    elif form == "prompt_completion":
        on = "all" if completion is False else "completion"
        keys.defaults = {**keys.defaults, "completion_only_loss": "auto"}
        keys.say("completion_only_loss", {"data.loss_on": on})
        keys.same("assistant_only_loss", note="the completion carries the loss")
    else:
        keys.ledger.set("data.loss_on", "all")
        keys.passive(
            ("completion_only_loss", "assistant_only_loss"), "the rows are text: all of it is learnt"
        )
    if form == "chat":
        keys.same("eos_token", note="the chat template ends a turn")
    keys.unless("eos_token", (None,), "the tokenizer's own end of text ends a sample here")


def _packing(keys: Keys) -> None:
    on = keys.flag("packing")
    strategy = str(keys.value("packing_strategy"))
    note = {
        "bfd": "",
        "bfd_split": "what is longer than a row is cut off here; there it goes on in other rows",
    }.get(
        strategy,
        "a sample attends to itself alone, and is whole or cut off here; there rows are cut anywhere",
    )
    keys.say("packing", {"data.packing": on}, note if on else "")
    keys.same(
        "packing_strategy",
        note="which samples share a row; each attends to itself alone" if on else "no packing",
    )
    keys.passive(
        ("eval_packing",), "evaluation's rows are packed as training's: its loss is a mean over tokens"
    )


def _template(keys: Keys, form: str, named: Named | None) -> None:
    path = keys.text("chat_template_path")
    if path is not None and path.endswith((".jinja", ".jinja2", ".j2")):
        keys.say("chat_template_path", {"data.chat_template": path})
    elif path is not None:
        keys.say(
            "chat_template_path", {"model.tokenizer": path}, "the whole tokenizer is taken, with its template"
        )
    elif (
        form == "chat"
        and named is not None
        and named.model is not None
        and named.model.family.name != "qwen3"
    ):
        own = templates.own(named.model)
        for target, value in own.sets.items():
            keys.ledger.set(target, value, own.note)
    keys.same("chat_template_path", note="the tokenizer's own template")
