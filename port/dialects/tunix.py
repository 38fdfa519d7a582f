"""Tunix's command for supervised fine-tuning (tunix.cli.peft_main): its YAML, or what overrides it.

A run starts from base_config.yaml in Tunix's repository. If a file or the command line gives
`optimizer_config`, `training_config` or `lora_config`, it replaces that complete section. Missing keys then
have the defaults of optax and Tunix, not the values of base_config.yaml. Other sections are merged.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipec.port.dialects import tunix_grpo
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import REASONS, Keys, defaults_of, keys_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import adapters, datasets, model_names, rows, sharding, training
from recipec.port.meaning.rows import Rows
from recipec.port.meaning.run import Run
from recipec.port.meaning.training import E1162
from recipec.port.refusals import E1143, E1144, E1160, E1163
from recipec.port.rules import common, follow, mappings, unused
from recipec.port.tool_names import known, tokenizer_of

NAME = "tunix"
TITLE = "Tunix"
RL = words(
    """rl_training_config actor_model_config critic_model_config reference_model_config rollout_model_config
    rollout_config grpo_config ppo_config"""
)
"""Sections of Tunix's other commands, which base_config.yaml also contains."""
MARKS = words(
    """model_config.model_name model_config.model_id model_config.model_source model_config.mesh
    model_config.model_download_path model_config.lora_config tokenizer_config.tokenizer_type
    tokenizer_config.tokenizer_path optimizer_config.opt_type optimizer_config.schedule_type
    rl_training_config.actor_optimizer_config rl_training_config.max_steps grpo_config.beta
    rollout_config.total_generation_steps grpo_config.num_generations actor_model_config.lora_config
    reference_model_config.model_name rollout_model_config.mesh reward_functions rollout_engine
    training_config.max_steps training_config.eval_every_n_steps training_config.checkpoint_root_directory
    max_target_length"""
)
KEYS = table("""
files tfds_download data_directory
unused data_source data_module apply_chat_template_to_dataset train_fraction num_test_batches num_batches
    rollout_engine vllm_config sglang_jax_config offload_to_cpu verl_compatible reward_functions: a key of
    Tunix's RL, which peft_main does not read
""")
OF_MODEL = table("""
files model_path model_download_path intermediate_ckpt_dir
log model_display
kernels flash_attention_block_size
lost kwargs={}
""")
OF_TRAINING = table("""
log metrics_logging_options profiler_options perf_metrics_options metrics_prefix pbar_description
checkpoints checkpointing_options
speed max_inflight_computations
mesh data_sharding_axis
lost max_seq_token_per_tpu: recipec packs rows with data.packing
""")
OF_OPTIMIZER = table("""
lost eps_root mu_dtype nesterov accumulator_dtype
learned mask exponent=1/1.0 transition_begin=0
unused warmup_ratio: a key of Tunix's RL, which peft_main does not read
""")
CLIPPED = "peft_main passes it to optax's optimizer, which has no such argument: Tunix clips no gradients"
PROJECTIONS = {
    "q_proj": ("attn/q_proj", "attn/q_einsum", "attn/qkv_einsum"),
    "k_proj": ("attn/k_proj", "attn/kv_einsum", "attn/k_einsum", "attn/qkv_einsum"),
    "v_proj": ("attn/v_proj", "attn/kv_einsum", "attn/qkv_einsum"),
    "o_proj": ("attn/o_proj", "attn/attn_vec_einsum"),
    "gate_proj": ("mlp/gate_proj",),
    "up_proj": ("mlp/up_proj",),
    "down_proj": ("mlp/down_proj",),
}
"""Names of the projections in Tunix's models. Gemma's projections are einsums."""
REMAT = {"1": "none", "2": "block", "3": "decoder", "none": "none", "block": "block", "decoder": "decoder"}
OPTIMIZERS = ("adam", "adamw", "lion", "sgd")
OPUS = "Helsinki-NLP/opus-100"
TRANSLATED = '''"""Rows of opus-100 as Tunix asks for a translation: a prompt, and what is learned."""


def convert(row):
    """A row of `translation`, with the texts `en` and `fr`."""
    english, french = row["translation"]["en"], row["translation"]["fr"]
    return {"prompt": f"Translate this into French:\\n{english}\\n", "completion": french}
'''
STARTS = "Tunix starts the answer with the tokenizer's bos_token again, and trains on it"
FLOAT = "recipec's activations have this type; those of most of Tunix's models are float32"
SCHEDULES = {
    "constant_schedule": "constant",
    "warmup_constant_schedule": "constant",
    "linear_schedule": "linear",
    "cosine_decay_schedule": "cosine",
    "warmup_cosine_decay_schedule": "cosine",
}
OF_SCHEDULES = (
    *("value", "init_value", "peak_value", "end_value", "alpha", "warmup_steps", "decay_steps"),
    *("transition_steps", "schedule_type", "exponent", "transition_begin"),
)


@dataclass
class Tunix(Run):
    """A run of Tunix.

    Attributes:
        steps: the steps of the run; None for whole epochs.
        reinforces: whether grpo_main runs the file, instead of peft_main.
        of_model: the section that names the model.
        of_actor: the section with the adapters and the mesh.
    """

    steps: int | None = None
    reinforces: bool = False
    of_model: str = "model_config"
    of_actor: str = "model_config"

    @property
    def groups(self) -> Keys:
        """The section `grpo_config`."""
        return self.keys.below("grpo_config", tunix_grpo.GROUPS)

    def mesh(self) -> Statements[dict[str, int]]:
        """Return the sizes of the actor's axes by name."""
        place = self.section(self.of_actor)
        place = place if place.mapping("mesh") else self.section("model_config")
        return (yield from _mesh(place.below("mesh", defaults_of(NAME, "mesh"))))

    @property
    def training(self) -> Keys:
        """The section of the training, which replaces that of base_config.yaml."""
        if self.reinforces:
            return self.keys.below("rl_training_config")
        section = self.keys.below("training_config")
        if not section.defaults:
            whole = self.keys.mapping("training_config")
            section.defaults = defaults_of(NAME, "training_config" if whole else "training")
        return section


def opened(ledger: Ledger) -> Tunix:
    """Return the run of a file."""
    keys = Keys(ledger, ledger.sources.main, TITLE, defaults_of(NAME, "config"))
    keys.below("model_config", defaults_of(NAME, "model"))
    return Tunix(keys)


def _model(run: Tunix) -> Says:
    keys, model = run.keys, run.section(run.of_model)
    source = model.choice("model_source", ("huggingface", "kaggle", "gcs", "internal", "maxtext", ""))
    id, name = str(model.value("model_id")), str(model.value("model_name"))
    ids = known(NAME, "names")
    bare = re.sub(r"[-.]", lambda mark: {"-": "_", ".": "p"}[mark[0]], name.lower())
    taken = id if "/" in id else ids.get(id) or ids.get(bare) or id
    run.named = named = model_names.resolve(taken, keys.source.path.parent)
    copy = "recipec uses the Hugging Face Hub's weights of this model; name others in model.id"
    yield model.say(
        "model_id", {"model.id": named.id}, named.note or ("" if source == "huggingface" else copy)
    )
    yield from model.passive(("model_source", "model_name"), "part of model.id")
    tokenizer = keys.below("tokenizer_config", defaults_of(NAME, "tokenizer"))
    path = tokenizer.text("tokenizer_path")
    of_hub = tokenizer.given("tokenizer_path") and path and re.fullmatch(r"[\w.-]+/[\w.-]+", path)
    other = of_hub and model_names.resolve(str(path), keys.source.path.parent).id != named.id
    yield tokenizer.same(
        "tokenizer_path", {"model.tokenizer": path} if other else None, "" if other else "the model's own"
    )
    yield tokenizer.same("tokenizer_type", note="the same tokens as a Hugging Face tokenizer")
    yield from tokenizer.passive(
        ("add_bos", "add_eos"), "prompts begin with bos_token, answers end with eos_token"
    )
    seed = model.integer("rng_seed") or 0
    yield model.say("rng_seed", {"train.seed": seed})
    if model.flag("use_flash_attention"):
        yield model.same("use_flash_attention", {"model.attention": "splash"}, "the same attention")
    yield model.same("use_flash_attention", note="the same attention")
    remat = REMAT.get(str(model.value("remat_config")).rpartition(".")[2].lower())
    if remat is None:
        message = f"`remat_config` is {model.value('remat_config')}, which Tunix does not have"
        yield model.refuse("remat_config", E1160, message, "remat_config: 3")
    yield model.say("remat_config", {"remat.policy": remat or "decoder"})
    yield from model.follow(OF_MODEL, training.OFF)


def _lora(run: Tunix) -> Says:
    """State Qwix's adapters, which have the type of the weights."""
    keys, model, named = run.keys, run.section(run.of_actor), run.named
    if not model.mapping("lora_config"):
        model = run.section("model_config")
    stored = model_names.stored(named.id, keys.source.path.parent) if named else "auto"
    dtype = "float32" if stored == "float32" else "bfloat16"
    yield keys.sets("model.dtype", dtype, FLOAT)
    if not model.mapping("lora_config"):
        yield model.same("lora_config", note="empty: all weights are trained")
        yield keys.sets("lora", None, "full fine-tuning: lora_config is empty")
        yield keys.sets("train.optimizer.master_weights", False, "Tunix trains the weights themselves")
        return
    lora = model.below("lora_config", defaults_of(NAME, "lora"))
    path = lora.text("module_path") or ""
    paths = {name: [f"layers/0/{module}" for module in modules] for name, modules in PROJECTIONS.items()}
    help = '".*q_proj|.*k_proj|.*v_proj|.*o_proj"'
    targets = yield from adapters.say_pattern(lora, "module_path", path, paths, help)
    for key, kind in (("rank", lora.integer), ("alpha", lora.number)):
        if (value := kind(key)) is None:
            yield lora.refuse(key, E1144, f"{key} is missing, and Tunix requires it", f"{key}: 16")
        else:
            yield lora.say(key, {f"lora.{key}": value})
    yield keys.sets("lora.init", "qwix", "A is uniform with the bound sqrt(6/fan_in), as in Tunix")
    yield keys.sets("lora.dropout", 0.0, "Qwix applies no dropout")
    yield keys.sets("lora.dtype", dtype, "the base model's type, as in the tool")
    fused = named is None or named.model is None or named.model.family.name.startswith("gemma")
    if fused and {"k_proj", "v_proj"} <= set(targets):
        yield keys.sets("lora.kv", "shared", "key and value share one A, as in Qwix's fused projection")
    yield from adapters.say_qwix(lora, "weight_qtype", "tile_size")


def _batch(run: Tunix) -> Says:
    """State the rows of a step. batch_size counts the rows of one micro-batch on all devices."""
    keys, model, section = run.keys, run.section("model_config"), run.training
    mesh = model.below("mesh", defaults_of(NAME, "mesh"))
    sizes = yield from _mesh(mesh)
    tp, fsdp = sizes.get("tp", 1), sizes.get("fsdp", 1)
    size = keys.integer("batch_size") or 1
    accumulation = section.integer("gradient_accumulation_steps") or 1
    if size < fsdp or size % fsdp:
        message = f"batch_size: {size} does not divide over the {fsdp} devices of fsdp"
        yield keys.refuse("batch_size", E1162, message, f"batch_size: {fsdp}")
    sets = {"train.micro_batch_size": max(size // fsdp, 1), "train.global_batch_size": size * accumulation}
    yield keys.say("batch_size", sets)
    yield section.same("gradient_accumulation_steps", note=f"{size} rows x {accumulation} micro-batches")
    yield keys.means(size)
    kept = "micro_batches" if accumulation > 1 else "tokens"
    yield keys.sets("train.loss_normalization", kept, "the mean of micro-batches' means" * (accumulation > 1))
    count = math.prod(sizes.values())
    fits = (keys.ledger.tpus or count) == count
    axes = {"mesh.axes": {"fsdp": fsdp, "tp": tp}} if fits and tp > 1 else None
    yield mesh.same("shape", axes, sharding.sharing(tp) if axes else REASONS["mesh"])
    yield from mesh.passive(keys_of(NAME, "mesh"), REASONS["mesh"])


def _mesh(mesh: Keys) -> Statements[dict[str, int]]:
    """Return the sizes of the axes by name, or {} after an error."""
    try:
        sizes, names = (ast.literal_eval(str(mesh.value(key))) for key in ("shape", "axis_names"))
        axes = dict(zip(names, sizes, strict=True))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        axes = {"": 0}
    if not all(isinstance(size, int) and size > 0 for size in axes.values()):
        message = (
            f"{mesh.value('shape')} and {mesh.value('axis_names')} are not sizes of the same number of axes"
        )
        yield mesh.refuse("shape", E1160, message, "shape: \"(2,2)\", with axis_names: \"('fsdp','tp')\"")
        return {}
    if not set(axes) <= {"fsdp", "tp"}:
        message = f"the axes {', '.join(map(str, axes))} are not those of Tunix's models"
        yield mesh.refuse("axis_names", E1160, message, "axis_names: \"('fsdp','tp')\"")
        return {}
    return axes


def _data(run: Tunix) -> Says:
    keys, section, model = run.keys, run.training, run.model
    name = str(keys.value("dataset_name"))
    if name != OPUS:
        why = (
            "mtnt is a data set of TensorFlow Datasets, which recipec does not read"
            if name.startswith("mtnt")
            else "peft_main reads only mtnt/en-fr and Helsinki-NLP/opus-100"
        )
        message = f"recipec cannot read the data: {why}"
        yield keys.refuse("dataset_name", E1143, message, f"--set dataset_name={OPUS}")
    twice = STARTS if model is None or tokenizer_of(model) in known("adds_bos") else ""
    yield keys.say("dataset_name", {"data.train": [datasets.source(f"hf://{OPUS}", None, "en-fr")]}, twice)
    yield from rows.say(keys, "dataset_name", [Rows("prompt_completion", transform=TRANSLATED)])
    yield keys.sets("data.loss_on", "completion", "the loss covers only the translation")
    yield keys.sets("data.packing", False, "one sample per row")
    yield keys.sets("data.shuffle_seed", None, "the rows keep their order")
    length = {"data.max_length": keys.integer("max_target_length") or 256, "data.overlong": "drop"}
    yield keys.say("max_target_length", length)
    every = section.integer("eval_every_n_steps")
    if every is None:
        message = "eval_every_n_steps is missing, and Tunix requires it"
        yield section.refuse("eval_every_n_steps", E1144, message, "eval_every_n_steps: 100")
    else:
        held = datasets.source(f"hf://{OPUS}", "validation", "en-fr")
        yield keys.sets("data.eval", [held])
        yield section.say("eval_every_n_steps", {"train.eval_every": max(every, 1)})


def _length(run: Tunix) -> Says:
    """State the steps of the run and its checkpoints."""
    keys, section = run.keys, run.training
    if run.reinforces:
        yield from tunix_grpo.batches(run)
    run.steps, epochs = section.integer("max_steps"), keys.integer("num_train_epochs") or 1
    note = f"Tunix ends the run after num_train_epochs: {epochs} if that is sooner"
    if not (yield from training.say_steps(section, "max_steps", note, "num_train_epochs", keys)):
        yield keys.say("num_train_epochs", {"train.epochs": epochs})
        yield section.same("max_steps", note="the same as without the key")
    kept = section.below("checkpointing_options", section.defaults.get("checkpointing_options"))
    for key, target in (("save_interval_steps", "every_steps"), ("max_to_keep", "keep")):
        if count := kept.integer(key):
            yield kept.say(key, {f"checkpoint.{target}": count})
    yield from training.directory(section, "checkpoint_root_directory")


def _optimizer(run: Tunix) -> Says:
    """State optax's optimizer, by name, and the arguments that it accepts."""
    keys, steps = run.keys, run.steps
    section = (
        run.training.below("actor_optimizer_config") if run.reinforces else keys.below("optimizer_config")
    )
    whole = run.reinforces or keys.mapping("optimizer_config")
    section.defaults = {} if whole else defaults_of(NAME, "optimizer")
    if run.reinforces:
        section.defaults = yield from tunix_grpo.computed(run)
    name = str(section.value("opt_type") or "").lower()
    if not name:
        yield section.refuse(
            "opt_type", E1144, "opt_type is missing, and Tunix requires it", "opt_type: adamw"
        )
    known_by = name if name in OPTIMIZERS else "adamw"
    translation = training.ADAMW if known_by == "adam" else training.optimizer_of(known_by)
    if name and name != known_by:
        message = f"the optimizer optax.{name} has no counterpart in recipec"
        yield section.refuse("opt_type", E1163, message, "opt_type: adamw")
    yield from training.say_optimizer(section, "opt_type", name, translation, "adamw")
    section.defaults = {**defaults_of(NAME, known_by), **section.defaults}
    decays = "weight_decay" in keys_of(NAME, known_by)
    for key in ("b1", "b2", "eps", "momentum", "weight_decay"):
        if key in keys_of(NAME, known_by):
            yield section.say(key, {f"train.optimizer.{key}": section.number(key) or 0.0})
    if not decays:
        yield keys.sets("train.optimizer.weight_decay", 0.0, f"optax.{name} does not have this setting")
    yield keys.sets("train.optimizer.max_grad_norm", None, "Tunix clips no gradients")
    yield from section.unused(("max_grad_norm",), CLIPPED)
    yield from section.unused(
        ("b1", "b2", "eps", "momentum", "weight_decay"), f"optax.{name} has no such argument"
    )
    yield from _schedule(section, steps)
    yield from section.follow(OF_OPTIMIZER, training.OFF)


def _schedule(section: Keys, steps: int | None) -> Says:
    """State the learning rate. optax uses a given `learning_rate` regardless of schedule_type."""
    rate = section.number("learning_rate")
    kind = section.text("schedule_type") or ""
    settings: dict[str, Any] = {"name": "constant", "warmup_steps": 0}
    yield section.say("learning_rate", {"train.optimizer.learning_rate": rate} if rate is not None else None)
    if rate is not None:
        yield from section.unused(
            OF_SCHEDULES, "learning_rate is given, and Tunix uses it instead of a schedule"
        )
    elif kind not in SCHEDULES:
        help = "schedule_type: warmup_cosine_decay_schedule, or a learning_rate instead"
        message = f"recipec has no schedule {kind}" if kind else "learning_rate is missing"
        yield section.refuse("schedule_type", E1163 if kind else E1144, message, help)
        yield from section.passive(OF_SCHEDULES, "part of the schedule")
    else:
        section.defaults = {**defaults_of(NAME, kind), **section.defaults}
        warm, settings["name"] = kind.startswith("warmup"), SCHEDULES[kind]
        peak = "value" if kind == "constant_schedule" else "peak_value" if warm else "init_value"
        rate = section.number(peak)
        if rate is None:
            yield section.refuse(peak, E1144, f"{peak} is missing, and {kind} requires it", f"{peak}: 1e-4")
        yield section.say(peak, {"train.optimizer.learning_rate": rate or 1e-4})
        if warm:
            settings["warmup_steps"] = section.integer("warmup_steps") or 0
            from_zero = not section.number("init_value")
            start = "" if from_zero else "recipec's warm-up starts at zero; Tunix's starts at init_value"
            yield section.say("init_value", None, start)
        last = "alpha" if kind == "cosine_decay_schedule" else "end_value"
        end = section.number(last) or 0.0
        settings["min_lr_ratio"] = end if last == "alpha" else round(end / rate, 12) if rate else 0.0
        length = "transition_steps" if kind == "linear_schedule" else "decay_steps"
        whole = section.integer(length)
        if settings["name"] == "constant":
            settings.pop("min_lr_ratio")
        elif whole != steps:
            message = (
                f"the schedule has {whole} steps and the run {steps or 'epochs'}: recipec's schedule "
                "is as long as the run"
            )
            help = f"--set optimizer_config.{length}={steps}" if steps else "set training_config.max_steps"
            yield section.refuse(length, E1163, message, help)
        used = {key for key in OF_SCHEDULES if key in keys_of(NAME, kind)}
        yield from section.passive(
            ("schedule_type", *used - {"exponent", "transition_begin"}), "part of the schedule"
        )
        yield from section.unused(
            [key for key in OF_SCHEDULES if key not in used], f"{kind} has no such argument"
        )
    for key, value in settings.items():
        yield section.sets(f"train.schedule.{key}", value)


def _peft(*rules: Rule[Tunix]) -> tuple[Rule[Tunix], ...]:
    """Return rules that state keys only if peft_main runs the file."""
    return tuple(_if(rule, False) for rule in rules)


def _grpo(*rules: Rule[Tunix]) -> tuple[Rule[Tunix], ...]:
    """Return rules that state keys only if grpo_main runs the file."""
    return tuple(_if(rule, True) for rule in rules)


def _if(rule: Rule[Tunix], reinforces: bool) -> Rule[Tunix]:
    def says(run: Tunix) -> Says:
        if run.reinforces is reinforces:
            yield from rule(run)

    return says


RULES: Sequence[Rule[Tunix]] = (
    tunix_grpo.command,
    mappings("model_config", "tokenizer_config", "optimizer_config", "training_config"),
    mappings("mesh", "lora_config", section="model_config"),
    _model,
    _lora,
    *_peft(_batch, _data),
    *_grpo(tunix_grpo.batch, tunix_grpo.loss, tunix_grpo.rollout, tunix_grpo.data, tunix_grpo.rewards),
    _length,
    _optimizer,
    follow(OF_TRAINING, "training_config", off=training.OFF),
    *_grpo(follow((*OF_TRAINING, *tunix_grpo.OF_TRAINING), "rl_training_config", off=training.OFF)),
    *_grpo(tunix_grpo.roles),
    *_grpo(unused(tunix_grpo.OTHERS, "grpo_main does not read it")),
    *_peft(unused(RL, "peft_main does not read it")),
    *_peft(follow(KEYS, off=training.OFF)),
    *_grpo(follow("files tfds_download data_directory data_source prompt_key data_config")),
    common(NAME, off=training.OFF),
)
