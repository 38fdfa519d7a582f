"""litgpt's finetune lora, qlora and full: YAML as its --config reads it."""

from __future__ import annotations

from typing import Any

from compiler.catalog import original_of
from compiler.port import known
from compiler.port.dialects import litgpt_data
from compiler.port.keys import Keys, words
from compiler.port.ledger import Ledger
from compiler.port.meaning import adapters, batches, models, quantization, results, torch_optimizers
from compiler.port.meaning.models import Named

NAME = "litgpt"
TITLE = "litgpt"
MARKS = words(
    """checkpoint_dir out_dir precision lora_query lora_key lora_value lora_projection lora_mlp lora_head
    num_nodes data.class_path train.global_batch_size train.lr_warmup_steps train.micro_batch_size
    train.save_interval eval.max_new_tokens logger_name quantize devices"""
)
FLAGS = {
    "lora_query": ("q_proj",),
    "lora_key": ("k_proj",),
    "lora_value": ("v_proj",),
    "lora_projection": ("o_proj",),
    "lora_mlp": ("gate_proj", "up_proj", "down_proj"),
}
QUANTISED = {
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
"""The defaults of `train` in finetune lora and full, which are not those of TrainArgs."""


def port(ledger: Ledger) -> None:
    """Says what became of every key."""
    source = ledger.sources.main
    method = _method(Keys(ledger, source, TITLE))
    given = {"precision": "bf16-mixed", "optimizer": "AdamW"}
    keys = Keys(ledger, source, TITLE, {**known.defaults("litgpt", method), **given})
    train = keys.below("train", {**known.defaults("litgpt", "train"), **TRAIN})
    named = _model(keys)
    if method == "lora":
        _lora(keys)
    else:
        ledger.set("lora", None, "full fine-tuning")
        if keys.given("quantize"):
            message = "full fine-tuning with quantised base: quantised weights cannot be trained"
            keys.refuse("quantize", "E1146", message, "add lora_r, or remove quantize")
    devices = _devices(keys)
    _batch(train, devices)
    _length(train)
    _schedule(train)
    _optimizer(keys)
    _precision(keys, method == "lora")
    litgpt_data.speak(keys, train, named)
    _rest(keys, train)


def _method(keys: Keys) -> str:
    """lora, of which qlora is a part, or full: by the keys, or else by the file's name."""
    name = keys.source.path.stem.lower()
    if any(keys.stands(key) for key in known.keys("litgpt", "lora") if key.startswith("lora_")):
        return "lora"
    if "adapter" in name:
        help = "port a configuration of finetune lora or full"
        message = "litgpt's adapter methods have no counterpart here: prefixes that are learnt"
        keys.refuse("checkpoint_dir", "E1149", message, help)
    return "lora" if "lora" in name else "full"


def _model(keys: Keys) -> Named | None:
    name = keys.text("checkpoint_dir")
    if name is None:
        help = "--set checkpoint_dir=checkpoints/Qwen/Qwen3-8B"
        keys.refuse("checkpoint_dir", "E1144", "the file names no model", help)
        return None
    pieces = [piece for piece in name.split("/") if piece]
    named = models.resolve("/".join(pieces[-2:]), keys.source.path.parent)
    if named.model is None and (original := original_of(pieces[-1] if pieces else "")):
        named = models.resolve(original, keys.source.path.parent)
    if named.model is None:
        keys.refuse("checkpoint_dir", named.code, named.error, named.help)
    if named.note:
        keys.say("checkpoint_dir", {"model.id": named.id}, named.note)
    keys.same("checkpoint_dir", {"model.id": named.id}, "the folder's last two names are the model's id")
    return named


def _lora(keys: Keys) -> None:
    keys.say("lora_r", {"lora.rank": keys.integer("lora_r")})
    keys.say("lora_alpha", {"lora.alpha": keys.number("lora_alpha")})
    keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout")})
    targets = [name for flag, names in FLAGS.items() for name in names if keys.flag(flag)]
    if not targets:
        keys.refuse("lora_query", "E1148", "no projection carries an adapter", "lora_query: true")
    for flag in FLAGS:
        keys.say(flag, {"lora.targets": targets} if targets else None)
    adapters.say_head(keys, "lora_head")
    keys.ledger.set("lora.init", "peft", "A uniform with the bound 1/sqrt(fan_in), B zero, as there")
    name = keys.choice("quantize", QUANTISED)
    precision = keys.text("precision") or "bf16-mixed"
    if name is None:
        keys.same("quantize", note="not quantised")
        return
    if "mixed" in precision:
        message = "litgpt stops on a quantised base with mixed precision"
        key = "precision" if keys.given("precision") else "quantize"
        keys.refuse(key, "E1145", message, "precision: bf16-true")
    made = quantization.translate(*QUANTISED[name])
    keys.say("quantize", {"lora.quantize": made.value}, made.note)


def _devices(keys: Keys) -> int:
    given = keys.value("devices")
    nodes = keys.integer("num_nodes") or 1
    if given in ("auto", -1, "-1"):
        keys.same("devices", note="all GPUs of the machine: their number is --devices")
        return keys.ledger.devices or nodes
    count = keys.integer("devices") or 1
    if keys.given("quantize") and count * nodes > 1:
        keys.refuse("devices", "E1145", "litgpt trains on a quantised base with one GPU alone", "devices: 1")
    keys.passive(
        ("devices", "num_nodes"), f"{count * nodes} data-parallel devices, which share the global batch"
    )
    return keys.ledger.devices or count * nodes


def _batch(train: Keys, devices: int) -> None:
    """A global batch, which is divided among devices and micro-batches, rounded down."""
    rows, micro = train.integer("global_batch_size") or 1, train.integer("micro_batch_size") or 1
    accumulation = rows // devices // micro
    if accumulation < 1:
        message = (
            f"litgpt stops on a global_batch_size of {rows}, with {micro} rows on each of {devices} devices"
        )
        train.refuse("global_batch_size", "E1145", message, f"global_batch_size: {micro * devices}")
        accumulation = 1
    made = batches.Batch(micro, accumulation, devices)
    note = "" if made.rows == rows else f"{made.rows} rows: what {rows} gives when litgpt rounds down, {made}"
    train.say("micro_batch_size", {"train.micro_batch_size": micro})
    sets = {"train.global_batch_size": made.rows}
    if note and train.given("global_batch_size"):
        train.same("global_batch_size", sets, note)
    train.say("global_batch_size", sets, note)
    why = "litgpt's loss is the mean of its micro-batches' means"
    why += ", those of each device for themselves" if devices > 1 else ""
    train.ledger.set("train.loss_normalization", "micro_batches", why)


def _length(train: Keys) -> None:
    steps, epochs = train.integer("max_steps"), train.integer("epochs")
    if steps:
        train.say(
            "max_steps", {"train.steps": steps}, "" if epochs is None else f"there at most {epochs} epochs"
        )
        train.same("epochs", note="max_steps sets the length of the run, where the epochs are not shorter")
    else:
        train.say("epochs", {"train.epochs": epochs})
        train.same("max_steps", note="null: whole epochs")
    train.unless("max_time", (None,), "the run does not end by the clock here")


def _schedule(train: Keys) -> None:
    steps = train.integer("lr_warmup_steps")
    train.say("lr_warmup_steps", {"train.schedule.warmup_steps": steps})
    train.ledger.set("train.schedule.name", "cosine", "litgpt's: a linear warm-up, then a cosine to zero")
    train.passive(("min_lr",), "finetune does not read it: the cosine ends at zero")
    for key in ("max_tokens", "max_norm", "tie_embeddings", "lr_warmup_fraction"):
        if train.given(key):
            train.refuse(
                key, "E1145", f"litgpt's finetune stops on {key}, which pretrain alone reads", f"remove {key}"
            )
        train.same(key, note="null: finetune does not read it")


def _optimizer(keys: Keys) -> None:
    """A name, or a class with its arguments."""
    found = keys.value("optimizer")
    if isinstance(found, dict):
        name = str(found.get("class_path") or "torch.optim.AdamW")
        torch_optimizers.speak(keys.below("optimizer.init_args"), name, keys.below("optimizer"), "class_path")
    else:
        torch_optimizers.speak(keys.below("optimizer.init_args"), str(found), keys, "optimizer")
    keys.ledger.set("train.optimizer.max_grad_norm", None, "litgpt does not clip when it fine-tunes")


def _precision(keys: Keys, lora: bool) -> None:
    known_ones = ("bf16-mixed", "bf16-true", "32-true", "16-mixed", "16-true")
    found = keys.choice("precision", known_ones) or "bf16-mixed"
    made = "float32" if found == "32-true" else "bfloat16"
    notes = {
        "bf16-mixed": "the weights are held in bfloat16 here; there in float32, and rounded for each product",
        "16-mixed": "bfloat16 in place of float16: more range, three bits less precision",
        "16-true": "bfloat16 in place of float16: more range, three bits less precision",
    }
    keys.say("precision", {"model.dtype": made}, notes.get(found, ""))
    whole = found.endswith("true") and made == "bfloat16"
    if lora:
        keys.ledger.set(
            "lora.dtype", "bfloat16" if whole else "float32", "litgpt's adapters are of its precision"
        )
    elif made == "bfloat16":
        keys.ledger.set("train.optimizer.master_weights", not whole)


def _logs(keys: Keys) -> None:
    """Where the run is logged."""
    name, log = keys.text("logger_name"), keys.below("log")
    project = log.text("project")
    if name == "wandb":
        model = (keys.text("checkpoint_dir") or "").rstrip("/").rpartition("/")[2]
        sets = {results.PROJECT: project or f"finetune-{model}"}
        log.same("project", sets if log.given("project") else None)
        keys.same("logger_name", sets)
        for key, variable in (("run", "WANDB_NAME"), ("group", "WANDB_RUN_GROUP")):
            log.unless(key, results.OFF, f"{variable} in the environment of the run says it")
    elif name in ("mlflow", "litlogger"):
        keys.unless("logger_name", (), f"nothing is logged there: {results.LOGS}")
    keys.same("logger_name", {"train.log.tensorboard": True} if name == "tensorboard" else None, "a log")
    keys.mappings(("log",))
    log.passive(keys.mapping("log"), "a log")


def _rest(keys: Keys, train: Keys) -> None:
    seed = keys.integer("seed")
    note = "another generator: other draws of the same distribution"
    if keys.given("seed"):
        keys.same("seed", {"train.seed": seed}, note)
    keys.say("seed", {"train.seed": seed})
    every = train.integer("save_interval")
    train.same(
        "save_interval", {"checkpoint.every_steps": every} if train.given("save_interval") and every else None
    )
    train.passive(("log_interval",), "a log, of micro-batches")
    evaluation = keys.below("eval")
    steps = evaluation.integer("interval")
    sets: dict[str, Any] = {"train.eval_every": steps} if steps else {}
    evaluation.same("interval", sets, "")
    passive = ("max_new_tokens", "max_iters", "initial_validation", "final_validation", "evaluate_example")
    evaluation.passive(passive, "how it evaluates, which trains nothing")
    keys.mappings(("data", "train", "eval", "optimizer"))
    keys.below("data").mappings(("init_args",))
    keys.below("optimizer").mappings(("init_args",))
    results.directory(keys, "out_dir")
    _logs(keys)
    keys.passive(("access_token",), "the hub's token is the environment's")
    keys.passive(("resume",), "train.py --resume")
