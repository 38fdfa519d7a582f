"""MaxText's supervised fine-tuning (post_train.sft.train_sft): its YAML, and its command line's KEY=VALUE.

A file with `base_config: base.yml` has the defaults of that file. In other files, and for a command line
alone, the values of MaxText's sft.yml, from which a run starts, override these defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.wording import plural
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import REASONS, Keys, defaults_of, keys_of, table, tools, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    datasets,
    experts,
    images,
    model_names,
    sharding,
    templates,
    training,
)
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1142, E1143, E1144, E1149, E1150, E1160, E1163, E1180
from recipec.port.rules import common, directory, follow, passive
from recipec.port.tool_names import known
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.yaml_document import Refused

NAME = "maxtext"
TITLE = "MaxText"
MARKS = words(
    """base_config base_output_directory max_target_length remat_policy decoder_block base_emb_dim
    base_num_decoder_layers ici_fsdp_parallelism ici_tensor_parallelism dcn_data_parallelism hf_path use_sft
    load_parameters_path enable_checkpointing sft_train_on_completion_only train_data_columns
    per_device_batch_size tokenizer_path checkpoint_period weight_dtype scan_layers"""
)

KEYS = table("""
files base_config run_name hf_access_token convert_checkpoint_if_possible enable_data_shuffling tokenizer_type
log log_period eval_steps target_eval_loss log_config debug_sharding
evaluation eval_per_device_batch_size eval_data_columns hf_eval_split hf_eval_files eval_start_step
    tokenize_eval_data generate_padding_batch_eval
speed enable_nnx pure_nnx pure_nnx_decoder expansion_factor_real_data max_inflight_computations
    num_vocab_tiling use_chat_template
media train_image_column eval_image_column default_prompt
part dataset_type hf_name hf_train_files hf_data_dir train_split train_data_columns
exact add_bos add_eos use_truncation: fine-tuning writes only the tokens of the chat template, truncated at
    max_target_length
exact enable_dropout: dropout_rate gives the rate
exact enable_checkpointing save_checkpoint_on_start save_checkpoint_on_completion: recipec keeps checkpoints
exact use_sft use_dpo use_grpo use_multimodal: it selects fine-tuning on text
exact max_segments_per_seq grain_packing_type: it decides which samples share a row
exact abort_on_nan_loss abort_on_inf_loss: a loss that is not finite stops the run
exact override_model_config override_logical_axis_rules: it allows keys next to the model's name
lost quantization: recipec computes products in model.dtype, not in 8 bits: more precise
lost grad_dtype=float32 mu_dtype=float32 cast_logits_to_fp32=true
lost matmul_precision=default: products of model.dtype have the accelerator's own precision
lost logits_dot_in_fp32 float32_qk_product float32_logits activations_in_float32: recipec sums products in
    float32, and multiplies in model.dtype
learned dropout_rate adamw_mask adam_eps_root trainable_parameters_mask skip_step_on_spikes enable_diloco
    reuse_example_batch training_objective=causal_lm
learned enable_rampup_batch_size: all steps of recipec have the same number of rows
learned formatting_func_path: this function writes the rows: copy it into data.transform
learned load_full_state_path: a run starts at step 0; --resume continues it
""")
OF_LORA = table("""
integer lora_rank -> lora.rank
number lora_alpha -> lora.alpha
learned lora_restore_path: training starts from new adapters; lora.start_from starts from others
""")
OF_ADAMW = table("""
number adam_b1 -> train.optimizer.b1
number adam_b2 -> train.optimizer.b2
number adam_eps -> train.optimizer.eps
number adam_weight_decay -> train.optimizer.weight_decay
""")
GROUPS = {
    "checkpoints": "Checkpointing OrbaxStorage EmergencyCheckpointing",
    "kernels": "SplashAttention MoEKernels",
    "mesh": "HardwareAndMesh LayoutAndSharding DcnParallelism IciParallelism PipelineParallelism",
    "speed": "RematAndOffload DevelopmentAndDebugging GrainDataset",
    "log": "Profiling HloDump Metrics Goodput GcpMonitoring Tensorboard ManagedMLDiagnostics RunInfo",
    "launch": "AOT ElasticTraining",
    "generation": "Decoding InferenceLayout InferenceServer InferenceBenchmark PrefixCaching VLLM",
    "media": "VisionTower VisionProjector AudioEncoder MultimodalGeneral",
    "method": "Distillation Muon DPO DilocoParams TfdsDataset MMapDataset OlmoGrainDataset",
}
"""Groups of MaxText's keys, by the reason why they affect no number here."""

OWN = ("sft", "models", "balance", "LoRA", "DPO")
"""Parts of the table that are not groups of a file's keys."""
OTHERS = {
    "use_dpo": "a preference run",
    "use_grpo": "a GRPO run",
    "rl": "an RL run",
    "student_overrides": "a distillation",
    "teacher_overrides": "a distillation",
}
"""Keys of MaxText's other trainers."""
REMAT = {
    "full": "decoder",
    "minimal": "save_dots",
    "minimal_with_context": "save_dots",
    "minimal_offloaded": "offload_dots",
    "save_dot_except_mlp": "save_attention",
    "save_dot_except_mlpwi": "save_attention",
    "save_dot_with_context_except_mlp": "save_attention",
    "none": "none",
}
PROJECTIONS = {
    "q_proj": "attention/query",
    "k_proj": "attention/key",
    "v_proj": "attention/value",
    "o_proj": "attention/out",
    "gate_proj": "mlp/wi_0",
    "up_proj": "mlp/wi_1",
    "down_proj": "mlp/wo",
}
"""MaxText's names of the projections, at the end of a module's path."""
BALANCED = "recipec takes all tokens of a micro-batch and all layers; MaxText each row and layer"
ROWS = ("data", "fsdp", "fsdp_transpose", "diloco")
"""Axes whose devices have different rows. They map to fsdp."""
WIDTH = ("tensor", "tensor_sequence", "tensor_transpose")
"""Axes that split matrix products. They map to tp."""
STREAM = "recipec draws another order; MaxText shuffles a stream, within 1000 rows"
ROUNDS = "recipec writes all rounds at once; MaxText writes each round as its own conversation"
SOONER = "MaxText reaches the last step's learning rate one step sooner"


def opened(ledger: Ledger) -> Run:
    """Return the run of a file.

    Raises:
        Refused: the file is for another of MaxText's trainers.
    """
    keys = Keys(ledger, ledger.sources.main, TITLE, _defaults(ledger))
    keys.below("lora", defaults_of(NAME, "LoRA"))
    _refuse_others(keys)
    return Run(keys)


def _defaults(ledger: Ledger) -> dict[str, Any]:
    groups = [name for name in tools()[NAME]["sections"] if name not in OWN]
    defaults = defaults_of(NAME, *groups)
    base = ledger.sources.main.get("base_config", "sft.yml")
    return defaults if base == "base.yml" else {**defaults, **defaults_of(NAME, "sft")}


def _refuse_others(keys: Keys) -> None:
    """Refuse a run of another of MaxText's trainers."""
    switched = [key for key in OTHERS if key.startswith("use_") and keys.flag(key)]
    sections = [key for key in OTHERS if not key.startswith("use_") and keys.mapping(key)]
    other = next(iter([*switched, *sections]), None)
    if other is None and keys.flag("use_sft"):
        return
    key = other or "use_sft"
    what = OTHERS[other] if other else "a run of MaxText's pre-training"
    message = f"this is {what}, as `{key}` says; recipec reads only MaxText's supervised fine-tuning"
    says = "" if other else "; --set use_sft=true makes it one"
    help = f"port a file of post_train.sft.train_sft{says}"
    raise Refused(Diagnostic(E1149, message, key, help, keys.source.place(key)))


def _model(run: Run) -> Says:
    """State MaxText's name of a model. A converted checkpoint is assumed to equal the hub's weights."""
    keys = run.keys
    name = keys.text("model_name")
    if name in (None, "default"):
        yield keys.refuse("model_name", E1144, "the file names no model", "--set model_name=qwen3-8b")
        return
    ids = {**defaults_of(NAME, "models"), **known(NAME, "names")}
    tokenizer = keys.text("tokenizer_path") or ""
    hub = tokenizer if re.fullmatch(r"[\w.-]+/[\w.-]+", tokenizer) and "tokenizer" not in tokenizer else ""
    run.named = named = model_names.resolve(ids.get(str(name)) or hub or str(name), keys.source.path.parent)
    yield keys.same("model_name", {"model.id": named.id}, named.note or "MaxText's name for the model")
    path = _bare(keys.text("load_parameters_path") or "")
    if path and not any(_bare(spelling) in path for spelling in (str(name), named.id.rpartition("/")[2])):
        other = f"recipec starts from the weights of {named.id}, and this path names no such model"
        yield keys.learned("load_parameters_path", (), other)
    copy = "recipec uses the Hugging Face Hub's weights of this model; name others in model.id"
    yield keys.say("load_parameters_path", None, copy)
    if hub and hub != named.id:
        yield keys.same("tokenizer_path", {"model.tokenizer": hub})
    yield keys.same("tokenizer_path", note="the model's own")
    yield from _balance(keys, str(name), named.model)
    if keys.flag("use_multimodal"):
        message = images.NOT_CARRIED.format("a run with `use_multimodal`", TITLE)
        yield keys.refuse("use_multimodal", E1150, message, images.AFTERWARDS)


def _bare(text: str) -> str:
    """Return a name's letters and digits, so that names of one model in two spellings are equal."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _balance(keys: Keys, name: str, model: Model | None) -> Says:
    key = "load_balance_loss_weight"
    keys.defaults = {**keys.defaults, key: defaults_of(NAME, "balance").get(name, 0.0)}
    weight = keys.number(key) or 0.0
    if weight and model is not None and experts.coefficient(model) is None:
        message = f"`{key}` is {weight:g} for this model, for which recipec has no load-balancing loss"
        yield keys.refuse(key, E1180, message, f"--set {key}=0.0 ports the run without it")
    elif weight:
        yield keys.say(key, {experts.AUX: weight}, BALANCED)


def _lora(run: Run) -> Says:
    keys, lora = run.keys, run.section("lora")
    run.lora = lora.flag("enable_lora")
    if not run.lora:
        yield from lora.passive(keys_of(NAME, "LoRA"), "enable_lora is off")
        yield keys.sets("lora", None, "full fine-tuning")
        return
    yield lora.same("enable_lora", note="it adds the lora section")
    yield from lora.follow(OF_LORA, training.OFF)
    usual = {name: _paths(module) for name, module in PROJECTIONS.items()}
    if experts.has_experts(run.model) and not lora.text("lora_module_path"):
        usual = {name: paths for name, paths in usual.items() if "attention" in PROJECTIONS[name]}
    path, help = lora.text("lora_module_path") or ".*", '".*(query|key|value|out|wi_0|wi_1|wo)"'
    yield from adapters.say_pattern(lora, "lora_module_path", path, usual, help)
    yield keys.sets("lora.init", "qwix", "A is uniform with the bound sqrt(6/fan_in), as in MaxText")
    yield from adapters.say_qwix(lora, "lora_weight_qtype", "lora_tile_size")


def _paths(module: str) -> list[str]:
    """Return the forms of a projection's path in MaxText's decoders."""
    block, _, name = module.partition("/")
    blocks = [block, f"self_{block}", "self_attention_local", "self_attention_global", "mlp_local"]
    blocks = [inner for inner in blocks if block in inner]
    layers = ("decoder/layers", "decoder/layers/0", "decoder/layers_0", "decoder/scanned_blocks/layers_0")
    return [f"{layer}/{inner}/{name}" for layer in layers for inner in blocks]


def _batch(run: Run) -> Says:
    """State the rows of a step, counted over all devices, including devices that share a row."""
    keys = run.keys
    devices, tp = yield from _mesh(keys)
    per_device = keys.number("per_device_batch_size") or 1.0
    accumulation = keys.integer("gradient_accumulation_steps") or 1
    rows = int(devices * per_device) * accumulation
    if rows < 1:
        message = f"{per_device:g} rows per device on {devices} devices are less than one row"
        yield keys.refuse("per_device_batch_size", E1160, message, "per_device_batch_size: 1")
        return
    micro = max(int(per_device * tp), 1)
    sets = {"train.micro_batch_size": micro, "train.global_batch_size": rows}
    product = f"{per_device:g} x {devices} devices x {accumulation} micro-batches: {rows} rows per step"
    yield keys.say("per_device_batch_size", sets)
    yield keys.same("gradient_accumulation_steps", note=product)
    yield keys.sets("train.global_batch_size", rows)
    tunix = keys.flag("use_tunix_gradient_accumulation")
    yield keys.means(rows // accumulation)
    kept = "micro_batches" if tunix and accumulation > 1 else "tokens"
    yield keys.same(
        "use_tunix_gradient_accumulation", note="the mean of micro-batches' means" if tunix else ""
    )
    yield keys.sets("train.loss_normalization", kept)
    yield keys.say("remat_policy", {"remat.policy": REMAT.get(str(keys.value("remat_policy")), "decoder")})


def _mesh(keys: Keys) -> Statements[tuple[int, int]]:
    """State the keys NETWORK_AXIS_parallelism, and set `mesh.axes` if the files also split products (tp).

    Returns:
        The number of all devices: --devices, or the product of the sizes, where -1 stands for the requested
        accelerator's devices. The number of those that split each product.
    """
    every = [
        key for key in keys.defaults if key.endswith("_parallelism") and key.startswith(("ici_", "dcn_"))
    ]
    axes = {key: key.removesuffix("_parallelism").partition("_")[2] for key in every}
    sizes: dict[str, int] = {}
    for key, name in axes.items():
        sizes[name] = sizes.get(name, 1) * max(keys.integer(key) or 1, 1)
    rest = any((keys.integer(key) or 1) < 1 for key in every if key.startswith("ici_"))
    product = math.prod(sizes.values())
    devices = keys.ledger.devices or (keys.ledger.tpus or product if rest else product)
    tp = math.prod(sizes.get(name, 1) for name in WIDTH)
    carried = product == math.prod(sizes.get(name, 1) for name in (*ROWS, *WIDTH)) and devices % tp == 0
    sets = {"mesh.axes": {"fsdp": devices // tp, "tp": tp}} if carried and tp > 1 else None
    for key, name in axes.items():
        if sets and name in WIDTH and (keys.integer(key) or 1) > 1:
            yield keys.same(key, sets, sharding.sharing(tp))
        yield keys.same(key, note=REASONS["mesh"])
    return devices, tp if carried else 1


def _data(run: Run) -> Says:
    keys = run.keys
    kind = keys.choice("dataset_type", ("hf", "grain", "tfds", "synthetic", "c4_mlperf", "olmo_grain"))
    where = "hf_path" if kind == "hf" else "grain_train_files"
    name, files = keys.text(where), keys.text("hf_train_files") if kind == "hf" else None
    place = datasets.place(name, files or None) if name else None
    if kind not in ("hf", "grain") or place is None or place.path is None:
        key = "dataset_type" if kind not in ("hf", "grain") else where
        why = place.note if place is not None else f"recipec does not read {kind} rows"
        help = "--set dataset_type=hf --set hf_path=OWNER/NAME"
        yield keys.refuse(key, E1143, f"recipec cannot read the data: {why}", help)
    else:
        folder, hub = keys.text("hf_data_dir"), place.path.startswith("hf://")
        config, split = keys.text("hf_name") or folder, keys.text("train_split")
        entry = datasets.source(
            place.path, split if hub and split != "train" else None, (config or None) if hub else None
        )
        yield keys.say(where, {"data.train": [entry]})
        if folder:
            yield keys.say(
                "hf_data_dir", {}, "recipec reads the folder as the configuration of the same name"
            )
        every = keys.integer("eval_interval") or 0
        if every > 0 and (held := keys.text("hf_eval_split") or keys.text("hf_eval_files")):
            key = "hf_eval_split" if keys.value("hf_eval_split") else "hf_eval_files"
            file = not keys.value("hf_eval_split")
            other = held if file else datasets.source(place.path, held, (config or None) if hub else None)
            yield keys.same(key, {"data.eval": [other]})
            yield keys.same("eval_interval", {"train.eval_every": every})
    yield keys.same("eval_interval", note=REASONS["evaluation"])
    yield from _rows(keys, run.model)
    yield from datasets.length(keys, "max_target_length")
    on = keys.flag("packing")
    yield keys.say("packing", {"data.packing": on})
    seed = keys.integer("data_shuffle_seed") if keys.flag("enable_data_shuffling") else None
    yield keys.same("data_shuffle_seed", {"data.shuffle_seed": seed}, STREAM)


def _rows(keys: Keys, model: Model | None) -> Says:
    """State the form of the rows, by the columns that are read, and which tokens are trained on."""
    columns = keys.value("train_data_columns")
    parts = columns if isinstance(columns, list) else str(columns).split(",")
    names = [str(part).strip(" []'\"") for part in parts]
    form, renamed = "chat", {"messages": names[0]} if names and names != ["messages"] else {}
    if {"question", "answer"} <= set(names):
        form, renamed = "instruction", {"instruction": "question", "output": "answer"}
    elif len(names) == 2:
        form = "prompt_completion"
        pair = {"prompt": names[0], "completion": names[1]}
        renamed = {} if list(pair) == list(pair.values()) else pair
    elif len(names) != 1:
        message = f"MaxText makes one conversation of {len(names)} columns, and a recipe cannot"
        yield keys.refuse("train_data_columns", E1142, message, "train_data_columns: [messages]")
    sets = {"data.format": form, **({"data.fields": renamed} if renamed else {})}
    yield keys.say("train_data_columns", sets, ROUNDS if form == "chat" else "")
    completion = keys.flag("sft_train_on_completion_only")
    on = ("assistant" if form == "chat" else "completion") if completion else "all"
    yield keys.say("sft_train_on_completion_only", {"data.loss_on": on})
    text, path = keys.text("chat_template"), keys.text("chat_template_path")
    if text or path:
        key = "chat_template" if text else "chat_template_path"
        yield keys.say(key, {"data.chat_template": text or path})
    elif model is not None and "model.tokenizer" not in keys.ledger.lines:
        yield from templates.say_own(keys, model)
    yield from keys.passive(("chat_template", "chat_template_path"), "the tokenizer's own")


def _length(run: Run) -> Says:
    keys = run.keys
    steps, whole = keys.integer("steps") or 0, keys.integer("learning_rate_schedule_steps") or -1
    steps = whole if steps == -1 else steps
    epochs = keys.integer("num_epoch") or 1
    yield keys.say(
        "steps",
        {"train.steps": steps},
        f"MaxText runs at most {plural(epochs, 'epoch')}" if steps > 0 else "",
    )
    yield keys.same("num_epoch", note="steps sets the length of the run, unless the data is shorter")
    if whole not in (-1, steps):
        message = (
            f"the schedule has {whole} steps and the run {steps}: recipec's schedule is as long as the run"
        )
        help = "--set learning_rate_schedule_steps=-1 makes the schedule as long"
        yield keys.refuse("learning_rate_schedule_steps", E1163, message, help)
    yield keys.same("learning_rate_schedule_steps", note="as long as the run")
    warm = int(steps * (keys.number("warmup_steps_fraction") or 0.0))
    yield keys.say("warmup_steps_fraction", {"train.schedule.warmup_steps": warm})
    final = keys.number("learning_rate_final_fraction") or 0.0
    kind = keys.choice("lr_schedule_type", ("cosine", "wsd")) or "cosine"
    if kind == "cosine":
        yield keys.say("lr_schedule_type", {"train.schedule.name": "cosine"}, SOONER)
        yield keys.say("learning_rate_final_fraction", {"train.schedule.min_lr_ratio": final})
    else:
        note = training.SCHEDULES["warmup_stable_decay"].note
        yield keys.say("lr_schedule_type", {"train.schedule.name": "constant"}, note)
    yield from keys.passive(
        ("learning_rate_final_fraction", "wsd_decay_steps_fraction", "wsd_decay_style"),
        "part of the schedule",
    )


def _optimizer(run: Run) -> Says:
    keys = run.keys
    name = str(keys.value("opt_type"))
    translation = training.ADAMW if name == "adam_pax" else training.optimizer_of(name)
    yield from training.say_optimizer(keys, "opt_type", name, translation, "adamw")
    yield keys.say("learning_rate", {"train.optimizer.learning_rate": keys.number("learning_rate")})
    if translation.name == "adamw":
        yield from keys.follow(OF_ADAMW)
    else:
        yield keys.sets("train.optimizer.weight_decay", 0.0, "optax.sgd does not have this setting")
    yield from keys.passive(
        ("adam_b1", "adam_b2", "adam_eps", "adam_weight_decay"),
        f"{translation.name} does not have this setting",
    )


def _seed(run: Run) -> Says:
    seed = run.keys.integer("init_weights_seed")
    yield run.keys.same("init_weights_seed", {"train.seed": seed}, "other draws")


def _precision(run: Run) -> Says:
    keys = run.keys
    kinds = ("bfloat16", "float32")
    dtype, weights = keys.choice("dtype", kinds) or kinds[0], keys.choice("weight_dtype", kinds) or kinds[1]
    yield keys.say("dtype", {"model.dtype": dtype})
    if run.lora:
        yield keys.say("weight_dtype", {"lora.dtype": weights})
    elif dtype == "bfloat16":
        yield keys.say("weight_dtype", {"train.optimizer.master_weights": weights == "float32"})
    yield keys.same("weight_dtype", note="model.dtype")
    attention = {"flash": "splash", "dot_product": "dot"}.get(str(keys.value("attention")))
    yield keys.same("attention", {"model.attention": attention} if attention else None, "the same attention")


def _logs(run: Run) -> Says:
    keys = run.keys
    if keys.flag("enable_wandb"):
        yield keys.same("enable_wandb", {training.PROJECT: keys.text("wandb_project_name")}, "a log")
    if keys.given("enable_tensorboard") and keys.flag("enable_tensorboard"):
        yield keys.same("enable_tensorboard", {"train.log.tensorboard": True}, "a log")


def _shape(run: Run) -> Says:
    """Refuse other keys, which belong to the model, or have no effect."""
    shape = "the model's name and its config.json decide it"
    for key in [key for key in run.keys.defaults if not key.startswith("lora")]:
        yield run.keys.learned(key, (*training.OFF, run.keys.defaults[key]), shape)


RULES: Sequence[Rule[Run]] = (
    _model,
    _lora,
    _batch,
    _data,
    _length,
    _optimizer,
    follow("positive gradient_clipping_threshold -> train.optimizer.max_grad_norm"),
    _seed,
    _precision,
    directory("base_output_directory"),
    follow("count checkpoint_period -> checkpoint.every_steps"),
    _logs,
    follow(KEYS, off=training.OFF),
    *(passive(keys_of(NAME, *groups.split()), REASONS[word]) for word, groups in GROUPS.items()),
    passive(keys_of(NAME, "DPO"), REASONS["method"], "dpo"),
    _shape,
    common(NAME, off=training.OFF),
)
