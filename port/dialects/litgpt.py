"""litgpt's finetune lora, qlora and full: YAML as its --config reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.catalog import Model, is_directory, original_of
from recipec.compiler.wording import listing
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, keys_of, pretraining, table, tools, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import adapters, conversion, datasets, model_names, training
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1143, E1144, E1145, E1148, E1149, E1160, E1163
from recipec.port.rules import common, directory, follow, mappings
from recipec.port.tool_names import known, tokenizer_of

NAME = "litgpt"
TITLE = "litgpt"
MARKS = words(
    """checkpoint_dir out_dir precision lora_query lora_key lora_value lora_projection lora_mlp lora_head
    num_nodes data.class_path train.global_batch_size train.lr_warmup_steps train.micro_batch_size
    train.save_interval eval.max_new_tokens logger_name quantize devices"""
)
KEYS = table("""
log train.log_interval
evaluation eval.max_new_tokens eval.max_iters eval.initial_validation eval.final_validation
    eval.evaluate_example
lost train.max_time=null
exact train.min_lr: litgpt finetune does not read it: the cosine ends at zero
""")
OF_LORA = table("""
integer lora_r -> lora.rank
number lora_alpha -> lora.alpha
number lora_dropout -> lora.dropout
""")
OF_TRAIN = table("""
integer lr_warmup_steps -> train.schedule.warmup_steps
sets -> train.schedule.name=cosine: litgpt's schedule: a linear warm-up, then a cosine to zero
E1145 max_tokens max_norm tie_embeddings lr_warmup_fraction: litgpt's finetune stops at {key}, which only
    pretrain reads => remove {key}
exact max_tokens max_norm tie_embeddings lr_warmup_fraction: null: finetune does not read it
""")
OLDER = {"learning_rate": 3e-4, "weight_decay": 0.02, "beta1": 0.9, "beta2": 0.95}
"""Keys of `train` for AdamW in litgpt 0.3, which had no `optimizer`, with the defaults of finetune lora."""
OF_OLDER = table("""
number learning_rate -> train.optimizer.learning_rate
number weight_decay -> train.optimizer.weight_decay
number beta1 -> train.optimizer.b1
number beta2 -> train.optimizer.b2
""")
OF_WANDB = table("""
lost run: set WANDB_NAME in the environment of the run
lost group: set WANDB_RUN_GROUP in the environment of the run
""")
OF_DATA = table("""
lost ignore_index=-100
files num_workers download_dir file_url file_name repo_id
""")

FLAGS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
}
QUANTIZED = {
    "bnb.nf4": (4, "nf4", False),
    "bnb.nf4-dq": (4, "nf4", True),
    "bnb.fp4": (4, "fp4", False),
    "bnb.fp4-dq": (4, "fp4", True),
    "bnb.int8-training": (8, "nf4", False),
}
TRAIN = {
    "save_interval": 1000,
    "global_batch_size": 16,
    "micro_batch_size": 1,
    "lr_warmup_steps": 100,
    "epochs": 5,
}
"""The defaults of `train` in finetune lora and full, as far as they differ from those of TrainArgs."""


@dataclass
class Litgpt(Run):
    """A run of litgpt.

    Attributes:
        devices: the number of data-parallel devices.
    """

    devices: int = 1


def opened(ledger: Ledger) -> Litgpt:
    """Return the run of a file, with the defaults of its method."""
    source = ledger.sources.main
    bare = Keys(ledger, source, TITLE)
    method = "lora" if _has_lora_keys(bare) or "lora" in _file(bare) else "full"
    usual = {"precision": "bf16-mixed", "optimizer": "AdamW"}
    keys = Keys(ledger, source, TITLE, {**defaults_of("litgpt", method), **usual})
    keys.below("train", {**defaults_of("litgpt", "train"), **TRAIN})
    return Litgpt(keys, lora=method == "lora")


def _has_lora_keys(keys: Keys) -> bool:
    return any(keys.stands(key) for key in keys_of("litgpt", "lora") if key.startswith("lora_"))


def _file(keys: Keys) -> str:
    return keys.source.path.stem.lower()


def _method(run: Litgpt) -> Says:
    """Refuse litgpt's other methods, which the file's name gives."""
    if "adapter" in _file(run.keys) and not _has_lora_keys(run.keys):
        help = "port a configuration of finetune lora or full"
        message = "litgpt's adapter methods learn prefixes, which have no counterpart in recipec"
        yield run.keys.refuse("checkpoint_dir", E1149, message, help)


def _model(run: Litgpt) -> Says:
    keys = run.keys
    name = keys.text("checkpoint_dir")
    if name is None:
        help = "--set checkpoint_dir=checkpoints/Qwen/Qwen3-8B"
        if keys.given("model_name") and not keys.given("initial_checkpoint_dir"):
            yield keys.refuse("model_name", *pretraining(help))
            return
        yield keys.refuse("checkpoint_dir", E1144, "the file names no model", help)
        return
    named = model_names.resolve(_id(name), keys.source.path.parent)
    if named.model is None and (original := original_of(name.rstrip("/").rpartition("/")[2])):
        named = model_names.resolve(original, keys.source.path.parent)
    parts = name.removeprefix("checkpoints/").strip("/").split("/")
    if named.model is None and (len(parts) != 2 or is_directory(name)) and "/" in name.strip("/"):
        named = model_names.resolve(name if is_directory(name) else f"./{name}", keys.source.path.parent)
        yield keys.same("checkpoint_dir", {"model.id": named.id}, "the weights in this folder")
        run.named = named
        return
    if named.note:
        yield keys.say("checkpoint_dir", {"model.id": named.id}, named.note)
    last = "the last part of the folder's path is litgpt's name for the model"
    whole = named.id == "/".join(name.rstrip("/").split("/")[-2:])
    note = "the last two parts of the folder's path are the model's id" if whole else last
    yield keys.same("checkpoint_dir", {"model.id": named.id}, note)
    run.named = named


def _id(folder: str) -> str:
    """Return the id for a checkpoint's folder: its last two names, or the id of litgpt's name of a model."""
    owner, name = ["", "", *filter(None, folder.split("/"))][-2:]
    known_as: str = known(NAME, "names").get(name, "")
    if known_as and owner in ("", "checkpoints", known_as.partition("/")[0]):
        return known_as
    return f"{owner}/{name}" if owner else name


def _lora(run: Litgpt) -> Says:
    if not run.lora:
        yield run.keys.sets("lora", None, "full fine-tuning")
        yield from adapters.refuse_quantized(run.keys, "quantize", "add lora_r, or remove quantize")
        return
    keys = run.keys
    yield from keys.follow(OF_LORA)
    targets = [name for flag, names in FLAGS.items() for name in names if keys.flag(flag)]
    if not targets:
        yield keys.refuse("lora_query", E1148, "no projection carries an adapter", "lora_query: true")
    targets, note = adapters.fused(run.model, targets)
    for flag in FLAGS:
        yield keys.say(flag, {"lora.targets": targets} if targets else None, note if keys.flag(flag) else "")
    yield from adapters.say_head(keys, "lora_head")
    bounded = "A is uniform with the bound 1/sqrt(fan_in) and B is zero, as in the tool"
    yield keys.sets("lora.init", "peft", bounded)
    name = keys.choice("quantize", QUANTIZED)
    precision = keys.text("precision") or "bf16-mixed"
    if name is None:
        yield keys.same("quantize", note="not quantized")
        return
    if "mixed" in precision:
        message = "litgpt stops if the base model is quantized and mixed precision is on"
        key = "precision" if keys.given("precision") else "quantize"
        yield keys.refuse(key, E1145, message, "precision: bf16-true")
    quantization = adapters.quantized(*QUANTIZED[name])
    yield keys.say("quantize", {"model.quantization": quantization.value}, quantization.note)


def _devices(run: Litgpt) -> Says:
    keys = run.keys
    devices = keys.value("devices")
    nodes = keys.integer("num_nodes") or 1
    if devices in ("auto", -1, "-1"):
        yield keys.same("devices", note="all GPUs of the machine; --devices gives their number")
        run.devices = keys.ledger.devices or nodes
        return
    count = keys.integer("devices") or 1
    if keys.given("quantize") and count * nodes > 1:
        yield keys.refuse(
            "devices", E1145, "litgpt trains on a quantized base model only with one GPU", "devices: 1"
        )
    note = f"{count * nodes} data-parallel devices, which share the global batch"
    yield from keys.passive(("devices", "num_nodes"), note)
    run.devices = keys.ledger.devices or count * nodes


def _batch(run: Litgpt) -> Says:
    """State the global batch, which is divided among devices and micro-batches, rounded down."""
    train, devices = run.section("train"), run.devices
    rows, micro = train.integer("global_batch_size") or 1, train.integer("micro_batch_size") or 1
    accumulation = rows // devices // micro
    if accumulation < 1:
        stops = f"litgpt stops at a global_batch_size of {rows}"
        message = f"{stops}, with {micro} rows on each of {devices} devices"
        yield train.refuse("global_batch_size", E1145, message, f"global_batch_size: {micro * devices}")
        accumulation = 1
    batch = training.Batch(micro, accumulation, devices)
    note = "" if batch.rows == rows else f"{batch.rows} rows: litgpt rounds {rows} down to {batch}"
    yield train.say("micro_batch_size", {"train.micro_batch_size": micro})
    sets = {"train.global_batch_size": batch.rows}
    if note and train.given("global_batch_size"):
        yield train.same("global_batch_size", sets, note)
    yield train.say("global_batch_size", sets, note)
    why = "litgpt takes the mean of its micro-batches' means"
    why += ", on each device by itself" if devices > 1 else ""
    yield train.sets("train.loss_normalization", "micro_batches", why)


def _length(run: Litgpt) -> Says:
    train = run.section("train")
    steps, epochs = train.integer("max_steps"), train.integer("epochs")
    if steps:
        note = "" if epochs is None else f"litgpt runs at most {epochs} epochs"
        yield train.say("max_steps", {"train.steps": steps}, note)
        yield train.same("epochs", note="max_steps sets the length of the run, unless the epochs are shorter")
    else:
        yield train.say("epochs", {"train.epochs": epochs})
        yield train.same("max_steps", note="null: whole epochs")


def _optimizer(run: Litgpt) -> Says:
    """State the optimizer: a name, or a class with its arguments. In litgpt 0.3 it is AdamW."""
    keys, train = run.keys, run.section("train")
    optimizer, arguments = keys.value("optimizer"), keys.below("optimizer.init_args")
    if not keys.stands("optimizer") and any(train.given(key) for key in OLDER):
        yield keys.sets("train.optimizer.name", "adamw", "the optimizer of litgpt 0.3, as these keys say")
        full = {"learning_rate": 3e-3} if not run.lora else {}
        train.defaults = {**OLDER, **full, **train.defaults}
        yield from train.follow(OF_OLDER)
        yield keys.sets("train.optimizer.eps", 1e-8, "torch.optim.AdamW's default")
    elif isinstance(optimizer, dict):
        name = str(optimizer.get("class_path") or "torch.optim.AdamW")
        yield from training.say_torch_optimizer(arguments, name, keys.below("optimizer"), "class_path")
    else:
        yield from training.say_torch_optimizer(arguments, str(optimizer), keys, "optimizer")


def _precision(run: Litgpt) -> Says:
    keys = run.keys
    half = "recipec uses bfloat16 instead of float16: more range, three bits less precision"
    notes = {
        "bf16-mixed": "recipec keeps the weights in bfloat16; litgpt in float32",
        "bf16-true": "",
        "32-true": "",
        "16-mixed": half,
        "16-true": half,
    }
    precision = keys.choice("precision", notes) or "bf16-mixed"
    dtype_of_model = "float32" if precision == "32-true" else "bfloat16"
    yield keys.say("precision", {"model.dtype": dtype_of_model}, notes.get(precision, ""))
    whole = precision.endswith("true") and dtype_of_model == "bfloat16"
    if run.lora:
        dtype = "bfloat16" if whole else "float32"
        yield keys.sets("lora.dtype", dtype, "litgpt keeps adapters in this precision")
    elif dtype_of_model == "bfloat16":
        yield keys.sets("train.optimizer.master_weights", not whole)


def _logs(run: Litgpt) -> Says:
    keys = run.keys
    name, log = keys.text("logger_name"), keys.below("log")
    project = log.text("project")
    if name == "wandb":
        model = (keys.text("checkpoint_dir") or "").rstrip("/").rpartition("/")[2]
        sets = {training.PROJECT: project or f"finetune-{model}"}
        yield log.same("project", sets if log.given("project") else None)
        yield keys.same("logger_name", sets)
        yield from log.follow(OF_WANDB, training.OFF)
    elif name in ("mlflow", "litlogger"):
        yield keys.unless("logger_name", (), f"recipec does not log to this service: {training.LOGS}")
    yield keys.same(
        "logger_name", {"train.log.tensorboard": True} if name == "tensorboard" else None, "a log"
    )
    yield from keys.mappings(("log",))
    yield from log.passive(keys.mapping("log"), "a log")


def _seed(run: Litgpt) -> Says:
    seed = run.keys.integer("seed")
    if run.keys.given("seed"):
        note = "recipec uses another random generator: other draws of the same distribution"
        yield run.keys.same("seed", {"train.seed": seed}, note)
    yield run.keys.say("seed", {"train.seed": seed})


SOURCES = {
    "Alpaca": "yahma/alpaca-cleaned",
    "Alpaca2k": "mhenrichsen/alpaca_2k_test",
    "AlpacaGPT4": "vicgalle/alpaca-gpt4",
}
"""Modules for one data set, with the same rows on the hub."""

DEFAULT_FRACTION = 0.05
"""The share of a JSON file's rows that litgpt holds out by default."""


def _data(run: Litgpt) -> Says:
    keys, train = run.keys, run.section("train")
    data = keys.value("data")
    name = data.get("class_path") if isinstance(data, dict) else data if isinstance(data, str | None) else ""
    name = str(name or "litgpt.data.Alpaca").rpartition(".")[2]
    section = keys.below("data.init_args")
    known = f"litgpt.data.{name}"
    section.defaults = defaults_of(NAME, known) if known in tools()[NAME]["sections"] else {}
    yield from datasets.length(train, "max_seq_length")
    yield keys.sets("data.packing", False, "litgpt does not pack samples when it fine-tunes")
    if name not in (*SOURCES, "JSON"):
        names = listing([f"litgpt.data.{module}" for module in ("JSON", *SOURCES)], "or")
        message = f"the data module {name} has no counterpart in recipec"
        key = "data.class_path" if keys.stands("data.class_path") else "data"
        help = f"write its rows to a file, with class_path: litgpt.data.JSON; recipec reads {names}"
        yield keys.refuse(key, E1143, message, help)
        return
    source = (yield from _json(section)) if name == "JSON" else datasets.source(f"hf://{SOURCES[name]}")
    if isinstance(data, dict):
        copy = "the Hugging Face Hub's copy of the same rows, which may have been corrected"
        note = "" if name in ("JSON", "Alpaca2k") else copy
        yield keys.below("data").say("class_path", {"data.train": [source]}, note)
    else:
        keys.defaults = {**keys.defaults, "data": "litgpt.data.Alpaca"}
        yield keys.say("data", {"data.train": [source]}, "the Hugging Face Hub's copy of the same rows")
    yield from _held_out(section, name)
    yield from _prompts(section, run.model)
    on = "completion" if section.flag("mask_prompt") else "all"
    yield section.say("mask_prompt", {"data.loss_on": on})
    seed = section.integer("seed")
    yield section.say("seed", {"data.shuffle_seed": seed})
    yield from section.follow(OF_DATA)


def _json(section: Keys) -> Statements[Any]:
    path = section.text("json_path")
    if path is None:
        yield section.refuse(
            "json_path", E1143, "litgpt.data.JSON names no file", "json_path: data/train.jsonl"
        )
        return ""
    if path.endswith((".json", ".jsonl")):
        yield section.same("json_path", note="data.train")
        return path
    folder = section.source.path.parent / path
    files = {}
    for split in ("train", "val"):
        lines = (folder / f"{split}.jsonl").is_file() and not (folder / f"{split}.json").is_file()
        files[split] = f"{path.rstrip('/')}/{split}.json{'l' if lines else ''}"
    yield section.same("json_path", {"data.eval": [files["val"]]}, "a folder with the files train and val")
    return files["train"]


def _held_out(section: Keys, name: str) -> Says:
    folder = bool(section.ledger.value("data.eval"))
    if name == "JSON" and not folder and not section.given("val_split_fraction"):
        section.defaults = {**section.defaults, "val_split_fraction": DEFAULT_FRACTION}
    share = section.number("val_split_fraction")
    if folder or share is None:
        yield section.same("val_split_fraction", note="the folder has its own evaluation rows")
        return
    if not 0 < share < 1:
        message = f"val_split_fraction is {share:g}, and must be between 0 and 1"
        yield section.refuse("val_split_fraction", E1160, message, "val_split_fraction: 0.05")
        return
    sets = {"data.eval_fraction": share, "data.eval_seed": section.integer("seed")}
    yield section.say("val_split_fraction", sets, "as many rows, drawn by another random generator")


def _prompts(section: Keys, model: Model | None) -> Says:
    """State the prompt style, which a transform writes. Only Alpaca's style uses the rows' `input`."""
    style = section.text("prompt_style") or "alpaca"
    text = defaults_of(NAME, "styles").get(style)
    if style == "default":
        format = {"data.format": "prompt_completion"}
        fields = {"data.fields": {"prompt": "instruction", "completion": "output"}}
        yield section.say("prompt_style", {**format, **fields})
    elif style == "alpaca" or text:
        begins = model is not None and tokenizer_of(model) in known("adds_bos")
        text = text.removeprefix("<|begin_of_text|>") if text and begins else text
        prompt = conversion.Prompt("", text, input=None) if text else conversion.alpaca_prompt()
        yield section.file(conversion.FILE, conversion.prompts(prompt, f"litgpt's {style} style"))
        yield section.say(
            "prompt_style", {"data.format": "prompt_completion", "data.transform": conversion.TRANSFORM}
        )
    else:
        message = f"the prompt style {style} has no counterpart in recipec"
        yield section.refuse("prompt_style", E1163, message, "prompt_style: alpaca, or default")


RULES: Sequence[Rule[Litgpt]] = (
    _method,
    _model,
    _lora,
    _devices,
    _batch,
    _length,
    follow(OF_TRAIN, "train"),
    _optimizer,
    follow("sets -> train.optimizer.max_grad_norm=null: litgpt does not clip gradients when it fine-tunes"),
    _precision,
    _data,
    _seed,
    follow("""
    count train.save_interval -> checkpoint.every_steps
    count eval.interval -> train.eval_every
    exact train.save_interval eval.interval
    """),
    mappings("data", "train", "eval", "optimizer"),
    mappings("init_args", section="data"),
    mappings("init_args", section="optimizer"),
    directory("out_dir"),
    _logs,
    follow(KEYS),
    common(NAME),
)
