"""Axolotl's data sets: their places, how each type writes a row, and which tokens are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port import copies
from recipec.port.dialects.axolotl_prompts import PROMPTS, STYLES
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table, words
from recipec.port.meaning import conversion, datasets, images, reinforcement, rows, templates
from recipec.port.meaning.losses import UNPAIRED
from recipec.port.refusals import E1143, E1145, E1147
from recipec.port.tool_names import known, tokenizer_of
from recipec.runtime.data.messages import ALIASES, ROLES
from recipec.spec.codes import Code

SPLIT = "other rows: Axolotl takes the last of its shuffled rows that are not too long"
SEEDS = "recipec uses other random generators: the order of samples and the initial adapters differ"
PACKED = "other samples share a row; Axolotl leaves out an epoch's last incomplete micro-batch"
MARKS = "recipec also trains on the markers between messages"
TOOL_ENDS = "Axolotl may also train on the end of a tool's turn"
MARKED = (
    "Axolotl trains on each message that this key marks; recipec does so only if roles_to_train has its role"
)
STRIPPED = "recipec trains on a line break at the end of the template; Axolotl removes it from both answers"
PRETRAINING = "pretraining_dataset"
JOINED = "texts share rows; without sample_packing, a text in Axolotl attends to those before it"
OF_SOURCES = table("""
exact ds_type: the file name gives the type
exact trust_remote_code: recipec runs no code of a data set
files preprocess_shards
lost revision shards shards_idx
lost input_transform: recipec does not apply it; data.transform names your own function
lost temperature logprobs_field: it is for distillation, which recipec does not have
""")
"""Keys of a data set, except those of its place and its rows."""
OF_MESSAGES = table("""
lost field_thinking=reasoning_content template_thinking_key=reasoning_content: messages keep the names of
    their other keys
lost message_field_training_detail input_format
lost split_thinking=false: reasoning stays in the content of its message
""")
"""Keys for what chat_template reads of messages in addition to role and content."""


def say_data(keys: Keys, model: Model | None, objective: str) -> Says:
    """State the keys of `data`: sources, formats, template, masks, lengths, packing, evaluation."""
    pretrains = bool(keys.value(PRETRAINING))
    train = yield from _sources(keys, PRETRAINING if pretrains else "datasets", objective)
    yield keys.same(PRETRAINING, note="" if pretrains else "off")
    if pretrains:
        yield from keys.unused(("datasets",), f"Axolotl reads {PRETRAINING} instead")
    held = yield from _sources(keys, "test_datasets", objective)
    kinds = [entry.kind for entry in train if entry.kind is not None]
    yield from _forms(keys, train, held)
    if objective == "grpo":
        yield from _completed(keys)
    else:
        yield from _lengths(keys, [entry.kind for entry in (*train, *held) if entry.kind is not None])
    yield from _packing(keys, objective)
    if kinds:
        yield from _loss(keys, train, kinds)
        yield from _template(keys, train, model)
    yield from _evaluation(keys)
    yield from _order(keys, objective)
    for entry in (*train, *held):
        yield from entry.keys.unused(sorted(_OF_TYPES), "its data set type does not read it")


def _order(keys: Keys, objective: str) -> Says:
    """State seeds, and whether samples keep their sources' order, as in TRL's KTOTrainer."""
    seed = keys.integer("seed") if keys.given("seed") else 42
    sets: dict[str, Any] = {} if seed is None or seed < 0 else {"train.seed": seed}
    if keys.flag("curriculum_sampling"):
        yield keys.say("curriculum_sampling", {"data.shuffle_seed": None})
    elif objective == "kto":
        yield keys.defaulted("order", "the data's", {"data.shuffle_seed": None}, "TRL's KTOTrainer keeps it")
    elif sets:
        sets["data.shuffle_seed"] = seed
    yield keys.same("curriculum_sampling", note="off")
    yield keys.say("seed", sets, SEEDS)


@dataclass(frozen=True)
class Entry:
    """A data set."""

    keys: Keys
    path: str
    source: Any
    kind: Kind | None

    @property
    def named(self) -> str:
        """The key that names the template of its turns."""
        if self.kind is None or not self.kind.fastchat:
            return "chat_template"
        return "conversation" if self.keys.given("conversation") else "type"


def _sources(keys: Keys, key: str, objective: str) -> Statements[list[Entry]]:
    entries = keys.value(key)
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        if key in ("datasets", PRETRAINING):
            message = f"`{key}` is not a list of data sets with a path and a type each"
            yield keys.refuse(key, E1143, message, "datasets: [{path: OWNER/NAME, type: chat_template}]")
        yield keys.unless(key, ([],), "it is not a list of data sets")
        return []
    path = "data.eval" if key == "test_datasets" else "data.train"
    sources = []
    for index in range(len(entries)):
        below = keys.below(f"{key}[{index}]")
        chatml = (below.text("conversation") or keys.text("chat_template")) == "chatml"
        packs = keys.flag("sample_packing")
        kind = (
            (yield from _texts(below, packs))
            if key == PRETRAINING
            else (yield from _kind(below, objective, chatml))
        )
        sources.append(Entry(below, path, (yield from _place(below)), kind))
    return sources


def _forms(keys: Keys, train: Sequence[Entry], held: Sequence[Entry]) -> Says:
    """Set the sources and the form of their rows: once for all, or for each source if they differ."""
    typed = [(entry, entry.kind) for entry in (*train, *held) if entry.kind is not None]
    sources = {id(entry): entry.source for entry in (*train, *held)}
    if rows.alike([kind for _, kind in typed]):
        if train and train[0].kind is not None:
            yield from _form(train[0].keys, train[0].kind)
    else:
        separate = yield from rows.apart(keys, [(entry.source, kind) for entry, kind in typed])
        sources |= {
            id(entry): source for (entry, _), source in zip(typed, separate, strict=True) if entry.source
        }
    if len({kind.overlong for _, kind in typed}) > 1:
        for entry, kind in typed:
            override = {"overlong": kind.overlong} if kind.overlong else {}
            sources[id(entry)] = rows.with_own(sources[id(entry)], override)
    for entries in (train, held):
        separate = [sources[id(entry)] for entry in entries if entry.source is not None]
        for entry in entries:
            sets = {entry.path: separate} if separate else {}
            for name in ("path", "data_files", "name", "split"):
                yield entry.keys.same(name, sets if entry.keys.given(name) else None)
            yield from entry.keys.follow(OF_SOURCES)
            note = entry.kind.note if entry.kind is not None else ""
            if entry.kind is not None and entry.kind.remark:
                yield entry.keys.same("type", sets, entry.kind.remark)
            yield entry.keys.say("type", sets, note)


def _form(first: Keys, kind: Kind) -> Says:
    sets: dict[str, Any] = {"data.format": kind.format}
    if kind.fields:
        sets["data.fields"] = dict(kind.fields)
    if kind.transform:
        sets["data.transform"] = conversion.TRANSFORM
        yield first.file(conversion.FILE, kind.transform)
    if kind.remark:
        yield first.same("type", sets, kind.remark)
    yield first.say("type", sets, kind.note)


def _place(keys: Keys) -> Statements[Any]:
    path, files = keys.text("path"), keys.texts("data_files")
    if path is None and not files:
        yield keys.refuse("path", E1143, "a data set has no `path`", "path: OWNER/NAME")
        return None
    place = datasets.place(path or "json", files)
    if place.path is None:
        key = "path" if path else "data_files"
        yield keys.refuse(
            key, E1143, f"recipec cannot read the source `{path}`: {place.note}", "path: ./data.jsonl"
        )
        return None
    return datasets.source(place.path, keys.text("split"), keys.text("name"))


_OF_TYPES = words(
    """conversation input_format field field_human field_model field_messages field_tools field_thinking
    template_thinking_key message_field_role message_field_content message_property_mappings
    message_field_training message_field_training_detail split_thinking roles_to_train train_on_eos
    train_on_eot roles drop_system_message chat_template chat_template_jinja field_chosen field_rejected
    text_column skip step_separator max_completion_length train_on_last_step_only length sequence_length
    min_input_id max_input_id seed field_system field_prompt"""
)


def _lengths(keys: Keys, kinds: Sequence[Kind]) -> Says:
    """State the length of rows. The strategy does not apply to texts, which a kind of their own cuts."""
    length = keys.integer("sequence_len")
    yield keys.say("sequence_len", {"data.max_length": length} if length and length >= 8 else {})
    key = "excess_length_strategy"
    strategy = keys.choice(key, ("drop", "truncate", "raise")) or "drop"
    fates = {kind.overlong for kind in kinds}
    alone = fates.pop() if len(fates) == 1 else ""
    over = alone or ("error" if strategy == "raise" else strategy)
    if alone:
        yield keys.same(key, {"data.overlong": over} if keys.given(key) else None, CUT)
    yield keys.default(key, "drop", {"data.overlong": over}, CUT if alone else "")


def _completed(keys: Keys) -> Says:
    """State the lengths of prompts and completions. Axolotl reads prompts of any length."""
    section = keys.below("trl")
    whole, completion = keys.integer("sequence_len") or 0, section.integer("max_completion_length") or 0
    longest = whole - completion if whole > completion else reinforcement.LONGEST_PROMPT
    yield keys.sets("data.format", "prompt")
    yield keys.same("sequence_len", note="grpo's completions have a length of their own")
    yield keys.same("excess_length_strategy", note="grpo leaves out no rows")
    yield from reinforcement.say_lengths(section, longest)


def _packing(keys: Keys, objective: str) -> Says:
    joined = bool(keys.value(PRETRAINING)) and keys.flag("pretraining_sample_concatenation")
    packs = (keys.flag("sample_packing") or joined) and objective == "sft"
    note = PACKED if packs else ""
    if joined and not keys.flag("sample_packing"):
        yield keys.default("sample_packing", False, {"data.packing": True}, JOINED)
    elif keys.given("sample_packing"):
        yield keys.say("sample_packing", {"data.packing": packs}, note)
    else:
        yield keys.default("sample_packing", False, {"data.packing": False})
    if keys.given("eval_sample_packing") and keys.flag("eval_sample_packing") != packs:
        note = "recipec packs evaluation data like training data: the loss is the same"
        yield keys.say("eval_sample_packing", {}, note)
    yield keys.same("eval_sample_packing", note="the same as in training")


def _loss(keys: Keys, train: Sequence[Entry], kinds: Sequence[Kind]) -> Says:
    """State which tokens carry loss. With several row formats, each has its own rule, unless all do."""
    unmarked = _without_turns(keys, train)
    formats, whole = {kind.format for kind in kinds}, keys.flag("train_on_inputs") or unmarked
    if formats == {"prompt"}:
        yield keys.same("train_on_inputs", note="the loss covers the completions")
        return
    if "chat" not in formats:
        loss = "all" if whole or formats == {"text"} else "completion"
        plain = formats in ({"preference"}, {UNPAIRED}) or (len(formats) > 1 and not whole)
        yield keys.say("train_on_inputs", {} if plain else {"data.loss_on": loss})
        return
    note = UNMARKED if unmarked else MARKS if whole else ""
    yield keys.say("train_on_inputs", {"data.loss_on": "all"} if whole else {}, note)
    chats = [entry for entry in train if entry.kind is not None and entry.kind.format == "chat"]
    losses = [_learned(entry.keys) for entry in chats]
    shared = len(formats) == 1 and all(loss == losses[0] for loss in losses)
    placed = [entry for entry in train if entry.source is not None]
    overrides = {
        id(entry): {"loss_on": loss} for entry, loss in zip(chats, losses, strict=True) if loss != "assistant"
    }
    sources = zip(placed, keys.ledger.value("data.train", []), strict=True)
    weighed = [
        rows.with_own(source, {} if shared or whole else overrides.get(id(entry), {}))
        for entry, source in sources
    ]
    sets = {"data.loss_on": losses[0]} if shared else {"data.train": weighed}
    for entry, loss in zip(chats, losses, strict=True):
        yield from _turns(entry.keys, loss, {} if whole else sets)
    if shared and not whole:
        yield chats[0].keys.default("roles_to_train", ["assistant"], sets)


KNOWN_TURNS = words(
    """qwen2_vl qwen3_5 gemma3 gemma3n gemma4 gemma4_unified llama3_2_vision llama4 pixtral
    mistral_v7_tekken"""
)
"""The templates whose turns Axolotl knows where it trains on pictures."""
UNMARKED = (
    "with pictures, Axolotl does not know the turns of this template: it trains on all tokens but pictures'"
)


def _without_turns(keys: Keys, train: Sequence[Entry]) -> bool:
    """Return whether Axolotl trains on whole conversations, because it does not know their turns."""
    if not images.trained_on(keys) or keys.value("role_boundaries"):
        return False
    names = {entry.keys.text("chat_template") or keys.text("chat_template") for entry in train}
    return not names <= KNOWN_TURNS


def _roles(keys: Keys) -> list[str]:
    names = keys.value("roles_to_train")
    return [ALIASES.get(str(role), str(role)) for role in names] if isinstance(names, list) else ["assistant"]


def _learned(keys: Keys) -> Any:
    """Return the trained turns as `data.loss_on`: the assistant's if a role does not exist here."""
    roles = _roles(keys)
    if not roles or not set(roles) <= set(ROLES) or set(roles) == {"assistant"}:
        return "assistant"
    return list(dict.fromkeys(roles))


def _turns(keys: Keys, loss: Any, sets: Mapping[str, Any]) -> Says:
    """State which turns are trained on, and whether their ends are."""
    if keys.value("roles_to_train") is not None:
        known = _roles(keys) and set(_roles(keys)) <= set(ROLES)
        unknown = "" if known else "recipec trains on all turns of the assistant, and on no others"
        yield keys.say("roles_to_train", sets, TOOL_ENDS if "tool" in loss else unknown)
    for name in ("train_on_eos", "train_on_eot"):
        ends = keys.choice(name, ("all", "turn", "last", "none"))
        if ends not in (None, "turn"):
            yield keys.say(
                name, {}, "recipec trains on the end of each turn that it trains on, and of no other turn"
            )
        yield keys.same(name)


def _template(keys: Keys, train: Sequence[Entry], model: Model | None) -> Says:
    """Set the template of the file or of the first data set. Other templates are set for their sources."""
    formats = {entry.kind.format for entry in train if entry.kind is not None}
    names = ("chat_template", "chat_template_jinja")
    if formats == {"prompt"}:
        template = _named_template(keys, model)
        if not template.known:
            yield from _refused_template(keys, template)
        yield keys.say("chat_template", template.sets if keys.given("chat_template") else {}, template.note)
        yield from keys.passive(("chat_template_jinja", "eot_tokens"), "part of data.chat_template")
        return
    if formats <= {"prompt_completion", "text"}:
        for below in (keys, *(entry.keys for entry in train)):
            yield from below.passive(names, "plain text has no template; a template is for conversations")
        yield from keys.passive(("eot_tokens",), "plain text has no turns")
        return
    chats = [
        entry for entry in train if entry.kind is not None and entry.kind.format in ("chat", "preference")
    ]
    naming = [entry for entry in chats if entry.named != "chat_template" or entry.keys.given("chat_template")]
    system = (
        keys.text("default_system_message")
        if any(entry.named != "chat_template" for entry in naming)
        else None
    )
    templates_of = {id(entry): _template_of(entry, model, system) for entry in naming}
    alike = len(naming) == len(chats) and len({str(template.sets) for template in templates_of.values()}) == 1
    at, name = (naming[0].keys, naming[0].named) if alike and naming else (keys, "chat_template")
    template = templates_of[id(naming[0])] if alike and naming else _named_template(keys, model)
    jinja = at.text("chat_template_jinja")
    if not template.known:
        yield from _refused_template(at, template)
    elif at.given(name):
        yield at.say(name, template.sets, template.note)
    elif not jinja:
        yield keys.default("chat_template", "tokenizer_default", {}, "Axolotl's default: the tokenizer's own")
    yield at.same("chat_template_jinja", template.sets if at.given("chat_template_jinja") else None)
    if alike:
        yield from keys.passive(names, "the same as the other data sets")
        for entry in naming:
            yield from entry.keys.passive((*names, entry.named), "the same as the other data sets")
    else:
        others = {
            key: entry
            for key, entry in templates_of.items()
            if not entry.known or entry.sets != template.sets
        }
        yield from _own_templates(keys, train, others)
    if system is not None:
        yield keys.same(
            "default_system_message", template.sets, "the system message of a conversation without one"
        )
    marked = any(entry.named == "chat_template" for entry in chats)
    if model is not None and not jinja and "chat" in formats and marked:
        yield from _ends(keys, model, template.ends)
    yield keys.same("eot_tokens", note="the end of a turn, which the loss covers")


def _named_template(keys: Keys, model: Model | None) -> templates.Template:
    name, jinja = keys.text("chat_template"), keys.text("chat_template_jinja")
    return templates.axolotl(name or ("jinja" if jinja else "tokenizer_default"), model, jinja)


def _template_of(entry: Entry, model: Model | None, system: str | None) -> templates.Template:
    """Return the template of a data set. FastChat writes the system message into each conversation."""
    if entry.kind is None or not entry.kind.fastchat:
        return _named_template(entry.keys, model)
    changes = {**FASTCHAT, **({"default_system": system} if system else {})}
    return templates.of("axolotl", entry.kind.fastchat, model, changes)


def _refused_template(keys: Keys, template: templates.Template) -> Says:
    message = templates.unknown("the chat template", keys.text("chat_template"), template)
    help = "chat_template: tokenizer_default, or chat_template_jinja"
    yield keys.refuse("chat_template", E1147, message, help)


def _own_templates(
    keys: Keys, train: Sequence[Entry], templates_of: Mapping[int, templates.Template]
) -> Says:
    """Set the templates of data sets whose turns are written differently from the others'."""
    placed = [entry for entry in train if entry.source is not None]
    sources = zip(placed, keys.ledger.value("data.train", []), strict=True)
    sources_with = []
    for entry, source in sources:
        template = templates_of.get(id(entry))
        text = template.sets.get("data.chat_template") if template is not None else None
        sources_with.append(rows.with_own(source, {"chat_template": text} if text else {}))
        if template is None:
            continue
        if not template.known:
            yield from _refused_template(entry.keys, template)
        elif text is None:
            note = "a source cannot have the tokenizer's template as its own next to data.chat_template"
            yield entry.keys.refuse(
                "chat_template", E1147, note, "chat_template_jinja with the template's text"
            )
    for entry in train:
        if (template := templates_of.get(id(entry))) is not None:
            yield entry.keys.say(entry.named, {"data.train": sources_with}, template.note)
        yield from entry.keys.passive(("chat_template", "chat_template_jinja"), "part of its template")


def _ends(keys: Keys, model: Model, written: str) -> Says:
    """State the token that ends a turn. Axolotl trains on the eos_token, or on one that eot_tokens names."""
    markers = model.family.markers(model.architecture)
    if not markers and not written:
        return
    mark = written or markers[1]
    tokens = keys.value("eot_tokens")
    if isinstance(tokens, list) and tokens:
        if mark not in tokens:
            yield keys.say("eot_tokens", {}, f"recipec trains on {mark}, with which the template ends a turn")
    elif (markers and mark != markers[1]) or not (
        model.chat and tokenizer_of(model) in known("axolotl", "turn_ends")
    ):
        note = f"recipec trains on {mark}, the end of a turn; Axolotl does so only if it is the eos_token"
        yield keys.default("eot_tokens", None, {}, note)


def _evaluation(keys: Keys) -> Says:
    size = keys.number("val_set_size")
    if not size:
        yield keys.same("val_set_size", note="the run holds out no rows")
        if not keys.stands("val_set_size"):
            yield keys.default("val_set_size", 0.0, {}, "Axolotl's default: no rows are held out")
        return
    seed = keys.integer("seed")
    sets, note = datasets.evaluation(keys, size, 42 if seed is None or seed < 0 else seed)
    if sets:
        yield keys.say("val_set_size", sets, note or SPLIT)
    else:
        yield keys.unless("val_set_size", (), datasets.ROWS_HELD_OUT)


E1141 = Code(
    "E1141",
    "data set type without a counterpart",
    cause="A data set of the ported file has no type, an unknown type, or a type that no format of "
    "recipes covers.",
    cure="Convert the rows to messages, and name their type (`chat_template`). Or set `data` in the "
    "recipe that `--partial` writes.",
)


def _kind(keys: Keys, objective: str, chatml: bool) -> Statements[Kind | None]:
    """Return the kind of a data set's rows, None after an error."""
    type = keys.value("type")
    if objective == "kto":
        return (yield from _unpaired(keys, type))
    if objective == "grpo":
        return (yield from _prompts(keys, type))
    if objective != "sft":
        return (yield from _preference(keys, type))
    if isinstance(type, dict):
        yield from _told(keys, "type", type)
        yield from _fillable(keys, type)
        return user_defined(type)
    if type is None:
        message = "a data set has no `type`, which gives the format of its rows"
        yield keys.refuse("type" if keys.stands("type") else "path", E1141, message, "type: chat_template")
        return None
    name = str(type)
    if name == "chat_template":
        return (yield from _chat(keys))
    if name in SHAREGPT and chatml:
        return (yield from _sharegpt(keys))
    if name == "completion":
        field = keys.text("field")
        yield keys.same("field")
        fields = {"text": field} if field not in (None, "text") else {}
        return Kind("text", fields, remark=PIECES, overlong="split")
    style = keys.text("conversation")
    if name == "alpaca_chat" and style in STYLES:
        yield keys.same("conversation")
        name = f"alpaca:{style}"
    kind = plain_type(name)
    if kind is None:
        yield from _unknown(keys, name)
    return kind


def _prompts(keys: Keys, type: Any) -> Statements[Kind | None]:
    """Return the kind of prompts: rows as they are, or what a function of a file next to the config makes."""
    if type is None:
        return Kind("prompt")
    module, _, name = str(type).rpartition(".")
    path = keys.source.path.parent / f"{module.replace('.', '/')}.py"
    why = f"it is not a function of a file next to the config: {path.name} is not there"
    if module and path.is_file():
        copier = copies.of_file(path)
        text, why = copies.of_maker(copier, name, str(type)) if copier else ("", "it is not valid Python")
        if text:
            return Kind("prompt", transform=text)
    message = f"recipec cannot take over the rows of `type: {type}`: {why}"
    help = "type: null, for rows that have a column `prompt`; or put the file next to the config"
    yield keys.refuse("type", E1141, message, help)
    return None


def _fillable(keys: Keys, type: Mapping[str, Any]) -> Says:
    """Refuse formats of the file's own type that name other values than those that Axolotl fills in."""
    for name in ("format", "no_input_format"):
        text = str(type.get(name) or "")
        try:
            others = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
        except ValueError:
            others = {"{"}
        if wrong := sorted(others - {"instruction", "input"}):
            message = (
                f"Axolotl stops at `{name}`: it fills in {{instruction}} and {{input}}, not {wrong[0]!r}"
            )
            yield keys.refuse(
                "type", E1145, message, f"end {name} where the answer begins; write braces twice"
            )


def _texts(keys: Keys, packs: bool) -> Statements[Kind]:
    """Return the kind of a data set for pre-training, whose texts Axolotl cuts in two ways."""
    column = keys.text("text_column")
    yield keys.same("text_column")
    yield keys.unless("skip", (0,), "recipec uses all rows")
    fields = {"text": column} if column not in (None, "text") else {}
    if packs:
        return Kind("text", fields, note=WINDOWS, overlong="split")
    return Kind("text", fields, note=BEGINNINGS, overlong="truncate")


def _unknown(keys: Keys, name: str) -> Says:
    why = next((why for known, why in UNPORTED.items() if name.partition(".")[0] == known), "")
    message = f"recipec does not support the data set type `{name}`: {why}"
    message = message if why else f"unknown data set type `{name}`"
    help = "type: chat_template, with field_messages and message_property_mappings for columns of other names"
    if name in SHAREGPT:
        names = "field_messages: conversations, and message_property_mappings: {role: from, content: value}"
        help = f"conversation: chatml, if the turns have its marks; or type: chat_template, with {names}"
    yield keys.refuse("type", E1141, message, help)


def _told(keys: Keys, key: str, mapping: Mapping[str, Any]) -> Says:
    """State that what is said of a mapping covers its keys."""
    for name in mapping:
        yield keys.covered(f"{key}.{name}")


def _chat(keys: Keys) -> Statements[Kind]:
    mapping, role, content = _mapping(keys)
    conversation = keys.text("field_messages") or "messages"
    tools = keys.text("field_tools") or "tools"
    names = {"messages": conversation, "role": role, "content": content, "tools": tools}
    marks = keys.text("message_field_training")
    names |= {"weight": marks} if marks else {}
    fields = {name: column for name, column in names.items() if name != column}
    words = yield from _words(keys)
    unmarked = "recipec selects messages only by role, and converts the names of the roles"
    yield keys.say("message_field_training", {}, (MARKED if words is None else unmarked) if marks else "")
    for name in ("field_messages", "field_tools", "message_field_role", "message_field_content"):
        yield keys.same(name, {"data.fields": fields} if fields and keys.given(name) else None)
    yield from _beside(keys, mapping, {} if words else fields)
    if words is None and keys.flag("drop_system_message"):
        yield keys.say("drop_system_message", {"data.transform": conversion.TRANSFORM})
        return Kind("chat", fields, transform=conversion.without_system(conversation, role))
    yield keys.unless("drop_system_message", (False,), "system messages stay")
    yield keys.same("drop_system_message")
    if words is None:
        return Kind("chat", fields)
    tags = conversion.Tagged(conversation, role, content, words)
    return Kind("chat", transform=conversion.tagged(tags))


def _sharegpt(keys: Keys) -> Statements[Kind]:
    """Return the kind for conversations of ShareGPT, as Axolotl 0.4 read them."""
    words = {}
    for name, usual, role in (("field_human", "human", "user"), ("field_model", "gpt", "assistant")):
        words[keys.text(name) or usual] = role
        yield keys.same(name, note="the same role under another name")
    yield keys.same("strict", note="recipec reads the usual names of roles")
    yield keys.unless("roles", (), "recipec reads the usual names of roles")
    columns = ("conversations", "from", "value")
    if all(ALIASES.get(word, word) == role for word, role in words.items()):
        fields = dict(zip(("messages", "role", "content"), columns, strict=True))
        return Kind("chat", fields, note=TURNS, fastchat="chatml")
    transform = conversion.tagged(conversion.Tagged(*columns, {**words, "system": "system"}))
    return Kind("chat", transform=transform, note=TURNS, fastchat="chatml")


def _mapping(keys: Keys) -> tuple[dict[str, Any], str, str]:
    mapping = keys.mapping("message_property_mappings")
    role = str(mapping.get("role") or keys.text("message_field_role") or "role")
    content = str(mapping.get("content") or keys.text("message_field_content") or "content")
    return mapping, role, content


def _words(keys: Keys) -> Statements[dict[str, str] | None]:
    """Return the data's words for roles that are unknown here, or None if all roles are known."""
    roles = keys.mapping("roles")
    words = {
        str(word): str(role)
        for role, names in roles.items()
        for word in (names if isinstance(names, list) else [names])
    }
    yield keys.same("roles", note="the same roles under other names")
    usual = {**ALIASES, **{role: role for role in ROLES}}
    return None if all(usual.get(word) == role for word, role in words.items()) else words


def _beside(keys: Keys, mapping: Mapping[str, Any], fields: Mapping[str, str]) -> Says:
    """State what chat_template reads of messages in addition to role and content."""
    others = [name for name, column in mapping.items() if name not in ("role", "content") and name != column]
    if others:
        note = f"{', '.join(others)}: messages keep the names of these keys"
        yield keys.say("message_property_mappings", {}, note)
    yield keys.same("message_property_mappings", {"data.fields": fields} if fields and mapping else None)
    yield from keys.follow(OF_MESSAGES)


def _preference(keys: Keys, type: Any) -> Statements[Kind | None]:
    name = "" if isinstance(type, dict) else str(type)
    if name in (*(f"chat_template.{end}" for end in ("default", "argilla", "argilla_chat")), "chat_template"):
        chosen, rejected = keys.text("field_chosen") or "chosen", keys.text("field_rejected") or "rejected"
        conversation = keys.text("field_messages") or "messages"
        _, role, content = _mapping(keys)
        words = yield from _words(keys)
        for end in ("messages", "chosen", "rejected"):
            yield keys.same(f"field_{end}")
        for end in ("property_mappings", "field_role", "field_content"):
            yield keys.same(f"message_{end}")
        if "argilla" in name and words is None:
            pairs = (("chosen", chosen), ("rejected", rejected), ("role", role), ("content", content))
            fields = {here: there for here, there in pairs if here != there}
            return Kind("preference", fields, note=STRIPPED)
        tags = conversion.Tagged(conversation, role, content, words, None, chosen, rejected)
        return Kind("preference", transform=conversion.tagged(tags), note=STRIPPED)
    if name in ("passthrough", "passthrough.default"):
        return Kind("preference")
    if isinstance(type, dict):
        yield from _told(keys, "type", type)
        return _own_preference(type)
    template, _, rows = name.partition(".")
    if template in WRITTEN and rows == "argilla_chat":
        return Kind("preference", note=f"{WRITTEN_BY.format(template)} and reads the first two messages")
    if template in WRITTEN and rows in DPO_COLUMNS:
        transform = conversion.ranked(*DPO_COLUMNS[rows], system="system", turns=rows == "ultra")
        return Kind("preference", transform=transform, note=WRITTEN_BY.format(template))
    yield from _unknown(keys, name or "none")
    return None


WRITTEN = ("llama3", "chatml")
WRITTEN_BY = "recipec writes turns with the recipe's chat template; Axolotl uses the markers of {}"
DPO_COLUMNS = {
    "argilla": ("instruction", "chosen_response", "rejected_response"),
    "icr": ("input", "chosen", "rejected"),
    "intel": ("question", "chosen", "rejected"),
    **dict.fromkeys(("prompt_pairs", "ultra"), ("prompt", "chosen", "rejected")),
}
"""The columns of the question and the answers in Axolotl's types for dpo."""
KTO_COLUMNS = {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"}
"""The columns of the questions in Axolotl's types for kto."""


def _unpaired(keys: Keys, type: Any) -> Statements[Kind | None]:
    if isinstance(type, dict):
        yield from _told(keys, "type", type)
        names = {name: str(type.get(f"field_{name}") or name) for name in ("prompt", "completion", "label")}
        formats = any(type.get(f"{name}_format") for name in ("prompt", "completion"))
        note = (
            "recipec does not write prompt_format and completion_format around the texts" if formats else ""
        )
        return Kind(UNPAIRED, {name: there for name, there in names.items() if name != there}, note=note)
    template, _, rows = str(type or "").partition(".")
    if type is None:
        return Kind(UNPAIRED)
    if template not in WRITTEN or rows not in (*KTO_COLUMNS, "argilla_chat"):
        message = f"unknown data set type `{type}` of kto"
        yield keys.refuse(
            "type", E1141, message, "type: chatml.argilla, or none for prompt, completion and label"
        )
        return None
    if rows == "argilla_chat":
        transform = conversion.tagged(conversion.Tagged("completion", label="label"))
    else:
        transform = conversion.labeled(KTO_COLUMNS[rows], "completion", "label")
    return Kind(UNPAIRED, transform=transform, note=WRITTEN_BY.format(template))


def _own_preference(type: Mapping[str, Any]) -> Kind:
    """Return the kind for a preference type that the file defines. Its text formats are not applied."""
    names = {name: str(type.get(f"field_{name}") or name) for name in ("prompt", "chosen", "rejected")}
    plain = all(
        str(type.get(f"{name}_format") or f"{{{name}}}") in (f"{{{name}}}", f"{{{names[name]}}}")
        for name in names
    )
    fields = {name: there for name, there in names.items() if name != there}
    unwritten = "recipec does not write prompt_format, chosen_format and rejected_format around the texts"
    system = "recipec does not write the system message before the prompt" if type.get("field_system") else ""
    note = "; ".join(filter(None, ("" if plain else unwritten, system)))
    return Kind("preference", fields, note=note)


@dataclass(frozen=True)
class Kind:
    """The meaning of a type's rows here.

    Attributes:
        format: the value of `data.format`.
        fields: the value of `data.fields`.
        transform: the text of the file of `data.transform`, "" for none.
        note: how the tokens differ.
        fastchat: the name of FastChat's template that writes the turns, "" for none.
        remark: a condition under which the tokens are the same, "" for none.
        overlong: the value of `data.overlong` for its rows; "" if excess_length_strategy gives it.
    """

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    note: str = ""
    fastchat: str = ""
    remark: str = ""
    overlong: str = ""


SHAREGPT = ("sharegpt", "sharegpt.load", "sharegpt:chat")
FASTCHAT = {
    "assistant": "{}<|im_end|>\n",
    "after": "",
    "default_system": "You are a helpful assistant.",
    "adds_bos": True,
}
"""How the turns of FastChat's chatml differ from those of Axolotl's own template."""
TURNS = "as Axolotl 0.4 read it, which also trained on a line break before an answer"
PLAIN = "recipec tokenizes the whole text; it drops a row whose completion merges with the prompt"
PIECES = "the same tokens, up to 64 rows of a text; Axolotl leaves out the rest of a longer text"
WINDOWS = "Axolotl's rows of a long text overlap by 256 tokens, and it ends each of them with the eos token"
BEGINNINGS = "Axolotl truncates texts two tokens earlier, and without concatenation writes no eos token"
CUT = "it does not apply to texts, which Axolotl cuts in its own way"
SEGMENTS = "recipec ends each row with the eos token, and drops rows with earlier trained segments"

UNPORTED = {
    "sharegpt": "Axolotl refuses it, and recipec reads it only with the template chatml",
    **dict.fromkeys(
        words("context_qa creative_acr llama2_chat messages metharme orcamini pygmalion"),
        "recipec has no format for its rows",
    ),
    "explainchoice": "recipec has no format for its lists of choices",
    "concisechoice": "recipec has no format for its lists of choices",
    "reflection": "recipec has no format for its reflections",
    "jeopardy": "it rewrites answers",
    "bradley_terry": "it is for reward models",
    "stepwise_supervised": "it is for reward models",
    "_synthetic": "it draws tokens at random",
    "pretrain": "it is for pre-training",
}
"""Types that Axolotl has, or had, and why they are not ported."""


def plain_type(name: str) -> Kind | None:
    """Return the kind for a type that needs no further keys, or None for other types."""
    prompt = PROMPTS.get(name.removesuffix(".load"))
    if prompt is not None:
        transform = conversion.prompts(prompt, f"Axolotl's {name}")
        return Kind("prompt_completion", transform=transform, note=PLAIN)
    if name == "input_output":
        return Kind("prompt_completion", transform=conversion.segments(), note=SEGMENTS)
    return None


def user_defined(type: Mapping[str, Any]) -> Kind:
    """Return the kind for a type that the file defines: `type: {field_instruction: ..., format: ...}`."""

    def text(key: str, default: str) -> str:
        value = type.get(key)
        return default if value is None else str(value)

    bare = type.get("format") == type.get("no_input_format") == "{instruction}"
    if bare and not type.keys() & {"field_input", "field_system", "system_format", "system_prompt"}:
        columns = {
            "prompt": text("field_instruction", "instruction"),
            "completion": text("field_output", "output"),
        }
        return Kind(
            "prompt_completion", {name: there for name, there in columns.items() if name != there}, note=PLAIN
        )
    system = text("system_format", "{system}")
    prompt = conversion.Prompt(
        text("format", "{instruction} {input} "),
        text("no_input_format", "{instruction} "),
        text("field_instruction", "instruction"),
        text("field_input", "input"),
        text("field_output", "output"),
        system,
        text("field_system", "system"),
        text("system_prompt", ""),
    )
    return Kind("prompt_completion", transform=conversion.prompts(prompt, "this type"), note=PLAIN)
