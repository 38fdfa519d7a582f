"""torchtune's recipes: YAML of components, for LoRA, full fine-tuning and DPO."""

from __future__ import annotations

from typing import Any

from compiler.port.dialects import torchtune_data, torchtune_model
from compiler.port.keys import Keys, words
from compiler.port.ledger import Ledger
from compiler.port.meaning import batches, results, schedules, torch_optimizers

NAME = "torchtune"
TITLE = "torchtune"
MARKS = words(
    """model._component_ tokenizer._component_ dataset._component_ checkpointer optimizer._component_
    lr_scheduler._component_ loss._component_ metric_logger epochs max_steps_per_epoch
    enable_activation_checkpointing enable_activation_offloading clip_grad_norm log_peak_memory_stats
    profiler save_adapter_weights_only resume_from_checkpoint"""
)
SCHEDULE = "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"


def port(ledger: Ledger) -> None:
    """Says what became of every key."""
    keys = Keys(ledger, ledger.sources.main, TITLE, {"dtype": "bf16", "gradient_accumulation_steps": 1})
    built = torchtune_model.speak(keys)
    objective = _loss(keys)
    _stages(keys)
    torchtune_data.speak(keys, built.model, objective)
    _batch(keys)
    _length(keys)
    section = keys.below("optimizer")
    name = section.text("_component_")
    if name is None:
        keys.refuse(
            "optimizer", "E1144", "the file names no optimizer", "optimizer: {_component_: torch.optim.AdamW}"
        )
    else:
        torch_optimizers.speak(
            Keys(ledger, keys.source, TITLE, prefix="optimizer."), name, section, "_component_"
        )
    norm = keys.number("clip_grad_norm")
    keys.same("clip_grad_norm", {"train.optimizer.max_grad_norm": norm})
    _schedule(keys)
    _precision(keys, built.lora)
    _order(keys)
    remat = keys.flag("enable_activation_checkpointing") or keys.value("ac_mode") in ("full", "selective")
    keys.same("enable_activation_checkpointing", {"remat.policy": "decoder" if remat else "none"})
    _rest(keys)


def _loss(keys: Keys) -> str:
    """The objective, by the loss's component."""
    section = keys.below("loss", {"beta": 0.1, "label_smoothing": 0.0})
    name = str(section.value("_component_") or "").rpartition(".")[2]
    if name == "DPOLoss":
        keys.ledger.set("train.objective", "dpo")
        section.same("_component_", note="the sigmoid loss")
        section.say("beta", {"train.beta": section.number("beta")})
        section.say("label_smoothing", {"train.label_smoothing": section.number("label_smoothing")})
        return "dpo"
    if name and "CrossEntropy" not in name and not name.startswith("CE"):
        message = f"the loss {name} has no counterpart here"
        help = "_component_: torchtune.modules.loss.CEWithChunkedOutputLoss"
        section.refuse("_component_", "E1163", message, help)
    section.passive(
        ("_component_", "num_output_chunks"), "the negative log-likelihood, a mean over a step's tokens"
    )
    section.unless("ignore_index", (-100,), "tokens without loss have no number here")
    return "sft"


def _stages(keys: Keys) -> None:
    for key in (
        "teacher_model",
        "teacher_checkpointer",
        "kd_loss",
        "policy_model",
        "valuemodel",
        "reward_and_value_model",
    ):
        message = f"{key}: distillation and reinforcement learning have no counterpart here"
        if keys.stands(key):
            keys.refuse(
                key, "E1149", message, "port a configuration of lora_finetune, full_finetune or lora_dpo"
            )
    keys.learnt("quantizer", (None,), "weights are not quantised while they are trained here")
    keys.passive(
        ("ref_checkpointer", "base_model_path"), "the reference is the model that training starts from"
    )


def _batch(keys: Keys) -> None:
    per_device = keys.integer("batch_size") or 1
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    shared = keys.integer("tensor_parallel_dim") or 1
    devices = keys.ledger.devices or shared
    try:
        made = batches.global_batch(per_device, accumulation, devices, shared)
    except ValueError:
        help = f"give the number of GPUs of the run with --devices, a multiple of {shared}"
        message = f"{devices} GPUs cannot be split into groups of {shared} that share their rows"
        keys.refuse("tensor_parallel_dim", "E1162", message, help)
        made = batches.Batch(per_device, accumulation, devices)
    if not keys.stands("batch_size"):
        keys.refuse("batch_size", "E1144", "the file gives no batch_size", "batch_size: 2")
    keys.say("batch_size", {"train.micro_batch_size": made.per_device})
    note = f"{made.rows} rows a step: {made}; the launcher's GPUs are --devices"
    keys.same("gradient_accumulation_steps", {"train.global_batch_size": made.rows}, note)
    keys.ledger.set("train.global_batch_size", made.rows, str(made))
    keys.ledger.set("train.loss_normalization", "tokens")
    keys.same("tensor_parallel_dim", note=f"{shared} devices share their rows: they are not data-parallel")


def _length(keys: Keys) -> None:
    epochs, most = keys.integer("epochs") or 1, keys.integer("max_steps_per_epoch")
    if most is None:
        keys.say("epochs", {"train.epochs": epochs})
        keys.same("max_steps_per_epoch", note="null: whole epochs")
        return
    note = "" if epochs == 1 else "the data go on here; there they are begun anew after so many steps"
    keys.say("max_steps_per_epoch", {"train.steps": most * epochs}, note)
    keys.same("epochs", note="max_steps_per_epoch sets the length of the run")


def _schedule(keys: Keys) -> None:
    if not keys.given("lr_scheduler"):
        keys.ledger.set("train.schedule.name", "constant", "torchtune has no schedule without lr_scheduler")
        keys.same("lr_scheduler", note="null: the rate stays the same")
        return
    section = keys.below("lr_scheduler", {"num_cycles": 0.5})
    name = str(section.value("_component_") or "")
    if name.rpartition(".")[2] != "get_cosine_schedule_with_warmup":
        section.refuse(
            "_component_", "E1163", f"the schedule {name} has no counterpart here", f"_component_: {SCHEDULE}"
        )
    steps = section.integer("num_warmup_steps") or 0
    made = schedules.translate("cosine", {"num_cycles": section.number("num_cycles")})
    section.say("_component_", {"train.schedule.name": "cosine"}, made.note)
    section.say("num_warmup_steps", {"train.schedule.warmup_steps": steps})
    section.passive(("num_cycles", "last_epoch"), "part of the schedule")


def _precision(keys: Keys, lora: bool) -> None:
    dtype = keys.choice("dtype", ("bf16", "fp32", "fp16")) or "bf16"
    if dtype == "fp16":
        keys.refuse(
            "dtype", "E1160", "torchtune stops on fp16, which its recipes do not train in", "dtype: bf16"
        )
    made = "float32" if dtype == "fp32" else "bfloat16"
    keys.say("dtype", {"model.dtype": made})
    if lora:
        keys.ledger.set("lora.dtype", made, "torchtune's adapters are of its dtype")
    elif made == "bfloat16":
        keys.ledger.set(
            "train.optimizer.master_weights", False, "the weights are trained in bfloat16 itself, as there"
        )


def _order(keys: Keys) -> None:
    seed = keys.integer("seed")
    keys.same("seed", {"train.seed": seed or 0}, "another generator: other draws of the same distribution")
    keys.ledger.set("data.shuffle_seed", 0 if keys.flag("shuffle") else None)
    keys.same(
        "shuffle", {"data.shuffle_seed": 0 if keys.flag("shuffle") else None}, "the sampler's seed is 0"
    )


def _logger(section: Keys) -> None:
    """Where the run is logged."""
    name = str(section.value("_component_") or "").rpartition(".")[2]
    project = section.text("project") or "torchtune"
    if name == "WandBLogger":
        section.same("_component_", {results.PROJECT: project}, "Weights & Biases")
        section.same("project", {results.PROJECT: project})
        for key in ("entity", "group"):
            section.unless(key, results.OFF, f"WANDB_{key.upper()} in the environment of the run says it")
    elif name in ("CometLogger", "MLFlowLogger"):
        section.unless("_component_", (), f"nothing is logged there: {results.LOGS}")
    found = section.source.get(section.prefix.rstrip("."), None)
    section.passive(found if isinstance(found, dict) else (), "a log")


def _rest(keys: Keys) -> None:
    if not isinstance(keys.value("dataset"), list) or not keys.value("dataset"):
        keys.mappings(("dataset",))
    keys.mappings(("model", "tokenizer", "optimizer", "lr_scheduler", "loss"))
    every = keys.integer("log_every_n_steps")
    keys.same("log_every_n_steps", {"train.log.every": every} if every and every > 0 else None)
    results.directory(keys, "output_dir")
    keys.passive(("checkpoint_dir",), "where files go")
    _logger(keys.below("metric_logger"))
    keys.mappings(("metric_logger",))
    keys.passive(("profiler", "log_level", "log_peak_memory_stats", "profile_memory"), "a log")
    keys.passive(
        ("resume_from_checkpoint", "save_adapter_weights_only", "enable_async_checkpointing"),
        "how checkpoints are kept; here adapters with the optimizer's state",
    )
    keys.passive(
        ("fsdp_cpu_offload", "fsdp_reshard_after_forward", "fsdp_sharding_strategy", "custom_sharded_layers"),
        "the mesh is chosen for the accelerator",
    )
    keys.passive(
        ("tensor_parallel_plan", "data_parallel_shard_dim", "data_parallel_replicate_dim"), "the same"
    )
    speed = "how fast it runs and where memory lies, not what it computes"
    keys.passive(("compile", "device", "low_cpu_ram", "cudnn_deterministic_mode", "optimizer_in_bwd"), speed)
    keys.passive(
        ("enable_activation_offloading", "ac_mode", "ac_option", "memory_efficient_fsdp_wrap"), speed
    )
    usual: tuple[Any, ...] = (None, "torchtune.data.padded_collate_sft", "torchtune.data.padded_collate_dpo")
    keys.unless("collate_fn", usual, "rows are put together by the run itself here")
