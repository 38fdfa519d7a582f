"""NeMo AutoModel's finetuning of language models: YAML with a section for each object that is built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from recipec.compiler.catalog import Model
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, pretraining, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    conversion,
    datasets,
    experts,
    model_names,
    rounding,
    rows,
    sharding,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.model_names import Named
from recipec.port.meaning.rows import Rows
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1143, E1144, E1145, E1149, E1150, E1163, E1180
from recipec.port.rules import common, directory, follow, mappings

NAME = "automodel"
TITLE = "NeMo AutoModel"
MARKS = words(
    """step_scheduler.global_batch_size step_scheduler.local_batch_size dist_env packed_sequence
    loss_fn._target_ distributed.strategy distributed.tp_size model.pretrained_model_name_or_path
    model._target_ checkpoint.model_save_format dataset._target_ optimizer._target_ peft._target_
    rng._target_ lr_scheduler.lr_decay_style"""
)
KEYS = table("""
launch dist_env ci slurm skypilot nemo_run
checkpoints checkpoint auto_resume
log wandb mlflow comet benchmark profiling
speed compile te_fp8
evaluation validation_dataloader
part dataloader
exact rng: the seed of the run
exact recipe: fine-tuning on the next token
lost fp8.enabled=false
setting fp8.recipe_name fp8.filter_fqns fp8.emulate fp8.enable_fsdp_float8_all_gather
    fp8.precompute_float8_dynamic_scale_for_fsdp fp8.force_recompute_fp8_weight_in_bwd -> fp8.enabled
learned teacher_model kd_loss_fn=null
""")
OF_MODEL = table("""
kernels backend use_liger_kernel
part attn_implementation
derived trust_remote_code force_hf
files cache_dir
speed use_cache low_cpu_mem_usage output_hidden_states
exact load_base_model: from_pretrained always loads the published weights
""")
OF_CONFIG = table("""
kernels attn_implementation _attn_implementation attn_implementation_new
derived trust_remote_code
exact _target_: the class that reads config.json
files cache_dir
speed use_cache output_hidden_states
""")
"""Keys of model.config that leave the model as it is published."""
OF_STEPS = table("""
count ckpt_every_steps -> checkpoint.every_steps
exact ckpt_every_steps val_every_steps max_steps: the same as without the key
speed gc_every_steps
log log_remote_every_steps loss_average_window_steps
checkpoints save_checkpoint_every_epoch preemption_signal
evaluation validate_on_checkpoint
exact start_step start_epoch: training starts at the first step
""")
OF_LORA = table("""
integer dim -> lora.rank
number alpha -> lora.alpha
switch use_dora -> lora.kind=dora
kernels use_triton use_memory_efficient_lora
learned moe_rank_scaling=false
lost expert_weight_format=unquantized: recipec keeps experts in model.dtype
""")
OF_QUANTIZED = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype")
OF_SCHEDULE = table("""
checkpoints use_checkpoint_opt_param_scheduler override_opt_param_scheduler
lost start_wd=null end_wd=null wd_incr_steps=null wd_incr_style=constant lr_decay_steps=null
    wsd_decay_steps=null lr_wsd_decay_style=null
""")
OF_DATA = table("""
part split name limit_dataset_samples num_samples_limit seq_length truncation mask_history
    answer_only_loss_mask use_hf_chat_template column_mapping path_or_dataset path_or_dataset_id dataset_name
padding padding pad_to_max_length
derived tokenizer
files fp8 start_of_turn_token unshifted shuffle_seed skip_invalid_samples
lost mask_reasoning_content=false mask_generation_prompt=false
""")

WILD = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
DROPPED = "recipec applies dropout to an adapter's input; NeMo AutoModel to its output"
NORMAL = "recipec starts A uniform; NeMo AutoModel starts it with xavier_normal_"

COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
PREDICTIONS = (*COUNTS, "mtp_use_repeated_layer", "mtp_loss_scaling_factor")
PREDICTED = ("nemotron_h", "qwen3_5", "qwen3_5_moe")
"""Families here for which NeMo AutoModel has layers that predict further tokens."""
PREDICTING = re.compile(r"Qwen3\.[56]-|Nemotron-3(\.5-Lightning|-Super|-Ultra)-")
"""Ids of the catalog's models whose config.json counts such layers."""

SQUAD_ROWS = '''"""Rows of SQuAD as NeMo AutoModel asks them."""


def convert(row):
    """A row of `context`, `question` and `answers`."""
    asked = f"Context: {row['context']} Question: {row['question']} Answer: "
    answers = row["answers"]["text"]
    return {"MADE_prompt": asked, "MADE_answer": answers[0].strip() if answers else ""}
'''

HELLASWAG_ROWS = '''"""Rows of HellaSwag: a beginning, and the ending that is right."""


def convert(row):
    """A row of `ctx`, `endings` and `label`."""
    return {"prompt": row["ctx"], "completion": row["endings"][int(row["label"])]}
'''


def opened(ledger: Ledger) -> Run:
    """Return the run of a file."""
    keys = Keys(ledger, ledger.sources.main, TITLE)
    keys.below("model", {"torch_dtype": "auto"})
    keys.below("peft", defaults_of(NAME, "peft"))
    keys.below("step_scheduler", {**defaults_of(NAME, "step_scheduler"), "global_batch_size": 32})
    keys.below("clip_grad_norm", {"max_norm": 1.0})
    keys.below("lr_scheduler", defaults_of(NAME, "lr_scheduler"))
    keys.below("packed_sequence", {"packed_sequence_size": 0})
    return Run(keys, lora=keys.given("peft"))


def _recipe(run: Run) -> Says:
    keys = run.keys
    kind = str(keys.source.get("recipe._target_", str(keys.value("recipe") or "")))
    if kind and not kind.endswith("TrainFinetuneRecipeForNextTokenPrediction"):
        name = kind.rpartition(".")[2]
        message = f"the recipe {name} has no counterpart: recipec fine-tunes language models"
        yield keys.refuse("recipe", E1149, message, "recipe: TrainFinetuneRecipeForNextTokenPrediction")


SCALES = "recipec's scales are float32; NeMo AutoModel's are bfloat16, and change a few codes"


def _qat(run: Run) -> Says:
    """State quantization-aware training, which rounds every torch.nn.Linear of the model."""
    keys = run.keys
    section = keys.below("qat")
    if not section.flag("enabled"):
        yield from keys.passive(("qat",), "off")
        return
    key = "qat_config" if section.given("qat_config") else "quantizer"
    settings = section.below(key, {"quantizer_type": "int8_dynact_int4weight"})
    kind = settings.text("quantizer_type")
    if run.lora:
        yield section.refuse(
            "enabled", E1145, "NeMo AutoModel stops at qat with peft", "qat: {enabled: false}"
        )
        return
    if not section.given(key) or kind != "int8_dynact_int4weight":
        other = kind if section.given(key) else "a missing qat_config"
        note = f"recipec rounds as int8_dynact_int4weight does, not as {other}"
        yield keys.learned("qat", (), note)
        return
    yield section.same("enabled")
    # The fused loss reads the head's weight, and does not round it.
    head = "FusedLinear" not in str(keys.source.get("loss_fn._target_", ""))
    yield settings.say("quantizer_type", rounding.rounds(head, rounding.SYMMETRIC), SCALES)
    yield settings.same("_target_", note="the class of the settings")
    yield from rounding.say_group(settings, "groupsize", 256)
    yield from settings.passive(("precision",), "the type of the model")
    yield from settings.passive(("padding_allowed",), "all inputs are whole groups")
    yield settings.same("scales_precision", note="part of quantizer_type")
    yield from rounding.say_later(section, from_zero=True)


def _model(run: Run) -> Says:
    """State which model is trained."""
    keys, quantization = run.section("model"), run.section("quantization")
    quantized = quantization.flag("load_in_4bit") or quantization.flag("load_in_8bit")
    target = str(keys.value("_target_") or "NeMoAutoModelForCausalLM.from_pretrained")
    kind, _, method = target.rpartition(".")
    if not kind.endswith("NeMoAutoModelForCausalLM") or method not in ("from_pretrained", "from_config"):
        code = E1150 if "Image" in kind or "Multimodal" in kind else E1149
        message = f"{kind.rpartition('.')[2]} has no counterpart: recipec trains language models"
        yield keys.refuse("_target_", code, message, "NeMoAutoModelForCausalLM.from_pretrained")
    elif method == "from_config" and (anew := _anew(keys)):
        yield keys.refuse("_target_", *pretraining(anew))
    yield keys.same("_target_", note="a language model of the Hugging Face Hub")
    yield from model_names.say_flash(keys)
    if method == "from_config":
        run.named = named = yield from _configured(keys)
    else:
        run.named = named = yield from model_names.say_model(
            keys, "pretrained_model_name_or_path", "revision"
        )
        yield from _config(keys, "config", named, keys.text("pretrained_model_name_or_path"))
    yield from _config(keys, "text_config", named)
    if not keys.flag("force_hf") and not quantized:
        yield from _predictions(keys, run.model)
    for section in (keys, keys.below("config"), keys.below("text_config")):
        yield from section.passive(PREDICTIONS, "no loss of layers that predict further tokens is added")


def _base(keys: Keys) -> tuple[str, str] | None:
    """Return the key below model and the name of the checkpoint that from_config can load, None for none."""
    config = keys.value("config")
    if isinstance(config, str):
        return "config", config
    if not isinstance(config, dict):
        return None
    auto = str(config.get("_target_", "")).endswith("AutoConfig.from_pretrained")
    for key in ("name_or_path", *(("pretrained_model_name_or_path",) if auto else ())):
        if isinstance(name := config.get(key), str) and name:
            return f"config.{key}", name
    return None


def _anew(keys: Keys) -> str:
    """Return the help for a from_config that starts from new weights, "" if it loads a checkpoint."""
    if (base := _base(keys)) is None:
        return (
            "model: {_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, "
            "pretrained_model_name_or_path: OWNER/NAME}"
        )
    return "" if keys.flag("load_base_model") else f"--set model.load_base_model=true starts from {base[1]}"


def _configured(keys: Keys) -> Statements[Named | None]:
    """State the model of from_config: its name is below model.config."""
    base = _base(keys)
    if base is None:
        yield from keys.passive(("config", "load_base_model"), "the sizes of a model with new weights")
        return None
    key, name = base
    section, _, last = key.rpartition(".")
    place = keys.below(section) if section else keys
    named = yield from model_names.say_model(place, last, "revision")
    yield keys.same("load_base_model", note="whether the published weights are loaded")
    yield from _config(keys, "config", named, name)
    return named


def _config(keys: Keys, name: str, named: Named | None, weights: str | None = None) -> Says:
    """State the keys of config.json that a section replaces: recipec keeps the published ones."""
    overrides = keys.value(name)
    if not isinstance(overrides, dict):
        yield keys.learned(name, (), "recipec uses config.json unchanged")
        return
    section = keys.below(name)
    yield from section.follow(OF_CONFIG)
    for key in ("pretrained_model_name_or_path", "name_or_path"):
        if section.value(key) != weights:
            yield section.learned(
                key, (), f"NeMo AutoModel loads the weights of {weights} into another model"
            )
        yield section.same(key, note="the model's name")
    published = named.model.config if named and named.model else {}
    inner = published.get("text_config") or {}
    for key in overrides:
        if key not in PREDICTIONS:
            idle = [config[key] for config in (inner, published) if key in config][:1]
            yield section.learned(key, idle, "recipec uses config.json unchanged")


def _predictions(keys: Keys, model: Model | None) -> Says:
    """Refuse layers that predict further tokens, where NeMo AutoModel trains them.

    Their loss is added to that of the next token, and its gradients reach all layers of the model, the
    embedding and the output head. NeMo AutoModel has such layers for the families of PREDICTED alone.
    """
    if model is not None and model.family.name not in PREDICTED:
        return
    places = [keys, *(keys.below(name) for name in ("config", "text_config") if keys.mapping(name))]
    counted = next(((section, key) for section in places for key in COUNTS if section.given(key)), None)
    count = counted[0].integer(counted[1]) if counted else int(model is not None and _predicts(model))
    if not count or keys.number("mtp_loss_scaling_factor") == 0:
        return
    place, key = counted or (keys, COUNTS[0])
    message = (
        f"`{place.prefix}{key}` changes what is learned: NeMo AutoModel adds the loss of layers that predict "
        "further tokens, which trains the whole model; recipec's loss is only that of the next token"
    )
    yield place.refuse(key, E1180, message, f"--set {place.prefix}{key}=0 ports the run without these layers")


def _predicts(model: Model) -> bool:
    """Return whether the published model has layers that predict further tokens."""
    if model.origin == "catalog":
        return bool(PREDICTING.search(model.id))
    config = model.config.get("text_config") or model.config
    return any(config.get(key) for key in COUNTS)


def _pattern(entries: list[str]) -> str:
    """Convert AutoModel's wildcards to a regular expression for full names."""
    parts = [
        re.escape(entry).replace(r"\*", ".*") if "*" in entry else rf"(.*\.)?{re.escape(entry)}"
        for entry in entries
    ]
    return "|".join(f"({part})" for part in parts)


def _linear(model: Model | None) -> str:
    """Return what matches every linear layer, with the output head: NeMo AutoModel leaves no layer out."""
    if model is None or experts.has_experts(model):
        return "all-linear"
    return rf"(?!(.*\.)?{re.escape(model.family.names.embedding)}$).*"


def _lora(run: Run) -> Says:
    keys, peft, quantized, model = run.keys, run.section("peft"), run.section("quantization"), run.model
    bits = 4 if quantized.flag("load_in_4bit") else 8 if quantized.flag("load_in_8bit") else None
    key = "load_in_4bit" if bits == 4 else "load_in_8bit"
    if not run.lora:
        yield keys.sets("lora", None, "full fine-tuning: the file has no peft section")
        yield from adapters.refuse_quantized(quantized, key, "add peft, or remove quantization")
    else:
        yield peft.same("_target_", note="it adds the lora section")
        yield from peft.follow(OF_LORA)
        targets, exclude = peft.listed("target_modules"), peft.listed("exclude_modules")
        every = peft.flag("match_all_linear") or (exclude and not targets)
        name = (
            "match_all_linear"
            if peft.flag("match_all_linear")
            else "exclude_modules"
            if every
            else "target_modules"
        )
        if not every and not targets:
            peft.defaults = {**peft.defaults, "target_modules": "*_proj"}
        spec = _linear(model) if every else _pattern(targets or ["*_proj"])
        without = _pattern(exclude) if exclude else None
        chosen = yield from adapters.say_targets(peft, name, model, spec, exclude=without)
        yield from peft.passive(
            ("target_modules", "exclude_modules", "match_all_linear"), "part of lora.targets"
        )
        dropout = peft.number("dropout") or 0.0
        after = dropout and str(peft.value("dropout_position")) == "post"
        yield peft.say("dropout", {"lora.dropout": dropout}, DROPPED if after else "")
        yield peft.same("dropout_position", note="where dropout is applied")
        uniform = str(peft.value("lora_A_init")) != "xavier"
        yield peft.say("lora_A_init", {"lora.init": "peft"}, "" if uniform else NORMAL)
        dtype = str(peft.value("lora_dtype") or "bfloat16").removeprefix("torch.")
        yield peft.say("lora_dtype", {"lora.dtype": "float32" if dtype == "float32" else "bfloat16"})
        yield keys.sets(
            "lora.dtype",
            "float32" if dtype == "float32" else "bfloat16",
            "the base model's type, as in the tool",
        )
        if bits is not None and chosen is not None:
            code = str(quantized.value("bnb_4bit_quant_type") or "fp4")
            nested = quantized.flag("bnb_4bit_use_double_quant")
            yield from adapters.say_bits(quantized, key, bits, code, nested, model)
    yield from quantized.passive(
        (*OF_QUANTIZED, "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_storage"),
        "part of model.quantization",
    )


CUTS = (True, "longest_first", "only_first")
"""The values of `truncation` at which samples are truncated to seq_length."""


def _data(run: Run) -> Says:
    keys, named = run.keys, run.named
    section = keys.below("dataset")
    what = yield from _rows(section, named)
    if what is not None and (source := (yield from _source(section))) is not None:
        yield keys.sets("data.train", [source])
    yield from rows.say(section, "_target_", [what] if what is not None else [])
    yield section.same("_target_", note="it affects how rows are read")
    if what is not None and keys.given("step_scheduler") and keys.value("validation_dataset"):
        held = keys.below("validation_dataset")
        if (
            held.value("_target_") == section.value("_target_")
            and (source := (yield from _source(held))) is not None
        ):
            yield keys.sets("data.eval", [source])
        yield from held.follow(OF_DATA)
        yield from held.passive(
            ("_target_", "chat_template", "column_mapping", "answer_only_loss_mask"), "the same as in dataset"
        )
        yield from held.passive(("mask_history", "use_hf_chat_template"), "the same as in dataset")
    packed = keys.below("packed_sequence")
    size = packed.integer("packed_sequence_size") or 0
    yield packed.say("packed_sequence_size", {"data.packing": size > 0})
    if size:
        neat = packed.value("packing_strategy") == "neat"
        stops = neat and packed.given("drop_long_samples") and not packed.flag("drop_long_samples")
        sets = {"data.max_length": size, "data.overlong": "error" if stops else "drop"}
        yield packed.say("packed_sequence_size", sets)
        cut = section.integer("seq_length") if section.value("truncation") in CUTS else None
        if cut == size:
            yield section.same("seq_length", {"data.overlong": "truncate"}, "samples are truncated to a row")
        elif cut and cut < size:
            yield section.unless("seq_length", (), f"recipec truncates no sample of a row of {size} tokens")
        yield section.same("seq_length", note="the length of a row is packed_sequence_size")
    elif section.value("truncation") in CUTS:
        yield from datasets.length(section, "seq_length")
    else:
        sets = {
            "data.max_length": section.integer("seq_length") or datasets.unlimited(section),
            "data.overlong": "error",
        }
        yield section.default(
            "truncation", False, sets, "NeMo AutoModel truncates nothing; recipec stops at a longer sample"
        )
    yield from packed.passive(
        ("split_across_pack", "max_packs", "packing_strategy", "drop_long_samples"),
        "it affects how samples fill a row",
    )
    yield from section.follow(OF_DATA)
    shuffle = keys.source.get("dataloader.shuffle", True)
    yield keys.sets("data.shuffle_seed", _seed_of(keys) if shuffle else None)


def _source(keys: Keys) -> Statements[Any]:
    name = next(
        (k for k in ("path_or_dataset_id", "path_or_dataset", "dataset_name") if keys.given(k)),
        "dataset_name",
    )
    text = keys.text(name) or ("squad" if "squad" in str(keys.value("_target_")) else None)
    place = datasets.place(text) if text else datasets.Place(None, "it has no name")
    if place.path is None:
        yield keys.refuse(
            name, E1143, f"recipec cannot read this source: {place.note}", f"{name}: OWNER/NAME"
        )
        return None
    hub = place.path.startswith("hf://")
    split = keys.text("split") if hub else None
    limits = ("limit_dataset_samples", "num_samples_limit")
    limit = next((keys.integer(key) for key in limits if keys.given(key)), None)
    yield keys.same(name, note="part of data.train")
    return datasets.source(
        place.path, split if split != "train" else None, keys.text("name") if hub else None, limit
    )


def _rows(keys: Keys, named: Named | None) -> Statements[Rows | None]:
    """Return what a class of data sets makes of a row, or None after an error."""
    kind = str(keys.value("_target_") or "").rpartition(".")[2]
    model = named.model if named else None
    chats = model is None or model.chat is not False or keys.given("chat_template")
    template = keys.text("chat_template")
    yield keys.same(
        "chat_template", {"data.chat_template": template} if template else None, "the tokenizer's own"
    )
    if kind == "ChatDataset":
        last = keys.flag("mask_history")
        yield keys.say("mask_history", {"data.loss_on": "last_assistant" if last else "assistant"})
        yield keys.sets(
            "data.loss_on", "last_assistant" if last else "assistant", "the loss covers the assistant's turns"
        )
        if model is not None and not template:
            yield from templates.say_own(keys, model)
        return Rows("chat")
    whole = keys.value("answer_only_loss_mask") is False
    if kind == "make_squad_dataset":
        text = SQUAD_ROWS.replace("MADE_prompt", "instruction" if chats else "prompt")
        text = text.replace("MADE_answer", "output" if chats else "completion")
        yield keys.sets("data.loss_on", "completion", "the loss covers only the answer")
        return Rows("instruction" if chats else "prompt_completion", transform=text)
    if kind == "HellaSwag":
        yield keys.sets("data.loss_on", "completion", "the loss covers only the ending")
        note = "recipec also trains on the end-of-text token after the ending"
        return Rows("prompt_completion", transform=HELLASWAG_ROWS, note=note)
    mapping = keys.mapping("column_mapping")
    if kind == "ColumnMappedTextInstructionDataset" and isinstance(mapping.get("answer"), str):
        yield keys.same("column_mapping", note="part of data.transform")
        yield keys.say("answer_only_loss_mask", {"data.loss_on": "all" if whole else "completion"})
        yield keys.sets("data.loss_on", "all" if whole else "completion", "the loss covers the answer")
        asked, context = mapping.get("question"), mapping.get("context")
        named_by = [str(column) for column in (context, asked) if column]
        if keys.flag("use_hf_chat_template"):
            yield keys.same("use_hf_chat_template", note="the tokenizer's own template")
            fields = {"instruction": str(asked or context), "output": str(mapping["answer"])}
            return Rows("instruction", {**fields, **({"system": str(context)} if context and asked else {})})
        yield keys.same("use_hf_chat_template", note="off")
        return Rows("prompt_completion", transform=conversion.spaced(named_by, str(mapping["answer"])))
    message = f"recipec does not know the data set type `{kind or 'no _target_'}`"
    help = "ChatDataset, ColumnMappedTextInstructionDataset or make_squad_dataset"
    yield keys.refuse("_target_", E1143, message, help)
    yield from keys.passive(
        ("column_mapping", "path_or_dataset", "path_or_dataset_id", "dataset_name"),
        "a setting of a source that recipec does not read",
    )
    return None


def _steps(run: Run) -> Says:
    keys = run.section("step_scheduler")
    total, local = keys.integer("global_batch_size"), keys.integer("local_batch_size") or 1
    yield keys.say("global_batch_size", {"train.global_batch_size": total or local})
    yield keys.say("local_batch_size", {"train.micro_batch_size": local})
    yield keys.sets(
        "train.loss_normalization", "tokens", "NeMo AutoModel takes the mean over all tokens of a step"
    )
    epochs = keys.integer("num_epochs")
    note = f"NeMo AutoModel ends the run after num_epochs: {epochs} if that is sooner" if epochs else ""
    if not (yield from training.say_steps(keys, "max_steps", note, "num_epochs")):
        yield keys.default("num_epochs", epochs or 10, {"train.epochs": epochs or 10})
    if keys.given("val_every_steps") and (every := keys.integer("val_every_steps")):
        sets = {"train.eval_every": every} if run.ledger.value("data.eval") else None
        yield keys.same("val_every_steps", sets)


def _optimizer(run: Run) -> Says:
    optimizer = run.section("optimizer")
    name = optimizer.text("_target_")
    if name is None:
        yield optimizer.refuse("_target_", E1144, "the file has no optimizer", "_target_: torch.optim.AdamW")
    yield from training.say_torch_optimizer(optimizer, name or "torch.optim.AdamW", optimizer, "_target_")


def _schedule(run: Run) -> Says:
    keys, section, rate = run.keys, run.section("lr_scheduler"), run.section("optimizer").number("lr") or 0.0
    if not keys.given("lr_scheduler"):
        yield keys.same("lr_scheduler", note="null: the same as without the key")
        sets = {"train.schedule.name": "constant", "train.schedule.warmup_steps": 0}
        yield keys.defaulted("lr_scheduler", None, sets, f"{TITLE}'s default: a constant learning rate")
        return
    yield section.same("_target_", note="the schedule")
    style = str(section.value("lr_decay_style"))
    if style.lower() not in WILD:
        yield section.refuse(
            "lr_decay_style", E1163, f"recipec has no schedule {style}", "lr_decay_style: cosine"
        )
    yield section.say("lr_decay_style", {"train.schedule.name": WILD.get(style.lower(), "cosine")})
    least = section.number("min_lr")
    ratio = 0.01 if least is None or not rate else round(min(least / rate, 1.0), 12)
    if style.lower() != "constant":
        yield section.default("min_lr", "a hundredth", {"train.schedule.min_lr_ratio": ratio})
    yield section.same("min_lr", note="the learning rate does not decay")
    steps = section.integer("lr_warmup_steps")
    start = "NeMo AutoModel's warm-up starts at a tenth of the peak; recipec's starts at zero"
    if steps is None:
        sets = {"train.schedule.warmup_ratio": 0.1}
        yield section.default(
            "lr_warmup_steps", "a tenth of the run", sets, f"{TITLE}'s default, at most 1000; {start}"
        )
    else:
        zero = steps == 0 or section.value("init_lr") == 0
        yield section.say("lr_warmup_steps", {"train.schedule.warmup_steps": steps}, "" if zero else start)
    yield section.same("init_lr", note="where the warm-up starts")
    yield section.unless("max_lr", (rate,), "optimizer.lr is the peak")
    yield from section.follow(OF_SCHEDULE)


def _dtype(run: Run) -> Says:
    keys = run.section("model")
    name = "torch_dtype" if not keys.given("dtype") else "dtype"
    stored = str(keys.value(name)).removeprefix("torch.")
    dtype = "float32" if stored == "float32" else "bfloat16"
    yield keys.say(name, {"model.dtype": dtype}, training_arguments.HALF if stored == "float16" else "")
    yield keys.sets("model.dtype", dtype)


def _copies(run: Run) -> Says:
    """State whether the optimizer keeps the trained weights more precisely than the model does."""
    keys, ledger, lora = run.section("optimizer"), run.ledger, run.lora
    names = ("master_weights", "master_weight_bits")
    name = next((key for key in names if keys.value(key)), None)
    half = ledger.value("lora.dtype" if lora else "model.dtype") == "bfloat16"
    if half and name is not None and lora:
        note = "recipec keeps adapters in float32; NeMo AutoModel only their copy in the optimizer"
        yield keys.say(name, {"lora.dtype": "float32"}, note)
    elif half and name is not None:
        bits = keys.integer("master_weight_bits") or 32
        note = "" if bits == 32 else f"recipec's master copy of the weights has 32 bits, not {bits}"
        yield keys.say(name, {"train.optimizer.master_weights": True}, note)
    elif half and not lora:
        why = "the weights are trained directly in bfloat16, as in the tool"
        yield keys.sets("train.optimizer.master_weights", False, why)
    yield from keys.passive(names, "the optimizer has no master copy of the weights")
    yield keys.unless(
        "master_weight_dtype", (None, "float32", "torch.float32"), "recipec's master copy is float32"
    )


def _seed_of(keys: Keys) -> int:
    seed = keys.integer("seed") if keys.given("seed") else keys.source.get("rng.seed", 42)
    return seed if isinstance(seed, int) else 42


def _seed(run: Run) -> Says:
    yield run.keys.same("seed", note=training_arguments.SEED)
    yield run.keys.sets("train.seed", _seed_of(run.keys))


def _memory(run: Run) -> Says:
    section = run.section("distributed")
    policy = "decoder" if section.flag("activation_checkpointing") else "none"
    yield section.say("activation_checkpointing", {"remat.policy": policy})
    yield run.keys.same("distributed", note=sharding.MESH)


def _loss(run: Run) -> Says:
    loss = str(run.keys.source.get("loss_fn._target_", ""))
    if loss and "CrossEntropy" not in loss:
        message = f"the loss {loss.rpartition('.')[2]} has no counterpart in recipec"
        yield run.section("loss_fn").refuse("_target_", E1163, message, "MaskedCrossEntropy")
    yield run.keys.same("loss_fn", note="next-token cross-entropy, as in recipec")


RULES: Sequence[Rule[Run]] = (
    mappings("model", "peft", "step_scheduler", "optimizer", "lr_scheduler", "dataset", "distributed"),
    mappings("packed_sequence", "loss_fn", "quantization", "clip_grad_norm"),
    _recipe,
    _model,
    _lora,
    _data,
    _steps,
    follow(OF_STEPS, "step_scheduler"),
    _optimizer,
    follow("positive max_norm -> train.optimizer.max_grad_norm", "clip_grad_norm"),
    _schedule,
    _qat,
    _dtype,
    _copies,
    follow(OF_MODEL, "model"),
    _seed,
    _memory,
    _loss,
    directory("checkpoint_dir", "checkpoint"),
    follow(KEYS),
    common(NAME, "model", "peft", off=training.OFF),
)
