"""torchtune's recipes: YAML of components, for LoRA, full fine-tuning and DPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.catalog import E0801, Model, is_directory
from recipec.compiler.wording import listing
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, keeps, table, tools, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    conversion,
    datasets,
    images,
    model_names,
    rounding,
    rows,
    sharding,
    templates,
    training,
)
from recipec.port.meaning.model_names import Named
from recipec.port.meaning.rows import Rows
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1142, E1143, E1144, E1145, E1148, E1149, E1150, E1160, E1163, E1164
from recipec.port.rules import common, directory, follow, mappings
from recipec.port.tool_names import known

NAME = "torchtune"
TITLE = "torchtune"
MARKS = words(
    """model._component_ tokenizer._component_ dataset._component_ checkpointer optimizer._component_
    lr_scheduler._component_ loss._component_ metric_logger epochs max_steps_per_epoch
    enable_activation_checkpointing enable_activation_offloading clip_grad_norm log_peak_memory_stats
    profiler save_adapter_weights_only resume_from_checkpoint"""
)
STAGES = table("""
E1149 kd_loss policy_model reward_and_value_model teacher_checkpointer teacher_model valuemodel: {key}:
    distillation and reinforcement learning have no counterpart in recipec => port a configuration of
    lora_finetune, full_finetune or lora_dpo
""")
KEYS = table("""
files checkpoint_dir
log profiler log_level profile_memory
speed fsdp_sharding_strategy data_parallel_shard_dim data_parallel_replicate_dim memory_efficient_fsdp_wrap
lost collate_fn=null/torchtune.data.padded_collate_sft/torchtune.data.padded_collate_dpo
exact base_model_path: part of other keys
exact checkpointer: the checkpoint's folder; recipec uses `model.id`, or --model of train.py
exact model.tie_word_embeddings model.quantize_base model.attn_dropout model.max_seq_len: the model's own
exact tokenizer.path tokenizer.merges_file tokenizer.special_tokens_path: the tokenizer of model.id
exact tokenizer.truncation_type: the end is truncated
""")
OF_WANDB = table("""
lost entity: set WANDB_ENTITY in the environment of the run
lost group: set WANDB_GROUP in the environment of the run
""")
OF_DPO = table("""
number beta -> train.beta
number label_smoothing -> train.label_smoothing
""")
OF_LORA = table("""
integer lora_rank -> lora.rank
number lora_alpha -> lora.alpha
number lora_dropout -> lora.dropout
switch use_dora -> lora.kind=dora
""")
OF_SOURCES = table("""
lost data_dir=null: a folder of a repository: name its files as data_files
files cache_dir streaming num_proc trust_remote_code
""")
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


WHOLE_STEPS = "recipec makes an incomplete step of an epoch's last rows; torchtune skips them"


def opened(ledger: Ledger) -> Run:
    """Return the run of a file."""
    return Run(Keys(ledger, ledger.sources.main, TITLE, {"dtype": "bf16", "gradient_accumulation_steps": 1}))


def _loss(run: Run) -> Says:
    keys = run.keys
    section = keys.below("loss", {"beta": 0.1, "label_smoothing": 0.0})
    name = str(section.value("_component_") or "").rpartition(".")[2]
    if name == "DPOLoss":
        yield keys.sets("train.objective", "dpo")
        yield section.same("_component_", note="the sigmoid loss")
        yield from section.follow(OF_DPO)
        run.objective = "dpo"
        return
    if name.startswith(("GRPO", "PPO")):
        message = f"the loss {name} is for reinforcement learning, which has no counterpart in recipec"
        help = "port a configuration of lora_finetune, full_finetune or lora_dpo"
        yield section.refuse("_component_", E1149, message, help)
    elif name and "CrossEntropy" not in name and not name.startswith("CE"):
        message = f"the loss {name} has no counterpart in recipec"
        help = "_component_: torchtune.modules.loss.CEWithChunkedOutputLoss"
        yield section.refuse("_component_", E1163, message, help)
    note = "the negative log-likelihood, a mean over the tokens of a step"
    yield from section.passive(("_component_", "num_output_chunks"), note)
    yield section.unless("ignore_index", (-100,), "recipec has no number for tokens without loss")


def _optimizer(run: Run) -> Says:
    keys, section = run.keys, run.keys.below("optimizer")
    name = section.text("_component_")
    if name is None:
        help = "optimizer: {_component_: torch.optim.AdamW}"
        yield keys.refuse("optimizer", E1144, "the file names no optimizer", help)
    else:
        arguments = Keys(run.ledger, keys.source, TITLE, prefix="optimizer.")
        yield from training.say_torch_optimizer(arguments, name, section, "_component_")
    norm = keys.number("clip_grad_norm")
    yield keys.same("clip_grad_norm", {"train.optimizer.max_grad_norm": norm})


def _memory(run: Run) -> Says:
    keys = run.keys
    mode = keys.value("ac_mode") in ("full", "selective")
    remat = keys.flag("enable_activation_checkpointing") or mode
    if mode:
        yield keys.sets("remat.policy", "decoder")
    yield keys.same("enable_activation_checkpointing", {"remat.policy": "decoder" if remat else "none"})


def _batch(run: Run) -> Says:
    keys = run.keys
    per_device = keys.integer("batch_size") or 1
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    shared = keys.integer("tensor_parallel_dim") or 1
    devices = keys.ledger.devices or shared
    batch = yield from training.say_groups(
        keys, "tensor_parallel_dim", per_device, accumulation, devices, shared
    )
    if not keys.stands("batch_size"):
        yield keys.refuse("batch_size", E1144, "the file gives no batch_size", "batch_size: 2")
    yield keys.say("batch_size", {"train.micro_batch_size": batch.per_device})
    note = f"{batch.rows} rows per step: {batch}; the launcher's GPUs are --devices"
    yield keys.same("gradient_accumulation_steps", {"train.global_batch_size": batch.rows}, note)
    yield keys.sets("train.global_batch_size", batch.rows)
    yield keys.sets("train.loss_normalization", "tokens")
    yield keys.same("tensor_parallel_dim", note=sharding.sharing(shared))


CUT = (
    "recipec keeps the last token of a truncated sample; torchtune replaces it with an end token without loss"
)
WEIGHED = "torchtune's weights of micro-batches also count the first token of each sample"
SHORTER = "recipec runs this many steps, even if an epoch has fewer; torchtune ends with the epoch"


def _length(run: Run) -> Says:
    keys = run.keys
    epochs, most = keys.integer("epochs") or 1, keys.integer("max_steps_per_epoch")
    if most is None:
        yield keys.say("epochs", {"train.epochs": epochs}, WHOLE_STEPS)
        yield keys.same("max_steps_per_epoch", note="null: whole epochs")
        return
    note = (
        SHORTER
        if epochs == 1
        else "recipec continues with the data; torchtune starts it again after this many steps"
    )
    yield keys.say("max_steps_per_epoch", {"train.steps": most * epochs}, note)
    yield keys.same("epochs", note="max_steps_per_epoch sets the length of the run")


def _schedule(run: Run) -> Says:
    keys = run.keys
    if not keys.given("lr_scheduler"):
        yield keys.sets("train.schedule.name", "constant", "torchtune has no schedule without lr_scheduler")
        yield keys.same("lr_scheduler", note="null: a constant learning rate")
        return
    section = keys.below("lr_scheduler", {"num_cycles": 0.5})
    name = str(section.value("_component_") or "")
    if name.rpartition(".")[2] != "get_cosine_schedule_with_warmup":
        message = f"the schedule {name} has no counterpart in recipec"
        yield section.refuse("_component_", E1163, message, f"_component_: {SCHEDULE}")
    steps = section.integer("num_warmup_steps") or 0
    schedule = training.schedule_of("cosine", {"num_cycles": section.number("num_cycles")})
    yield section.say("_component_", {"train.schedule.name": "cosine"}, schedule.note)
    yield section.say("num_warmup_steps", {"train.schedule.warmup_steps": steps})
    yield from section.passive(("num_cycles", "last_epoch"), "part of the schedule")


def _precision(run: Run) -> Says:
    keys, lora = run.keys, run.lora
    dtype = keys.choice("dtype", ("bf16", "fp32", "fp16")) or "bf16"
    if dtype == "fp16":
        message = "torchtune stops at fp16, which its recipes do not support"
        yield keys.refuse("dtype", E1160, message, "dtype: bf16")
    computes = "float32" if dtype == "fp32" else "bfloat16"
    yield keys.say("dtype", {"model.dtype": computes})
    if lora:
        yield keys.sets("lora.dtype", computes, "torchtune keeps adapters in this dtype")
    elif computes == "bfloat16":
        held, why = sharding.Launch().masters(False, False)
        yield keys.sets("train.optimizer.master_weights", held, why)


QUANTIZERS = ("Int8DynActInt4WeightQATQuantizer", "Int8DynActInt4WeightQATQuantizerModuleSwap")


def _quantizer(run: Run) -> Says:
    """State quantization-aware training.

    torchtune's recipes for it round every torch.nn.Linear, or with LoRA those with an adapter. A head that
    shares the embedding's weight is no such module.
    """
    keys = run.keys
    if not keys.given("quantizer"):
        yield keys.same("quantizer", note="weights are not rounded")
        yield from keys.unused((rounding.LATER,), "the file has no quantizer")
        return
    section = keys.below("quantizer")
    name = (section.text("_component_") or "").rpartition(".")[2]
    if name not in QUANTIZERS:
        message = f"recipec rounds as torchao's {QUANTIZERS[0]} does, not as {name or 'an unnamed quantizer'}"
        yield keys.learned("quantizer", (), message)
        yield from keys.unused((rounding.LATER,), "the quantizer is not ported")
        return
    head = not run.lora and rounding.has_own_head(run.model)
    why = "the output head is a linear layer too" if head else ""
    yield section.same("_component_", rounding.rounds(head, rounding.SYMMETRIC), why)
    yield from rounding.say_group(section, "groupsize", 256)
    yield from section.passive(("precision",), "torchtune replaces it by dtype")
    yield from section.passive(("padding_allowed",), "all inputs are whole groups")
    yield section.learned("scales_precision", ("torch.float32",), "recipec's scales are float32")
    if run.lora:
        yield from keys.unused((rounding.LATER,), "torchtune's QAT with LoRA rounds from the first step")
    else:
        yield from rounding.say_later(keys)


def _order(run: Run) -> Says:
    keys = run.keys
    seed = keys.integer("seed")
    yield keys.same(
        "seed",
        {"train.seed": seed or 0},
        "recipec uses another random generator: other draws of the same distribution",
    )
    shuffle = 0 if keys.flag("shuffle") else None
    yield keys.sets("data.shuffle_seed", shuffle)
    yield keys.same("shuffle", {"data.shuffle_seed": shuffle}, "the sampler's seed is 0")


def _logger(run: Run) -> Says:
    section = run.keys.below("metric_logger")
    name = str(section.value("_component_") or "").rpartition(".")[2]
    project = section.text("project") or "torchtune"
    if name == "WandBLogger":
        yield section.same("_component_", {training.PROJECT: project}, "Weights & Biases")
        yield section.same("project", {training.PROJECT: project})
        yield from section.follow(OF_WANDB, training.OFF)
    elif name in ("CometLogger", "MLFlowLogger"):
        yield section.unless("_component_", (), f"recipec does not log to this service: {training.LOGS}")
    others = run.keys.source.get("metric_logger", None)
    yield from section.passive(others if isinstance(others, dict) else (), "a log")


def _sections(run: Run) -> Says:
    if not isinstance(run.keys.value("dataset"), list) or not run.keys.value("dataset"):
        yield from run.keys.mappings(("dataset",))


BUILDERS: Mapping[str, tuple[str, ...]] = {
    name: tuple(ids) for name, ids in known("torchtune", "builders").items()
}
"""Builders without lora_ and qlora_, and their published checkpoints."""

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""torchtune's names of the attention's projections, and the recipe's."""


def _model(run: Run) -> Says:
    keys, section = run.keys, run.keys.below("model")
    component = section.text("_component_")
    builder = (component or "").removeprefix("torchtune.models.")
    package, _, function = builder.rpartition(".")
    run.lora = function.startswith(("lora_", "qlora_"))
    plain = f"{package}.{function.removeprefix('q').removeprefix('lora_') if run.lora else function}"
    name = f"torchtune.models.{builder}"
    if name in tools()["torchtune"]["sections"]:
        section.defaults = defaults_of("torchtune", name)
    run.named = yield from _named(keys, section, component, plain)
    if run.lora:
        yield from _lora(section, run.model)
    else:
        yield keys.sets("lora", None, "full fine-tuning: the builder's name does not begin with lora_")
        help = "a builder whose name begins with qlora_"
        yield from adapters.refuse_quantized(section, "quantize_base", help)


def _named(keys: Keys, section: Keys, component: str | None, plain: str) -> Statements[Named | None]:
    ids = BUILDERS.get(plain)
    if component is None:
        help = "_component_: torchtune.models.llama3_2.lora_llama3_2_1b"
        yield section.refuse("_component_", E1144, "the file names no model", help)
        return None
    if any(part in component for part in ("vision", ".clip.", ".flux.", ".t5.")):
        message = f"{component} is not a text-only model"
        yield section.refuse("_component_", E1150, message, "port a configuration of a text-only model")
        return None
    if "_reward_" in component:
        message = f"{component} builds a reward model, which another stage uses"
        yield section.refuse(
            "_component_", E1149, message, "port a configuration of lora_dpo, or a supervised one"
        )
        return None
    if ids is None:
        builders = listing(sorted({name.partition(".")[0] for name in BUILDERS}))
        message = f"recipec does not know the model builder {component}"
        yield section.refuse("_component_", E0801, message, f"recipec knows builders of {builders}")
        return None
    return (yield from _checkpoint(keys, section, ids))


def _checkpoint(keys: Keys, section: Keys, ids: tuple[str, ...]) -> Statements[Named | None]:
    """State the checkpoint that is trained: the one in the checkpointer's folder, if the builder fits it."""
    checkpointer = keys.below("checkpointer")
    directory = checkpointer.text("checkpoint_dir")
    if directory is None and len(ids) > 1:
        message = f"the file names no checkpoint, and the builder is for {listing(ids, 'or')}"
        help = f"--set checkpointer.checkpoint_dir={ids[-1]}"
        yield checkpointer.refuse("checkpoint_dir", E1144, message, help)
        yield section.same("_component_", note="the checkpoint decides which model this is")
        return None
    folder = keys.source.path.parent
    chosen = (
        model_names.of_folder(directory, folder, ids) if directory else model_names.resolve(ids[0], folder)
    )
    fitting = [named.architecture for id in ids if (named := model_names.resolve(id, folder).model)]
    if chosen.id not in ids and chosen.model and fitting and chosen.model.architecture not in fitting:
        message = f"the builder is for {listing(ids, 'or')}, and the checkpoint's folder for {chosen.id}"
        if is_directory(chosen.id):
            message = f"the builder is for {listing(ids, 'or')}, which the model in {chosen.id} is not"
        help = "make the builder and checkpointer.checkpoint_dir agree"
        yield section.refuse("_component_", E1145, message, help)
    note = "the model is that of the checkpoint" if directory else "the only checkpoint of this builder"
    yield section.same("_component_", None if directory else {"model.id": chosen.id}, note)
    local = is_directory(chosen.id)
    note = "the weights in this folder" if local else "the model that the folder is named after"
    yield checkpointer.same("checkpoint_dir", {"model.id": chosen.id} if directory else None, note)
    return chosen


def _reference(run: Run) -> Says:
    """State `ref_checkpointer`, which torchtune reads in full fine-tuning with DPO."""
    keys, lora, objective = run.keys, run.lora, run.objective
    if objective != "dpo" or lora:
        base = "torchtune's reference is the model without adapters"
        note = base if lora else "only dpo has a reference"
        yield from keys.unused(("ref_checkpointer",), note)
        return
    if not isinstance(keys.value("ref_checkpointer"), dict):
        yield keys.same("ref_checkpointer", note="null")
        return
    policy, reference = keys.below("checkpointer"), keys.below("ref_checkpointer")
    if _folder(reference) != _folder(policy):
        note = "recipec's reference is the model that training starts from, and torchtune loads another"
        yield reference.learned("checkpoint_dir", (), note)
    yield keys.same("ref_checkpointer", note="the reference is the model that training starts from")


def _folder(checkpointer: Keys) -> str:
    return str(checkpointer.value("checkpoint_dir")).rstrip("/")


def _lora(keys: Keys, model: Model | None) -> Says:
    modules = keys.listed("lora_attn_modules")
    targets = [NAMES[module] for module in NAMES if module in modules]
    unknown = [module for module in modules if module not in NAMES]
    if unknown:
        help = "lora_attn_modules: [q_proj, v_proj, output_proj]"
        yield keys.refuse(
            "lora_attn_modules", E1164, f"{listing(unknown)} is not a projection of attention", help
        )
    if keys.flag("apply_lora_to_mlp"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    if not targets:
        help = "lora_attn_modules: [q_proj, v_proj]"
        yield keys.refuse("lora_attn_modules", E1148, "no projection carries an adapter", help)
    targets, note = adapters.fused(model, targets)
    sets = {"lora.targets": targets} if targets else None
    if note:
        yield keys.say("lora_attn_modules", sets, note)
    yield keys.same("lora_attn_modules", sets, "output_proj is o_proj")
    yield keys.say("apply_lora_to_mlp", sets, note if keys.flag("apply_lora_to_mlp") else "")
    yield from adapters.say_head(keys, "apply_lora_to_output")
    yield from keys.follow(OF_LORA)
    yield keys.sets(
        "lora.init", "peft", "A is uniform with the bound 1/sqrt(fan_in) and B is zero, as in the tool"
    )
    if keys.flag("quantize_base"):
        value = adapters.quantized(4).value
        yield keys.say("quantize_base", {"model.quantization": value}, adapters.NESTED)


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
    "stack_exchange_paired_dataset": "preference",
}
"""The builders of data sets, with the form of their rows."""

COLUMNS = {"samsum_dataset": ("dialogue", "summary"), "cnn_dailymail_articles_dataset": ("article", "")}
"""The columns of question and answer, by builders that are for one data set."""

RANKED = {
    "stack_exchange_paired_dataset": {
        "prompt": "question",
        "chosen": "response_j",
        "rejected": "response_k",
    }
}
"""The columns of preferences in plain text, if no column_map gives other names."""

SOURCE_KEYS = words(
    """source data_files split name subset data_dir cache_dir streaming num_proc trust_remote_code"""
)

SOURCES = {"alpaca_cleaned_dataset": "yahma/alpaca-cleaned"}


def _data(run: Run) -> Says:
    keys, model, objective = run.keys, run.model, run.objective
    entries = yield from _entries(keys, "dataset")
    if not entries:
        help = "dataset: {_component_: torchtune.datasets.alpaca_dataset}"
        yield keys.refuse("dataset", E1143, "the file names no data set", help)
    train = yield from _read(keys, entries, objective, [], "data.train")
    held = yield from _validation(keys, objective, train)
    entries_read = [*train, *held]
    settings = next(
        (its for _, its in entries_read if its["data.format"] != "text"),
        entries_read[0][1] if entries_read else {},
    )
    forms = [
        Rows(its["data.format"], its.get("data.fields", {}), its["transform"]) for _, its in entries_read
    ]
    sources = [source for source, _ in entries_read]
    apart = not rows.alike(forms)
    if apart:
        sources = yield from rows.apart(keys, list(zip(sources, forms, strict=True)))
        every = settings.get("data.loss_on") == "all"
        sources = [
            rows.with_own(source, {"loss_on": "all"} if form.format == "text" and not every else {})
            for source, form in zip(sources, forms, strict=True)
        ]
    elif settings.get("transform"):
        yield keys.file(conversion.FILE, settings["transform"])
        yield keys.sets("data.transform", conversion.TRANSFORM)
    yield from rows.say_sources(keys, sources, len(train))
    for path, value in settings.items():
        if path != "transform" and not (apart and path in ("data.format", "data.fields")):
            yield keys.sets(path, value)
    yield keys.sets("data.packing", bool(settings.get("data.packing")))
    yield from _tokenizer(keys, model, settings)


Read = list[tuple[Any, dict[str, Any]]]


def _read(keys: Keys, entries: list[Keys], objective: str, before: Read, path: str) -> Statements[Read]:
    """Read the sources of some data sets, each with its settings. `transform` is the text of a file."""
    sources: Read = []
    alike: list[Keys] = []
    for entry in entries:
        source = yield from _one(keys, entry, objective, path)
        if source is None:
            continue
        if any(_at_odds(source[1], its) for _, its in (*before, *sources)):
            message = "recipec cannot mix data sets that are trained or packed in two ways"
            help = keeps(
                entries[0].prefix.partition("[")[0].rstrip("."), [_whole(earlier) for earlier in alike]
            )
            if path == "data.eval":
                help = "--set run_val_every_n_steps=null ports the run without its evaluation"
            yield entry.refuse("_component_", E1142, message, help)
        else:
            alike.append(entry)
        sources.append(source)
        yield entry.same("_component_", note="how rows become samples; data.format and data.loss_on set it")
    return sources


def _at_odds(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two data sets differ in a setting of the whole run: packing, or conversations' loss."""
    talks = "text" not in (first["data.format"], other["data.format"])
    names = ("data.packing", *(("data.loss_on",) if talks else ()))
    return any(first.get(name) != other.get(name) for name in names)


def _whole(entry: Keys) -> Any:
    return entry.source.get(entry.prefix.rstrip("."))


def _validation(keys: Keys, objective: str, train: Read) -> Statements[Read]:
    """State `dataset_val`, which is evaluated completely every `run_val_every_n_steps`."""
    every = keys.integer("run_val_every_n_steps")
    if not every or every < 0:
        note = "run_val_every_n_steps is not set: torchtune does not evaluate"
        yield from keys.passive(("dataset_val", "run_val_every_n_steps", "batch_size_val"), note)
        return []
    entries = yield from _entries(keys, "dataset_val")
    if not entries:
        message = "torchtune stops at run_val_every_n_steps without dataset_val"
        help = "dataset_val: {_component_: torchtune.datasets.alpaca_dataset, split: 'train[95%:]'}"
        yield keys.refuse("run_val_every_n_steps", E1145, message, help)
    sources = yield from _read(keys, entries, objective, train, "data.eval")
    if sources:
        yield keys.same("run_val_every_n_steps", {"train.eval_every": every})
    yield from keys.passive(
        ("run_val_every_n_steps", "batch_size_val"), "how the tool evaluates, which does not affect training"
    )
    return sources


def _entries(keys: Keys, key: str) -> Statements[list[Keys]]:
    """Return the data sets of a key, or [] if its value has another type."""
    value = keys.value(key)
    if isinstance(value, dict) and str(value.get("_component_", "")).endswith("ConcatDataset"):
        yield keys.below(key).same("_component_", note="the data sets are concatenated")
        inner = value.get("datasets")
        return [
            keys.below(f"{key}.datasets[{n}]") for n in range(len(inner) if isinstance(inner, list) else 0)
        ]
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        return [keys.below(f"{key}[{n}]") for n in range(len(value))]
    return [keys.below(key)] if isinstance(value, dict) else []


def _one(keys: Keys, entry: Keys, objective: str, path: str) -> Statements[tuple[Any, dict[str, Any]] | None]:
    component = entry.text("_component_") or ""
    builder = component.removeprefix(PREFIX)
    kind = KINDS.get(builder)
    if kind is None:
        code, message = E1143, f"the data set {component or 'without _component_'} has no counterpart"
        if "multimodal" in component:
            code, message = E1150, images.NOT_CARRIED.format(component, TITLE)
        names = listing([name for name in KINDS], "or")
        yield entry.refuse("_component_", code, message, f"one of {PREFIX}: {names}")
        return None
    if (kind == "preference") != (objective == "dpo"):
        message = f"{builder} does not fit the loss: {objective} needs other rows"
        yield entry.refuse("_component_", E1145, message, "choose a dataset and a loss that fit each other")
        return None
    entry.defaults = {**defaults_of("torchtune", PREFIX + builder), "split": "train"}
    if builder in SOURCES:
        entry.defaults["source"] = SOURCES[builder]
    source = yield from _source(entry, path)
    settings = {"transform": "", **(yield from _SETTINGS[kind](keys, entry, builder))}
    for older in ("template", "chat_format"):
        yield entry.learned(
            older, (None,), "torchtune up to 0.2 wrote each row by it, and newer versions refuse it"
        )
    if kind != "text" and entry.given("max_seq_len"):
        yield from datasets.length(entry, "max_seq_len", CUT)
    if kind == "text":
        settings["data.loss_on"] = "all"
        yield entry.same("train_on_input", note="the loss covers all of a text")
    elif kind == "preference":
        yield entry.unless("train_on_input", (False,), "the loss does not cover the prompt in dpo")
    else:
        settings["data.loss_on"] = "all" if entry.flag("train_on_input") else "assistant"
        several = settings["data.loss_on"] == "all" and keys.integer("gradient_accumulation_steps") != 1
        note = WEIGHED if several else ""
        yield entry.say("train_on_input", {"data.loss_on": settings["data.loss_on"]}, note)
    if kind != "preference":
        settings["data.packing"] = entry.flag("packed")
        yield entry.say("packed", {"data.packing": settings["data.packing"]})
    note = "recipec reads all rows; a data.transform that returns None leaves a row out"
    yield entry.unless("filter_fn", (None,), note)
    return (source, settings) if source is not None else None


def _source(entry: Keys, path: str) -> Statements[Any]:
    config = entry.text("name") or entry.text("subset")
    source = yield from datasets.given(entry, "source", "source: OWNER/NAME, or json with data_files", config)
    if source is None:
        yield from entry.passive(SOURCE_KEYS, "a setting of a source that recipec cannot read")
        return None
    if not entry.given("source"):
        yield entry.say("source", {path: [source]})
    file = source if isinstance(source, str) else source["path"]
    if not file.startswith("hf://") and entry.text("split") not in (None, "train"):
        yield entry.unless("split", (), "a file has no splits: recipec reads all of it")
    yield from entry.passive(("source", "data_files", "split", "name", "subset"), f"part of {path}")
    yield from entry.follow(OF_SOURCES)
    return source


def _columns(entry: Keys) -> Statements[dict[str, str]]:
    columns = {str(key): str(value) for key, value in entry.mapping("column_map").items()}
    yield from entry.passive(("column_map",), "the names of the columns")
    return columns


def _alpaca(keys: Keys, entry: Keys, builder: str) -> Statements[dict[str, Any]]:
    asked = ("instruction", "input", "output")
    names = yield from _columns(entry)
    columns = {key: name for key, name in names.items() if key in asked}
    transform = conversion.alpaca_messages(conversion.alpaca_prompt(columns), "Alpaca's prompts")
    return {"data.format": "chat", "transform": transform}


def _pairs(keys: Keys, entry: Keys, builder: str) -> Statements[dict[str, Any]]:
    asked, answered = COLUMNS.get(builder, ("input", "output"))
    columns = yield from _columns(entry)
    system = entry.text("new_system_prompt")
    yield from entry.passive(("new_system_prompt",), "the first message of each row")
    transform = conversion.paired(columns.get("input", asked), columns.get("output", answered), system)
    return {"data.format": "chat", "transform": transform}


def _chat(keys: Keys, entry: Keys, builder: str) -> Statements[dict[str, Any]]:
    column = entry.text("conversation_column") or (yield from _columns(entry)).get("conversations")
    style = entry.text("conversation_style")
    if style not in (None, "openai", "sharegpt"):
        help = "conversation_style: openai"
        yield entry.refuse(
            "conversation_style", E1160, f"recipec does not know the conversation style {style}", help
        )
    yield from entry.passive(
        ("conversation_column", "conversation_style", "column_map"), "both spellings of messages"
    )
    yield entry.unless("new_system_prompt", (None,), "recipec keeps each row's own system message")
    sets: dict[str, Any] = {"data.format": "chat"}
    if column not in (None, "messages", "conversations"):
        sets["data.fields"] = {"messages": column}
    return sets


def _text(keys: Keys, entry: Keys, builder: str) -> Statements[dict[str, Any]]:
    column = entry.text("column") or COLUMNS.get(builder, ("text", ""))[0]
    column = "page" if builder == "wikitext_dataset" else column
    yield from entry.passive(("column",), "the column with the text")
    yield entry.unless("add_eos", (True,), "recipec ends each sample with the end-of-text token")
    if entry.flag("packed") and entry.flag("split_across_pack"):
        note = "recipec truncates a sample that does not fit into a row; torchtune continues it in the next"
        yield entry.say("split_across_pack", {}, note)
    yield from entry.passive(("split_across_pack",), "no packing")
    most = entry.integer("max_seq_len")
    yield entry.say("max_seq_len", {"data.max_length": most} if most else None)
    return {"data.format": "text", **({} if column == "text" else {"data.fields": {"text": column}})}


def _preference(keys: Keys, entry: Keys, builder: str) -> Statements[dict[str, Any]]:
    columns = yield from _columns(entry)
    yield entry.unless("new_system_prompt", (None,), "recipec keeps each row's own system message")
    if builder in RANKED:
        names = [(columns or RANKED[builder]).get(key, key) for key in ("prompt", "chosen", "rejected")]
        return {"data.format": "preference", "transform": conversion.ranked(*names)}
    fields = {key: columns[key] for key in ("chosen", "rejected") if columns.get(key, key) != key}
    return {"data.format": "preference", **({"data.fields": fields} if fields else {})}


_SETTINGS = {"alpaca": _alpaca, "pairs": _pairs, "chat": _chat, "text": _text, "preference": _preference}


PROMPTED = ("llama2_tokenizer", "mistral_tokenizer")
"""Tokenizers that take their marks from a prompt template. prompt_template: null removes the marks."""


def _differs(turns: templates.Turns, opened: bool) -> str:
    """Say how a written template's tokens differ from torchtune's.

    Args:
        opened: whether the beginning of an answer carries loss as in torchtune.
    """
    if not turns.opening:
        once = "; only the first question has a system message before it" if turns.system != "{}" else ""
        return (
            f"recipec writes messages as torchtune does, but torchtune tokenizes each message by itself{once}"
        )
    missing = [] if turns.final is not None else ["no end-of-text token after the last"]
    missing += [] if opened else ["no loss on an answer's first"]
    return (
        f"recipec writes torchtune's markers around messages, but with {' and '.join(missing)}"
        if missing
        else ""
    )


def _tokenizer(keys: Keys, model: Model | None, settings: Mapping[str, Any]) -> Says:
    form, whole = settings.get("data.format"), settings.get("data.loss_on") == "all"
    section = keys.below("tokenizer", {"max_seq_len": None})
    if keys.ledger.value("data.max_length") is None or section.given("max_seq_len"):
        yield from datasets.length(section, "max_seq_len", CUT)
    name = str(section.value("_component_") or "").rpartition(".")[2]
    turns = templates.TORCHTUNE.get(name)
    if form in ("chat", "preference") and turns is not None:
        bare = section.stands("prompt_template") and not section.given("prompt_template")
        if bare and name in PROMPTED:
            turns = templates.PLAIN
        if turns.final is not None and section.integer("max_seq_len") is not None:
            # If there is a maximum length, torchtune masks the last token of each sample.
            turns = replace(turns, final="" if whole else turns.final, learns_final=False)
        opened = whole or (turns.learns_opening and form == "chat")
        sets = {"data.chat_template": templates.written(turns)}
        yield section.say("_component_", sets, _differs(turns, opened))
    elif form in ("chat", "preference") and model is not None:
        yield from templates.say_own(keys, model)
        note = f"recipec uses the model's chat template, because it does not know {name or 'the tokenizer'}"
        yield section.say("_component_", {}, note)
    yield section.same("_component_", note="the tokenizer of model.id")
    note = "recipec writes only the chat template's markers around a message"
    yield section.unless("prompt_template", (None,), note)


RULES: Sequence[Rule[Run]] = (
    _model,
    _loss,
    follow(STAGES),
    _reference,
    _data,
    _batch,
    _length,
    _optimizer,
    _schedule,
    _precision,
    _quantizer,
    _order,
    _memory,
    _sections,
    mappings("model", "tokenizer", "optimizer", "lr_scheduler", "loss", "quantizer"),
    follow("""
    count log_every_n_steps -> train.log.every
    exact log_every_n_steps
    """),
    directory("output_dir"),
    _logger,
    mappings("metric_logger"),
    follow(KEYS),
    common(NAME),
)
