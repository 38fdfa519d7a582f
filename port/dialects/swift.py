"""ms-swift's sft and rlhf: the YAML or JSON of its arguments, or a checkpoint's args.json."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.catalog import Model, entries
from recipec.compiler.wording import listing
from recipec.port.common_keys import say_start
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import Keys, defaults_of, keys_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    conversion,
    datasets,
    losses,
    model_names,
    rows,
    sharding,
    templates,
    training,
    training_arguments,
)
from recipec.port.meaning.model_names import Named
from recipec.port.meaning.rows import Rows
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1142, E1143, E1146, E1147, E1149, E1160, E1180
from recipec.port.rules import balance, common, follow, passive, tokens
from recipec.port.tool_names import known
from recipec.runtime.training.objectives import OBJECTIVES

NAME = "swift"
TITLE = "ms-swift"
MARKS = words(
    """tuner_type train_type tuner_backend split_dataset_ratio model_author rlhf_type adapters attn_impl
    agent_template loss_scale custom_dataset_info custom_register_path external_plugins val_dataset
    lazy_tokenize quant_bits quant_method target_regex use_hf dataset_shuffle truncation_strategy
    packing_length freeze_vit freeze_aligner freeze_llm lora_dtype init_weights global_world_size
    local_world_size model_suffix norm_bbox use_chat_template vit_lr aligner_lr rpo_alpha torch_dtype
    lorap_lr_ratio bnb_4bit_use_double_quant train_dataloader_shuffle add_version task_type"""
)
KEYS = table("""
derived use_swift_lora disable_auto_column_mapping model_type task_type model_suffix model_info model_meta
    model_dir ckpt_dir swift_version hub rank local_world_size training_args mcore_model experts_impl
    local_repo_path check_model num_labels problem_type
files add_version create_checkpoint_symlink load_args load_data_args load_from_cache_file dataset_num_proc
    download_mode lazy_tokenize packing_num_proc strict hub_token safe_serialization max_shard_size
    ignore_args_error
speed device_groups use_ray max_memory vit_gradient_checkpointing use_logits_to_keep
    dataloader_multiprocessing_context zero_hpz_partition_size enable_npu_model_patch
log acc_strategy eval_metric metric swanlab_token swanlab_exp_name swanlab_notification_method
    swanlab_webhook_url swanlab_secret swanlab_sender_email swanlab_receiver_email swanlab_smtp_server
    swanlab_smtp_port swanlab_email_language
checkpoints resume_only_model use_flash_ckpt max_epochs
evaluation eval_use_evalscope eval_dataset eval_dataset_args eval_limit eval_generation_config extra_eval_args
    val_dataset_shuffle
generation max_new_tokens temperature top_k top_p repetition_penalty num_beams stream stop_words logprobs
    top_logprobs structured_outputs_regex response_prefix template_backend ds3_gather_for_generation
media max_pixels norm_bbox freeze_vit freeze_aligner vit_lr aligner_lr
padding padding_side padding_free packing_strategy
part attn_impl attn_implementation dataset_shuffle train_dataloader_shuffle stopping_strategy agent_template
    enable_thinking preserve_thinking add_non_thinking_prefix disable_ignore_empty_think use_chat_template
    is_binary_loss_scale
exact use_hf max_model_len: recipec reads an id as one of the Hugging Face Hub
exact group_by_length: recipec does not group samples of similar length
lost early_stop_interval=null model_kwargs=null/{}
lost hqq_axis=null: a setting of another quantization
learned adapters=[] init_strategy=null freeze_parameters=[] freeze_parameters_regex=null
    freeze_parameters_ratio=0 trainable_parameters=[] trainable_parameters_regex=null freeze_llm=false
    enable_channel_loss=false mrl_dims=null use_galore=false lisa_activated_layers=0 optimizer=null
    decision_drop_instructions=0 decision_subsample_options=0 decision_state_as_text=0
    decision_shuffle_fields=false
learned external_plugins=[] custom_register_path=[] callbacks=[]: custom code, which recipec does not read
learned custom_dataset_info=[]: a separate file, which recipec does not read
""")
OF_LORA = table("""
integer lora_rank -> lora.rank
number lora_alpha -> lora.alpha
""")
OF_RLHF = table("""
learned rpo_alpha=null ref_adapters=[]
derived ref_model_type ref_model_revision
""")
PRESETS = re.compile(r"(galore|lisa|lora_ga|fourier|boft|vera|adapter|adalora|llamapro|reft)_")
"""Matches settings of methods that `tuner_type`, `use_galore` or `init_weights` switch on."""

TYPES = {"dpo": "dpo", "orpo": "orpo", "cpo": "cpo", "simpo": "cpo", "kto": "kto"}
"""Kinds of rlhf with a counterpart, and its objective."""
SIMPO = {"loss_type": "simpo", "beta": 2.0}
"""The values in which the kind simpo differs from cpo."""
OTHERS = "recipec takes the row before on a device; ms-swift in the whole step"
OF_PREFERENCES = ("beta", "rpo_alpha", "ld_alpha", "ref_model")

OWN = {
    "qwen3_5": words("qwen3_5"),
    "llama3": words("llama3_2"),
    "gemma3": words("gemma3 gemma3_text gemma3_vision"),
    "gemma4": words("gemma4 gemma4_text"),
}
"""ms-swift's templates that are not written out; a tokenizer's own template takes their place."""
FOLLOWS = "recipec uses the tokenizer's own template; whitespace and reasoning may differ"
END = "recipec trains on the end of an answer only after the last answer"
NO_TOOLS = "recipec leaves out rows with tool calls, because this template writes none"
BOTH = "recipec counts an empty thought before both answers as part of them; dpo's loss does not change"
CUT_OFF = "recipec leaves out a row with no answer left; in ms-swift the row takes a place in its step"
UNREAD = "ms-swift does not use it with preferences or label smoothing"
COGNITION = words("swift/self-cognition modelscope/self-cognition")
"""Data sets with marks for the names of the model and of its author."""
READS = {"": "", "AlpacaZhPreprocessor()": "", "LongAlpacaPreprocessor()": "Answer: "}
"""Preprocessors that read rows by their columns, with the text that they remove from the beginning of
answers. AlpacaZhPreprocessor also removes a word from the beginning of inputs."""
HUB = "use_hf is off, so ms-swift reads ModelScope;"


def opened(ledger: Ledger) -> Run:
    """Return the run of a file."""
    return Run(Keys(ledger, ledger.sources.main, TITLE))


def _objective(run: Run) -> Says:
    keys = run.keys
    run.objective = yield from _kind(keys)
    usual = {"optim": "adamw_torch_fused", "fp16": False, "bf16": True, "warmup_ratio": None}
    keys.defaults = {**defaults_of(NAME, "sft"), **usual}
    if run.objective != "sft":
        keys.defaults |= {
            **defaults_of("trl", run.objective),
            **keys.defaults,
            **defaults_of(NAME, "rlhf"),
            "beta": 0.1,
            "loss_type": None,
            "train_sampling_strategy": "random",
            **(SIMPO if keys.text("rlhf_type") == "simpo" else {}),
        }
        why = f"rlhf_type is {keys.text('rlhf_type') or run.objective}"
        yield keys.sets("train.objective", run.objective, why)


def _preferences(run: Run) -> Says:
    if run.objective != "sft":
        yield from run.keys.follow(losses.OF_ALL)
        yield from losses.preferences(run.keys, run.objective, words("sigmoid robust"))


def _presets(run: Run) -> Says:
    names = [key for key in run.keys.source.data if PRESETS.match(str(key))]
    yield from run.keys.passive(names, "a setting of a method that is off")


def _start(run: Run) -> Says:
    """State the start adapter. For preferences, it is also the reference if ref_adapters equals it."""
    keys = run.keys
    if keys.flag("resume_only_model") and keys.given("resume_from_checkpoint"):
        yield from say_start(keys, "resume_from_checkpoint", of_base=True)
        yield keys.same(
            "resume_only_model", note="recipec starts with a new optimizer, and at the beginning of the data"
        )
    alike = keys.given("adapters") and keys.value("adapters") == keys.value("ref_adapters")
    yield from say_start(keys, "adapters", of_base=not alike)
    if alike and "adapters" in keys.stated:
        yield keys.same(
            "ref_adapters", note="the reference is a copy of the adapter that training starts from"
        )
    yield from keys.follow(OF_RLHF)


def _kind(keys: Keys) -> Statements[str]:
    kind = keys.text("rlhf_type")
    if kind is None:
        kind = "dpo" if any(keys.given(key) for key in OF_PREFERENCES) else "sft"
        if kind == "dpo":
            yield keys.defaulted("rlhf_type", kind, {"train.objective": kind}, "ms-swift's default for rlhf")
        return kind
    if kind not in TYPES:
        message = f"ms-swift's rlhf_type {kind} has no counterpart: recipes train like {listing(TYPES)}"
        yield keys.refuse("rlhf_type", E1149, message, "rlhf_type: dpo")
        return "dpo"
    yield keys.say("rlhf_type", {"train.objective": TYPES[kind]}, OTHERS if kind == "kto" else "")
    return TYPES[kind]


def _launch(run: Run) -> Says:
    keys = run.keys
    launch = yield from training_arguments.launched(keys)
    count = keys.integer("global_world_size") if keys.given("global_world_size") else None
    if count is not None and count > 0:
        launch = replace(launch, processes=count)
        yield keys.same("global_world_size", note=f"{count} processes, which multiply the rows of a step")
    yield keys.same("global_world_size", note="one process")
    shared = keys.integer("sequence_parallel_size") or 1
    yield keys.same("sequence_parallel_size", note=sharding.sharing(shared))
    if keys.given("deepspeed_autotp_size") and (size := keys.integer("deepspeed_autotp_size")):
        shared *= size
    yield keys.same("deepspeed_autotp_size", note="devices that share their rows")
    run.launch = replace(launch, shared=launch.shared * max(shared, 1))


def _model(run: Run) -> Says:
    """State the model. ModelScope's ids equal those of the Hugging Face hub, or ms-swift lists both."""
    keys = run.keys
    name = keys.text("model")
    if "flash" in (keys.text("attn_impl") or ""):
        yield keys.same("attn_impl", {"model.attention": "splash"}, "the TPU's fused kernel")
    other = keys_of(NAME, "models").get(name or "")
    if name is None or keys.flag("use_hf") or (other is None and name.startswith((".", "/", "~"))):
        run.named = yield from model_names.say_model(keys, "model", "model_revision")
    else:
        run.named = named = model_names.resolve(other[1] if other else name, keys.source.path.parent)
        how = f"ms-swift's id for it is {named.id}" if other else "it uses the same id"
        note = f"{HUB} recipec reads the Hugging Face Hub, where {how}"
        local = named.model is not None and named.id not in entries() and not other
        yield keys.say("model", {"model.id": named.id}, "" if local else note)
        if keys.text("model_revision") not in (None, "master"):
            yield keys.unless(
                "model_revision", (), "a revision of ModelScope, which the Hugging Face Hub does not have"
            )
        yield keys.same("model_revision", note="the newest, as in ms-swift")
    if keys.text("task_type") not in (None, "causal_lm"):
        message = f"the task {keys.value('task_type')} has no counterpart: recipec trains language models"
        yield keys.refuse("task_type", E1149, message, "task_type: causal_lm")


def _lora(run: Run) -> Says:
    """State the adapters' keys. Their default learning rate is ten times that of full fine-tuning."""
    keys = run.keys
    kind = keys.text("tuner_type") or "lora"
    if kind not in ("lora", "full"):
        yield keys.refuse(
            "tuner_type",
            E1149,
            f"the tuner {kind} is not LoRA, and has no counterpart in recipec",
            "tuner_type: lora",
        )
    yield keys.same("tuner_type", {"lora": None} if kind == "full" else None, "it adds the lora section")
    yield keys.unless("tuner_backend", ("peft", "unsloth"), "recipec uses PEFT's arithmetic instead")
    yield keys.same("tuner_backend", note="the same arithmetic")
    rate = keys.number("learning_rate")
    if rate is None:
        rate = 1e-5 if kind == "full" else 1e-4
        keys.defaults = {**keys.defaults, "learning_rate": rate}
    run.lora, run.learning_rate = kind != "full", rate
    details = (
        "bnb_4bit_quant_type",
        "bnb_4bit_use_double_quant",
        "bnb_4bit_compute_dtype",
        "bnb_4bit_quant_storage",
    )
    if not run.lora:
        yield keys.sets("lora", None, "full fine-tuning")
        yield from adapters.refuse_quantized(keys, "quant_method", "tuner_type: lora, or remove quant_method")
        off = (
            "quant_bits",
            "target_modules",
            "target_regex",
            "target_parameters",
            "modules_to_save",
            "init_weights",
        )
        settings = [key for key in keys_of(NAME, "sft") if key.startswith("lora_")]
        yield from keys.passive((*settings, *off, *details, "use_rslora", "use_dora"), "tuner_type is full")
        return
    yield from keys.follow(OF_LORA)
    yield from keys.follow(adapters.KINDS)
    run.chosen = yield from _targets(keys, run.model)
    yield from adapters.say_init(keys, "init_weights", str(keys.value("init_weights")))
    if run.objective == "sft":
        yield from adapters.say_dropout(keys, run.chosen)
    else:
        yield keys.sets("lora.dropout", 0.0, "TRL's preference trainers switch dropout off")
        yield keys.same("lora_dropout", note="TRL's preference trainers switch it off")
    method, bits = keys.text("quant_method"), keys.integer("quant_bits")
    dtype = (keys.text("lora_dtype") or "float32").removeprefix("torch.")
    yield keys.sets(
        "lora.dtype",
        dtype if dtype in ("float32", "bfloat16") else "float32",
        "PEFT keeps adapters in this type",
    )
    yield keys.same(
        "lora_dtype", {"lora.dtype": dtype} if dtype in ("float32", "bfloat16") else None, "16 bits"
    )
    if method is not None and (method != "bnb" or bits not in (4, 8)):
        message = f"a base model in {bits} bits by {method} has no counterpart: recipes have nf4 and int8"
        yield keys.refuse("quant_method", E1146, message, "quant_method: bnb, with quant_bits: 4")
    elif method is not None:
        code, nested = str(keys.value("bnb_4bit_quant_type")), keys.flag("bnb_4bit_use_double_quant")
        yield from adapters.say_bits(keys, "quant_method", bits, code, nested, run.model)
    yield from keys.passive(("quant_method", "quant_bits", *details), "part of model.quantization")
    yield from keys.follow(adapters.FEATURES)


def _targets(keys: Keys, model: Model | None) -> Statements[adapters.Chosen | None]:
    key = "target_regex" if keys.given("target_regex") else "target_modules"
    spec: Any = keys.texts(key)
    names = [spec] if isinstance(spec, str) and key == "target_modules" else spec
    if isinstance(names, list) and "all-linear" in names:
        spec = "all-linear"
    elif isinstance(names, list):
        spec = names
    parameters = keys.listed("target_parameters")
    chosen = yield from adapters.say_targets(keys, key, model, spec, parameters=parameters)
    yield from adapters.say_parameters(keys, "target_parameters", chosen)
    yield from keys.passive(("target_modules", "target_regex"), "target_regex holds")
    return chosen


def _data(run: Run) -> Says:
    keys, objective = run.keys, run.objective
    ranking, judged = objective != "sft", OBJECTIVES[objective].format
    columns = keys.value("columns")
    columns = columns if isinstance(columns, dict) else {}
    if keys.given("columns") and not columns:
        yield keys.refuse("columns", E1160, "columns is not a mapping of names", "columns: {question: query}")
    yield keys.same("columns", note="part of data.transform")
    sets = yield from _sources(keys, "dataset")
    if sets:
        yield keys.sets("data.train", sets)
    elif "dataset" not in keys.stated:
        yield keys.refuse(
            "dataset", E1143, "the file names no data set", "dataset: [OWNER/NAME, or a file.jsonl]"
        )
    drawn = any(isinstance(source, dict) and "limit" in source for source in sets)
    yield keys.say(
        "dataset",
        {"data.train": sets},
        "for #N, recipec takes the first N rows; ms-swift draws N rows" if drawn else "",
    )
    system = keys.text("system")
    if system is not None and system.endswith(".txt"):
        yield keys.refuse(
            "system", E1160, f"the text of {system} is not among the files", "system: the text itself"
        )
    yield keys.same("system", note="part of data.transform")
    names: Mapping[str, str] = {str(old): str(new) for old, new in columns.items()}
    kinds = {"ranking": judged == "preference", "label": judged == losses.UNPAIRED}
    transform = conversion.by_columns(
        system, names, filled=(yield from _filled(keys)), prefix=(yield from _prefix(keys)), **kinds
    )
    yield from rows.say(keys, "dataset", [Rows(judged or "chat", transform=transform)])
    yield keys.learned("cached_dataset", ([],), "recipec does not read tokenized rows")
    yield from _held_out(keys)
    yield from _loss(keys, ranking)
    yield from _template(keys, run.named, ranking)
    yield from _lengths(keys, ranking)


def _filled(keys: Keys) -> Statements[dict[str, tuple[str, str]]]:
    """Return the names of the model and of its author, in Chinese and in English. One name is for both."""
    out = {}
    for mark, key in (("{{NAME}}", "model_name"), ("{{AUTHOR}}", "model_author")):
        if names := keys.listed(key):
            out[mark] = (names[0], names[-1])
        yield keys.same(key, note="only swift/self-cognition uses it")
    return out if COGNITION & {*re.split(r"[#\s,\[\]'\"]+", str(keys.value("dataset")))} else {}


def _read(name: str) -> str:
    """Return the preprocessor of a data set by its name, "" if rows are read by their columns."""
    sets = keys_of(NAME, "datasets")
    return next((reads for id, (reads, other) in sets.items() if name in (id, other)), "")


def _prefix(keys: Keys) -> Statements[str]:
    """Return the text to remove from the beginning of all answers. Refuse data sets that differ in it."""
    names = [re.split("[:#]", text.rpartition("::")[2])[0] for text in keys.listed("dataset")]
    prefixes = {READS.get(_read(name), "") for name in names}
    if len(prefixes) > 1:
        message = "ms-swift removes a word from the answers of only one of the data sets"
        yield keys.withdraw("dataset")
        yield keys.refuse("dataset", E1142, message, "keep only data sets of one kind")
    return max(prefixes, default="")


def _sources(keys: Keys, key: str) -> Statements[list[Any]]:
    """Return the sources, each written `[hf::|ms::]ID_OR_PATH[:SUBSET/...][#COUNT]`."""
    out: list[Any] = []
    sets = keys_of(NAME, "datasets")
    for text in keys.listed(key):
        hub, _, rest = text.rpartition("::")
        head, _, count = rest.rpartition("#") if re.search(r"#\d+$", rest) else (rest, "", "")
        name, _, subsets = head.partition(":")
        local = datasets.is_local(name)
        use_hf = keys.flag("use_hf") if hub not in ("hf", "ms") else hub == "hf"
        reads, other = _read(name), sets.get(name, ["", None])[1]
        if local or use_hf:
            other = name
        if other is None:
            message = f"`{name}` is a data set of ModelScope, which recipec does not read"
            help = "use_hf: true, if the Hugging Face Hub has it; or download it, and name the file"
            yield keys.refuse(key, E1143, message, help)
        elif reads not in READS and (name not in COGNITION or subsets):
            message = f"ms-swift reads the rows of `{name}` with its own code: {reads}"
            yield keys.refuse(key, E1142, message, "write its conversations to a file, and name that file")
        else:
            path = datasets.place(other).path or other
            for subset in subsets.split("/") if subsets and not local else [None]:
                out.append(datasets.source(path, None, subset, int(count) if count else None))
    return out


def _held_out(keys: Keys) -> Says:
    share, others = keys.number("split_dataset_ratio") or 0.0, keys.value("val_dataset")
    strategy = keys.text("eval_strategy") or str(keys.value("save_strategy") or "steps")
    evaluates = bool(others or share) and strategy != "no"
    every = keys.value("eval_steps") if keys.given("eval_steps") else keys.value("save_steps")
    keys.defaults = {**keys.defaults, "eval_strategy": strategy if evaluates else "no", "eval_steps": every}
    if evaluates:
        yield from training_arguments.evaluation(keys)
    yield from keys.passive(("eval_strategy", "eval_steps"), "the run does not evaluate")
    if others and evaluates:
        yield keys.same("val_dataset", {"data.eval": (yield from _sources(keys, "val_dataset"))})
    elif share and evaluates:
        sets = {"data.eval_fraction": share, "data.eval_seed": keys.integer("data_seed") or 0}
        yield keys.say("split_dataset_ratio", sets, "another random generator: other rows")
    yield from keys.passive(
        ("val_dataset", "cached_val_dataset", "split_dataset_ratio"), "the run holds out no rows"
    )


def _scale(keys: Keys, ranking: bool) -> list[str]:
    """Return what is trained on, and the strategies that modify it."""
    return (keys.text("loss_scale") or ("last_round" if ranking else "default")).split("+")


def _loss(keys: Keys, ranking: bool) -> Says:
    kinds = {"default": "assistant", "last_round": "last_assistant", "all": "all"}
    parts = [part for part in _scale(keys, ranking) if part != "ignore_empty_think"]
    base = next((part for part in parts if part in kinds), "default")
    others = [part for part in parts if part not in kinds]
    if others:
        message = (
            f"`loss_scale` changes what is learned: {'+'.join(others)} weights tokens, and "
            "recipec weights all tokens equally"
        )
        yield keys.refuse("loss_scale", E1180, message, f"loss_scale: {base}")
    if ranking:
        yield keys.same("loss_scale", note="the loss compares the answers of preferences")
    else:
        yield keys.say("loss_scale", {"data.loss_on": kinds[base]})
    if not ranking and keys.flag("enable_dft_loss") and not keys.number("label_smoothing_factor"):
        yield from losses.weighted(keys, "enable_dft_loss", "dft")
    yield keys.same("enable_dft_loss", note="off" if not keys.flag("enable_dft_loss") else UNREAD)
    share = keys.value("interleave_prob")
    yield keys.unless("interleave_prob", (None,), f"shares of {share}: recipec concatenates the data sets")


def _template(keys: Keys, named: Named | None, ranking: bool) -> Says:
    """State the template. ms-swift's own templates follow a tokenizer's template, or are written out."""
    name, model = keys.text("template"), named.model if named else None
    of_models = known(NAME, "of_models").items()
    taken = name or next((template for part, template in of_models if named and part in named.id), None)
    of_tokenizer = name is None or (model is not None and name in OWN.get(templates.tokenizer_of(model), ()))
    if keys.value("use_chat_template") is False:
        yield keys.refuse(
            "use_chat_template", E1147, "only swift pt trains on texts without a template", "remove the key"
        )
    changes: dict[str, Any] = {} if keys.flag("add_non_thinking_prefix") else {"thought": None}
    changes |= {"learns_empty": True} if keys.flag("disable_ignore_empty_think") else {}
    written = templates.of(NAME, taken, model, changes)
    if written.known:
        forgets = written.forgets and "last_round" in _scale(keys, ranking)
        last_alone = forgets or keys.value("preserve_thinking") is False
        written = templates.of(NAME, taken, model, {**changes, "last_alone": last_alone})
        counts = ranking and "<think>" in str(written.sets) and not keys.flag("disable_ignore_empty_think")
        notes = (
            written.note,
            NO_TOOLS,
            templates.PIECES,
            END if written.last else "",
            BOTH if counts else "",
        )
        note = "; ".join(filter(None, notes))
        if name is None:
            yield keys.default("template", taken, written.sets, f"ms-swift's for this model: {note}")
        else:
            yield keys.say("template", written.sets, note)
    elif of_tokenizer:
        (yield keys.default("template", None, {}, FOLLOWS)) if name is None else (
            yield keys.say("template", {}, FOLLOWS)
        )
        if model is not None:
            yield from templates.say_own(keys, model)
    else:
        message = templates.unknown("ms-swift's template", name, written)
        yield keys.refuse("template", E1147, message, "--set template=null takes the tokenizer's own")


def _lengths(keys: Keys, ranking: bool) -> Says:
    yield from datasets.length(keys, "max_length")
    strategy = keys.text("truncation_strategy") or "delete"
    if strategy in ("delete", "right") and keys.value("max_length") is not None:
        sets = {"data.overlong": "drop" if strategy == "delete" else "truncate"}
        yield keys.say("truncation_strategy", sets, "" if strategy == "delete" else CUT_OFF)
        yield keys.sets(
            "data.overlong", sets["data.overlong"], "ms-swift's default" if strategy == "delete" else ""
        )
    elif strategy == "split":
        yield keys.say(
            "truncation_strategy",
            {},
            "recipec truncates a sample that is longer than a row; the tool continues it in other rows",
        )
    yield keys.unless("truncation_strategy", ("delete", "right"), "recipec truncates the end, not the start")
    packing = keys.flag("packing") and not ranking
    yield keys.say("packing", {"data.packing": packing}, "other samples share a row" if packing else "")
    if packing and keys.given("packing_length"):
        yield keys.say(
            "packing_length", {"data.max_length": keys.integer("packing_length")}, "the length of a row"
        )
    yield keys.same("packing_length", note="the length of a row if samples are packed")


def _training(run: Run) -> Says:
    keys = run.keys
    if not keys.given("gradient_accumulation_steps"):
        per_device = keys.integer("per_device_train_batch_size") or 1
        count = max(1, math.ceil(16 / max(per_device, 1) / sharding.devices(keys.ledger, run.launch)))
        keys.defaults = {**keys.defaults, "gradient_accumulation_steps": count}
        note = "ms-swift's default: 16 rows per step, or one row per device if there are more devices"
        yield keys.default("gradient_accumulation_steps", count, {"train.global_batch_size": None}, note)
    dtype = (keys.text("torch_dtype") or "auto").removeprefix("torch.")
    if dtype in ("float16", "float32"):
        keys.defaults = {**keys.defaults, "bf16": False, "fp16": True}
    yield from training_arguments.say_run(run, keys, dtype)
    yield from datasets.say_stream(keys, "streaming", ("shuffle_buffer_size",))
    computes = keys.ledger.value("model.dtype")
    yield keys.say(
        "torch_dtype",
        {"model.dtype": computes},
        training_arguments.HALF if dtype != "auto" and dtype != computes else "",
    )
    yield from training_arguments.memory(run, keys)
    if not keys.given("report_to"):
        yield keys.say("report_to", {"train.log.tensorboard": True})
    yield from training_arguments.bookkeeping(keys)


RULES: Sequence[Rule[Run]] = (
    _objective,
    _launch,
    training_arguments.placement,
    _model,
    _lora,
    _data,
    _preferences,
    _training,
    balance("router_aux_loss_coef"),
    _start,
    follow(KEYS),
    _presets,
    tokens("new_special_tokens"),
    common(NAME, off=training.OFF),
    passive(keys_of(NAME, "rlhf"), "a setting of another rlhf_type"),
)
