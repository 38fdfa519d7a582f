"""transformers' TrainingArguments, which appear in the files of the Trainer and of TRL.

Each function records some of their keys, and together they record all, as in transformers 5.12.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, table
from recipec.port.meaning import model_names, sharding, training
from recipec.port.meaning.run import Run
from recipec.port.meaning.sharding import DeepSpeed, Launch
from recipec.port.refusals import E1160, E1163

AUTOCAST = "recipec keeps weights in bfloat16; the tool keeps float32, rounded for each product"
HALF = "recipec uses bfloat16 instead: more range, three bits less precision, and no loss scaling"
DECAYED = "recipec decays norms and biases too; the Trainer leaves both out"
SEED = "the same seed of another random generator: other draws of the same distribution"


def for_deepspeed(keys: Keys, processes: int) -> dict[str, Any]:
    """Return the values that the Trainer compares with a DeepSpeed configuration, by DeepSpeed's keys."""
    values = {key: keys.value(key) for key in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    rows = [value for value in values.values() if isinstance(value, int)]
    fp16 = keys.value("fp16") is True
    bf16 = keys.value("bf16")
    return {
        "train_micro_batch_size_per_gpu": values["per_device_train_batch_size"],
        "gradient_accumulation_steps": values["gradient_accumulation_steps"],
        "train_batch_size": math.prod(rows) * processes,
        "gradient_clipping": keys.value("max_grad_norm"),
        "optimizer.params.lr": keys.value("learning_rate"),
        "optimizer.params.betas": [keys.value("adam_beta1"), keys.value("adam_beta2")],
        "optimizer.params.eps": keys.value("adam_epsilon"),
        "optimizer.params.weight_decay": keys.value("weight_decay"),
        "scheduler.params.warmup_max_lr": keys.value("learning_rate"),
        "fp16.enabled": fp16,
        "bf16.enabled": bf16 if bf16 is not None else not fp16 and keys.tool == "TRL",
    }


def dtype_of(keys: Keys, key: str) -> str:
    """Return the type that weights are loaded in, "float32" if the key has no value."""
    return keys.choice(key, ("auto", "bfloat16", "float16", "float32")) or "float32"


def say_run(run: Run, keys: Keys, dtype: str) -> Says:
    """State batch, length, optimizer, schedule, precision and order, by the keys of a section."""
    yield from batch(keys, run.launch)
    yield from length(keys)
    yield from optimizer(run, keys)
    yield from schedule(run, keys)
    if dtype == "auto":
        dtype = model_names.stored(keys.ledger.value("model.id"), keys.source.path.parent)
    yield from precision(run, keys, dtype)
    yield from order(keys)


def launched(keys: Keys) -> Statements[Launch]:
    """Return how the run was started according to accelerate's file, if there is one."""
    file = keys.ledger.sources.others.get("accelerate")
    expected = for_deepspeed(keys, keys.ledger.devices or 1)
    return (yield from sharding.accelerate(keys.ledger, file, expected)) if file is not None else Launch()


def placement(run: Run) -> Says:
    """State `fsdp`, `fsdp_config`, `parallelism_config` and `deepspeed`, and DeepSpeed's own file."""
    keys, launch = run.keys, run.launch
    ledger, expected = keys.ledger, for_deepspeed(keys, sharding.devices(keys.ledger, launch))
    taken = DeepSpeed()
    yield keys.same("fsdp", note=sharding.MESH)
    remat = (yield from sharding.fsdp(keys.below("fsdp_config"))) or launch.remat
    shared = launch.shared * (yield from sharding.parallelism(keys.below("parallelism_config")))
    inner = keys.value("deepspeed")
    launch = launch.with_(keys.value("fsdp"), inner or "deepspeed" in ledger.sources.others)
    if isinstance(inner, dict) and inner:
        taken = yield from sharding.deepspeed(keys.below("deepspeed"), expected)
    elif not inner:
        yield keys.same("deepspeed", note="off")
    else:
        file = ledger.sources.others.get("deepspeed")
        if file is None:
            yield keys.same("deepspeed", note=f"not among the files; recipec assumes auto; {sharding.MESH}")
        else:
            yield keys.same("deepspeed", note=f"read from {file.file}")
    if (file := ledger.sources.others.get("deepspeed")) is not None:
        taken = yield from sharding.deepspeed(Keys(ledger, file, "DeepSpeed"), expected)
    run.launch = replace(launch, shared=shared * taken.shared, remat=remat)
    run.deepspeed = taken


def batch(keys: Keys, launch: Launch) -> Says:
    """State the rows of a step: rows per device x accumulation x data-parallel devices."""
    per_device = keys.integer("per_device_train_batch_size") or 1
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    processes = sharding.devices(keys.ledger, launch)
    config = keys.value("accelerator_config")
    inner = isinstance(config, dict) and config.get("split_batches") is True
    split = keys.flag("split_batches") if keys.given("split_batches") else inner
    key = "per_device_train_batch_size"
    step = yield from training.say_groups(keys, key, per_device, accumulation, processes, launch.shared)
    if split:
        step = training.Batch(max(per_device // step.data_parallel, 1), accumulation, step.data_parallel)
        for key in ("split_batches", "accelerator_config"):
            yield keys.same(key, note="split_batches: the batch size is of all devices together")
    yield keys.same("split_batches", note="off")
    whole = ""
    if keys.tool == "Unsloth" and (size := _group(keys)) and step.rows % size:
        step, whole = (
            replace(step, per_device=size),
            f"Unsloth makes it {size}, so that a step has whole groups",
        )
    yield keys.say("per_device_train_batch_size", {"train.micro_batch_size": step.per_device}, whole)
    rows = {"train.global_batch_size": step.rows}
    yield keys.same("gradient_accumulation_steps", rows, f"{step.rows} rows per step: {step}")
    yield keys.sets("train.global_batch_size", step.rows)
    if keys.ledger.value("train.objective") == "grpo":
        yield keys.same("average_tokens_across_devices", note="the loss has a normalization of its own")
        return
    stated = keys.value("average_tokens_across_devices") is not None
    tokens = keys.flag("average_tokens_across_devices") if stated else True
    yield keys.sets("train.loss_normalization", "tokens", "")
    if tokens or step.data_parallel == 1:
        yield keys.same(
            "average_tokens_across_devices", note="the mean is over all tokens of a step, as in recipec"
        )
    note = "recipec takes the mean over the tokens of all devices, not of each device"
    yield keys.say("average_tokens_across_devices", {}, note)


def _group(keys: Keys) -> int:
    """Return the completions of a group; 0 without groups, or if a draw is not for one step."""
    grouped = keys.ledger.value("train.objective") == "grpo"
    other = keys.given("steps_per_generation") or keys.given("generation_batch_size")
    return (keys.integer("num_generations") or 0) if grouped and not other else 0


def length(keys: Keys) -> Says:
    """State `max_steps`, or else `num_train_epochs`."""
    epochs = keys.number("num_train_epochs")
    if (yield from training.say_steps(keys, "max_steps", "", "num_train_epochs")):
        return
    yield keys.same("max_steps", note="not above zero: the epochs set the length of the run")
    if epochs is None or epochs <= 0:
        message = f"num_train_epochs is {epochs}, which is not above 0"
        yield keys.refuse("num_train_epochs", E1160, message, "num_train_epochs: 1")
        return
    whole = math.ceil(epochs)
    note = (
        ""
        if whole == epochs
        else f"recipec runs whole epochs, not {epochs}: set train.steps for a part of one"
    )
    yield keys.say("num_train_epochs", {"train.epochs": whole}, note)


def optimizer(run: Run, keys: Keys) -> Says:
    """State the optimizer, its hyperparameters and gradient clipping."""
    taken = run.deepspeed
    name = taken.optimizer or str(keys.value(run.optim) or "adamw_torch_fused")
    translation = training.optimizer_of(name)
    if run.muon and not taken.optimizer:
        translation = training.MUON
        yield keys.say(run.muon, {"train.optimizer.name": translation.name})
        yield keys.same(run.optim, note=f"{run.muon} selects another optimizer")
    if translation.same and taken.optimizer and keys.given(run.optim):
        yield keys.same(
            run.optim, {"train.optimizer.name": translation.name}, "DeepSpeed's optimizer applies instead"
        )
    yield keys.unless("adafactor", (False,), "an older name of optim; the value of optim applies")
    yield from training.say_optimizer(keys, run.optim, name, translation, "adamw_torch")
    yield keys.say("learning_rate", {"train.optimizer.learning_rate": run.learning_rate})
    decay = keys.number("weight_decay") or 0.0
    note = DECAYED if decay and not run.lora and translation.name != "muon" else ""
    yield keys.say("weight_decay", {"train.optimizer.weight_decay": decay}, note)
    arguments = yield from _arguments(keys)
    if translation.name in ("adamw", "lion", "muon"):
        betas = (keys.number("adam_beta1"), keys.number("adam_beta2"))
        yield keys.say("adam_beta1", {"train.optimizer.b1": betas[0]})
        yield keys.say("adam_beta2", {"train.optimizer.b2": betas[1]})
    if translation.name in ("adamw", "muon"):
        yield keys.say("adam_epsilon", {"train.optimizer.eps": keys.number("adam_epsilon")})
    yield from keys.passive(
        ("adam_beta1", "adam_beta2", "adam_epsilon"), f"{translation.name} does not have this setting"
    )
    if translation.name == "rmsprop":
        yield from say_rmsprop(keys, arguments)
    if translation.name == "sgd" and arguments.get("momentum"):
        yield keys.same("optim_args", {"train.optimizer.momentum": float(arguments["momentum"])})
    note = (
        f"{name} does not read them"
        if translation.name in ("adamw", "muon")
        else "the same as recipec's defaults"
    )
    yield keys.same("optim_args", note=note)
    unset = keys.stands("max_grad_norm") and not keys.given("max_grad_norm")
    norm = None if unset else keys.number("max_grad_norm")
    yield keys.say("max_grad_norm", {"train.optimizer.max_grad_norm": norm or None})


def say_rmsprop(keys: Keys, arguments: Mapping[str, str]) -> Says:
    """State the arguments of rmsprop, which are in `optim_args` alone."""
    try:
        yield keys.default(
            "optim_args", "alpha=0.99, eps=1e-8", training.of_rmsprop(arguments), "PyTorch's defaults"
        )
    except ValueError as error:
        yield keys.refuse("optim_args", E1160, f"optim_args: {error}", 'optim_args: "alpha=0.99"')


def _arguments(keys: Keys) -> Statements[dict[str, str]]:
    try:
        return training.arguments(keys.value("optim_args"))
    except ValueError as error:
        yield keys.refuse("optim_args", E1160, f"optim_args: {error}", 'optim_args: "momentum=0.9"')
        return {}


def schedule(run: Run, keys: Keys) -> Says:
    """State the schedule and its warm-up."""
    name, note = str(keys.value("lr_scheduler_type")), ""
    if run.deepspeed.scheduler is not None:
        name, note = _DEEPSPEED_SCHEDULES.get(run.deepspeed.scheduler, (name, ""))
    decay = training.schedule_of(name, keys.mapping("lr_scheduler_kwargs"), run.learning_rate)
    if decay.name is None:
        help = "lr_scheduler_type: cosine"
        yield keys.refuse("lr_scheduler_type", E1163, f"recipec has no schedule {name}", help)
        decay = training.Schedule("linear")
    sets: dict[str, Any] = {"train.schedule.name": decay.name}
    if decay.min_lr_ratio:
        sets["train.schedule.min_lr_ratio"] = decay.min_lr_ratio
    yield keys.say("lr_scheduler_type", sets, decay.note or note)
    steps, ratio = keys.number("warmup_steps"), keys.number("warmup_ratio")
    if not decay.warms_up:
        yield from keys.passive(("warmup_steps", "warmup_ratio"), f"{name} has no warm-up")
        return
    warmup = training.warmup(steps, ratio)
    if ratio is None:
        yield keys.same("warmup_ratio", note="null: warmup_steps applies")
    if ratio is not None:
        yield keys.say("warmup_ratio", warmup.values(), warmup.note)
        yield keys.same("warmup_steps", note="warmup_ratio overrides it")
    else:
        yield keys.say("warmup_steps", warmup.values(), warmup.note)


_LOGARITHMIC = "DeepSpeed's warm-up rises with the logarithm of the step; recipec's is linear"
_DEEPSPEED_SCHEDULES: Mapping[str, tuple[str, str]] = {
    "WarmupLR": ("constant_with_warmup", _LOGARITHMIC),
    "WarmupDecayLR": ("linear", _LOGARITHMIC),
    "WarmupCosineLR": (
        "cosine",
        "DeepSpeed's warm-up and decay start from small shares of the peak; recipec's start from zero",
    ),
}


def precision(run: Run, keys: Keys, dtype: str) -> Says:
    """State `bf16` and `fp16`, given the type that the weights are loaded in."""
    launch = run.launch
    half = keys.flag("fp16")
    unset = keys.value("bf16") is None
    mixed = (keys.tool == "TRL" and not half) if unset else keys.flag("bf16")
    if not mixed and not half and launch.mixed_precision in ("bf16", "fp16"):
        mixed, half = launch.mixed_precision == "bf16", launch.mixed_precision == "fp16"
    if half or dtype == "float16":
        computes, note = "bfloat16", HALF
    elif mixed:
        computes, note = "bfloat16", AUTOCAST if dtype == "float32" else ""
    else:
        computes, note = ("float32", "") if dtype == "float32" else ("bfloat16", "")
    sets = {"model.dtype": computes}
    if half and keys.given("fp16"):
        yield keys.say("fp16", sets, note)
    elif keys.given("bf16") or unset:
        default = {"bf16": mixed}
        keys.defaults = {**keys.defaults, **default}
        yield keys.say("bf16", sets, note)
    yield from keys.passive(("bf16", "fp16"), "model.dtype sets the precision")
    yield keys.sets("model.dtype", computes, note)
    if not run.lora and computes == "bfloat16":
        held, why = launch.masters(dtype == "float32", mixed or half)
        yield keys.sets("train.optimizer.master_weights", held, why)


def order(keys: Keys) -> Says:
    """State seeds and the order of the samples."""
    seed = keys.integer("seed") or 0
    shuffle = keys.integer("data_seed") if keys.given("data_seed") else seed
    sampling = keys.value("train_sampling_strategy") or "random"
    if keys.given("seed"):
        yield keys.same("seed", {"train.seed": seed}, SEED)
    else:
        yield keys.say("seed", {"train.seed": seed})
    if sampling == "sequential":
        yield keys.say("train_sampling_strategy", {"data.shuffle_seed": None})
        yield keys.same("data_seed", note="the order is that of the sources")
        return
    yield keys.sets("data.shuffle_seed", shuffle)
    yield keys.same("data_seed", {"data.shuffle_seed": shuffle} if keys.given("data_seed") else None, SEED)
    mixed = "recipec does not group samples of similar length: other batches"
    if sampling == "group_by_length":
        yield keys.say("train_sampling_strategy", {}, mixed)
    yield keys.same("train_sampling_strategy", note="shuffled again in each epoch, as in recipec")
    if keys.given("group_by_length") and keys.value("group_by_length"):
        yield keys.say("group_by_length", {}, mixed)
    yield keys.same("group_by_length", note="off")


def memory(run: Run, keys: Keys, key: str = "gradient_checkpointing") -> Says:
    """State rematerialization."""
    on = keys.flag(key) or run.launch.remat
    yield keys.say(key, {"remat.policy": "decoder" if on else "none"})


def bookkeeping(keys: Keys) -> Says:
    """State logs, checkpoints and evaluation, and all keys that do not affect any number."""
    yield from training.directory(keys, "output_dir")
    yield from training.hub(keys)
    every = keys.number("logging_steps")
    if keys.given("logging_steps") and every is not None and every >= 1:
        yield keys.same("logging_steps", {"train.log.every": int(every)})
    yield keys.same("logging_steps", note="how often a line is logged")
    yield from training.report_to(keys)
    strategy = str(keys.value("save_strategy") or "steps")
    if strategy != "steps":
        yield keys.same("save_steps", note=f"save_strategy is {strategy}, which does not read it")
    elif keys.given("save_steps"):
        every = keys.number("save_steps") or 0
        if every >= 1:
            yield keys.same("save_steps", {"checkpoint.every_steps": int(every)})
        yield keys.same(
            "save_steps", note="the tool takes a share of the run; recipec takes a number of steps"
        )
    if keys.given("save_total_limit") and (keep := keys.integer("save_total_limit")) and keep > 0:
        yield keys.same("save_total_limit", {"checkpoint.keep": keep})
    yield from training.best(
        keys, "early_stopping_steps" if keys.stands("early_stopping_steps") else training.PATIENCE
    )
    yield from keys.follow(KEYS)


def evaluation(keys: Keys) -> Statements[bool]:
    """State `eval_strategy` and `eval_steps`."""
    strategy = str(keys.value("eval_strategy") or "no")
    every = keys.number("eval_steps") or keys.number("logging_steps")
    if strategy == "steps" and every is not None and every >= 1:
        name = "eval_steps" if keys.given("eval_steps") else "logging_steps"
        yield keys.sets("train.eval_every", int(every))
        yield keys.same(name, {"train.eval_every": int(every)})
    elif strategy != "no":
        name = "eval_steps" if strategy == "steps" and keys.given("eval_steps") else "eval_strategy"
        yield keys.say(name, {"train.eval_every": training.EVERY}, training.EPOCH)
    note = "no evaluation" if strategy == "no" else f"the run evaluates by {strategy}"
    yield keys.same("eval_strategy", note=note)
    yield keys.same("eval_steps", note="it affects how often the run evaluates")
    return strategy != "no"


KEYS = table("""
files overwrite_output_dir
log include_tokens_per_second
checkpoints save_safetensors
launch sagemaker_program sagemaker_submit_directory sagemaker_region sagemaker_job_name sagemaker_s3_output
    sagemaker_container_log_level sagemaker_distribution_instance_groups sagemaker_instance_type
    sagemaker_torch_distributed_enabled sagemaker_mpi_enabled
evaluation generation_config generation_max_length generation_num_beams include_inputs_for_metrics
    predict_with_generate sortish_sampler
speed dispatch_batches fp16_backend fp16_opt_level fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
    half_precision_backend jit_mode_eval mp_parameters past_index ray_scope torchdynamo tpu_metrics_debug
    tpu_num_cores use_ipex use_legacy_prediction_loop use_mps_device xpu_backend
exact optim_target_modules: the optimizer updates all trained parameters
part lr_scheduler_kwargs
lost liger_kernel_config=null: kernels of the same arithmetic
lost auto_find_batch_size=false
exact dataloader_drop_last: it affects at most the last step of an epoch
exact label_names length_column_name remove_unused_columns: data.format and data.fields name the columns
""")
"""Keys that affect no number or have no counterpart, including keys of earlier versions of transformers."""
