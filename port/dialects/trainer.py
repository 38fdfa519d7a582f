"""Hugging Face's Trainer: a TrainingArguments JSON, together with PEFT's adapter_config.json.

The JSON may contain keys of transformers' example scripts: the model, the data set and its lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipec.compiler.catalog import Model
from recipec.port.common_keys import say_common
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    datasets,
    model_names,
    rows,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1143, E1149, W1168
from recipec.port.rules import common, follow
from recipec.spec.diagnostics import Diagnostic

NAME = "trainer"
TITLE = "Trainer"
MARKS = words(
    """per_device_train_batch_size log_level_replica logging_nan_inf_filter skip_memory_metrics local_rank
    dataloader_pin_memory ddp_broadcast_buffers eval_do_concat_batches include_num_input_tokens_seen
    disable_tqdm log_on_each_node logging_first_step per_device_eval_batch_size past_index train_file
    validation_file dataset_config_name block_size preprocessing_num_workers adam_epsilon"""
)
KEYS = table("""
files config_name cache_dir use_fast_tokenizer token use_auth_token model_revision preprocessing_num_workers
    overwrite_cache streaming trust_remote_code low_cpu_mem_usage keep_linebreaks
exact torch_dtype dtype: it gives model.dtype, together with bf16 and fp16
exact tokenizer_name: the model's own
part dataset_config_name attn_implementation
exact validation_file validation_split_percentage: the run does not evaluate
exact model_type: model_name_or_path gives the model
learned config_overrides
exact max_train_samples max_eval_samples: a limit of the evaluation, or no limit
""")
SIZES = table("""
integer r -> lora.rank
number lora_alpha -> lora.alpha
""")
ADAPTER = table("""
exact peft_type task_type auto_mapping peft_version base_model_name_or_path: it describes the adapter
exact revision inference_mode runtime_config megatron_core: it does not affect training
lost megatron_config=null
lost fan_in_fan_out=false: no model that recipec trains stores its weights as [in, out]
exact qalora_group_size ensure_weight_tying loftq_config: a setting of a feature that is off
exact eva_config corda_config lora_ga_config: of init_lora_weights
""")
"""The meaning of PEFT's keys in adapter_config.json."""


@dataclass
class OfTrainer(Run):
    """A run of the Trainer.

    Attributes:
        adapter: the keys of adapter_config.json; None if the run trains all weights.
    """

    adapter: Keys | None = None


def opened(ledger: Ledger) -> OfTrainer:
    """Return the run of TrainingArguments, and of adapter_config.json next to them."""
    usual = {"optim": "adamw_torch_fused", "torch_dtype": "float32", "max_seq_length": None}
    defaults = {**defaults_of("trainer", "training_arguments"), **usual}
    run = OfTrainer(Keys(ledger, ledger.sources.main, TITLE, defaults))
    if (file := ledger.sources.others.get("adapter_config")) is not None:
        defaults = {**defaults_of("peft", "lora"), "init_lora_weights": True}
        run.adapter, run.lora = Keys(ledger, file, PEFT, defaults), True
    return run


def _launch(run: OfTrainer) -> Says:
    run.launch = yield from training_arguments.launched(run.keys)


def _model(run: OfTrainer) -> Says:
    """State the adapter's base, or the example scripts' model_name_or_path, and the tokenizer."""
    keys, adapter = run.keys, run.adapter
    yield from model_names.say_flash(keys)
    if (tokenizer := keys.text("tokenizer_name")) and tokenizer != keys.text("model_name_or_path"):
        yield keys.say("tokenizer_name", {"model.tokenizer": tokenizer})
    base = "base_model_name_or_path"
    if adapter is None or not adapter.given(base) or keys.given("model_name_or_path"):
        run.named = yield from model_names.say_model(keys, "model_name_or_path", "model_revision")
        return
    revision = keys.text("model_revision")
    yield keys.same(
        "model_revision", {"model.revision": revision} if revision not in (None, "main") else None
    )
    run.named = yield from model_names.say_model(adapter, base, "revision")


def _data(run: OfTrainer) -> Says:
    keys = run.keys
    evaluates = yield from training_arguments.evaluation(keys)
    name = keys.text("train_file") or keys.text("dataset_name")
    key = "train_file" if keys.given("train_file") else "dataset_name"
    place = datasets.place(name) if name is not None else None
    if place is None or place.path is None:
        help = datasets.elsewhere(key if key == "train_file" else "dataset_name")
        nowhere = "the files name no data set: a separate script reads it"
        message = place.note if place is not None else nowhere
        yield keys.refuse(key, E1143, message, help)
    else:
        config = keys.text("dataset_config_name")
        yield keys.say(key, {"data.train": [datasets.source(place.path, config=config)]})
        form = yield from _format(keys, key, str(name))
        yield keys.sets("data.format", form[0], form[1])
        if form[0] == "chat" and run.model is not None:
            yield from templates.say_own(keys, run.model)
    if evaluates and (held := keys.text("validation_file")):
        yield keys.say("validation_file", {"data.eval": [held]})
    share = keys.number("validation_split_percentage")
    if evaluates and not keys.given("validation_file") and share:
        sets = {"data.eval_fraction": share / 100}
        yield keys.say("validation_split_percentage", sets, "other rows of the same share")
    names = ("max_seq_length", "block_size", "max_length")
    key = next((name for name in names if keys.given(name)), "max_seq_length")
    if _of_blocks(keys):
        yield keys.say(key, {}, BLOCKS)
    yield from datasets.length(keys, key)
    note = BLOCKS if _of_blocks(keys) else "the Trainer does not pack samples"
    yield keys.sets("data.packing", _of_blocks(keys), note)


BLOCKS = "run_clm concatenates texts and cuts them into blocks; a sample in recipec attends only to itself"


def _of_blocks(keys: Keys) -> bool:
    """Return whether the file has keys that only transformers' run_clm has. Its rows are text."""
    return any(keys.stands(key) for key in ("block_size", "config_overrides", "keep_linebreaks"))


def _format(keys: Keys, key: str, name: str) -> Statements[tuple[str, str]]:
    row = datasets.first_row(name, keys.source.path.parent)
    blocks = row is None and _of_blocks(keys)
    form = "text" if blocks or (row is not None and "text" in row) else None
    if row is not None and ("messages" in row or "conversations" in row):
        form = "chat"
    if form is not None:
        return form, "run_clm reads rows of text" if blocks else f"from the columns of {name}"
    message = "the format of the data is a guess: the script that reads the data is not among the files"
    help = "set data.format and data.loss_on in the recipe: chat, instruction, prompt_completion or text"
    yield keys.warn(Diagnostic(W1168, message, key, help, keys.source.span(key)))
    return "chat", "not known from the files"


def _limit(run: OfTrainer) -> Says:
    keys = run.keys
    limit = keys.integer("max_train_samples")
    if limit:
        train = keys.ledger.value("data.train", [])
        sources = [rows.with_own(source, {"limit": limit}) for source in train]
        yield keys.say("max_train_samples", {"data.train": sources})


PEFT = "PEFT"


def _lora(run: OfTrainer) -> Says:
    run.learning_rate = run.keys.number("learning_rate") or 0.0
    if (keys := run.adapter) is None:
        yield run.keys.sets("lora", None, "full fine-tuning: there is no adapter_config.json")
        return
    if str(keys.value("peft_type") or "LORA").upper() != "LORA":
        message = f"{keys.value('peft_type')} is not LoRA, and has no counterpart in recipec"
        yield keys.refuse("peft_type", E1149, message, "peft_type: LORA")
    yield from keys.follow(SIZES)
    yield from keys.follow(adapters.KINDS)
    yield from _targets(keys, run.model)
    yield from adapters.say_patterns(keys)
    yield from adapters.say_init(keys, "init_lora_weights", keys.value("init_lora_weights"))
    yield keys.sets("lora.dtype", "float32", "PEFT keeps adapters in float32")
    yield from keys.follow(adapters.FEATURES)
    yield from keys.follow(ADAPTER)
    yield from say_common(keys, "peft", training.OFF)


def _training(run: OfTrainer) -> Says:
    keys = run.keys
    dtype = "dtype" if keys.given("dtype") else "torch_dtype"
    yield from training_arguments.say_run(run, keys, training_arguments.dtype_of(keys, dtype))
    yield from training_arguments.memory(run, keys)
    yield from training_arguments.bookkeeping(keys)


def _targets(keys: Keys, model: Model | None) -> Says:
    spec = keys.texts("target_modules")
    layers = yield from adapters.layers_of(keys)
    parameters = keys.listed("target_parameters")
    exclude = keys.texts("exclude_modules")
    chosen = yield from adapters.say_targets(keys, "target_modules", model, spec, layers, exclude, parameters)
    yield from adapters.say_parameters(keys, "target_parameters", chosen)
    yield from adapters.say_dropout(keys, chosen)
    yield from keys.passive(
        ("layers_to_transform", "exclude_modules"), "part of lora.targets and lora.layers"
    )
    yield keys.unless("layers_pattern", adapters.USUAL, "the decoder's layers are counted")


RULES: Sequence[Rule[OfTrainer]] = (
    _launch,
    training_arguments.placement,
    _model,
    _lora,
    _data,
    _training,
    _limit,
    follow(KEYS),
    common(NAME, off=training.OFF),
)
