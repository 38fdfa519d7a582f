"""open-instruct's scripts: grpo_fast.py and grpo.py, finetune.py, dpo_tune_cache.py and dpo.py.

Their arguments are a command's flags, or a YAML file. Each script has its own keys, by which a file is
recognized. open_instruct_grpo.py has what only reinforcement learning has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.port.dialects import open_instruct_grpo as grpo
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import REASONS, Keys, as_number, defaults_of, keys_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    datasets,
    model_names,
    sharding,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1143, E1144, E1147, E1163
from recipec.port.rules import common, follow

NAME = "open_instruct"
TITLE = "open-instruct"
MARKS = words(
    """model_name_or_path use_lora use_qlora use_slow_tokenizer use_flash_attn with_tracking reduce_loss
    checkpointing_steps dataset_mixer_list dataset_mix_dir dataset_mixer_list_splits gamma_beta_ratio
    hf_entity hf_metadata_dataset mixer_list try_launch_beaker_eval_jobs try_auto_save_to_beaker
    tokenizer_name num_unique_prompts_rollout num_samples_per_prompt_rollout total_episodes response_length
    max_prompt_token_length keep_last_n_checkpoints"""
)
SCRIPTS = {"grpo_fast": "grpo", "grpo": "grpo", "finetune": "sft", "dpo_tune_cache": "dpo", "dpo": "dpo"}
"""The sections of data/dialects.json, by the name of the script."""

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"warmup_ratio": 0.0, "max_grad_norm": 1.0, "per_device_train_batch_size": 1, "loss_fn": "dapo"},
    "sft": {"max_seq_length": 4096},
    "dpo": {"max_seq_length": 2048, "loss_type": "dpo_norm"},
}
"""Defaults that the scripts set in addition to those of their classes."""
COLUMNS = {"sft_messages_key": "messages", "ground_truths_key": "ground_truth"}

KEYS = table("""
files exp_name run_name config_name do_not_randomize_output_dir low_cpu_mem_usage dataset_cache_mode
    dataset_local_cache_dir dataset_config_hash dataset_config_eval_hash dataset_skip_cache dataset_mix_dir
    preprocessing_num_workers overwrite_cache cache_dataset_only cache_mode local_cache_dir skip_cache
    config_hash use_slow_tokenizer use_fast tokenizer_files_hash tokenizer_revision trust_remote_code
    hf_entity max_workers timeout cache_logprobs_only no_auto_dataset_cache
export push_to_hub hf_repo_id hf_repo_revision hf_repo_url hf_metadata_dataset save_to_hub gs_bucket_path
    try_auto_save_to_beaker
evaluation try_launch_beaker_eval_jobs try_launch_beaker_eval_jobs_on_weka oe_eval_tasks oe_eval_max_length
    oe_eval_beaker_image oe_eval_gpu_multiplier eval_workspace eval_priority
log with_tracking wandb_project wandb_project_name wandb_entity wandb_group_name report_to verbose
    send_slack_alerts profiling
speed gradient_checkpointing use_liger_kernel fused_optimizer sync_each_batch attn_implementation
    use_flash_attn use_cache activation_memory_budget activation_checkpointing_mode
    activation_checkpointing_modules compile_model concatenated_forward loss_implementation reduce_loss
mesh sequence_parallel_size tensor_parallel_degree context_parallel_degree fsdp_shard_degree fsdp_num_replicas
    zero_stage offload_optimizer offload_param zero_hpz_partition_size cp_degree cp_strategy
checkpoints keep_last_n_checkpoints ephemeral_save_interval resume_from_checkpoint clean_checkpoints_at_end
    use_ephemeral_checkpoints
part data_loader_seed dataset_config_name dataset_target_columns target_columns dataset_transform_fn
    transform_fn
learned additional_model_arguments=null/{} rope_scaling_factor=null optimizer_type=adamw optimizer_kwargs={}
    load_balancing_loss=false: recipec computes the step of the checkpoint's own config.json
setting rope_scaling_beta_fast rope_scaling_beta_slow rope_scaling_old_context_len -> rope_scaling_factor
setting load_balancing_weight -> load_balancing_loss
lost get_tokenizer_fn=get_tokenizer_tulu_v2_2/get_tokenizer_tulu_v2_1/get_tokenizer_tulu_v1
exact packing: the rows of a micro-batch one behind the other without padding: the same means
exact use_8bit_optimizer dpo_use_paged_optimizer: recipec keeps the optimizer state in float32
count logging_steps -> train.log.every
""")
FIRST = "recipec takes the first rows; the tool draws as many"
UPSAMPLED = "recipec repeats whole data sets; the tool draws the rest of the rows"
LORA = ("q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj")
PAIR_LOSSES = {"dpo": ("dpo", "sigmoid"), "dpo_norm": ("dpo", "sigmoid_norm"), "simpo": ("cpo", "simpo")}
"""The objective and the loss by the name of a DPO loss."""


@dataclass
class OpenInstruct(Run):
    """A run of open-instruct.

    Attributes:
        script: the section of the script's keys, a value of SCRIPTS.
        mixer: the key that names the data sets.
    """

    script: str = ""
    mixer: str = "dataset_mixer_list"


def opened(ledger: Ledger) -> OpenInstruct:
    """Return the run of a file, with the defaults of its script."""
    source = ledger.sources.main
    chosen = ledger.script if ledger.script in SCRIPTS.values() else SCRIPTS.get(ledger.script or "")
    script = chosen or _script(source.data)
    keys = Keys(ledger, source, TITLE, {**COLUMNS, **defaults_of(NAME, script), **ARGUMENTS[script]})
    objective = {"dpo": PAIR_LOSSES.get(str(keys.value("loss_type")), ("dpo", ""))[0]}.get(script, script)
    mixer = "mixer_list" if script == "dpo" else "dataset_mixer_list"
    return OpenInstruct(keys, objective=objective, script=script, mixer=mixer)


def _script(data: Any) -> str:
    """Return the script that has most of a file's keys."""
    present = set(data) if isinstance(data, dict) else set()
    return max(("sft", "dpo", "grpo"), key=lambda script: len(present & keys_of(NAME, script).keys()))


def _objective(run: OpenInstruct) -> Says:
    if run.objective != "sft":
        why = f"the keys are those of open-instruct's {run.script} script"
        yield run.keys.sets("train.objective", run.objective, why)


def _launch(run: OpenInstruct) -> Says:
    run.launch = yield from training_arguments.launched(run.keys)


def _model(run: OpenInstruct) -> Says:
    keys = run.keys
    run.named = yield from model_names.say_model(keys, "model_name_or_path", "model_revision")
    name = keys.text("model_name_or_path")
    key = "tokenizer_name_or_path" if keys.given("tokenizer_name_or_path") else "tokenizer_name"
    if (tokenizer := keys.text(key)) and tokenizer != name:
        yield keys.say(key, {"model.tokenizer": tokenizer})
    yield from keys.passive(("tokenizer_name", "tokenizer_name_or_path"), "the model's own")
    yield keys.sets("model.dtype", "bfloat16", "open-instruct computes in bfloat16")
    yield keys.say("dtype", {"model.dtype": "bfloat16"})
    yield keys.unless("model_dtype", ("bfloat16",), "recipec computes in bfloat16")


def _lora(run: OpenInstruct) -> Says:
    """State the adapters of finetune.py and dpo_tune_cache.py. grpo_fast.py trains all weights."""
    keys, model = run.keys, run.model
    run.lora = run.script != "grpo" and (keys.flag("use_lora") or keys.flag("use_qlora"))
    run.learning_rate = keys.number("learning_rate") or 0.0
    if not run.lora:
        note = "full fine-tuning" if run.script != "grpo" else "grpo_fast.py trains all weights"
        yield keys.sets("lora", None, note)
        names = ("use_lora", "use_qlora", "lora_rank", "lora_alpha", "lora_dropout", *grpo.OF_ADAPTERS)
        yield from keys.passive(names, note)
        yield keys.sets("train.optimizer.master_weights", True, "DeepSpeed keeps float32 weights")
        return
    yield keys.same("use_lora", note="it adds the lora section")
    yield keys.say("lora_rank", {"lora.rank": keys.integer("lora_rank")})
    yield keys.say("lora_alpha", {"lora.alpha": keys.number("lora_alpha")})
    run.chosen = yield from adapters.say_targets(keys, "use_lora", model, list(LORA), None, None, [])
    yield from adapters.say_dropout(keys, run.chosen)
    if keys.flag("use_qlora"):
        yield from adapters.say_bits(keys, "use_qlora", 4, "nf4", True, model)
    yield keys.same("use_qlora", note="not quantized")
    yield keys.sets("lora.dtype", "float32", "PEFT keeps adapters in float32")


def _data(run: OpenInstruct) -> Says:
    """State the data sets of a mixer, and the form of their rows."""
    keys = run.keys
    pairs = yield from _mixed(run)
    sources, notes = [], []
    splits = keys.listed(f"{run.mixer}_splits") or ["train"]
    for number, (name, amount) in enumerate(pairs):
        place = datasets.place(name)
        if place.path is None:
            message = f"recipec cannot read the data set `{name}`: {place.note}"
            yield keys.refuse(run.mixer, E1143, message, datasets.elsewhere(run.mixer, run.objective))
            continue
        split = splits[number] if len(splits) == len(pairs) else splits[0]
        parts, note = _amount(place.path, split, amount)
        sources += parts
        notes += [note] if note else []
    key = next((key for key in MIXERS if keys.given(key)), run.mixer)
    if sources:
        yield keys.say(key, {"data.train": sources}, "; ".join(dict.fromkeys(notes)))
    yield from keys.passive((*MIXERS, f"{run.mixer}_splits"), "part of data.train")
    limit = keys.integer("max_train_samples")
    yield keys.unless("max_train_samples", (None,), f"recipec trains on all rows, not on {limit} of them")
    if run.script == "grpo":
        yield from grpo.say_rows(run, [name for name, _ in pairs], key)
    elif run.script == "dpo":
        yield keys.sets("data.format", "preference")
        yield keys.same("sft_messages_key", note="the rows have pairs")
    else:
        column = str(keys.value("sft_messages_key"))
        yield keys.sets("data.format", "chat")
        yield keys.same(
            "sft_messages_key", {"data.fields": {"messages": column}} if column != "messages" else None
        )
        yield keys.sets("data.loss_on", "assistant")
    yield from keys.passive(("ground_truths_key",), "the rows have no such column")
    if run.script != "grpo":
        yield from datasets.length(keys, "max_seq_length")
        yield keys.sets("data.packing", False)
    yield from _template(run)


MIXERS = ("dataset_mixer", "dataset_mixer_list", "mixer_list", "dataset_name")


def _mixed(run: OpenInstruct) -> Statements[list[tuple[str, str]]]:
    """Return the names of the data sets, and the amount of each as it is written."""
    keys = run.keys
    if keys.given("dataset_mixer"):
        return [(str(name), str(amount)) for name, amount in keys.mapping("dataset_mixer").items()]
    if keys.given("dataset_name"):
        return [(str(keys.value("dataset_name")), "1.0")]
    written = keys.value(run.mixer)
    words = [str(word) for word in written] if isinstance(written, list) else str(written or "").split()
    if len(words) % 2 or not words:
        message = f"`{run.mixer}` has no pairs of a name and an amount"
        yield keys.refuse(run.mixer, E1144, message, f"{run.mixer}: [OWNER/NAME, 1.0]")
        words = words[: len(words) // 2 * 2]
    return list(zip(words[::2], words[1::2], strict=True))


def _amount(path: str, split: str, amount: str) -> tuple[list[Any], str]:
    """Return the sources for a share of a data set's rows, as "0.5", or for a number of them, and a note."""
    number = as_number(amount) or 0.0
    named = None if split == "train" else split
    if "." not in amount:
        return [datasets.source(path, named, limit=int(number))], FIRST
    whole, part = int(number), round(100 * (number % 1))
    sources = [datasets.source(path, named)] * whole
    if part:
        sources.append(datasets.source(path, f"{split}[:{part}%]"))
    return sources, (UPSAMPLED if whole else FIRST) if part else ""


def _template(run: OpenInstruct) -> Says:
    """State the chat template. A name that open-instruct does not have means the tokenizer's own."""
    keys, model = run.keys, run.model
    name = keys.text("chat_template_name") or ""
    known = templates.written_by(NAME)
    if name in known:
        turns = templates.named(NAME).get(name)
        bos = {"prefix": f"\0bos_token\0{turns.prefix}"} if turns and keys.flag("add_bos") else {}
        template = templates.of(NAME, name, model, bos)
        if not template.known:
            message = templates.unknown("open-instruct's template", name, template)
            help = "--set chat_template_name=null trains with the tokenizer's own template"
            yield keys.refuse("chat_template_name", E1147, message, help)
            return
        yield keys.say("chat_template_name", template.sets, template.note)
        yield keys.same("add_bos", note="part of the template")
        return
    note = "no template of open-instruct: it then takes the tokenizer's own" if name else ""
    yield keys.same("chat_template_name", note=note)
    yield keys.unless("add_bos", (False,), "recipec's template is the tokenizer's own")
    if model is not None:
        yield from templates.say_own(keys, model)


def _batch(run: OpenInstruct) -> Says:
    """State the rows of a step, and the length of a run of finetune.py and dpo_tune_cache.py."""
    keys = run.keys
    if run.script == "grpo":
        yield from grpo.say_batch(run)
        return
    processes = sharding.devices(keys.ledger, run.launch)
    per_device = keys.integer("per_device_train_batch_size") or 1
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    shared = run.launch.shared * (keys.integer("sequence_parallel_size") or 1)
    key = "per_device_train_batch_size"
    step = yield from training.say_groups(keys, key, per_device, accumulation, processes, shared)
    yield keys.say(key, {"train.micro_batch_size": step.per_device})
    sets = {"train.global_batch_size": step.rows}
    yield keys.same("gradient_accumulation_steps", sets, f"{step.rows} rows per step: {step}")
    yield keys.sets("train.global_batch_size", step.rows)
    yield keys.sets("train.loss_normalization", "micro_batches")
    epochs = "num_train_epochs" if run.script == "sft" else "num_epochs"
    if not (yield from training.say_steps(keys, "max_train_steps", "", epochs)):
        yield keys.say(epochs, {"train.epochs": keys.integer(epochs)})
    yield keys.same("max_train_steps", note="the epochs set the length of the run")


def _optimizer(run: OpenInstruct) -> Says:
    keys = run.keys
    sets: dict[str, Any] = {"name": "adamw", "b1": 0.9, "b2": 0.999, "eps": 1e-8}
    for name, value in sets.items():
        yield keys.sets(f"train.optimizer.{name}", value, "torch's AdamW" if name == "name" else "")
    yield keys.say("learning_rate", {"train.optimizer.learning_rate": run.learning_rate})
    decay = keys.number("weight_decay") or 0.0
    split = run.script != "grpo" or keys.flag("set_weight_decay_on_bias_and_norm")
    note = training_arguments.DECAYED.replace("the Trainer", TITLE) if decay and split else ""
    yield keys.say("weight_decay", {"train.optimizer.weight_decay": decay}, note)
    yield keys.same("set_weight_decay_on_bias_and_norm", note="part of the weight decay")
    key = "clip_grad_norm" if run.script == "sft" else "max_grad_norm"
    norm = keys.number(key)
    yield keys.say(key, {"train.optimizer.max_grad_norm": norm if norm and norm > 0 else None})
    name = str(keys.value("lr_scheduler_type") or "linear")
    ratio = keys.number("final_lr_ratio")
    decayed = training.schedule_of(name, {}, run.learning_rate)
    if decayed.name is None:
        message = f"recipec has no schedule {name}"
        yield keys.refuse("lr_scheduler_type", E1163, message, "lr_scheduler_type: cosine")
        decayed = training.Schedule("linear")
    schedule: dict[str, Any] = {"train.schedule.name": decayed.name}
    if ratio and name == "linear":
        schedule["train.schedule.min_lr_ratio"] = ratio
        yield keys.same("final_lr_ratio", {"train.schedule.min_lr_ratio": ratio})
    yield keys.same("final_lr_ratio", note="only linear schedules read it")
    yield keys.say("lr_scheduler_type", schedule, decayed.note)
    if decayed.warms_up:
        warmup = training.warmup(None, keys.number("warmup_ratio") or 0.0)
        yield keys.say("warmup_ratio", warmup.values(), warmup.note)
    yield keys.same("warmup_ratio", note=f"{name} has no warm-up")
    seed = keys.integer("seed") or 0
    if keys.given("seed"):
        yield keys.same("seed", {"train.seed": seed}, training_arguments.SEED)
    yield keys.say("seed", {"train.seed": seed})
    yield keys.sets("data.shuffle_seed", seed)


def _pairs(run: OpenInstruct) -> Says:
    """State the loss of pairs. dpo_norm compares means over the tokens of an answer."""
    keys = run.keys
    if run.script != "dpo":
        return
    name = str(keys.value("loss_type"))
    if name not in PAIR_LOSSES:
        message = f"the loss {name} has no counterpart"
        yield keys.refuse("loss_type", E1163, message, "loss_type: dpo_norm")
        return
    yield keys.say("loss_type", {"train.loss_type": PAIR_LOSSES[name][1]})
    beta = keys.number("beta") or 0.0
    yield keys.say("beta", {"train.beta": beta})
    smoothing = keys.number("label_smoothing") or 0.0
    if run.objective == "cpo":
        margin = (keys.number("gamma_beta_ratio") or 0.0) * beta
        yield keys.say("gamma_beta_ratio", {"train.simpo_gamma": margin})
        yield keys.sets("train.cpo_alpha", 0.0)
        yield keys.say("label_smoothing", {"train.label_smoothing": smoothing} if smoothing else {})
    yield keys.same("gamma_beta_ratio", note="only simpo reads it")
    yield keys.learned("label_smoothing", (0, 0.0), "recipec smooths no labels of this loss")


def _checkpoints(run: OpenInstruct) -> Says:
    keys = run.keys
    yield from training.directory(keys, "output_dir")
    every = keys.value("checkpointing_steps")
    if (steps := as_number(every)) and steps > 0 and keys.given("checkpointing_steps"):
        yield keys.same("checkpointing_steps", {"checkpoint.every_steps": int(steps)})
    yield keys.same("checkpointing_steps", note=REASONS["checkpoints"])


def _reinforces(run: OpenInstruct) -> Says:
    if run.script == "grpo":
        yield from grpo.say(run)


RULES: Sequence[Rule[OpenInstruct]] = (
    _objective,
    _launch,
    _model,
    _lora,
    _data,
    _batch,
    _optimizer,
    _pairs,
    _reinforces,
    _checkpoints,
    follow(KEYS),
    common(NAME),
)
