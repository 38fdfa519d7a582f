"""TRL's command line (trl sft, dpo, kto, grpo, rloo; the scripts of orpo, cpo, gkd): its --config's YAML."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.wording import listing
from recipec.port.common_keys import COMMON, say_methods, say_tokens
from recipec.port.engine import Rule, Says, Statements
from recipec.port.follow import UNSLOTH_COLLATOR
from recipec.port.keys import REASONS, Keys, as_number, defaults_of, keys_of, table, tools, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    datasets,
    distillation,
    experts,
    images,
    losses,
    model_names,
    reinforcement,
    rows,
    scripts,
    sharding,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.model_names import Named
from recipec.port.meaning.run import Run
from recipec.port.meaning.sharding import Launch
from recipec.port.refusals import E1143, E1145, E1149, E1160, E1163, E1171
from recipec.port.rules import common, follow, places
from recipec.port.source import Source
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.yaml_document import Refused

NAME = "trl"
TITLE = "TRL"
MARKS = words(
    """model_name_or_path dataset_name dataset_config dataset_train_split dataset_test_split use_peft
    attn_implementation max_length packing_strategy completion_only_loss assistant_only_loss
    use_bnb_nested_quant chat_template_path dataset_text_field padding_free lora_task_type model_revision
    beta loss_type precompute_ref_log_probs torch_dtype dataset_num_proc dataset_mixture dataset_mixer
    eos_token lora_modules_to_save accelerate_config disable_dropout shuffle_dataset reward_funcs
    num_generations max_completion_length desirable_weight undesirable_weight center_rewards_coefficient"""
)

KEYS = table("""
speed gradient_checkpointing_use_reentrant use_num_logits_to_keep use_logits_to_keep dataset_batch_size
    num_of_sequences chars_per_token
exact env: environment variables, which recipec's scripts do not read
lost activation_offloading=false
part attn_implementation shuffle_dataset
exact chat_template_path: the tokenizer's own template
exact text_column columns_to_keep: which columns are read and kept
exact dtype: it gives model.dtype, together with bf16 and fp16
""")
OF_LORA = table("""
integer lora_r -> lora.rank
number lora_alpha -> lora.alpha
lost lora_task_type=CAUSAL_LM
""")
OF_SOURCES = table("""
part path name split data_files
lost data_dir=null: a folder of a repository: name its files as data_files
lost revision=null/main
exact columns: recipec ignores columns that it does not use
""")

GROUPS = ("grpo", "rloo")
"""The scripts of reinforcement learning, whose objective is grpo."""
OBJECTIVES = {**dict.fromkeys(GROUPS, "grpo"), "gkd": "distill"}
"""The recipe's objective of a script, if it has another name."""
SHIPPED = {"single_gpu": 1, **dict.fromkeys(("multi_gpu", "fsdp1", "fsdp2", "zero1", "zero2", "zero3"), 8)}
"""The accelerate configs that TRL contains, with their number of processes."""


@dataclass
class Trl(Run):
    """A run of TRL.

    Attributes:
        script: the script of the run, one of SCRIPTS.
    """

    script: str = ""


def opened(ledger: Ledger) -> Trl:
    """Return the run of a file."""
    return Trl(Keys(ledger, ledger.sources.main, TITLE))


def _objective(run: Trl) -> Says:
    """Learn which script the file is for.

    Raises:
        Refused: the script for the file is unclear, or has no counterpart.
    """
    keys, script = run.keys, run.keys.source.script
    run.objective = script.objective if script else (yield from told(keys, run.ledger.script))
    run.script = run.objective
    keys.defaults = _defaults(run.script)
    run.objective = OBJECTIVES.get(run.script, run.script)
    if script:
        keys.defaults, keys.tool = {**keys.defaults, **script.defaults}, script.tool
    if run.objective != "sft":
        why = f"the keys are those of TRL's {run.script} script"
        yield keys.sets("train.objective", run.objective, why)


def _training(run: Run) -> Says:
    yield from training_arguments.say_run(run, run.keys, training_arguments.dtype_of(run.keys, "dtype"))


def _memory(run: Run) -> Says:
    yield from training_arguments.memory(run, run.keys)
    yield from training_arguments.bookkeeping(run.keys)


def _methods(run: Run) -> Says:
    yield from say_methods(run.keys, training.OFF)


def _script(run: Run) -> Says:
    """State the keys that only Python scripts have."""
    keys, script = run.keys, run.keys.source.script
    if not script:
        return
    if keys.source.has("add_tokens"):
        yield from say_tokens(keys, "add_tokens")
        yield keys.same("resize_token_embeddings", note="recipec's embedding has a row for each token")
    if run.ledger.value("data.shuffle_seed", 0) is None:
        yield keys.unless("shuffle", (), "another order: the run reads the rows in their order in the files")
    yield from keys.follow(adapters.FEATURES)
    yield from keys.follow(scripts.KEYS)
    yield from scripts.say_arguments(keys, script)
    yield from keys.follow(COMMON, training.OFF)


def _stream(run: Run) -> Says:
    """State streaming. transformers' Trainer keeps a stream's order, unless shuffle_dataset is set."""
    keys = run.keys
    switch, other = "dataset_streaming", "streaming"
    if keys.flag(other):
        switch, other = other, switch
    if keys.flag(switch) and keys.ledger.value("train.steps") and not keys.flag("shuffle_dataset"):
        yield keys.sets("data.shuffle_seed", None)
    yield from datasets.say_stream(keys, switch, ("buffer_size",))
    yield keys.same(other, note="off")


def _defaults(objective: str) -> dict[str, Any]:
    sections = (objective, "script", "model", "mixture")
    settings = {} if objective in OBJECTIVES else {"loss_type": None}
    return {**defaults_of("trl", *sections), "optim": "adamw_torch_fused", **settings}


def _launch(run: Run) -> Says:
    """State accelerate's settings: from its file, a config in TRL, and launcher flags in the YAML."""
    keys, ledger = run.keys, run.ledger
    launch = yield from training_arguments.launched(keys)
    file = ledger.sources.others.get("accelerate")
    name = keys.text("accelerate_config")
    if name in SHIPPED:
        launch = Launch(SHIPPED[name], mixed_precision="bf16").with_("fsdp" in name, "zero" in name)
        yield keys.same("accelerate_config", note=f"{SHIPPED[name]} processes; {sharding.MESH}")
    elif name is not None and file is None:
        note = "not among the files: name it on the command line, or give --devices"
        yield keys.same("accelerate_config", note=note)
    yield keys.same("accelerate_config", note="read next to this file")
    if keys.given("num_processes") and (count := keys.integer("num_processes")) and count > 0:
        launch = replace(launch, processes=count)
        yield keys.same("num_processes", note=f"{count} processes, which multiply the rows of a step")
    for flag in keys_of("accelerate", "launch"):
        if flag not in ("gradient_accumulation_steps", "env"):
            yield keys.same(flag, note=REASONS["mesh" if flag.startswith("fsdp") else "launch"])
    run.launch = launch


def _model(run: Run) -> Says:
    keys = run.keys
    run.named = yield from model_names.say_model(keys, "model_name_or_path", "model_revision")
    if keys.source.script and (tokenizer := keys.text("tokenizer")):
        yield keys.say("tokenizer", {"model.tokenizer": tokenizer})
    yield from model_names.say_flash(keys)
    arguments = keys.mapping("model_init_kwargs")
    yield keys.unless("model_init_kwargs", (None, {}), f"recipec does not pass on {', '.join(arguments)}")


def _images(run: Run) -> Says:
    """State the pictures of TRL's script for them, and of a script with Unsloth's collator."""
    keys, model = run.keys, run.model
    if keys.source.has(SEEING):
        note = "TRL also trains on the tokens of pictures, which recipec never does"
        yield from images.say_images(keys, SEEING, model, run.objective, {images.IMAGES: {}}, note)
    script = keys.source.script
    if script is None or keys.text("data_collator") != UNSLOTH_COLLATOR:
        return
    rows = script.rows
    if rows is not None and not rows.by_hand and not scripts.has_pictures(rows.content):
        yield keys.same("data_collator", note="the rows have no pictures")
        return
    sets: dict[str, Any] = {images.IMAGES: {}}
    notes = []
    size = keys.value("resize")
    size = _shrunk(model) if size in (None, "min") else None if size == "max" else size
    tower = None if model is None else model.tower
    if isinstance(size, list):
        notes.append("Unsloth stretches pictures to one size; recipec keeps their shape")
        size = max(size)
    if isinstance(size, int) and (tower is None or tower.patches is None):
        sets = {"data.images.longest_side": size}
        notes.append(
            f"Unsloth scales pictures wider than {size} pixels down to them; recipec the longest side"
        )
    yield from keys.passive(("resize",), "part of data.images")
    yield from images.say_images(keys, "data_collator", model, run.objective, sets, "; ".join(notes))


def _shrunk(model: Model | None) -> int | None:
    """Return the width to which Unsloth scales wider pictures down by default."""
    if model is None:
        return None
    vision = {**model.config, **model.multimodal}.get("vision_config")
    size = vision.get("image_size") if isinstance(vision, Mapping) else None
    return size if isinstance(size, int) else 512


def _lora(run: Run) -> Says:
    keys, model = run.keys, run.model
    run.lora = keys.flag("use_peft")
    run.learning_rate = keys.number("learning_rate") or 0.0
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    details = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage")
    if not run.lora:
        for key in ("load_in_4bit", "load_in_8bit"):
            yield from adapters.refuse_quantized(keys, key, "use_peft: true, or remove the quantization")
        ours = [key for key in keys_of("trl", "model") if key.startswith("lora_")]
        of_adapters = (*ours, "use_rslora", "use_dora", *details, "load_in_4bit", "load_in_8bit")
        yield from keys.passive(of_adapters, "use_peft is off")
        yield keys.same("use_peft", {"lora": None}, "full fine-tuning")
        return
    yield keys.same("use_peft", note="it adds the lora section")
    yield from keys.follow(OF_LORA)
    yield from keys.follow(adapters.KINDS)
    if keys.value("init_lora_weights") not in (None, True, "default"):  # only in Python scripts
        yield from adapters.say_init(keys, "init_lora_weights", keys.value("init_lora_weights"))
    spec = keys.texts("lora_target_modules")
    if isinstance(spec, list) and len(spec) == 1:
        spec = spec[0] if spec[0] == "all-linear" or any(sign in spec[0] for sign in "*^$|()[]\\") else spec
    if keys.tool == adapters.UNSLOTH and images.trained_on(keys) and model is not None:
        spec = yield from _unsloth_targets(keys, model, spec)
    parameters = keys.listed("lora_target_parameters")
    layers, exclude = (
        (yield from adapters.layers_of(keys)),
        keys.texts("exclude_modules"),
    )  # only in Python scripts
    if model and layers is None and (last := keys.integer("finetune_last_n_layers")):
        layers = list(range(model.architecture.num_layers))[-last:]
    run.chosen = yield from adapters.say_targets(
        keys, "lora_target_modules", model, spec, layers, exclude, parameters
    )
    yield from adapters.say_patterns(keys)
    yield from adapters.say_parameters(keys, "lora_target_parameters", run.chosen)
    kind = keys.choice("bnb_4bit_quant_type", ("nf4", "fp4")) or "nf4"
    bits = 4 if four else 8 if eight else None
    key, nested = "load_in_4bit" if four else "load_in_8bit", keys.flag("use_bnb_nested_quant")
    quantization = yield from adapters.say_bits(keys, key, bits, kind, nested, model)
    if quantization.value is not None:
        rounded = keys.tool == TITLE
        why = "TRL trains bfloat16 adapters on a quantized base model" if rounded else ""
        yield keys.sets("lora.dtype", "bfloat16" if rounded else "float32", why)
    else:
        yield keys.sets("lora.dtype", "float32", "PEFT keeps adapters in float32")
    note = "part of model.quantization" if quantization.value else "not quantized"
    yield from keys.passive(("load_in_4bit", "load_in_8bit", *details), note)


def _unsloth_targets(keys: Keys, model: Model, spec: Any) -> Statements[Any]:
    """Return what Unsloth adapts of a model with a vision tower: by its switches, or the names of a list."""
    switches = {**adapters.LAYERS_OF, **adapters.MODULES_OF}
    off = [switch for switch in switches if keys.value(switch) is False]
    yield from keys.passive(tuple(switches), "part of lora.targets and lora.vision")
    if spec == "all-linear":
        return adapters.unsloth_targets(model, ())
    if not keys.given("lora_target_modules"):
        return adapters.unsloth_targets(model, off)
    if isinstance(spec, list) and off:
        pattern = adapters.unsloth_targets(model, off)
        return rf"(?=.*\.({'|'.join(map(re.escape, spec))})$){pattern}"
    return spec


def _balance(run: Run) -> Says:
    """State the load-balancing loss. Without the key, TRL takes the coefficient of config.json."""
    key, keys, model = "router_aux_loss_coef", run.keys, run.model
    usual = experts.coefficient(model)
    if run.objective == "grpo":
        wanted = keys.number(key) if keys.given(key) else (usual or keys.number(key))
        if wanted:
            message = f"TRL balances experts by {wanted:g} times their load loss; recipec's grpo does not"
            yield keys.refuse(key, E1163, message, f"--set {key}=0 ports the run without it")
        yield keys.same(key, note="no loss balances experts")
        return
    if run.objective not in ("sft", "dpo", "kto"):
        return
    if usual is not None and not keys.given(key):
        whose = "the coefficient of the model's config.json, by which TRL balances experts"
        yield keys.default(key, usual, {experts.AUX: usual}, f"{whose}; {experts.MEANS}" if usual else whose)
    elif usual is None and model is not None and keys.number(key):
        message = f"TRL has no load-balancing loss for {model.title}, and stops at `{key}`"
        yield keys.refuse(key, E1145, message, f"{key}: null")
    yield from experts.say_coefficient(keys, key, model)


SEEING = "sft_vlm"
"""TRL's example that trains on pictures. A command with it has its name as a key."""
SCRIPTS = ("sft", "dpo", "orpo", "cpo", "kto", *GROUPS, "gkd")
"""The scripts with a counterpart in recipes, by their sections."""

LAST = ("cpo", "rloo", "gkd")
"""The scripts to try last. Nearly all of their keys also belong to dpo, grpo or sft."""

EXPERIMENTAL = "experimental."
"""The prefix of the sections of scripts that are not commands of `trl`."""

_SHARED = ("script", "model", "mixture", "dataset")

_PAIRS = words(
    "max_prompt_length max_completion_length generate_during_eval is_encoder_decoder padding_value"
)
_PROMPTS = words("max_prompt_length")
OLDER = {
    **{name: _PAIRS for name in ("dpo", "cpo", "kto")},
    **{name: _PROMPTS for name in ("orpo", "grpo", "rloo")},
}
"""Keys that a script had in earlier versions."""

NEEDED = dict.fromkeys(("distillation", "gkd"), distillation.TEACHER)
"""A key without which a script does not start."""

LOSSES = {
    "sft": words("nll chunked_nll dft"),
    "dpo": words(
        """sigmoid sigmoid_norm hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair
        aot_unpaired apo_zero apo_down discopop sft kto_pair"""
    ),
    "cpo": words("sigmoid hinge ipo simpo alphapo"),
    "kto": words("kto apo_zero_unpaired"),
    "grpo": words("grpo dapo bnpo dr_grpo luspo cispo sapo vespo"),
}
"""The values of `loss_type` by which a script is recognized."""

COLUMNS: tuple[tuple[frozenset[str], tuple[str, ...]], ...] = (
    (words("chosen rejected"), ("dpo", "orpo", "cpo", "reward")),
    (words("prompt completion label"), ("kto",)),
    (words("prompt completion"), ("sft",)),
    (words("messages"), ("sft", "gkd")),
    (words("conversations"), ("sft",)),
    (words("text"), ("sft",)),
    (words("prompt"), ("grpo", "rloo")),
)
"""The columns of rows, and the scripts that read them. The first entry whose columns all exist counts."""


def told(keys: Keys, chosen: str | None) -> Statements[str]:
    """Return the script for the file, one of SCRIPTS.

    Args:
        chosen: the script of --script. Each key that it does not have is then an error.

    Raises:
        Refused: the file is for another script, or may be for several.
    """
    if chosen is not None:
        yield from _refuse(keys, chosen)
        return chosen
    source = keys.source
    used = _used(source)
    fits = [script for script in (*_commands(), *LAST) if all(script in readers for readers in used.values())]
    fits = [script for script in fits if NEEDED.get(script, "") in ("", *used)]
    having = [script for script in fits if script not in LAST] or fits
    foreign = [key for key, readers in used.items() if not readers.intersection(SCRIPTS)]
    if foreign or (having and not set(having).intersection(SCRIPTS)):
        raise Refused(_another(source, used, having or _nearest(used, foreign), foreign or [*used]))
    where, fitting = _reading(keys, having)
    if len(fitting) == 1 and fitting[0] in SCRIPTS:
        return fitting[0]
    if fitting and not set(fitting).intersection(SCRIPTS):
        raise Refused(_another(source, used, fitting, [where]))
    raise Refused(
        _untold(
            source,
            used,
            list(dict.fromkeys([*fitting, *_reading(keys, [s for s in fits if s in LAST], strict=True)[1]])),
        )
    )


@functools.cache
def _own() -> Mapping[str, frozenset[str]]:
    sections = tools()["trl"]["sections"]
    shared = {*keys_of("trainer", "training_arguments"), *keys_of("trl", *_SHARED)}
    return {name: frozenset(sections[name]) - shared for name in sections if name not in _SHARED}


def _commands() -> list[str]:
    """Return the scripts that are not experimental, without LAST."""
    return [name for name in _own() if not name.startswith(EXPERIMENTAL) and name not in LAST]


def _having(key: str) -> set[str]:
    """Return the scripts with a key; none if all have it, or if none has it in the current version."""
    having = {name for name, keys_of_script in _own().items() if key in keys_of_script}
    return having and having | {name for name, older in OLDER.items() if key in older}


def _used(source: Source) -> dict[str, set[str]]:
    """Return the file's keys that distinguish scripts, with the scripts that have them."""
    used: dict[str, set[str]] = {}
    for key, value in source.data.items() if isinstance(source.data, dict) else ():
        having = _having(str(key)) if value is not None else set()
        if key == "loss_type":
            having = having & _losing(value) or having
        if not having.issuperset(_commands()) and having:
            used[str(key)] = having
    return used


def _losing(value: Any) -> set[str]:
    """Return the scripts with a loss. Several losses at once mean dpo."""
    if isinstance(value, list):
        return {"dpo"}
    return {script for script, losses in LOSSES.items() if str(value) in losses}


def _reading(keys: Keys, scripts: list[str], strict: bool = False) -> tuple[str, list[str]]:
    """Return the key of the data set, and the scripts that can read its rows, if the rows are at hand.

    Args:
        strict: return no script if none can read them. Without it, all scripts are returned then.
    """
    where, path = _rows(keys)
    row = (datasets.first_row(path, keys.source.path.parent) if path else None) or {}
    readers = next((readers for columns, readers in COLUMNS if columns <= set(row)), ())
    able = [script for script in scripts if script in readers]
    return where, able if able or (strict and readers) else scripts


def _rows(keys: Keys) -> tuple[str, str | None]:
    entries = keys.value("datasets")
    entry = entries[0] if isinstance(entries, list) and entries else None
    if not isinstance(entry, dict):
        name = keys.value("dataset_name")
        return "dataset_name", name if isinstance(name, str) else None
    files = entry.get("data_files")
    file = files[0] if isinstance(files, list) and files else files
    return "datasets", next((path for path in (file, entry.get("path")) if isinstance(path, str)), None)


def _refuse(keys: Keys, chosen: str) -> Says:
    for key in keys.source.data if isinstance(keys.source.data, dict) else ():
        having = _having(str(key))
        if having and chosen not in having and keys.given(key):
            message = f"`{key}` is not a key of TRL's {chosen} script, but of {_named(having)}"
            others = [f"--script {script}" for script in SCRIPTS if script in having]
            yield keys.refuse(key, E1171, message, listing([f"--set {key}=null", *others], "or"))
        elif having and chosen not in having:
            yield keys.same(key, note="null: the same as without the key")


def _nearest(used: Mapping[str, set[str]], foreign: list[str]) -> Iterable[str]:
    """Return the scripts with all keys of a file, or else those with the first foreign key."""
    every = [name for name in _own() if all(name in readers for readers in used.values())]
    return every or used[foreign[0]]


def _another(
    source: Source, used: Mapping[str, set[str]], scripts: Iterable[str], keys: list[str]
) -> Diagnostic:
    """Return the error for a file whose keys belong to a script without a counterpart."""
    alone = not used.get(keys[0], set()).intersection(SCRIPTS)
    names = listing(f"`{key}`" for key in (keys[:1] if alone else keys))
    rows = "" if keys[0] in used else "the rows of "
    message = f"this is a run of TRL's {_named(scripts)} script, judging by {rows}{names}"
    lost = {script: [key for key in used if script not in used[key]] for script in SCRIPTS}
    nearest = min(SCRIPTS, key=lambda script: len(lost[script]))
    ways = "".join(f" --set {key}=null" for key in lost[nearest])
    help = f"recipes train like TRL's {listing(SCRIPTS, 'or')}; if this is one: --script {nearest}{ways}"
    return Diagnostic(E1171, message, keys[0], help, source.place(keys[0]))


E1172 = Code(
    "E1172",
    "TRL script is unclear",
    cause="Several scripts of TRL read such a file, or none has all of its keys. Each script trains "
    "differently.",
    cure="Name the script with `--script`: `sft`, `dpo`, `orpo`, `cpo`, `kto`, `grpo`, `rloo` or `gkd`.",
)


def _untold(source: Source, used: Mapping[str, set[str]], fitting: list[str]) -> Diagnostic:
    """Return the error for a file that may be for several scripts, or for none."""
    ways = [script for script in SCRIPTS if script in fitting] or list(SCRIPTS)
    help = f"name the script: {listing((f'--script {script}' for script in ways), 'or')}"
    if fitting:
        message = f"{source.file} may be for several scripts of TRL: {_named(fitting)}"
        return Diagnostic(E1172, message, help=help, span=source.top())
    pairs = (
        pair for pair in combinations(used, 2) if not used[pair[0]].intersection(used[pair[1]], _commands())
    )
    clash = next(pairs, tuple(used))
    message = f"no script of TRL has {listing(f'`{key}`' for key in clash)} together"
    return Diagnostic(E1172, message, clash[-1], help, source.place(clash[-1]))


def _named(scripts: Iterable[str]) -> str:
    """Name scripts for a message. If some are commands of `trl`, name only these."""
    names = set(scripts)
    commands = [name for name in _commands() if name in names]
    return listing(commands or sorted(name.removeprefix(EXPERIMENTAL) for name in names), "or")


def _data(run: Trl) -> Says:
    keys, objective = run.keys, run.objective
    evaluates = yield from training_arguments.evaluation(keys)
    path = yield from _read(keys, evaluates)
    naming = ("dataset_mixture", "dataset_mixer", "dataset_name", "datasets")
    name = next((key for key in naming if keys.given(key)), "dataset_name")
    script = keys.source.script
    if run.script in GROUPS:
        yield from _prompts(run, path, name)
        return
    if script and script.rows:
        form = yield from scripts.say_rows(keys, script)
    elif objective == "distill":
        form = "chat"
    else:
        form = yield from losses.form(keys, objective, path, (keys, name))
    if objective == "distill":
        row = datasets.first_row(path, keys.source.path.parent) if path else None
        yield from distillation.say_rows(keys, form, row, (keys, name))
    if objective == "sft":
        yield from losses.masks(keys, form)
        yield from losses.packing(keys, HANDBOOK if keys.given("dataset_mixer") else "")
    yield from _template(keys, form, run.named)
    if objective == "distill":
        yield from distillation.say_length(keys)
    else:
        yield from datasets.length(keys, "max_length")
    kwargs = keys.mapping("dataset_kwargs")
    skipped = bool(kwargs.get("skip_prepare_dataset"))
    note = "recipec cannot read tokenized rows"
    if skipped and images.trained_on(keys):
        yield keys.same("dataset_kwargs", note="Unsloth's collator tokenizes the rows")
    yield keys.unless("dataset_kwargs", () if skipped else (kwargs,), note)


def _prompts(run: Trl, path: str | None, name: str) -> Says:
    """State the rows of prompts, and the rewards of their answers."""
    keys, script = run.keys, run.keys.source.script
    longest = keys.integer("max_length") if keys.tool == "Unsloth" else None
    longest = (longest or 0) - (keys.integer("max_completion_length") or 0)
    longest = longest if longest > 0 else reinforcement.LONGEST_PROMPT
    if script and script.rows:
        yield from scripts.say_rows(keys, script)
        yield from reinforcement.say_lengths(keys, longest)
    else:
        row = datasets.first_row(path, keys.source.path.parent) if path else None
        yield from reinforcement.say_prompts(keys, row, (keys, name), longest)
    yield keys.same("max_length", note="the prompt and the completion have lengths of their own")
    if script:
        yield from scripts.say_template(keys, "chat", run.named)
    elif run.model is not None:
        yield from _template(keys, "chat", run.named)


def _teacher(run: Trl) -> Says:
    """State the teacher of a distillation."""
    if run.objective == "distill":
        yield from distillation.say_teacher(run.keys)


def _groups(run: Trl) -> Says:
    """State the loss, the completions and the rewards of reinforcement learning."""
    keys, script = run.keys, run.keys.source.script
    if run.script not in GROUPS:
        return
    if keys.given("reward_model_name_or_path"):
        message = "`reward_model_name_or_path` is a model that scores completions, which recipec does not run"
        help = "write a function that calls it into rewards.py, and name it in reward_funcs"
        yield keys.refuse("reward_model_name_or_path", E1149, message, help)
    yield from reinforcement.say_rewards(keys, script.rewards if script else None)
    yield from reinforcement.say_loss(keys, rloo=run.script == "rloo")
    yield from reinforcement.say_sampling(keys)
    yield from reinforcement.say_server(keys)
    rows, micro = (keys.ledger.value(f"train.{key}") for key in ("global_batch_size", "micro_batch_size"))
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    if isinstance(rows, int) and isinstance(micro, int):
        yield from reinforcement.say_draws(keys, accumulation, rows // max(accumulation, 1))
        yield from reinforcement.say_groups(keys, rows)
    if keys.given("shuffle_dataset") and not keys.flag("shuffle_dataset"):
        yield keys.say("shuffle_dataset", {"data.shuffle_seed": None})
    yield from keys.follow(reinforcement.OF_GROUPS)


def _read(keys: Keys, evaluates: bool) -> Statements[str | None]:
    if keys.value("dataset_mixture"):
        return (yield from _handbook(keys))
    if keys.value("dataset_mixer"):
        return (yield from _mixer(keys))
    yield keys.same("dataset_mixture", note="null: the same as without the key")
    return (yield from _mixture(keys)) if keys.value("datasets") else (yield from _single(keys, evaluates))


HANDBOOK = "run_sft.py of the alignment-handbook's versions with dataset_mixer packs in any case"


def _handbook(keys: Keys) -> Statements[str | None]:
    """State `dataset_mixture`, which the scripts of alignment-handbook read in addition to TRL's keys."""
    mixture = keys.below("dataset_mixture", {"seed": 0})
    values = keys.mapping("dataset_mixture")
    entries = values.get("datasets")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        yield mixture.refuse(
            "datasets", E1160, "datasets is not a list of mappings", "datasets: [{id: OWNER/NAME}]"
        )
        entries = []
    portions = []
    for index in range(len(entries)):
        below = mixture.below(f"datasets[{index}]", {"split": "train", "weight": 1.0})
        portions.append((yield from _portion(below)))
    yield keys.sets("data.train", [portion for portion in portions if portion is not None])
    yield from _held_out(mixture, {"data.eval_seed": mixture.integer("seed") or 0})
    yield mixture.same("seed", note="recipec shuffles the rows again in each epoch")
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets")
    yield from keys.unused(names, "the run reads dataset_mixture instead")
    return str(entries[0].get("id")) if entries else None


def _mixer(keys: Keys) -> Statements[str | None]:
    """State `dataset_mixer` of earlier alignment-handbook versions: each data set's share of first rows."""
    keys.defaults = {**keys.defaults, "dataset_splits": ["train", "test"]}
    splits, configs = (keys.value(key) for key in ("dataset_splits", "dataset_configs"))
    splits = [str(split_name) for split_name in splits] if isinstance(splits, list) else []
    train, held = ([split_name for split_name in splits if word in split_name] for word in ("train", "test"))
    sources: dict[str, list[Any]] = {"data.train": [], "data.eval": []}
    for number, (name, weight) in enumerate(keys.mapping("dataset_mixer").items()):
        place, share = datasets.place(str(name)), as_number(weight)
        if place.path is None or share is None or not 0 < share <= 1:
            why = place.note or f"its share is {weight}, which is not between 0 and 1"
            help = "dataset_mixer: {OWNER/NAME: 1.0}"
            yield keys.refuse("dataset_mixer", E1143, f"recipec cannot read the source `{name}`: {why}", help)
            continue
        config = str(configs[number]) if isinstance(configs, list) and number < len(configs) else None
        part = f"[:{max(round(100 * share), 1)}%]" if share < 1 else ""
        for split_name in train:
            split = None if split_name == "train" and not part else f"{split_name}{part}"
            sources["data.train"].append(datasets.source(place.path, split, config))
        sources["data.eval"] += [datasets.source(place.path, split_name, config) for split_name in held]
    evaluates = keys.text("eval_strategy") not in (None, "no")
    yield keys.say(
        "dataset_mixer", {key: sources[key] for key in sources if key == "data.train" or evaluates}
    )
    yield from keys.passive(("dataset_splits", "dataset_configs"), "part of data.train")
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets")
    yield from keys.unused(names, "the run reads dataset_mixer instead")
    return next(map(str, keys.mapping("dataset_mixer")), None)


def _portion(keys: Keys) -> Statements[Any]:
    """Return the source for a data set of alignment-handbook's mixture, with a share of its rows."""
    name, split, share = keys.text("id"), keys.text("split") or "train", keys.number("weight")
    place = datasets.place(name) if name else datasets.Place(None, "it has no id")
    yield from keys.passive(("columns",), "recipec ignores columns that it does not use")
    if place.path is None:
        yield keys.refuse("id", E1143, f"recipec cannot read this source: {place.note}", "id: OWNER/NAME")
        yield from keys.passive(
            ("config", "split", "weight"), "a setting of a source that recipec cannot read"
        )
        return None
    yield from keys.passive(("id", "config", "split"), "part of data.train")
    percent = round(100 * share) if share is not None else 100
    if share is not None and percent < 100:
        split = f"{split}[:{max(percent, 1)}%]"
        yield keys.say(
            "weight",
            {},
            f"recipec takes the first {max(percent, 1)} % of the rows; the tool draws this share",
        )
    yield keys.same("weight", note="all of its rows")
    return datasets.source(place.path, split if split != "train" else None, keys.text("config"))


def _held_out(keys: Keys, seed: Mapping[str, Any]) -> Says:
    """State `test_split_size`, a share of the rows. Here the same seed draws other rows."""
    share = keys.number("test_split_size")
    if share is None:
        yield keys.same("test_split_size", note="the run holds out no rows")
    elif 0 < share < 1:
        sets = {"data.eval_fraction": share, **seed}
        yield keys.say("test_split_size", sets, "another random generator: other rows")
    else:
        yield keys.unless("test_split_size", (), "recipec cannot hold out a number of rows: give a share")


def _single(keys: Keys, evaluates: bool) -> Statements[str | None]:
    yield from keys.unused(("datasets", "test_split_size"), "the run reads dataset_name instead")
    name = keys.text("dataset_name")
    if name is None:
        help = datasets.elsewhere("dataset_name", str(keys.ledger.value("train.objective") or "sft"))
        yield keys.refuse("dataset_name", E1143, "the files name no data set", help)
        return None
    place = datasets.place(name)
    if place.path is None:
        message = f"recipec cannot read the data set `{name}`: {place.note}"
        help = datasets.elsewhere("dataset_name", str(keys.ledger.value("train.objective") or "sft"))
        yield keys.refuse("dataset_name", E1143, message, help)
        return None
    config, split = keys.text("dataset_config"), keys.text("dataset_train_split")
    hub = place.path.startswith("hf://")
    split = split if hub and split != "train" else None
    yield keys.say(
        "dataset_name", {"data.train": [datasets.source(place.path, split, config if hub else None)]}
    )
    held = keys.text("dataset_test_split") or "test"
    if evaluates and hub:
        yield keys.say("dataset_test_split", {"data.eval": [datasets.source(place.path, held, config)]})
    yield from keys.passive(("dataset_config", "dataset_train_split"), "part of data.train")
    yield from keys.unused(("dataset_test_split",), "the run does not evaluate")
    return name


def _mixture(keys: Keys) -> Statements[str | None]:
    entries = keys.value("datasets")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        yield keys.refuse(
            "datasets", E1160, "datasets is not a list of mappings", "datasets: [{path: OWNER/NAME}]"
        )
        return None
    sources = []
    for index in range(len(entries)):
        sources.append((yield from _entry(keys.below(f"datasets[{index}]", {"split": "train"}))))
    yield keys.sets("data.train", [source for source in sources if source is not None])
    names = ("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split")
    yield from keys.unused(names, "datasets overrides it")
    yield from _held_out(keys, {})
    return _rows(keys)[1]


def _entry(keys: Keys) -> Statements[Any]:
    source = yield from datasets.given(keys, "path", "path: OWNER/NAME, or a file", keys.text("name"))
    if source is None:
        yield from keys.passive(keys_of("trl", "dataset"), "a setting of a source that recipec cannot read")
        return None
    share = keys.number("fraction")
    if share is not None:
        source = rows.with_own(source, {"weight": share})
        note = "recipec draws rows in these shares; the tool takes the first rows of each data set"
        yield keys.say("fraction", {}, note)
    yield from keys.follow(OF_SOURCES)
    return source


def _template(keys: Keys, form: str, named: Named | None) -> Says:
    if keys.source.script:
        yield from scripts.say_template(keys, form, named)
        return
    path, text = keys.text("chat_template_path"), keys.text("chat_template")
    if text is not None:
        yield keys.say("chat_template", {"data.chat_template": text})
    elif path is not None and path.endswith((".jinja", ".jinja2", ".j2")):
        yield keys.say("chat_template_path", {"data.chat_template": path})
    elif path is not None:
        note = "recipec uses the whole tokenizer, with its template"
        yield keys.say("chat_template_path", {"model.tokenizer": path}, note)
    elif form == "chat" and named and named.model is not None:
        yield from templates.say_own(keys, named.model)


def _losses(run: Trl) -> Says:
    keys, objective, chosen = run.keys, run.objective, run.chosen
    if objective == "sft":
        yield from losses.supervised(keys)
        if keys.flag("use_peft"):
            yield from adapters.say_dropout(keys, chosen)
        return
    if run.script in GROUPS:
        if keys.flag("use_peft"):
            yield from adapters.say_dropout(keys, chosen)
        return
    if objective != "distill":
        yield from keys.follow(losses.OF_ALL)
    if keys.flag("use_peft"):
        if keys.flag("disable_dropout") and not (chosen and chosen.parameters):
            yield keys.say("disable_dropout", {"lora.dropout": 0.0})
            yield keys.same("lora_dropout", note="disable_dropout sets it to zero")
        else:
            yield from adapters.say_dropout(keys, chosen)
    if objective == "distill":
        yield from distillation.say_divergence(keys)
        return
    yield from losses.preferences(keys, objective)
    yield from keys.follow(losses.OF_PREFERENCES)


RULES: Sequence[Rule[Trl]] = (
    _objective,
    _launch,
    training_arguments.placement,
    _model,
    _images,
    _lora,
    _data,
    _losses,
    places,
    _balance,
    _training,
    _teacher,
    _groups,
    _stream,
    _memory,
    follow(KEYS),
    _methods,
    _script,
    common(NAME, off=training.OFF),
)
