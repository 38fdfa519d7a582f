"""Hugging Face's Trainer: a TrainingArguments JSON, with PEFT's adapter_config.json beside it.

The JSON may have what transformers' example scripts add: the model, the data set and its lengths.
"""

from __future__ import annotations

from compiler.port import known
from compiler.port.dialects import trainer_adapter, trl_data
from compiler.port.keys import Keys, words
from compiler.port.ledger import Ledger
from compiler.port.meaning import datasets, models, rows, sharding, templates, trainer
from compiler.port.meaning.models import Named
from compiler.port.meaning.sharding import Launch
from compiler.port.meaning.trainer import Run
from spec.diagnostics import Diagnostic

NAME = "trainer"
TITLE = "Trainer"
MARKS = words(
    """per_device_train_batch_size log_level_replica logging_nan_inf_filter skip_memory_metrics local_rank
    dataloader_pin_memory ddp_broadcast_buffers eval_do_concat_batches include_num_input_tokens_seen
    disable_tqdm log_on_each_node logging_first_step per_device_eval_batch_size past_index train_file
    validation_file dataset_config_name block_size preprocessing_num_workers adam_epsilon"""
)


def port(ledger: Ledger) -> None:
    """Says what became of every key."""
    source = ledger.sources.main
    given = {"optim": "adamw_torch_fused", "torch_dtype": "float32", "max_seq_length": None}
    keys = Keys(ledger, source, TITLE, {**known.defaults("trainer", "training_arguments"), **given})
    launch = Launch()
    file = ledger.sources.others.get("accelerate")
    if file is not None:
        launch = sharding.accelerate(ledger, file, trainer.for_deepspeed(keys, ledger.devices or 1))
    launch, taken = trainer.placement(keys, launch)
    file = ledger.sources.others.get("adapter_config")
    adapter = trainer_adapter.read(ledger, file) if file is not None else None
    named = _model(keys, adapter)
    run = Run(adapter is not None, keys.number("learning_rate") or 0.0)
    if adapter is None:
        ledger.set("lora", None, "full fine-tuning: there is no adapter_config.json")
    else:
        trainer_adapter.speak(adapter, named)
    _data(keys, named)
    trainer.batch(keys, launch)
    trainer.length(keys)
    trainer.optimizer(keys, run, taken)
    trainer.schedule(keys, run, taken)
    dtype = keys.choice("torch_dtype", ("auto", "bfloat16", "float16", "float32")) or "float32"
    trainer.precision(keys, run, launch, dtype)
    keys.passive(("torch_dtype",), "with bf16 and fp16 it gives model.dtype")
    trainer.order(keys)
    trainer.memory(keys, launch)
    trainer.bookkeeping(keys)
    _rest(keys)


def _model(keys: Keys, adapter: Keys | None) -> Named | None:
    """The adapter's base, or the example scripts' model_name_or_path."""
    where, key = keys, "model_name_or_path"
    if adapter is not None and adapter.given("base_model_name_or_path") and not keys.given(key):
        where, key = adapter, "base_model_name_or_path"
    name = where.text(key)
    if name is None:
        help = "--set model_name_or_path=Qwen/Qwen3-8B"
        keys.refuse("model_name_or_path", "E1144", "the files name no model", help)
        return None
    named = models.resolve(name, where.source.path.parent)
    if named.model is None:
        where.refuse(key, named.code, named.error, named.help)
    where.say(key, {"model.id": named.id}, named.note)
    for place, revision in ((keys, "model_revision"), (adapter, "revision")):
        if place is not None and place.text(revision) not in (None, "main"):
            place.same(revision, {"model.revision": place.text(revision)})
    attention = keys.text("attn_implementation")
    if attention is not None and "flash" in attention:
        keys.same("attn_implementation", {"model.attention": "splash"}, "the TPU's fused kernel")
    return named


def _data(keys: Keys, named: Named | None) -> None:
    evaluates = trainer.evaluation(keys)
    name = keys.text("train_file") or keys.text("dataset_name")
    key = "train_file" if keys.given("train_file") else "dataset_name"
    place = datasets.place(name) if name is not None else None
    if place is None or place.path is None:
        help = "--set dataset_name=OWNER/NAME, or --set train_file=data/train.jsonl"
        message = (
            place.note if place is not None else "the files name no data set: a script of their own reads it"
        )
        keys.refuse(key, "E1143", message, help)
    else:
        config = keys.text("dataset_config_name")
        keys.say(key, {"data.train": [datasets.source(place.path, config=config)]})
        form = _format(keys, key, str(name))
        keys.ledger.set("data.format", form[0], form[1])
        if form[0] == "chat" and named is not None and named.model is not None:
            own = templates.own(named.model)
            for target, value in own.sets.items():
                keys.ledger.set(target, value, own.note)
    if evaluates and (held := keys.text("validation_file")):
        keys.say("validation_file", {"data.eval": [held]})
    share = keys.number("validation_split_percentage")
    if evaluates and not keys.given("validation_file") and share:
        keys.say(
            "validation_split_percentage", {"data.eval_fraction": share / 100}, "other rows of the same share"
        )
    keys.passive(
        ("dataset_config_name", "validation_file", "validation_split_percentage"), "the run does not evaluate"
    )
    key = next(
        (name for name in ("max_seq_length", "block_size", "max_length") if keys.given(name)),
        "max_seq_length",
    )
    trl_data.length(keys, key)
    keys.ledger.set("data.packing", False, "the Trainer packs no samples of itself")


def _format(keys: Keys, key: str, name: str) -> tuple[str, str]:
    row = rows.first(name, keys.source.path.parent)
    made = "text" if row is not None and "text" in row else None
    if row is not None and ("messages" in row or "conversations" in row):
        made = "chat"
    if made is not None:
        return made, f"by the columns of {name}"
    message = "the format of the data is a guess: the script that reads it is not among the files"
    help = "set data.format and data.loss_on in the recipe: chat, instruction, prompt_completion or text"
    keys.ledger.diagnostics.append(Diagnostic("W1168", message, key, help, keys.source.span(key)))
    return "chat", "not known from the files"


def _rest(keys: Keys) -> None:
    """What transformers' example scripts read beside TrainingArguments."""
    keys.passive(
        sorted(
            words(
                "config_name tokenizer_name cache_dir use_fast_tokenizer token use_auth_token model_revision"
            )
        ),
        "the model's own config and tokenizer",
    )
    keys.passive(
        sorted(
            words("preprocessing_num_workers overwrite_cache streaming trust_remote_code low_cpu_mem_usage")
        ),
        "how files are read, not what they hold",
    )
    keys.passive(("attn_implementation",), "the same attention, without a fused kernel")
    limit = keys.integer("max_train_samples")
    if limit:
        train = [_limited(entry, limit) for entry in keys.ledger.value("data.train", [])]
        keys.say("max_train_samples", {"data.train": train})
    keys.passive(("max_train_samples", "max_eval_samples"), "of the evaluation, or no limit")
    keys.passive(("keep_linebreaks",), "line breaks are kept")


def _limited(entry: object, limit: int) -> object:
    return {**(entry if isinstance(entry, dict) else {"path": entry}), "limit": limit}
