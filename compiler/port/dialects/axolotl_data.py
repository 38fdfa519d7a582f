"""Axolotl's data sets: where they lie, what their rows are, which tokens are learnt."""

from __future__ import annotations

from typing import Any

from compiler.catalog import Model
from compiler.port.dialects import axolotl_rows
from compiler.port.dialects.axolotl_types import Kind
from compiler.port.keys import Keys, keeps, words
from compiler.port.meaning import conversion, datasets, templates
from runtime.data.messages import ALIASES

SPLIT = (
    "the same share of rows; others, since Axolotl takes the last ones of its own shuffled order,"
    " without those "
    "that are too long"
)
SEEDS = "drawn from by other generators: another order of samples, and other adapters to start from"
TRANSFORM = conversion.FILE
ENDS = ("llama3", "qwen2", "qwen3")
"""Families whose chat-tuned models' eos_token ends a turn."""


def port(keys: Keys, model: Model | None, objective: str) -> None:
    """The keys of `data`: sources, formats, template, masks, lengths, packing, evaluation.

    Args:
        objective: "sft", "dpo" or "orpo".
    """
    kind = _sources(keys, "datasets", "data.train", objective, model)
    _lengths(keys)
    _packing(keys, objective)
    if kind is not None:
        _loss(keys, kind)
        _template(keys, kind, model)
    _evaluation(keys, objective, model)
    _order(keys)
    keys.passive(("shuffle_merged_datasets",), "each epoch has an order of its own, there and here")
    for key in ("datasets", "test_datasets"):
        given = keys.value(key)
        for index in range(len(given) if isinstance(given, list) else 0):
            keys.below(f"{key}[{index}]").unused(sorted(_OF_TYPES), "its data set type does not read it")


def _order(keys: Keys) -> None:
    """Seeds, and whether samples keep their sources' order."""
    seed = keys.integer("seed") if keys.given("seed") else 42
    sets: dict[str, Any] = {} if seed is None or seed < 0 else {"train.seed": seed}
    if keys.flag("curriculum_sampling"):
        keys.say("curriculum_sampling", {"data.shuffle_seed": None})
    elif sets:
        sets["data.shuffle_seed"] = seed
    keys.same("curriculum_sampling", note="off")
    keys.say("seed", sets, SEEDS)


def _sources(keys: Keys, key: str, path: str, objective: str, model: Model | None) -> Kind | None:
    """The sources of one list, and the kind that their rows have in common."""
    given = keys.value(key)
    if not isinstance(given, list) or not given or not all(isinstance(entry, dict) for entry in given):
        if key == "datasets" and not keys.given("pretraining_dataset"):
            message = "`datasets` is no list of data sets with a path and a type each"
            keys.refuse(key, "E1143", message, "datasets: [{path: OWNER/NAME, type: chat_template}]")
        keys.unless(key, ([],), "it is no list of data sets")
        return None
    made: list[Any] = []
    kinds: list[Kind | None] = []
    for index in range(len(given)):
        below = keys.below(f"{key}[{index}]")
        _place(below, made)
        kinds.append(axolotl_rows.kind(below, objective))
    sets = {path: made} if made else {}
    for index in range(len(given)):
        below = keys.below(f"{key}[{index}]")
        for name in ("path", "data_files", "name", "split"):
            below.same(name, sets if below.given(name) else None)
        _rest(below)
    first = kinds[0]
    for index, kind in enumerate(kinds):
        if kind is not None and first is not None and kind != first:
            message = (
                "the rows of this data set are of another form than the first's, and a recipe has one form"
            )
            where = f"{key}[{index}].type"
            keys.said.discard(where)
            keys.refuse(
                where,
                "E1142",
                message,
                keeps(key, [each for each, form in zip(given, kinds, strict=True) if form == first]),
            )
    if first is not None and key == "datasets":
        _form(keys, first)
    for index in range(len(given)):
        keys.below(f"{key}[{index}]").same("type", note="as the first data set")
    return first


def _form(keys: Keys, kind: Kind) -> None:
    sets: dict[str, Any] = {"data.format": kind.format}
    if kind.fields:
        sets["data.fields"] = dict(kind.fields)
    if kind.transform:
        sets["data.transform"] = f"{TRANSFORM}:{conversion.FUNCTION}"
        keys.ledger.files[TRANSFORM] = kind.transform
    keys.below("datasets[0]").say("type", sets, kind.note)


def _place(keys: Keys, made: list[Any]) -> None:
    path, files = keys.text("path"), keys.texts("data_files")
    if path is None and not files:
        keys.refuse("path", "E1143", "a data set has no `path`", "path: OWNER/NAME")
        return
    found = datasets.place(path or "json", files)
    if found.path is None:
        key = "path" if path else "data_files"
        keys.refuse(key, "E1143", f"`{path}` cannot be a source: {found.note}", "path: ./data.jsonl")
        return
    made.append(datasets.source(found.path, keys.text("split"), keys.text("name")))


def _rest(keys: Keys) -> None:
    """Keys of a data set beside its place and its rows."""
    keys.passive(("ds_type",), "the file's name tells what it is")
    keys.passive(("trust_remote_code",), "no code of a data set's runs here")
    keys.passive(("preprocess_shards",), "how rows are prepared, not which")
    keys.unless("revision", (), "the newest revision is taken here")
    keys.unless("shards", (), "the whole data set is taken here, not one shard of it")
    keys.unless("shards_idx", (), "the whole data set is taken here, not one shard of it")
    keys.unless(
        "input_transform", (), "rows are not changed by it: data.transform names a function of your own"
    )
    for name in ("temperature", "logprobs_field"):
        keys.unless(name, (), "it is for distillation, which there is not here")


_OF_TYPES = words(
    """conversation input_format field field_human field_model field_messages field_tools field_thinking
    template_thinking_key message_field_role message_field_content message_property_mappings
    message_field_training message_field_training_detail split_thinking roles_to_train train_on_eos
    train_on_eot roles drop_system_message chat_template chat_template_jinja field_chosen
    field_rejected text_column skip step_separator max_completion_length train_on_last_step_only
    length sequence_length min_input_id max_input_id seed field_system field_prompt"""
)


def _lengths(keys: Keys) -> None:
    length = keys.integer("sequence_len")
    keys.say("sequence_len", {"data.max_length": length} if length and length >= 8 else {})
    strategy = keys.choice("excess_length_strategy", ("drop", "truncate", "raise")) or "drop"
    sets = {"data.overlong": "error" if strategy == "raise" else strategy}
    if keys.given("excess_length_strategy"):
        keys.say("excess_length_strategy", sets)
    else:
        keys.default("excess_length_strategy", "drop", sets)


def _packing(keys: Keys, objective: str) -> None:
    packs = keys.flag("sample_packing") and objective == "sft"
    note = "as many tokens in a step, in rows that hold other samples together" if packs else ""
    if keys.given("sample_packing"):
        keys.say("sample_packing", {"data.packing": packs}, note)
    else:
        keys.default("sample_packing", False, {"data.packing": False})
    if keys.given("eval_sample_packing") and keys.flag("eval_sample_packing") != packs:
        keys.say(
            "eval_sample_packing", {}, "evaluation packs as the training does here: its loss is the same"
        )
    keys.same("eval_sample_packing", note="as the training does")


def _loss(keys: Keys, kind: Kind) -> None:
    first = keys.below("datasets[0]")
    whole = keys.flag("train_on_inputs")
    loss = "all" if whole or kind.format == "text" else "completion"
    if kind.format != "chat":
        keys.say("train_on_inputs", {} if kind.format == "preference" else {"data.loss_on": loss})
        return
    note = "the marks between the messages are learnt too" if whole else ""
    keys.say("train_on_inputs", {"data.loss_on": "all"} if whole else {}, note)
    given = keys.value("datasets")
    for index in range(len(given) if isinstance(given, list) else 0):
        _turns(keys.below(f"datasets[{index}]"), whole)
    if not keys.ledger.value("data.loss_on"):
        first.default("roles_to_train", ["assistant"], {"data.loss_on": "assistant"})


def _turns(keys: Keys, whole: bool) -> None:
    """Which turns are learnt, and whether their ends are."""
    roles = keys.value("roles_to_train")
    sets = {} if whole else {"data.loss_on": "assistant"}
    if isinstance(roles, list) and {ALIASES.get(str(role), str(role)) for role in roles} == {"assistant"}:
        keys.say("roles_to_train", sets)
    elif roles is not None:
        keys.say("roles_to_train", sets, "all turns of the assistant are learnt here, and no others")
    for name in ("train_on_eos", "train_on_eot"):
        ends = keys.choice(name, ("all", "turn", "last", "none"))
        if ends not in (None, "turn"):
            keys.say(name, {}, "the end of each learnt turn is learnt here, and of no other")
        keys.same(name)


def _template(keys: Keys, kind: Kind, model: Model | None) -> None:
    first = keys.below("datasets[0]")
    at = first if first.given("chat_template") else keys
    name, jinja = at.text("chat_template"), at.text("chat_template_jinja")
    if kind.format in ("prompt_completion", "text"):
        for below in (keys, first):
            below.passive(
                ("chat_template", "chat_template_jinja"), "plain text has no template; it is for chatting"
            )
        keys.passive(("eot_tokens",), "plain text has no turns")
        return
    found = templates.axolotl(name or ("jinja" if jinja else "tokenizer_default"), model, jinja)
    if not found.known:
        title = model.title if model else "this model"
        message = f"the chat template `{name}` is none of {title}'s, and is not known here"
        at.refuse(
            "chat_template", "E1147", message, "chat_template: tokenizer_default, or chat_template_jinja"
        )
    elif at.given("chat_template"):
        at.say("chat_template", found.sets, found.note)
    elif not jinja:
        keys.default("chat_template", "tokenizer_default", {}, "Axolotl's default: the tokenizer's own")
    at.same("chat_template_jinja", found.sets if at.given("chat_template_jinja") else None)
    if model is not None and not jinja and kind.format == "chat":
        _ends(keys, model, "data.chat_template" in found.sets)
    keys.same("eot_tokens", note="the end of a turn, which is learnt")


def _ends(keys: Keys, model: Model, chatml: bool) -> None:
    """The token that ends a turn; Axolotl learns it where eot_tokens names it, or where it is eos_token."""
    mark = "<|im_end|>" if chatml else model.family.turn_markers[1]
    given = keys.value("eot_tokens")
    if isinstance(given, list) and given:
        if mark not in given:
            keys.say("eot_tokens", {}, f"{mark}, which ends a turn in the template, is learnt here")
    elif not (model.chat and model.family.name in ENDS):
        note = f"{mark}, the end of a turn, is learnt here; in Axolotl only where it is the eos_token"
        keys.default("eot_tokens", None, {}, note)


def _evaluation(keys: Keys, objective: str, model: Model | None) -> None:
    _sources(keys, "test_datasets", "data.eval", objective, model)
    size = keys.number("val_set_size")
    if not size:
        keys.same("val_set_size", note="nothing is held out")
        if not keys.stands("val_set_size"):
            keys.default("val_set_size", 0.0, {}, "Axolotl's default: nothing is held out")
        return
    seed = keys.integer("seed")
    sets = datasets.evaluation(size)
    if sets:
        seeded = {**sets, "data.eval_seed": 42 if seed is None or seed < 0 else seed}
        keys.say("val_set_size", seeded, SPLIT)
    else:
        note = "a number of rows cannot be held out: nothing is; data.eval_fraction takes a share, 0.05 say"
        keys.unless("val_set_size", (), note)
