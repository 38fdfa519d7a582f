"""oumi's training configs: transformers' and TRL's trainers, and oumi's own loop, in one YAML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.common_keys import say_common
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, keys_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    conversion,
    datasets,
    images,
    losses,
    model_names,
    rows,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.rows import CHAT, Rows
from recipec.port.meaning.run import Run
from recipec.port.meaning.sharding import Launch
from recipec.port.refusals import E1142, E1143, E1145, E1147, E1149, E1150, E1160
from recipec.port.rules import common, follow, mappings

NAME = "oumi"
TITLE = "oumi"
MARKS = words(
    """model.model_name model.model_max_length model.torch_dtype_str data.train.datasets training.trainer_type
    training.enable_gradient_checkpointing training.per_device_train_batch_size training.use_peft
    training.optimizer training.lr_scheduler_type peft.lora_r peft.peft_save_mode peft.q_lora
    fsdp.enable_fsdp deepspeed.enable_deepspeed"""
)
OF_MODEL = table("""
part attn_implementation
derived tokenizer_pad_token text_only
speed shard_for_eval
generation chat_template_kwargs tool_call_parser
lost tokenizer_kwargs={} processor_kwargs={} model_kwargs={}
anew load_pretrained_weights=true
learned adapter_model=null: training starts from new adapters; lora.start_from starts from others
learned freeze_layers=[]
setting adapter_trainable -> adapter_model
""")
OF_TRAINING = table("""
exact use_deterministic: XLA's steps are always deterministic
log enable_mlflow include_alternative_mfu_metrics include_performance_metrics log_examples log_model_summary
    dep_log_level metrics_function profiler telemetry
checkpoints save_epoch save_final_model try_resume_from_last_checkpoint
speed dataloader_main_process_only empty_device_cache_steps
launch nccl_default_timeout_minutes
padding label_ignore_index
method grpo gkd gold reward_functions reward_function_kwargs verl_config_overrides
part lr_scheduler_kwargs
exact sgd_momentum: only sgd reads it
""")
OF_LORA = table("""
integer lora_r -> lora.rank
number lora_alpha -> lora.alpha
lost lora_task_type=CAUSAL_LM
export peft_save_mode
files bnb_4bit_quant_storage llm_int8_skip_modules
part lora_exclude_modules
""")
OF_FSDP = table("""
mesh enable_fsdp sharding_strategy cpu_offload backward_prefetch forward_prefetch use_orig_params
    state_dict_type auto_wrap_policy min_num_params transformer_layer_cls sync_module_states
part mixed_precision
""")
OF_DEEPSPEED = table("""
mesh enable_deepspeed deepspeed_config_path zero_stage offload_optimizer offload_param overlap_comm
    contiguous_gradients reduce_bucket_size allgather_bucket_size allgather_partitions reduce_scatter
    round_robin_gradients stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
    sub_group_size zero_allow_untested_optimizer zero_force_ds_cpu_optimizer activation_checkpointing
    memory_efficient_linear
log steps_per_print wall_clock_breakdown
part precision
lost train_batch_size=auto train_micro_batch_size_per_gpu=auto gradient_accumulation_steps=auto
    gradient_clipping=auto: the keys of training apply
""")
OF_SPLIT = table("""
exact target_col: the columns are those of the data set's own class
part seed mixture_strategy use_torchdata collator_kwargs train_target
exact stream: recipec reads the whole data set first, and shuffles all of it
""")
OF_SOURCE = table("""
part dataset_path subset split shuffle seed shuffle_buffer_size
derived trust_remote_code
speed transform_num_workers
""")

TRAINERS = {"trl_sft": "sft", "trl_dpo": "dpo", "hf": "sft", "oumi": "sft"}
"""The objective of each trainer that has a counterpart."""
INITS: Mapping[str, Any] = {"default": True, "random": False}

SYSTEMS = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.",
)
"""The system messages of oumi's AlpacaDataset, with an input and without."""
ALPACA = conversion.Prompt("{instruction}\n\n### Input:\n{input}", "{instruction}")
PLAIN = conversion.Prompt("{instruction}\n\n{input}", "{instruction}")
CHATS = words(
    """HuggingFaceH4/ultrachat_200k allenai/tulu-3-sft-mixture Magpie-Align/Llama-3-Magpie-Pro-1M-v0.1
    Magpie-Align/Magpie-Pro-300K-Filtered"""
)
"""Data sets whose classes in oumi read conversations as a recipe does."""
PAIRS = {
    "argilla/magpie-ultra-v0.1": ("instruction", "response"),
    "CohereForAI/aya_dataset": ("inputs", "targets"),
    "O1-OPEN/OpenO1-SFT": ("instruction", "output"),
}
TEXTS = words(
    """wikimedia/wikipedia roneneldan/TinyStories allenai/dolma bigcode/starcoderdata Salesforce/wikitext
    HuggingFaceFW/fineweb-edu EleutherAI/pile allenai/c4 nampdn-ai/tiny-textbooks tiiuae/falcon-refinedweb"""
)
OWN = words(
    """nvidia/ChatQA-Training-Data nvidia/ChatRAG-Bench uiuc-convai/CoALM-IT allenai/WildChat-1M
    argilla/databricks-dolly-15k-curated-en tatsu-lab/alpaca_eval trl-lib/tldr openai/gsm8k
    d1shs0ap/countdown text_dpo_jsonl debug_sft debug_dpo debug_pretraining"""
)
"""Data sets whose classes in oumi change a row in ways that no recipe does."""
IMAGES = words("hf_vision vl_sft vision_language_jsonl vision_dpo_jsonl coco_captions mnist_sft")


@dataclass
class Oumi(Run):
    """A run of oumi.

    Attributes:
        trainer: oumi's name of the trainer, in lower case.
        trl: the keys of `training.trainer_kwargs`, which are TRL's.
    """

    trainer: str = "hf"
    trl: Keys = field(init=False)


def opened(ledger: Ledger) -> Oumi:
    """Return the run of a file."""
    keys = Keys(ledger, ledger.sources.main, TITLE)
    usual = {"trainer_type": "HF", "mixed_precision_dtype": "NONE"}
    keys.below("training", {**defaults_of(NAME, "training"), **usual})
    keys.below("model", defaults_of(NAME, "model"))
    keys.below("peft", {**defaults_of(NAME, "peft"), "lora_init_weights": "default"})
    return Oumi(keys, optim="optimizer")


def _objective(run: Oumi) -> Says:
    section = run.section("training")
    run.trainer = kind = str(section.value("trainer_type")).lower()
    if kind not in TRAINERS:
        message = f"oumi's trainer {kind.upper()} has no counterpart: recipes train like TRL_SFT and TRL_DPO"
        yield section.refuse("trainer_type", E1149, message, "training.trainer_type: TRL_SFT")
    whose = "oumi's own loop" if kind == "oumi" else "the training that a recipe describes"
    yield section.same("trainer_type", note=whose)
    run.objective = TRAINERS.get(kind, "sft")
    if run.objective != "sft":
        why = f"training.trainer_type is {kind.upper()}"
        yield run.keys.sets("train.objective", run.objective, why)
    defaults = defaults_of("trl", run.objective)
    run.trl = Keys(run.ledger, run.keys.source, "TRL", defaults, "training.trainer_kwargs.")


def _model(run: Oumi) -> Says:
    keys = run.section("model")
    run.named = yield from model_names.say_model(keys, "model_name", "model_revision")
    yield from model_names.say_flash(keys)
    if (tokenizer := keys.text("tokenizer_name")) is not None:
        yield keys.say("tokenizer_name", {"model.tokenizer": tokenizer})
    yield keys.same("tokenizer_name", note="the model's own")
    template = keys.text("chat_template")
    written = templates.of("oumi", template, run.model)
    if written.known:
        yield keys.say("chat_template", written.sets, written.note)
    elif template not in (None, "auto"):
        if template not in templates.written_by(NAME):
            written = replace(written, note="oumi itself has none of this name")
        message = templates.unknown("oumi's chat template", template, written)
        yield keys.refuse(
            "chat_template", E1147, message, "--set model.chat_template=auto takes the tokenizer's"
        )
    yield keys.same("chat_template", note="the tokenizer's own template")


def _launch(keys: Keys) -> Launch:
    fsdp, deepspeed = keys.below("fsdp"), keys.below("deepspeed")
    launch = Launch().with_(fsdp.flag("enable_fsdp"), deepspeed.flag("enable_deepspeed"))
    precision = fsdp.text("mixed_precision") if launch.fsdp else None
    return replace(launch, mixed_precision=precision)


def _lora(run: Oumi) -> Says:
    keys, section, model = run.section("peft"), run.section("training"), run.model
    run.lora = section.flag("use_peft")
    if not run.lora:
        note = "" if section.given("use_peft") else "full fine-tuning"
        yield section.say("use_peft", {"lora": None}, note)
        yield section.same("use_peft", note="full fine-tuning")
        yield from adapters.refuse_quantized(keys, "q_lora", "training.use_peft: true, or remove peft.q_lora")
        yield from keys.unused(keys_of(NAME, "peft"), "training.use_peft is off")
        return
    yield section.same("use_peft", note="it adds the lora section")
    yield from keys.follow(OF_LORA)
    spec: Any = keys.texts("lora_target_modules")
    spec = "all-linear" if spec == ["all-linear"] else spec
    excluded = "|".join(f"({module})" for module in keys.listed("lora_exclude_modules"))
    parameters = keys.listed("lora_target_parameters")
    run.chosen = yield from adapters.say_targets(
        keys, "lora_target_modules", model, spec, exclude=excluded or None, parameters=parameters
    )
    yield from adapters.say_parameters(keys, "lora_target_parameters", run.chosen)
    start = str(keys.value("lora_init_weights")).lower()
    yield from adapters.say_init(keys, "lora_init_weights", INITS.get(start, start))
    yield from _quantized(keys, model, run.trainer)


def _quantized(keys: Keys, model: Model | None, kind: str) -> Says:
    yield keys.sets("lora.dtype", "float32", "PEFT keeps adapters in float32")
    details = ("q_lora_bits", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_compute_dtype")
    if not keys.flag("q_lora"):
        yield keys.same("q_lora", note="not quantized")
        yield from keys.passive(details, "not quantized")
        return
    bits, code = keys.integer("q_lora_bits"), keys.choice("bnb_4bit_quant_type", ("nf4", "fp4")) or "fp4"
    if bits not in (4, 8):
        yield keys.refuse(
            "q_lora_bits", E1160, f"a base model of {bits} bits, not of 4 or 8", "q_lora_bits: 4"
        )
        bits = 4
    nested = keys.flag("use_bnb_nested_quant")
    quantization = yield from adapters.say_bits(keys, "q_lora", bits, code, nested, model)
    if not keys.given("bnb_4bit_quant_type") and bits == 4:
        yield keys.default(
            "bnb_4bit_quant_type",
            code,
            {"model.quantization": quantization.value},
            f"oumi's default; {quantization.note}",
        )
    if keys.given("bnb_4bit_compute_dtype") and "16" not in str(keys.value("bnb_4bit_compute_dtype")):
        yield keys.say(
            "bnb_4bit_compute_dtype", {}, "recipec computes products of the base model in model.dtype"
        )
    yield from keys.passive(details, "part of model.quantization")
    if kind.startswith("trl"):
        yield keys.sets("lora.dtype", "bfloat16", "TRL trains bfloat16 adapters on a quantized base model")


def _data(run: Oumi) -> Says:
    keys, inner, kind = run.keys, run.trl, run.trainer
    data = keys.below("data")
    yield from data.mappings(("train", "validation", "test"))
    split = data.below("train", defaults_of(NAME, "split"))
    evaluates = yield from training_arguments.evaluation(run.section("training"))
    sources, forms, plain = yield from _sources(split, "data.train", inner, kind)
    held = data.below("validation", defaults_of(NAME, "split"))
    others: tuple[list[Any], list[Rows], str | None] = ([], [], None)
    if evaluates and held.value("datasets"):
        others = yield from _sources(held, "data.eval", inner, kind)
        yield from held.follow(OF_SPLIT)
        yield from held.passive(("collator_name", "pack"), "the same as in data.train")
    else:
        yield from data.unused(("validation",), "the run does not evaluate")
    yield from data.unused(("test",), "the run does not read it")
    form = yield from _form(split, (sources, forms), others[:2])
    if kind == "trl_dpo":
        yield keys.sets("data.format", "preference")
    elif plain and not forms:
        yield from losses.form(inner, "sft", plain, (split, "datasets"))
    yield from _loss(split, inner, str(keys.ledger.value("data.format")), bool(forms))
    yield from _packing(split, inner, form)
    of_tokenizer = keys.below("model").text("chat_template") in (None, "auto")
    if of_tokenizer and run.model is not None and form is not None and form.format == "chat":
        yield from templates.say_own(keys, run.model)
    yield from _length(keys.below("model"), inner, kind, forms, split)
    yield from split.follow(OF_SPLIT)
    if sources:
        yield split.withdraw("datasets")


Read = tuple[list[Any], list[Rows]]


def _form(split: Keys, train: Read, held: Read) -> Statements[Rows | None]:
    """Set the form of the rows. Conversations with different columns are set for each source."""
    (sources, forms_of_train), (others, alike) = train, held
    forms = [*forms_of_train, *alike]
    known = len(forms_of_train) == len(sources) and len(alike) == len(others)
    if rows.alike(forms) or not known or len({form.format for form in forms}) > 1:
        return (yield from rows.say(split, "datasets", forms_of_train))
    separate = yield from rows.apart(split, list(zip([*sources, *others], forms, strict=True)))
    yield from rows.say_sources(split, separate, len(sources))
    return forms_of_train[0]


def _sources(
    split: Keys, path: str, inner: Keys, kind: str
) -> Statements[tuple[list[Any], list[Rows], str | None]]:
    """Return a split's data sets, the forms of their rows, and the first data set that TRL itself reads."""
    entries = split.value("datasets")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        message = f"{split.prefix}datasets is not a list of data sets"
        yield split.refuse("datasets", E1143, message, "datasets: [{dataset_name: OWNER/NAME}]")
        return [], [], None
    sources, forms, plain = [], [], None
    for index in range(len(entries)):
        entry = split.below(f"datasets[{index}]", defaults_of(NAME, "dataset"))
        yield from entry.follow(OF_SOURCE)
        source, what = yield from _source(entry, kind)
        name = entry.text("dataset_name")
        if source is not None:
            sources.append(source)
        if what is not None:
            forms.append(what)
        else:
            plain = plain or name
    if sources:
        yield split.sets(path, sources)
    return sources, forms, plain


def _source(keys: Keys, kind: str) -> Statements[tuple[Any, Rows | None]]:
    name, folder = keys.text("dataset_name"), keys.text("dataset_path")
    inner = keys.below("dataset_kwargs")
    if name in IMAGES or inner.given("processor_name") or inner.given("image_column"):
        message = images.NOT_CARRIED.format(f"`{name}`", TITLE)
        yield keys.refuse("dataset_name", E1150, message, images.AFTERWARDS)
        yield from keys.passive(("dataset_kwargs",), "of the data set")
        return None, None
    where = inner.text("hf_dataset_path") or inner.text("dataset_name_override") or folder or name or ""
    what = yield from _rows(keys, inner, str(name), where, kind)
    place = datasets.place(where) if where else datasets.Place(None, "it has no name")
    if place.path is None:
        yield keys.refuse(
            "dataset_name",
            E1143,
            f"recipec cannot read this source: {place.note}",
            "dataset_name: OWNER/NAME",
        )
        return None, what
    hub = place.path.startswith("hf://")
    split = keys.text("split") if hub and keys.text("split") != "train" else None
    limit = keys.integer("sample_count")
    source = datasets.source(place.path, split, keys.text("subset") if hub else None, limit)
    yield keys.same("dataset_name", note="part of data.train")
    yield keys.same(
        "sample_count",
        note=f"recipec takes the first {limit} rows; oumi takes the first of the shuffled rows if "
        "it shuffles",
    )
    share = keys.number("mixture_proportion")
    if share is not None:
        source = rows.with_own(source, {"weight": share})
        yield keys.say(
            "mixture_proportion", {}, "recipec draws by weights until it has gone through each source"
        )
    yield keys.same("mixture_proportion", note="all rows")
    return source, what


def _rows(keys: Keys, inner: Keys, name: str, where: str, kind: str) -> Statements[Rows | None]:
    """Return what oumi's class for a data set makes of a row, or None if TRL reads the columns."""
    only = inner.flag("assistant_only")
    yield from inner.passive(("hf_dataset_path", "dataset_name_override", "limit"), "part of data.train")
    yield from inner.passive(
        ("assistant_only", "response_template", "instruction_template"), "part of data.loss_on"
    )
    columns: tuple[str, ...] = (
        "messages_column",
        "prompt_column",
        "response_column",
        "include_system_prompt",
        "format",
    )
    what = None
    if name in ("yahma/alpaca-cleaned", "tatsu-lab/alpaca"):
        systems = None if inner.value("include_system_prompt") is False else SYSTEMS
        what = Rows("chat", transform=conversion.alpaca_messages(ALPACA, "oumi's alpaca", systems))
    elif name == "PromptResponseDataset":
        asked, answered = inner.text("prompt_column"), inner.text("response_column")
        what = rows.pairs(asked or "instruction", answered or "output")
    elif name == "HuggingFaceDataset":
        column = inner.text("messages_column") or "messages"
        what = CHAT if column == "messages" else Rows("chat", {"messages": column})
    elif name in ("text_sft", "text_sft_jsonl"):
        row = datasets.first_row(where, keys.source.path.parent) or {}
        plain = inner.text("format") == "alpaca" or "instruction" in row
        transform = conversion.alpaca_messages(PLAIN, "oumi's text_sft")
        what = Rows("chat", transform=transform) if plain else CHAT
    elif name in PAIRS:
        what = rows.pairs(*PAIRS[name])
    elif name in CHATS:
        what = CHAT
    elif name in TEXTS:
        what = Rows("text")
        columns = (*columns, "seq_length", "dataset_text_field")
    elif name in OWN or (kind in ("hf", "oumi") and not keys.given("dataset_path")):
        message = f"recipec cannot convert rows as oumi's class for `{name}` does"
        yield keys.refuse("dataset_name", E1142, message, "write its conversations to a file: text_sft_jsonl")
    yield from inner.passive((*columns, "return_tensors"), "part of data.format")
    if what is not None and only and what.format == "chat":
        yield keys.sets(
            "data.loss_on", "assistant", "assistant_only: the loss covers what the assistant says"
        )
    yield keys.same("dataset_kwargs", note="empty")
    return what


def _losses(run: Oumi) -> Says:
    keys = run.trl
    if run.objective == "dpo":
        yield from keys.follow(losses.OF_ALL)
        if run.lora and keys.flag("disable_dropout"):
            yield keys.say("disable_dropout", {"lora.dropout": 0.0})
            yield run.section("peft").same("lora_dropout", note="disable_dropout sets it to zero")
        yield from losses.dpo(keys)
        yield from keys.follow(losses.OF_PREFERENCES)
    elif run.trainer == "trl_sft":
        yield from losses.supervised(keys)
    if run.lora and "lora.dropout" not in run.ledger.lines:
        yield from adapters.say_dropout(run.section("peft"), run.chosen)


def _loss(split: Keys, inner: Keys, form: str, tokenized: bool) -> Says:
    """State which tokens carry loss: by oumi's collator, or by TRL for rows that it reads itself."""
    name, target = split.text("collator_name") or "", str(split.value("train_target") or "").lower()
    kwargs = split.mapping("collator_kwargs")
    if "vision" in name:
        message = images.NOT_CARRIED.format(f"`{name}`", TITLE)
        yield split.refuse("collator_name", E1150, message, images.AFTERWARDS)
    elif form == "preference":
        yield split.same("collator_name", note="the loss compares the answers of preferences")
    elif "completions_only" in name:
        turns = {"end_of_turn_template", "instruction_template"} & set(kwargs)
        every = "all" in target or (not target and turns)
        yield split.say("collator_name", {"data.loss_on": "assistant" if every else "last_assistant"})
    elif tokenized:
        if "data.loss_on" not in split.ledger.lines:
            yield split.default(
                "collator_name", name or None, {"data.loss_on": "all"}, "oumi's default: every token"
            )
    elif form != "None":
        yield from losses.masks(inner, form)
    yield split.same("collator_name", note="padding alone")
    yield from inner.passive(
        ("assistant_only_loss", "completion_only_loss", "dataset_kwargs"), "the rows are already tokenized"
    )


def _packing(split: Keys, inner: Keys, form: Rows | None) -> Says:
    cut = "a sample in recipec attends only to itself, and is whole or truncated; the tool cuts rows anywhere"
    if split.flag("pack") or (form is not None and form.format == "text"):
        yield split.say("pack", {"data.packing": True}, cut)
        yield split.sets("data.packing", True, cut)
        yield from inner.passive(("packing", "packing_strategy"), "data.train.pack holds")
    elif form is not None:
        yield split.say("pack", {"data.packing": False})
        yield from inner.passive(("packing", "packing_strategy"), "TRL does not pack tokenized rows")
    else:
        yield from losses.packing(inner)
    yield split.same("pack", note="off")


def _length(model: Keys, inner: Keys, kind: str, forms: list[Rows], split: Keys) -> Says:
    """State model_max_length, also for TRL. Without it, max_length applies to rows that TRL reads."""
    if model.given("model_max_length") or forms or not kind.startswith("trl"):
        yield from datasets.length(model, "model_max_length")
        yield from inner.passive(
            ("max_length",), "model_max_length holds" if kind.startswith("trl") else "not read"
        )
    else:
        yield from datasets.length(inner, "max_length")


def _training(run: Oumi) -> Says:
    section, model, kind = run.section("training"), run.section("model"), run.trainer
    mixed = str(section.value("mixed_precision_dtype")).lower()
    section.defaults = {**section.defaults, "bf16": mixed == "bf16", "fp16": mixed == "fp16"}
    dtype = str(model.value("torch_dtype_str"))
    kinds = {"bf16": "bfloat16", "f32": "float32", "float": "float32", "f16": "float16", "half": "float16"}
    dtype = kinds.get(dtype, dtype)
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        yield model.refuse(
            "torch_dtype_str", E1160, f"recipec has no type {dtype}", "torch_dtype_str: bfloat16"
        )
    if mixed in ("bf16", "fp16") and dtype != "float32":
        message = f"mixed precision with weights in {dtype}: oumi requires float32"
        yield section.refuse("mixed_precision_dtype", E1145, message, "torch_dtype_str: float32")
    if section.given("warmup_steps") and section.given("warmup_ratio"):
        message = "warmup_steps and warmup_ratio exclude each other"
        yield section.refuse("warmup_ratio", E1145, message, "keep one of them")
    run.learning_rate = section.number("learning_rate") or 0.0
    run.launch = _launch(run.keys)
    yield from training_arguments.say_run(run, section, dtype)
    computes = run.ledger.value("model.dtype")
    halved = computes == "bfloat16" and dtype == "float16"
    yield model.say("torch_dtype_str", {"model.dtype": computes}, training_arguments.HALF if halved else "")
    yield section.same("mixed_precision_dtype", note="part of model.dtype")
    if section.ledger.value("train.optimizer.name") == "sgd":
        yield section.say("sgd_momentum", {"train.optimizer.momentum": section.number("sgd_momentum") or 0.0})
    if kind == "oumi":
        yield section.sets(
            "train.loss_normalization", "micro_batches", "oumi's loop takes the mean of each micro-batch"
        )
    yield from training_arguments.memory(run, section, "enable_gradient_checkpointing")
    yield section.say("enable_tensorboard", {"train.log.tensorboard": section.flag("enable_tensorboard")})
    if section.flag("enable_wandb"):
        project = "oumi" if kind == "oumi" else "huggingface"
        yield section.say(
            "enable_wandb", {training.PROJECT: project}, f"WANDB_PROJECT, or else `{project}`, as in recipec"
        )
    yield section.same("enable_wandb", note="off")
    if section.given("enable_mlflow") and section.flag("enable_mlflow"):
        yield section.say("enable_mlflow", {training.EXPERIMENT: "Default"}, training.BY_MLFLOW)
    yield from training_arguments.bookkeeping(section)


def _kwargs(run: Oumi) -> Says:
    yield from say_common(run.trl, "trl", training.OFF)
    yield run.section("training").same("trainer_kwargs", note="empty")


RULES: Sequence[Rule[Oumi]] = (
    mappings("model", "data", "training", "peft", "fsdp", "deepspeed"),
    _objective,
    _model,
    _lora,
    _data,
    _losses,
    _training,
    follow(OF_FSDP, "fsdp"),
    follow(OF_DEEPSPEED, "deepspeed"),
    follow(OF_MODEL, "model"),
    follow(OF_TRAINING, "training"),
    follow(adapters.FEATURES, "peft"),
    _kwargs,
    common(NAME, "model", "training", "peft", off=training.OFF),
)
