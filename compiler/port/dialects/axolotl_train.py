"""Axolotl's run: its length, batches, optimizer, schedule, precision, devices, and what is saved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compiler.catalog import Model
from compiler.port.keys import Keys
from compiler.port.meaning import batches, optimizers, schedules, sharding, trainer
from compiler.port.meaning.sharding import Launch

ONE = "the files do not say on how many GPUs the run was: one is taken, and --devices N says otherwise"
EPOCH = "a step that depends on the rows is not known yet: every {} steps here, and at the end"
UNCAST = "embeddings and norms are trained in bfloat16 too here; there in float32, as without flash attention"
EVERY = 100
"""The recipe's own default of train.eval_every and checkpoint.every_steps."""


def port(keys: Keys, model: Model | None) -> None:
    """The keys of `train`, `checkpoint`, `remat` and model.dtype, model.attention."""
    launch = _launch(keys)
    _batches(keys, launch)
    _length(keys)
    _optimizer(keys)
    _schedule(keys)
    _attention(keys, model)
    _precision(keys, launch)
    _remat(keys, launch)
    _saving(keys)
    _evaluating(keys)
    steps = keys.number("logging_steps")
    whole = steps is not None and steps >= 1 and steps == int(steps)
    keys.same("logging_steps", {"train.log.every": int(steps or 1)} if whole else None)
    if keys.flag("use_tensorboard"):
        keys.same("use_tensorboard", {"train.log.tensorboard": True})
    keys.same("use_tensorboard", note="how the run is logged, not what it computes")


def _launch(keys: Keys) -> Launch:
    """How the GPUs were arranged: from accelerate's and DeepSpeed's files, and from the keys."""
    others = keys.ledger.sources.others
    launch = sharding.accelerate(keys.ledger, others["accelerate"]) if "accelerate" in others else Launch()
    if "deepspeed" in others:
        sharding.deepspeed(Keys(keys.ledger, others["deepspeed"], "DeepSpeed"), {})
    if isinstance(keys.value("deepspeed"), dict):
        sharding.deepspeed(keys.below("deepspeed"), {})
    keys.same("deepspeed", note=sharding.MESH)
    remat = sharding.fsdp(keys.below("fsdp_config"))
    found = keys.value("fsdp_config")
    inner = found if isinstance(found, dict) else {}
    version = keys.value("fsdp_version") or inner.get("fsdp_version") or inner.get("version")
    # Axolotl's own way of preparing FSDP2 leaves the weights in their type.
    launch = launch.with_(
        str(version) != "2" and (keys.value("fsdp") or inner),
        keys.value("deepspeed") or "deepspeed" in others,
    )
    for name in ("fsdp", "fsdp_version", "fsdp_final_state_dict_type"):
        keys.same(name, note=sharding.MESH)
    shared = launch.shared
    for name in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        size = max(keys.integer(name) or 1, 1)
        shared *= size
        keys.same(
            name, note=f"{size} devices share their rows: they are not data-parallel" if size > 1 else ""
        )
    data = 1
    for name in ("dp_shard_size", "dp_replicate_size"):
        data *= max(keys.integer(name) or 1, 1)
        keys.same(name, note=sharding.MESH)
    processes = launch.processes or (data * shared if data > 1 else None)
    made = replace(launch, processes=processes, shared=shared, remat=launch.remat or remat)
    return sharding.ray(keys, made)


def _batches(keys: Keys, launch: Launch) -> None:
    micro, accumulation, total = (
        keys.integer(name) for name in ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    )
    micro = micro if keys.given("micro_batch_size") or not total else max(total // (accumulation or 1), 1)
    if not keys.given("gradient_accumulation_steps") and total and micro:
        accumulation = max(total // micro, 1)
    processes = sharding.devices(keys.ledger, launch)
    shared = launch.shared if processes % launch.shared == 0 else 1
    made = batches.global_batch(max(micro or 1, 1), max(accumulation or 1, 1), processes, shared)
    rows = {"train.global_batch_size": made.rows}
    keys.same("batch_size", rows if total else None, "rows of a step on one device")
    if keys.given("micro_batch_size"):
        keys.same("micro_batch_size", {"train.micro_batch_size": made.per_device, **rows}, str(made))
    else:
        keys.say("micro_batch_size", {"train.micro_batch_size": made.per_device, **rows})
    if keys.given("gradient_accumulation_steps"):
        keys.same("gradient_accumulation_steps", rows, str(made))
    else:
        keys.say("gradient_accumulation_steps", rows)
    if not keys.ledger.devices and not launch.processes:
        keys.ledger.defaulted("--devices", 1, rows, ONE)
    elif keys.ledger.devices:
        keys.ledger.defaulted("--devices", processes, rows, f"given by --devices: {made}")
    if keys.ledger.value("train.objective") is None:
        many = (
            "each device's own tokens are averaged there, and all tokens of the step here"
            if processes > 1
            else ""
        )
        note = "Axolotl's loss is a mean over the tokens of a step" + (f"; {many}" if many else "")
        keys.ledger.defaulted("loss", "mean over tokens", {"train.loss_normalization": "tokens"}, note)
    keys.passive(("eval_batch_size",), "rows of a batch of the evaluation, whose loss is the same")
    keys.passive(("dataloader_drop_last",), "a last batch that is not full is left out of an epoch here")


def _length(keys: Keys) -> None:
    epochs, steps = keys.number("num_epochs"), keys.integer("max_steps")
    if steps and steps > 0:
        keys.say(
            "max_steps",
            {"train.steps": steps},
            "the run has as many steps, also where num_epochs ends sooner",
        )
        keys.same("num_epochs", note="max_steps ends the run")
        return
    keys.same("max_steps", note="no bound")
    if epochs is None or epochs <= 0:
        return
    whole = max(round(epochs), 1)
    keys.say("num_epochs", {"train.epochs": whole}, "" if whole == epochs else f"{whole} whole epochs here")


def _optimizer(keys: Keys) -> None:
    rate = keys.number("learning_rate")
    if rate is None and not keys.stands("learning_rate"):
        message = "`learning_rate` is missing, which Axolotl has no default for"
        keys.refuse("learning_rate", "E1144", message, "learning_rate: 2e-4")
    keys.same("learning_rate", {"train.optimizer.learning_rate": rate} if rate and rate > 0 else None)
    name = keys.text("optimizer") or "adamw_torch_fused"
    found = optimizers.translate(name)
    optimizers.say(keys, "optimizer", name, found, "adamw_torch")
    decay = keys.number("weight_decay")
    note = trainer.DECAYED if decay and keys.ledger.value("lora", "") is None else ""
    keys.say("weight_decay", {"train.optimizer.weight_decay": decay} if decay is not None else {}, note)
    norm = keys.number("max_grad_norm")
    sets = {"train.optimizer.max_grad_norm": norm or None}
    if keys.given("max_grad_norm"):
        keys.say("max_grad_norm", sets)
    else:
        keys.default("max_grad_norm", 1.0, {"train.optimizer.max_grad_norm": 1.0}, "the Trainer's default")
    lion = found.name == "lion"
    for key, path, default in (
        ("adam_beta1", "train.optimizer.b1", 0.9),
        ("adam_beta2", "train.optimizer.b2", 0.99 if lion else 0.999),
        ("adam_epsilon", "train.optimizer.eps", 1e-8),
    ):
        value = keys.number(key)
        if keys.given(key):
            keys.say(key, {path: default if value is None else value})
        else:
            keys.default(key, default, {path: default}, "the Trainer's default")
    _arguments(keys)


def _arguments(keys: Keys) -> None:
    known = {
        "beta1": "b1",
        "beta2": "b2",
        "betas": "",
        "eps": "eps",
        "epsilon": "eps",
        "momentum": "momentum",
    }
    try:
        given = optimizers.arguments(keys.value("optim_args"))
    except (ValueError, AttributeError):
        keys.refuse(
            "optim_args", "E1160", "`optim_args` is not of the form NAME=VALUE", "optim_args: beta1=0.9"
        )
        return
    sets: dict[str, Any] = {}
    lost = []
    for name, value in given.items():
        try:
            sets[f"train.optimizer.{known[name]}"] = float(value)
        except (KeyError, ValueError):
            lost.append(name)
    note = f"{', '.join(lost)}: no settings of the optimizer here" if lost else ""
    keys.say("optim_args", {path: value for path, value in sets.items() if not path.endswith(".")}, note)


def _schedule(keys: Keys) -> None:
    name = keys.text("lr_scheduler") or "cosine"
    made = schedules.translate(name, keys.mapping("lr_scheduler_kwargs"), keys.number("learning_rate"))
    notes = {
        "one_cycle": "a cosine after the warm-up; momentum stays as it is",
        "rex": "a cosine in place of REX",
    }
    note = made.note or notes.get(name, "")
    if made.name is None and name not in notes:
        keys.refuse("lr_scheduler", "E1163", f"there is no schedule {name}", "lr_scheduler: cosine")
    sets: dict[str, Any] = {"train.schedule.name": made.name or "cosine"}
    final = keys.number("cosine_min_lr_ratio") if name == "cosine" else None
    ratio = final if final is not None else made.final_ratio
    if 0 < ratio <= 1:
        sets["train.schedule.final_ratio"] = ratio
    keys.say("lr_scheduler", sets, note)
    keys.same("lr_scheduler_kwargs", note="as the schedule has it")
    if name == "cosine":
        keys.same("cosine_min_lr_ratio", {"train.schedule.final_ratio": ratio} if 0 < ratio <= 1 else None)
    keys.passive(("cosine_min_lr_ratio",), f"the schedule {name} does not read it")
    _warmup(keys)


def _warmup(keys: Keys) -> None:
    """Axolotl rounds a ratio down, has two steps where it would be one, and a warm-up where none is given."""
    steps, ratio = keys.number("warmup_steps"), keys.number("warmup_ratio")
    if keys.given("warmup_steps") and keys.given("warmup_ratio"):
        message = "`warmup_steps` and `warmup_ratio` exclude each other in Axolotl"
        keys.refuse("warmup_ratio", "E1145", message, "keep one of them")
    if steps is not None:
        made = schedules.warmup(steps)
        count = 2 if made.steps == 1 else made.steps
        sets = {"train.schedule.warmup_steps": count or 0} if made.ratio is None else made.sets()
        keys.say(
            "warmup_steps", sets, "Axolotl makes two steps of one" if count == 2 != made.steps else made.note
        )
    elif ratio is not None:
        note = "rounded up to a whole step here, and down there" if 0 < ratio < 1 else ""
        keys.say("warmup_ratio", {"train.schedule.warmup_ratio": ratio} if 0 <= ratio < 1 else {}, note)
    else:
        note = (
            "Axolotl's default: 3 % of the steps, though 100 at most, which is not known before the rows are"
        )
        keys.default("warmup_ratio", 0.03, {"train.schedule.warmup_ratio": 0.03}, note)
    keys.passive(("warmup_steps", "warmup_ratio"), "the other one gives the warm-up")


def _precision(keys: Keys, launch: Launch) -> None:
    bf16 = keys.value("bf16")
    brain = bf16 in ("auto", "full", True) or keys.flag("bfloat16")
    half = keys.flag("fp16") or keys.flag("float16")
    eight = keys.flag("fp8")
    if half and not (bf16 is True or bf16 == "full"):
        brain = False
    dtype = "bfloat16" if brain or half or eight else "float32"
    sets: dict[str, Any] = {"model.dtype": dtype}
    note = ""
    if dtype == "bfloat16" and keys.ledger.value("lora", "") is None:
        held, why = launch.masters(False, bf16 != "full")
        keys.ledger.set("train.optimizer.master_weights", held, why)
        cast = any(keys.value(name) for name in ("fsdp", "fsdp_config", "cut_cross_entropy"))
        if not (held or cast) and keys.ledger.value("model.attention") == "dot":
            note = UNCAST
    if keys.given("bf16") and keys.source.get("bf16") not in (True, False, "auto", "full"):
        keys.refuse("bf16", "E1160", f"`bf16` is {bf16!r}, and not auto, true, false or full", "bf16: auto")
    keys.say("bf16", {} if half or eight else sets, note)
    for name in ("bfloat16", "fp16", "float16"):
        if not keys.flag(name):
            keys.same(name, note="off")
        elif name == "bfloat16":
            keys.same(name, sets)
        else:
            keys.say(
                name,
                sets,
                "bfloat16 in its place, which needs no loss scaling: three digits fewer, more range",
            )
    keys.same("float32", note="as model.dtype has it")
    keys.unless("fp8", (False,), "bfloat16 in its place: products are more precise, and take longer")
    keys.unless("fp8_config", (), "bfloat16 in its place of fp8")
    if dtype == "float32" and keys.value("tf32") is True:
        keys.say("tf32", {}, "float32 products are the TPU's own, not TF32")
    keys.same("tf32", note="products in bfloat16 are not touched by it")


_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}


def _attention(keys: Keys, model: Model | None) -> None:
    name = keys.text("attn_implementation")
    flags = [flag for flag in _FLAGS if keys.flag(flag)]
    held = name or (_FLAGS[flags[0]] if flags else None)
    fused = (
        held is not None and held not in ("eager", "sdpa") and (model is None or model.family.flash_attention)
    )
    sets = {"model.attention": "splash" if fused else "dot"}
    note = ""
    if held in ("sage", "fp8"):
        note = "scores are not quantised here"
    for key in ("attn_implementation", *_FLAGS):
        if key == "attn_implementation" or keys.flag(key):
            keys.say(key, sets if keys.given(key) else None, note)
        else:
            keys.same(key, note="off")


def _remat(keys: Keys, launch: Launch) -> None:
    given = keys.value("gradient_checkpointing")
    on = bool(given) or launch.remat
    sets = {"remat.policy": "decoder" if on else "none"}
    if keys.given("gradient_checkpointing"):
        keys.same("gradient_checkpointing", sets, "the same numbers, with less memory" if on else "")
    else:
        keys.say("gradient_checkpointing", sets)


def _every(keys: Keys, path: str, names: tuple[str, str, str], default: str, idle: str = "") -> None:
    """How often: in steps, or as a share of the run, or by epochs.

    Args:
        names: of the keys for steps, for times an epoch, and for the strategy.
        default: of the strategy.
        idle: why the keys say nothing, where they do not.
    """
    key, per_epoch, strategy = names
    count = keys.number(key)
    total = keys.ledger.value("train.steps")
    if idle:
        for name in (key, per_epoch, strategy):
            keys.same(name, note=idle)
    elif count is not None and count >= 1:
        keys.say(key, {path: int(count)})
    elif count and total:
        keys.say(key, {path: max(int(count * total), 1)})
    else:
        note = EPOCH.format(EVERY)
        given = next((name for name in (key, per_epoch, strategy) if keys.given(name)), None)
        if given is None:
            keys.default(strategy, default, {path: EVERY}, f"Axolotl's default is {default}; {note}")
        else:
            keys.say(given, {path: EVERY}, note)
    for name in (key, per_epoch, strategy):
        keys.same(name, note="as it is given by steps")


def _saving(keys: Keys) -> None:
    if keys.value("save_strategy") == "no":
        note = f"checkpoints are written every {EVERY} steps and at the end; what is trained is the same"
        keys.say("save_strategy", {"checkpoint.every_steps": EVERY}, note)
    _every(keys, "checkpoint.every_steps", ("save_steps", "saves_per_epoch", "save_strategy"), "epoch")
    keep = keys.integer("save_total_limit")
    if keep and keep > 0:
        keys.say("save_total_limit", {"checkpoint.keep": keep})
    elif "save_total_limit" not in keys.said:
        keys.default("save_total_limit", 4, {"checkpoint.keep": 4})
        keys.same("save_total_limit")


def _evaluating(keys: Keys) -> None:
    evaluates = keys.ledger.value("data.eval_fraction") or keys.ledger.value("data.eval")
    idle = "" if evaluates else "there is nothing to evaluate on"
    if evaluates and keys.value("eval_strategy") == "no":
        note = f"evaluation is every {EVERY} steps and at the end here"
        keys.say("eval_strategy", {"train.eval_every": EVERY}, note)
    keys.same("evaluation_strategy", note="its newer name is eval_strategy")
    _every(keys, "train.eval_every", ("eval_steps", "evals_per_epoch", "eval_strategy"), "no", idle)
