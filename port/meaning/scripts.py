"""What a Python script says besides its trainer's keys: functions over rows, and Unsloth's defaults.

A function over rows is followed with a row whose columns are unknown. It returns a text made of pieces, a
chat, or messages of text. Each of these has a format here, or a file for `data.transform` that makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from recipec.compiler.wording import listing
from recipec.port import common_keys
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table
from recipec.port.meaning import losses, templates
from recipec.port.meaning.conversion import FILE, FUNCTION, TRANSFORM, literal
from recipec.port.meaning.model_names import Named
from recipec.port.refusals import E1145, E1147, E1180, W1114
from recipec.port.source import Script
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span


@dataclass(frozen=True)
class Column:
    """A column of a row. In a batch it stands for the column, and for its value in each row."""

    name: str


@dataclass(frozen=True)
class End:
    """The tokenizer's eos_token, which a run appends to plain text by itself."""


@dataclass(frozen=True)
class Text:
    """A sequence of texts and columns."""

    pieces: tuple[str | Column | End, ...]

    @classmethod
    def of(cls, values: Iterable[Any]) -> Text | None:
        """Join values into one text, or return None if one of them is not text."""
        pieces: list[str | Column | End] = []
        for value in values:
            parts = value.pieces if isinstance(value, Text) else (value,)
            if not all(isinstance(piece, str | Column | End) for piece in parts):
                return None
            pieces += parts
        return cls(tuple(piece for piece in pieces if piece != ""))


@dataclass(frozen=True)
class Chat:
    """Messages that the tokenizer formats as a chat: a column, or [{"role": ..., "content": ...}]."""

    messages: Any


def is_content(value: Any) -> bool:
    """Return whether a column's value is text, a chat or messages of text."""
    if isinstance(value, list):
        return all(isinstance(item, dict) and item.keys() == {"role", "content"} for item in value) and all(
            isinstance(item["role"], str) and _is_said(item["content"]) for item in value
        )
    return isinstance(value, str | Text | Column) or (isinstance(value, Chat) and is_content(value.messages))


def _is_said(content: Any) -> bool:
    """Return whether a message's content is a text, or parts with texts and pictures."""
    if not isinstance(content, list):
        return Text.of([content]) is not None
    return all(
        isinstance(part, dict)
        and part.get("type") in ("text", "image")
        and all(Text.of([value]) is not None for value in part.values())
        for part in content
    )


def has_pictures(content: Any) -> bool:
    """Return whether messages have parts that are pictures."""
    if isinstance(content, Chat):
        return has_pictures(content.messages)
    if isinstance(content, dict):
        return content.get("type") == "image" or has_pictures(content.get("content"))
    return isinstance(content, list) and any(map(has_pictures, content))


@dataclass(frozen=True)
class Copy:
    """A function of a script with the statements that it needs, each with its line in the script."""

    name: str
    statements: tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class ByHand:
    """A function that is not followed, and whether it selects rows instead of changing them.

    Attributes:
        copy: the function as it is in the script; None if it needs more than the statements at its top.
    """

    name: str
    lines: tuple[str, ...]
    span: Span
    why: str
    selects: bool = False
    copy: Copy | None = None


@dataclass(frozen=True)
class Reward:
    """A reward function that a script gives its trainer.

    Attributes:
        name: the function's name, or the expression.
        copy: the function as it is in the script; None if it cannot be copied.
        why: why it cannot.
        named: whether the script has only its name, so that it is looked for as in a config.
    """

    name: str
    copy: Copy | None = None
    why: str = ""
    named: bool = False


def module_of(title: str, copies: Iterable[Copy]) -> str:
    """Return the text of a module with some functions of a script, and what they need, in its order."""
    statements = dict(sorted({line: text for copy in copies for line, text in copy.statements}.items()))
    out, before = f'"""{title}"""\n', ""
    for text in statements.values():
        apart = any(part.startswith(("def ", "class ", "async ", "@")) for part in (before, text))
        joins = not apart and before.startswith(IMPORTS) == text.startswith(IMPORTS) and before
        out += ("" if joins else "\n\n" if apart else "\n") + f"{text}\n"
        before = text
    return out


IMPORTS = ("import ", "from ")


@dataclass(frozen=True)
class Columns:
    """The columns that functions make before one that is not followed."""

    columns: Mapping[str, Any]


def before_hand(mapping: Mapping[str, Any]) -> tuple[tuple[Columns, ...], dict[str, Any]]:
    """Split columns at a function that is not followed: those to make before it, and what they are after it.

    A text that the chat template makes cannot be made in a file, so it stays as it is.
    """
    plain = {name: value for name, value in mapping.items() if not _templated(value)}
    after = {name: value if name not in plain else Column(name) for name, value in mapping.items()}
    return ((Columns(plain),) if plain else ()), after


def _templated(value: Any) -> bool:
    return isinstance(value, Chat) or (isinstance(value, Text) and any(map(_templated, value.pieces)))


@dataclass(frozen=True)
class Rows:
    """The rows of the data sets after the script's functions were applied.

    Attributes:
        content: for SFT, what is trained on: a Text, a Column, a Chat, messages, or {"prompt": ...,
            "completion": ...}. For preferences, {"prompt": ..., "chosen": ..., "rejected": ...}. For single
            answers, {"prompt": ..., "completion": ..., "label": ...}.
        steps: what is applied before it, in the script's order.
        keys: the script's keys that determine it, for the report.
    """

    content: Any = None
    steps: tuple[ByHand | Columns, ...] = ()
    keys: tuple[str, ...] = ()

    @property
    def by_hand(self) -> list[ByHand]:
        """The functions that have to be copied by hand."""
        return [step for step in self.steps if isinstance(step, ByHand)]


SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UNSLOTH: Mapping[str, Any] = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "learning_rate": 5e-5,
    "weight_decay": 0.001,
    "warmup_steps": 0.1,
    "optim": "adamw_8bit",
    "seed": 3407,
    "logging_steps": 1,
    "report_to": "none",
    "bf16": True,
    "dtype": "bfloat16",
    "max_length": 2048,
    "gradient_checkpointing": True,
}
"""The defaults of Unsloth 2026.10.9, from its configs (models/rl.py, transformers 5) and from_pretrained."""
UNSLOTH_LORA: Mapping[str, Any] = {
    "lora_r": 16,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": SEVEN,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,
}
"""The same for get_peft_model, and for the 4 bits of from_pretrained."""

KEYS = table("""
exact random_state: the seed of the initial adapters: other draws of the same distribution
part full_finetuning load_in_16bit finetune_attention_modules finetune_mlp_modules finetune_last_n_layers
    layers_to_transform exclude_modules padding_side pad_token_id shuffle
learned finetune_language_layers=null/true qat_scheme=null embedding_learning_rate=null ref_model=null
    resize_model_vocab=null text_only=false/true
    data_collator=null/DataCollatorForSeq2Seq/DataCollatorForLanguageModeling/default_data_collator
    resize_token_embeddings loftq_config=null/{}
exact finetune_vision_layers finetune_audio_layers: recipec's model has no tower for them
lost layers_pattern=layers/null/[]: the decoder's layers are counted
learned float32_mixed_precision=null/false/true: model.dtype sets the precision
learned optimizers=null: another optimizer than the arguments name
learned optimizer_cls_and_kwargs=null: another optimizer than the arguments name
learned compute_loss_func=null: another loss
lost truncation_side=right add_eos_token=null add_bos_token=null requires_grad model_config
lost response_part: recipec trains on whole answers, with their thoughts
lost model_max_length: recipec truncates samples only at data.max_length
learned clone_chat_template=null: recipec adds neither its template nor its tokens, which data.chat_template
    and model.add_tokens can give
log callbacks
evaluation compute_metrics preprocess_logits_for_metrics eval_dataset
learned init_lora_weights=true/null/default: the adapters start as PEFT's do by default
exact peft_type inference_mode auto_mapping: it describes the adapters
files token use_auth_token fix_tokenizer use_exact_model_name data_files
speed max_memory use_safetensors offload_embedding fast_inference gpu_memory_utilization max_lora_rank
    float8_kv_cache disable_log_stats unsloth_tiled_mlp bnb_4bit_compute_dtype llm_int8_threshold
    llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules
exact turns: the strings that begin the turns, which recipec finds by the chat template
learned last_turn=null/false: recipec trains on every answer
learned resize_dimension=null/0/max: recipec scales pictures down by their longest side
exact snap_to_patch_size: the checkpoint's processor rounds sizes to whole patches
exact formatting_func: it makes no column that is trained on
exact standardize_sharegpt: recipec reads both ways of writing conversations
lost dataset_shuffle: recipec takes the first rows; the script draws as many with a seed
exact pretraining_tp: how products are split, not their result
""")
"""The meaning of a script's keys that TRL's command line does not have."""


W1178 = Code(
    "W1178",
    "function that must be copied by hand",
    cause="A function that changes or filters rows has no known form: a chat template over messages, "
    "a text template, a column.",
    cure="Write it into the file that the port puts next to the recipe. Until then a run stops with "
    "an error there.",
)


def say_rows(keys: Keys, script: Script) -> Statements[str]:
    """State what becomes of the functions over rows, and return the format."""
    rows = script.rows or Rows()
    several = isinstance(rows.content, dict) or script.objective not in ANSWERED
    prompts = script.objective in ("grpo", "rloo")
    sayer = _prompts if prompts else _answers if several else _sft
    form, fields, body = sayer(rows.content)
    sets: dict[str, Any] = {"data.format": form}
    if fields:
        sets["data.fields"] = fields
    note = ""
    if rows.by_hand and prompts and all(step.copy for step in rows.by_hand):
        entry, text = _copied(rows, body)
        yield keys.file(FILE, text)
        sets["data.transform"] = f"{FILE}:{entry}"
    elif rows.by_hand:
        first, name = rows.by_hand[0], FUNCTION
        if len(rows.steps) == 1 and not (body or first.selects):
            name = first.name or FUNCTION
            yield keys.file(FILE, _stub(name, first, form, sorted(_columns(rows.content))))
        else:
            yield keys.file(FILE, _chain(rows, body))
        sets["data.transform"] = f"{FILE}:{name}"
        note = f"copy by hand into {FILE}: {listing(map(_shown, rows.by_hand))}"
        for columns in rows.by_hand:
            message = f"recipec cannot convert {_shown(columns)}, so copy it by hand: {columns.why}"
            help = f"{FILE} next to the recipe has its lines as a comment, and stops a run until you write it"
            yield keys.warn(Diagnostic(W1178, message, rows.keys[0], help, columns.span))
    elif body:
        what = MADE.get(form, "a prompt and its answer")
        yield keys.file(FILE, _file(what, sorted(_columns(rows.content)), body))
        sets["data.transform"] = TRANSFORM
    for path, value in sets.items():
        yield keys.sets(path, value)
    for key in rows.keys:
        yield keys.withdraw(key)
        yield keys.say(key, sets if key == rows.keys[0] else {}, note)
    if form == "text" and keys.flag("assistant_only_loss"):
        message = "the loss covers a part of a text, and the rows are whole texts"
        help = "--set assistant_only_loss=null trains on all of it"
        yield keys.refuse("assistant_only_loss", E1145, message, help)
    ends = "recipec ends each text with the eos_token; the tokenizer alone does not"
    yield keys.say("add_special_tokens", {}, "" if keys.flag("add_eos_token") else ends)
    if keys.given("dataset_text_field"):
        yield keys.same("dataset_text_field", note="the column that the function makes")
    return form


def say_arguments(keys: Keys, script: Script) -> Says:
    """State the arguments that only the script's own lines read."""
    below = keys.below("arguments")
    for name, note in script.arguments.items():
        if note.startswith("none "):
            place = keys.source.keys.get(f"arguments.{name}")
            yield below.unless(name, (), note)
            message = f"`{name}` is an argument of no class that the script parses"
            help = "remove it: the script's parser refuses it, or does not read it"
            yield keys.warn(Diagnostic(W1114, message, name, help, place))
        else:
            yield below.same(name, note=note)


def _sft(content: Any) -> tuple[str, dict[str, str], str]:
    """Return format, fields and the body of a function for `data.transform`, "" if none is needed."""
    if isinstance(content, Chat):
        content = content.messages
        if isinstance(content, Column):
            return "chat", _renamed({"messages": content.name}, ("messages", "conversations")), ""
    if isinstance(content, list):
        turns = [f"{{{_pairs(turn)}}}" for turn in content]
        lines = "".join(f"            {turn},\n" for turn in turns)
        body = f'    return {{\n        "messages": [\n{lines}        ]\n    }}\n'
        return "chat", {}, body
    text = Text.of([content]) or Text(())
    pieces = [piece for piece in text.pieces if not isinstance(piece, End)]
    if len(pieces) == 1 and isinstance(pieces[0], Column):
        return "text", _renamed({"text": pieces[0].name}), ""
    if not pieces:
        return "text", {}, ""
    body = f'    return {{"text": {_joined(pieces)}}}\n'
    return "text", {}, body


def _answers(content: Any) -> tuple[str, dict[str, str], str]:
    """Return the same as _sft, for a prompt with its completion or with two answers."""
    form = "prompt_completion" if "completion" in (content or {}) else "preference"
    form = losses.UNPAIRED if "label" in (content or {}) else form
    if not content or all(isinstance(value, Column) for value in content.values()):
        return form, _renamed({key: value.name for key, value in (content or {}).items()}), ""
    pairs = "".join(f"        {literal(key)}: {_written(value)},\n" for key, value in content.items())
    body = f"    return {{\n{pairs}    }}\n"
    return form, {}, body


def _renamed(fields: dict[str, str], usual: tuple[str, ...] = ()) -> dict[str, str]:
    return {name: column for name, column in fields.items() if column != name and column not in usual}


def _prompts(content: Any) -> tuple[str, dict[str, str], str]:
    """Return the same as _sft, for prompts. The other columns of a row stay, for reward functions."""
    columns = {name: value for name, value in (content or {}).items() if value != Column(name)}
    prompt = columns.get("prompt")
    if columns.keys() <= {"prompt"} and (prompt is None or isinstance(prompt, Column)):
        return PROMPT, _renamed({"prompt": prompt.name} if prompt else {}), ""
    pairs = "".join(f"        {literal(name)}: {_written(value)},\n" for name, value in columns.items())
    return PROMPT, {}, f"    return {{\n        **row,\n{pairs}    }}\n"


ANSWERED = ("sft", "gkd")
"""Scripts whose rows are conversations or texts."""
PROMPT = "prompt"
"""The format of prompts without answers."""
MADE = {"chat": "conversations", "text": "plain text", PROMPT: "prompts"}
"""What a file makes of rows, by format."""


def _file(what: str, columns: list[str], body: str) -> str:
    named = listing(f"`{column}`" for column in columns) or "no column"
    return f'''"""Rows as {what}, as the script makes them."""


def {FUNCTION}(row):
    """A row of {named}."""
{body}'''


def _written(value: Any) -> str:
    """Return Python code that makes a value from a row's texts."""
    if isinstance(value, list):
        return f"[{', '.join(f'{{{_pairs(turn)}}}' for turn in value)}]"
    text = Text.of([value]) or Text(())
    return _joined([piece for piece in text.pieces if not isinstance(piece, End)])


def _inline(value: Any) -> str:
    """Return the same on one line."""
    return re.sub(
        r"\[\n +|,\n +(?=\])|\n +", lambda mark: {"[": "[", ",": ""}.get(mark[0][0], " "), _written(value)
    )


def _pairs(turn: Mapping[str, Any]) -> str:
    return ", ".join(f"{literal(key)}: {_written(value)}" for key, value in turn.items())


def _joined(pieces: list[Any]) -> str:
    parts = [literal(piece) if isinstance(piece, str) else f"row[{literal(piece.name)}]" for piece in pieces]
    if len(parts) == 1:
        return parts[0]
    lines = "".join(f"        {part},\n" for part in parts)
    return f'"".join([\n{lines}    ])' if parts else '""'


def _columns(content: Any) -> set[str]:
    if isinstance(content, Column):
        return {content.name}
    if isinstance(content, Text):
        return {piece.name for piece in content.pieces if isinstance(piece, Column)}
    if isinstance(content, Chat):
        return _columns(content.messages)
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return {name for value in inner for name in _columns(value)}


WANTED = {
    "prompt_completion": "prompt and completion",
    "chat": "messages",
    "text": "text",
    PROMPT: "prompt",
    "preference": "prompt, chosen and rejected",
    "unpaired_preference": "prompt, completion and label",
}


def _shown(function: ByHand) -> str:
    first, last = function.span.line, function.span.line + len(function.lines) - 1
    lines = f"line {first}" if first == last else f"lines {first} to {last}"
    return f"`{function.name or 'lambda'}` ({lines})"


def _stub(name: str, function: ByHand, form: str, columns: list[str]) -> str:
    """Write a file whose function stops the run, with the lines that have to be rewritten by hand."""
    wanted = listing(columns) or WANTED[form]
    return f'''"""Rows as the script makes them: to be written by hand after the lines below."""

{_commented(function)}

def {name}(row):
    """One row, not a batch: gives a row of {wanted}, or None to leave it out."""
    raise NotImplementedError("copy {name} of the script here")
'''


def _commented(function: ByHand) -> str:
    place = f"# {function.span.file}:{function.span.line}\n"
    return place + "".join(f"# {line}".rstrip() + "\n" for line in function.lines)


def _copied(rows: Rows, body: str) -> tuple[str, str]:
    """Return the name of a function that applies the script's own functions to a row, and its file."""
    copies, calls = [], []
    for step in rows.steps:
        if isinstance(step, Columns):
            calls.append(_with_columns(step))
        elif step.copy is not None:
            copies.append(step.copy)
            name = step.copy.name
            keeps = f"    if not {name}(row):\n        return None\n"
            calls.append(keeps if step.selects else f"    row = {{**row, **{name}(row)}}\n")
    entry = FUNCTION if all(copy.name != FUNCTION for copy in copies) else f"{FUNCTION}_row"
    head = module_of("Rows as the script makes them.", copies)
    text = f'''{head}

def {entry}(row):
    """Apply the script's steps to a row, in their order. None leaves the row out."""
{"".join(calls)}{body or "    return row" + chr(10)}'''
    return entry, text


def _with_columns(step: Columns) -> str:
    pairs = "".join(f"        {literal(key)}: {_inline(value)},\n" for key, value in step.columns.items())
    return f"    row = {{\n        **row,\n{pairs}    }}\n"


def _chain(rows: Rows, body: str) -> str:
    """Write a file with the steps in the script's order. Functions that are not followed stop the run."""
    functions, calls, taken = [], [], {FUNCTION}
    for step in rows.steps:
        if isinstance(step, Columns):
            calls.append(_with_columns(step))
            continue
        plain = step.name or ("keep" if step.selects else "change")
        names = (plain, *(f"{plain}_{number}" for number in range(2, len(rows.steps) + 3)))
        name = next(candidate for candidate in names if candidate not in taken)
        taken.add(name)
        gives = "whether the row is kept" if step.selects else "the row with its new columns"
        functions.append(
            f'{_commented(step)}def {name}(row):\n    """One row, not a batch: return {gives}."""\n'
            f'    raise NotImplementedError("write {name} here")\n'
        )
        calls.append(
            f"    if not {name}(row):\n        return None\n" if step.selects else f"    row = {name}(row)\n"
        )
    defined = "\n\n".join(functions)
    return f'''"""Rows as the script makes them. Write the functions above `{FUNCTION}` by hand."""


{defined}

def {FUNCTION}(row):
    """Apply the script's steps to a row, in their order. None leaves the row out."""
{"".join(calls)}{body or "    return row" + chr(10)}'''


WITHOUT = "if the tokenizer has no template"
"""The value of setup_chat_format if the script calls it only for a tokenizer without a template."""
CHATML = ["<|im_start|>", "<|im_end|>"]
"""The tokens of setup_chat_format."""


def _set_up(keys: Keys, form: str, named: Named | None) -> Statements[bool]:
    """State TRL's setup_chat_format, which writes ChatML, and return whether the run has its template."""
    key, model = "setup_chat_format", named.model if named else None
    if not keys.given(key):
        return False
    if keys.value(key) == WITHOUT and (model is None or model.chat is not False):
        note = "the tokenizer has a template, so that the script does not call it"
        if model is None:
            yield keys.say(
                key, {}, "recipec does not know whether the tokenizer has a template, and uses its own"
            )
        yield keys.same(key, note=note)
        return False
    note = "its two tokens are tokens of the model"
    sets: dict[str, Any] = {}
    if model is None or templates.missing_end(CHATML[1], model, ()):
        if keys.given("add_tokens"):
            yield keys.learned(key, (None,), "recipec does not add its tokens to those of add_tokens")
            return False
        rows = common_keys.grown(keys, len(CHATML))
        sets = {"model.add_tokens": dict.fromkeys(CHATML), **({"model.vocab_size": rows} if rows else {})}
        note = "its two tokens are added; adapters train their rows only with lora.modules_to_save"
    if form != "text":
        sets["data.chat_template"] = templates.of("axolotl", "chatml", model).sets["data.chat_template"]
    yield keys.same(key, sets, note)
    return form != "text"


def say_template(keys: Keys, form: str, named: Named | None) -> Says:
    """State the chat template that the script gives its tokenizer."""
    if (yield from _set_up(keys, form, named)):
        yield keys.same("chat_template", note="setup_chat_format replaces it")
        return
    template = keys.text("chat_template")
    model = named.model if named else None
    if template is None or form != "chat":
        yield keys.same("chat_template", note="the rows are text, to which no template applies")
        if form == "chat" and model is not None:
            yield from templates.say_own(keys, model)
    elif "{%" in template or "{{" in template:
        yield keys.say("chat_template", {"data.chat_template": template})
    else:
        translation = templates.unsloth(template, model)
        mark = templates.missing_end(translation.ends, model, keys.ledger.value("model.add_tokens") or ())
        if mark and model is not None:
            message = templates.spelled(mark, model, "Unsloth")
            help = f"add it in the script: tokenizer.add_tokens(['{mark}']); or --set chat_template=null"
            yield keys.refuse("chat_template", E1180, message, help)
        elif translation.known:
            yield keys.say("chat_template", translation.sets, translation.note)
        else:
            message = templates.unknown("Unsloth's template", template, translation)
            help = "write it out as Jinja: --set 'chat_template={{ ... }}', or null for the model's own"
            yield keys.refuse("chat_template", E1147, message, help)
