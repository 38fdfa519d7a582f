"""Axolotl's YAML (0.19)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.wording import listing
from recipec.port.dialects.axolotl_data import PRETRAINING, say_data
from recipec.port.dialects.axolotl_optimizer import say_optimizer
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import OFF, Keys, defaults_of, table, words
from recipec.port.ledger import Ledger
from recipec.port.meaning import (
    adapters,
    datasets,
    experts,
    freezing,
    images,
    losses,
    model_names,
    reinforcement,
    rounding,
    sharding,
    templates,
    training,
)
from recipec.port.meaning.adapters import Chosen
from recipec.port.meaning.run import Run
from recipec.port.meaning.sharding import Launch
from recipec.port.meaning.training import EPOCH, EVERY
from recipec.port.refusals import E1144, E1145, E1148, E1149, E1160, E1163, E1180
from recipec.port.rules import common, directory, follow, places, start, tokens
from recipec.runtime.training.objectives import OBJECTIVES

NAME = "axolotl"
TITLE = "Axolotl"
MARKS = words(
    """base_model sequence_len sample_packing adapter lora_target_linear val_set_size micro_batch_size
    num_epochs lr_scheduler evals_per_epoch saves_per_epoch datasets dataset_prepared_path chat_template
    flash_attention load_in_4bit load_in_8bit rl eot_tokens base_model_config bnb_config_kwargs
    pad_to_sequence_len"""
)

UNCAST = "without flash attention, Axolotl trains embeddings and norms in float32"
WHOLE_TEXT = {"model.language_model", "lm_head"}
"""The name prefixes of all parameters of the language model, in a model that also reads images."""
OF_ADAPTERS = words(
    """lora_target_linear lora_target_modules lora_dropout lora_r lora_alpha lora_rank_pattern
    lora_alpha_pattern peft_use_rslora peft_init_lora_weights peft_layers_to_transform peft_layers_pattern
    peft bnb_config_kwargs lora_target_parameters quantize_moe_experts"""
)
OF_LORA = table("""
switch peft_use_rslora -> lora.rslora
switch peft_use_dora -> lora.kind=dora
""")
OF_EAFT = table("""
number eaft_alpha -> train.eaft_alpha
integer eaft_k -> train.eaft_top_k
sets -> train.eaft_entropy=1.0: Axolotl does not divide the entropy
""")
KINDS: Mapping[str, Mapping[str, str]] = {
    "dpo": {"train.objective": "dpo"},
    "ipo": {"train.objective": "dpo", "train.loss_type": "ipo"},
    "simpo": {"train.objective": "cpo", "train.loss_type": "simpo"},
    "orpo": {"train.objective": "orpo"},
    "kto": {"train.objective": "kto"},
    "grpo": {"train.objective": "grpo"},
}
"""The values of `rl`, with the recipe's values."""
KNOWN_PLUGINS = words(
    """CutCrossEntropyPlugin LigerPlugin KernelsPlugin ExpertParallelPlugin LMEvalPlugin SwanLabPlugin"""
)
OF_GROUPS = table("""
exact prefetch_depth vllm_sync_interval streaming_partial_batch streaming_min_groups replay_buffer_size
    replay_recompute_logps reroll_start_fraction reroll_max_groups skip_zero_advantage_batches: only Axolotl's
    asynchronous trainer reads it
learned use_data_producer=false async_prefetch=false: recipec draws completions with the weights of the step
learned reward_processing_classes=null: recipec runs no model that scores completions
""")
OF_PREFERENCES = words(
    """rl_beta dpo_beta orpo_alpha trl dpo_label_smoothing dpo_loss_type dpo_use_weighting
    precompute_ref_log_probs"""
)


def opened(ledger: Ledger) -> Run:
    """Return the run of a file."""
    return Run(Keys(ledger, ledger.sources.main, TITLE, defaults_of(NAME, "config")))


def _data(run: Run) -> Says:
    yield from say_data(run.keys, run.model, run.objective)


def _stream(run: Run) -> Says:
    pretrains = bool(run.keys.value(PRETRAINING)) or None
    buffers = ("streaming_multipack_buffer_size", "pretrain_multipack_buffer_size")
    yield from datasets.say_stream(run.keys, "streaming", buffers, 10000, pretrains)


def _balance(run: Run) -> Says:
    for name in ("overrides_of_model_config", "model_config"):
        yield from experts.say_overrides(run.keys, name, run.model)


def _wandb(run: Run) -> Says:
    project = run.keys.text("wandb_project")
    on = project and run.keys.value("wandb_mode") != "disabled"
    yield run.keys.same("wandb_project", {training.PROJECT: project} if on else None, "" if on else "off")


def _eaft(run: Run) -> Says:
    """State the loss that weights tokens by entropy. Axolotl does not divide the entropy."""
    keys, objective = run.keys, run.objective
    if objective != "sft":
        yield from keys.passive(
            ("use_eaft", "eaft_alpha", "eaft_k"), "it is a loss of supervised fine-tuning"
        )
    elif keys.flag("use_eaft"):
        yield from losses.weighted(keys, "use_eaft", "eaft")
        yield from keys.follow(OF_EAFT)
    yield keys.same("use_eaft", note="off")


def _mlflow(run: Run) -> Says:
    """State MLflow's keys. Axolotl exports them to the environment; an experiment name switches it on."""
    keys = run.keys
    name = keys.text("mlflow_experiment_name")
    if not name and not (keys.given("use_mlflow") and keys.flag("use_mlflow")):
        for off in ("use_mlflow", "mlflow_experiment_name"):
            yield keys.same(off, note="off")
        return
    key = "mlflow_experiment_name" if name else "use_mlflow"
    yield keys.say(key, {training.EXPERIMENT: name or "Default"}, "" if name else training.BY_MLFLOW)
    yield keys.same("use_mlflow", note="mlflow_experiment_name decides whether the run is logged to MLflow")
    yield keys.unless("mlflow_tracking_uri", OFF, "set MLFLOW_TRACKING_URI in the environment of the run")
    yield keys.unless("mlflow_run_name", OFF, "the MLflow run has the artifact's name")


def _best(run: Run) -> Says:
    """State early stopping. Axolotl then also loads the best model, if it evaluates at every save."""
    keys = run.keys
    saves, evaluates = (keys.number(name) or 0 for name in ("save_steps", "eval_steps"))
    loads = saves and evaluates and saves % evaluates == 0
    yield from training.best(keys, also={training.BEST: True} if loads else None)


def _model(run: Run) -> Says:
    keys = run.keys
    name = keys.text("base_model")
    revision = "revision_of_model" if keys.text("revision_of_model") else "model_revision"
    run.named = yield from model_names.say_model(keys, "base_model", revision)
    if run.named is None:
        return
    yield from keys.passive(("revision_of_model", "model_revision"), "")
    tokenizer = keys.text("tokenizer_config")
    other = tokenizer and tokenizer != name
    yield keys.same("tokenizer_config", {"model.tokenizer": tokenizer} if other else None)


def _objective(run: Run) -> Says:
    keys = run.keys
    kind = keys.text("rl")
    if kind is not None and kind not in KINDS:
        message = f"`rl: {kind}` is another kind of training: recipes have {listing(OBJECTIVES)}"
        yield keys.refuse("rl", E1149, message, "rl: dpo or grpo, or no rl for supervised fine-tuning")
        kind = None
    yield keys.say("rl", KINDS[kind] if kind else {})
    if kind is None:
        yield from keys.passive(OF_PREFERENCES, "it has no effect without rl")
        return
    run.objective = kind
    if kind == "grpo":
        yield from _groups(keys)
        return
    betas = ("trl.beta", "rl_beta", "dpo_beta", "orpo_alpha")
    beta = next((name for name in betas if keys.given(name)), None)
    if beta is not None:
        yield keys.same(beta, {"train.beta": keys.number(beta)})
    yield from keys.passive(betas, f"{beta} holds" if beta else "")
    if beta is None:
        yield keys.default("rl_beta", 0.1, {"train.beta": 0.1}, "TRL's default")
    if kind == "dpo":
        yield from losses.of_pairs(keys, "dpo", ("dpo_loss_type", "dpo_label_smoothing"))
        yield keys.learned("dpo_loss_weights", ([1], [1.0]), "recipec's only loss has the weight 1")
    elif kind == "simpo":
        if not keys.given("simpo_gamma"):
            yield keys.refuse(
                "simpo_gamma", E1145, "Axolotl's simpo stops if there is no margin", "simpo_gamma: 0.5"
            )
        yield keys.say("simpo_gamma", {"train.simpo_gamma": keys.number("simpo_gamma")})
        alpha = keys.number("cpo_alpha")
        yield keys.default(
            "cpo_alpha", 1.0, {"train.cpo_alpha": 1.0 if alpha is None else alpha}, "TRL's default"
        )
    elif kind == "kto":
        yield from losses.weights(keys, "kto_desirable_weight", "kto_undesirable_weight")
    yield from keys.passive(("dpo_loss_type", "dpo_label_smoothing"), "the loss does not read it")
    yield keys.learned("dpo_use_weighting", (False,), "recipec weights all preferences equally")
    yield from keys.passive(
        ("precompute_ref_log_probs",), "it decides when the reference is computed, not its values"
    )
    yield from keys.below("trl").passive(
        keys.mapping("trl"), "a setting of reinforcement learning, which this run is not"
    )


def _section(keys: Keys) -> Keys:
    """Return the keys of `trl`, with the defaults of the trainer where Axolotl has none."""
    settings = {key: value for key, value in defaults_of(NAME, "TRLConfig").items() if value is not None}
    return keys.below("trl", {**defaults_of("trl", "grpo"), "max_completion_length": None, **settings})


def _groups(keys: Keys) -> Says:
    """State the loss, the completions and the rewards of GRPO. Axolotl passes the keys of `trl` to TRL."""
    section = _section(keys)
    if section.value("max_completion_length") is None:
        message = "`trl.max_completion_length` is missing, and Axolotl has no default for it"
        yield section.refuse("max_completion_length", E1144, message, "max_completion_length: 512")
        section.defaults = {**section.defaults, "max_completion_length": 512}
    beta = section if section.given("beta") or not keys.given("rl_beta") else keys
    if beta is keys:
        section.defaults = {**section.defaults, "beta": keys.number("rl_beta")}
        yield keys.same("rl_beta", note="part of train.grpo")
    yield from reinforcement.say_rewards(section)
    yield from reinforcement.say_loss(section)
    yield from reinforcement.say_sampling(section)
    yield from reinforcement.say_server(section)
    yield from section.follow(OF_GROUPS)
    yield from section.follow(reinforcement.OF_GROUPS)
    names = [name for name in OF_PREFERENCES if name != "trl"]
    yield from keys.passive(names, "grpo does not read it")
    yield keys.same("trl", note="empty: the same as without the key")


def _draws(run: Run) -> Says:
    """State how many steps a draw of completions is for, and whether a step has whole groups."""
    if run.objective != "grpo":
        return
    section = _section(run.keys)
    rows, micro = (run.ledger.value(f"train.{key}") for key in ("global_batch_size", "micro_batch_size"))
    accumulation = run.keys.integer("gradient_accumulation_steps") or 1
    if isinstance(rows, int) and isinstance(micro, int):
        yield from reinforcement.say_draws(section, accumulation, rows // accumulation)
        yield from reinforcement.say_groups(section, rows)


def _plugins(run: Run) -> Says:
    keys = run.keys
    plugins = keys.value("plugins")
    names = [str(name).rpartition(".")[2] for name in plugins] if isinstance(plugins, list) else []
    lost = [name for name in names if name not in KNOWN_PLUGINS]
    if lost:
        yield keys.learned("plugins", (), f"recipec does not make the changes that {listing(lost)} makes")
    yield keys.same("plugins", note="the same arithmetic in fused kernels, or only logging")


OF_LLAMA_2 = re.compile(
    r"(mistralai|mistral-community|codellama|TinyLlama)/|meta-llama/Llama-2-|HuggingFaceH4/zephyr-7b-beta$"
)
"""Matches models of the catalog whose special tokens are those of Llama 2."""
TOKENS_OF_LLAMA_2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def _special_tokens(run: Run) -> Says:
    """State special tokens: padding is masked; other tokens would change the text."""
    keys, model = run.keys, run.model
    below, alike = keys.below("special_tokens"), model is not None and OF_LLAMA_2.match(model.id)
    usual = TOKENS_OF_LLAMA_2 if alike and not keys.given("tokenizer_config") else {}
    added = keys.ledger.value("model.add_tokens") or {}
    for name, token in keys.mapping("special_tokens").items():
        if name == "pad_token":
            yield below.same(name, note="padding is neither trained on nor attended to")
        elif token == usual.get(name, ()):
            yield below.same(name, note="the model's own")
        elif name == "eos_token" and (mark := templates.missing_end(str(token), model, added)):
            assert model is not None
            names = ", ".join(f'"{added_token}"' for added_token in (*added, mark))
            yield below.refuse(
                name, E1180, templates.spelled(mark, model, "Axolotl"), f"--set 'tokens=[{names}]'"
            )
        elif name in ("bos_token", "eos_token", "unk_token"):
            yield below.unless(
                name, (), f"the tokenizer keeps its own {name}; to change it, edit a copy of the tokenizer"
            )
        else:
            yield below.unless(name, ([],), "recipec does not add these tokens to the tokenizer")
    if not below.stated:
        yield keys.same("special_tokens")


def _adapters(run: Run) -> Says:
    keys, model = run.keys, run.model
    adapter = keys.choice("adapter", ("lora", "qlora"))
    if adapter is None and "adapter" not in keys.stated:
        yield from _full(keys, model)
        return
    yield keys.same("adapter", note="LoRA on a base model in 4 bits" if adapter == "qlora" else "")
    if keys.text("rl") in ("dpo", "ipo", "kto"):
        yield keys.same("unfrozen_parameters", note="TRL adds the adapters later, and then trains only them")
    yield from freezing.say_adapters(keys, "unfrozen_parameters", model)
    for key, value in (("lora_r", keys.integer("lora_r")), ("lora_alpha", keys.number("lora_alpha"))):
        if value is not None and value > 0:
            yield keys.say(key, {"lora.rank" if key == "lora_r" else "lora.alpha": value})
        else:  # PEFT's own default, because Axolotl passes None.
            yield keys.refuse(
                key, E1144, f"`{key}` is missing, and Axolotl has no default for it", f"{key}: 16"
            )
    yield from keys.follow(OF_LORA)
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = keys.mapping(f"lora_{name}")
        yield keys.same(f"lora_{name}", {f"lora.{name}": dict(pattern)} if pattern else None)
    yield from _dropout(keys, (yield from _targets(keys, model)))
    start = keys.value("peft_init_lora_weights")
    if start is None:
        yield keys.same("peft_init_lora_weights")
    else:
        yield from adapters.say_init(keys, "peft_init_lora_weights", start)
    settings = keys.mapping("peft").get("loftq_config")
    if settings and settings.get("loftq_bits"):  # Axolotl asks PEFT for LoftQ if its bits are given
        yield from adapters.say_loftq(keys, "peft", settings)
    yield keys.same("peft")
    yield from _quantized(keys, adapter, model)


def _dropout(keys: Keys, chosen: Chosen | None) -> Says:
    """State the adapters' dropout. Axolotl drops it for experts that target modules mean."""
    there = keys.given("lora_target_parameters")
    if keys.number("lora_dropout") and chosen and chosen.parameters and not there:
        note = "recipec applies no dropout; Axolotl applies it to adapters that are not only for experts"
        yield keys.say("lora_dropout", {"lora.dropout": 0.0}, note)
    elif keys.given("lora_dropout"):
        yield from adapters.say_dropout(keys, chosen)
    yield keys.default("lora_dropout", 0.0, {"lora.dropout": keys.ledger.value("lora.dropout", 0.0)})


def _full(keys: Keys, model: Model | None) -> Says:
    yield keys.sets("lora", None)
    yield keys.same("adapter")
    patterns = {pattern.lstrip("^") for pattern in keys.texts("unfrozen_parameters") or ()}
    if {pattern.removesuffix(".*") for pattern in patterns} >= WHOLE_TEXT:
        yield keys.same("unfrozen_parameters", note="this selects the whole text model, which recipec trains")
    if model is not None and patterns and (only := freezing.unfrozen(keys, "unfrozen_parameters", model)):
        yield keys.say("unfrozen_parameters", {"train.trainable_modules": only}, freezing.NAMES)
    if not keys.stands("adapter"):
        yield keys.default("adapter", None, {"lora": None}, "Axolotl's default: all parameters are trained")
    for name, way in (("load_in_4bit", "qlora"), ("load_in_8bit", "lora")):
        yield from adapters.refuse_quantized(keys, name, f"adapter: {way}")
        yield keys.same(name, note="off")
    yield from keys.passive(OF_ADAPTERS, "the run trains all parameters, and has no adapters")


def _targets(keys: Keys, model: Model | None) -> Statements[Chosen | None]:
    modules, linear = keys.texts("lora_target_modules"), keys.flag("lora_target_linear")
    layers = keys.value("peft_layers_to_transform")
    layers = [n for n in layers if isinstance(n, int)] if isinstance(layers, list) else None
    parameters = keys.listed("lora_target_parameters")
    if not modules and not linear and not parameters:
        message = "neither `lora_target_modules` nor `lora_target_linear` selects modules for adapters"
        yield keys.refuse("lora_target_modules", E1148, message, "lora_target_linear: true")
        yield from keys.passive(
            ("lora_target_linear", "peft_layers_to_transform", "peft_layers_pattern"), "off"
        )
        return None
    spec = [modules] if isinstance(modules, str) and linear else modules or []
    if linear and model is not None:
        # Axolotl collects the last parts of the names.
        names = [module.name.rpartition(".")[2] for module in adapters.modules(model) if module.linear]
        spec = list(dict.fromkeys([*spec, *(name for name in names if name != "lm_head")]))
    key = "lora_target_modules" if modules else "lora_target_linear" if linear else "lora_target_parameters"
    whole = "all-linear" if linear and model is None else spec
    chosen = yield from adapters.say_targets(keys, key, model, whole, layers, parameters=parameters)
    yield from adapters.say_parameters(keys, "lora_target_parameters", chosen)
    yield keys.same("lora_target_modules", note="lora_target_linear already has all of them")
    yield keys.same(
        "lora_target_linear", note="all Linear modules except the output head" if linear else "off"
    )
    sets = {"lora.layers": numbers} if (numbers := keys.ledger.value("lora.layers")) is not None else None
    yield keys.same("peft_layers_to_transform", sets if keys.given("peft_layers_to_transform") else None)
    yield keys.same("peft_layers_pattern", note="the model has one list of layers")
    return chosen


def _quantized(keys: Keys, adapter: str | None, model: Model | None) -> Says:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if adapter == "qlora" and not four:
        message = "`adapter: qlora` without `load_in_4bit: true`, which Axolotl requires"
        yield keys.refuse("load_in_4bit", E1145, message, "load_in_4bit: true")
        four = True
    usual = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    extra = keys.mapping("bnb_config_kwargs")
    kind = str(extra.get("bnb_4bit_quant_type", "nf4"))
    nested = extra.get("bnb_4bit_use_double_quant", True) is True
    if kind not in ("nf4", "fp4"):
        message = f"bitsandbytes has no type {kind}"
        yield keys.refuse("bnb_config_kwargs", E1160, message, "bnb_4bit_quant_type: nf4")
        kind = "nf4"
    bits = 4 if four else 8 if eight else None
    whole = yield from _experts_too(keys, bits is not None)
    quantization = adapters.quantized(bits, kind, nested, experts.has_experts(model) and not whole)
    sets: dict[str, Any] = {"model.quantization": quantization.value} if quantization.value else {}
    for name, on in (("load_in_4bit", four), ("load_in_8bit", eight and not four)):
        if on:
            yield keys.say(name, sets, quantization.note)
        yield keys.same(name, note="off")
    if extra:
        yield keys.say("bnb_config_kwargs", sets, quantization.note)
    elif four:
        yield keys.default("bnb_config_kwargs", usual, sets, f"Axolotl's default; {quantization.note}")
    yield keys.same("bnb_config_kwargs", note="the base model is not stored in 4 bits")


def _experts_too(keys: Keys, quantized: bool) -> Statements[bool]:
    """Return whether experts are quantized like linear layers, and refuse what Axolotl refuses with it."""
    key = "quantize_moe_experts"
    if not keys.flag(key):
        yield keys.same(key, note="off")
        return bool(keys.flag("llama4_linearized_experts"))
    if keys.flag("lora_target_linear"):
        message = "`lora_target_linear` with `quantize_moe_experts`: Axolotl refuses the two together"
        yield keys.refuse(key, E1145, message, "use lora_target_modules instead of lora_target_linear")
    if not quantized:
        message = (
            "`quantize_moe_experts` without `load_in_4bit` or `load_in_8bit`: Axolotl requires one of the two"
        )
        yield keys.refuse(key, E1145, message, "load_in_4bit: true")
    yield keys.same(key, note="model.quantization stores all weights of the layers in the same way")
    return True


ROUGHER = "recipec rounds as torchao 0.18 does; torchao 0.17 rounds small ranges more coarsely"


def _qat(run: Run) -> Says:
    """State quantization-aware training, which rounds every torch.nn.Linear."""
    keys = run.keys
    if not keys.mapping("qat"):
        yield keys.same("qat", note="off")
        return
    section = keys.below("qat", {**defaults_of(NAME, "QATConfig"), "weight_dtype": "int8"})
    kinds = {key: str(section.value(key)).lower() for key in ("weight_dtype", "activation_dtype")}
    kinds = {key: "fp8" if kind.startswith("float8") else kind for key, kind in kinds.items()}
    weights, activations = kinds["weight_dtype"], kinds["activation_dtype"]
    if keys.text("adapter"):
        note = "recipec rounds the projections with an adapter, and Axolotl all linear layers"
        yield keys.learned("qat", (), note)
        return
    if weights == "nvfp4":
        message = (
            "Axolotl asks torchao for nvfp4 of only the weights, which torchao cannot train: the run stops"
        )
        yield keys.refuse("qat", E1145, message, "qat: {weight_dtype: int4, activation_dtype: int8}")
        return
    if weights == "int8" or (weights, activations) == ("int4", "int4"):
        message = f"torchao does not train {weights} weights with {activations} activations: Axolotl stops"
        yield keys.refuse("qat", E1145, message, "qat: {weight_dtype: int4, activation_dtype: int8}")
        return
    head = not _fused_head(keys)
    if weights == "mxfp4":
        yield from _mxfp4(section, head)
        return
    if (weights, activations) != ("int4", "int8"):
        also = "" if activations == "none" else f" and {activations} activations"
        note = "recipec rounds to int4 weights with int8 activations, and to mxfp4"
        yield keys.learned("qat", (), f"{note}, not to {weights} weights{also}")
        return
    yield section.say("weight_dtype", rounding.rounds(head, rounding.SPREAD))
    yield section.say("activation_dtype", {}, ROUGHER)
    if head:
        yield section.same("weight_dtype", note="the output head is a linear layer too")
    yield from rounding.say_group(section, "group_size", 32)
    yield section.learned("quantize_embedding", (False,), "recipec does not round the embedding")
    yield from rounding.say_later(section)


def _mxfp4(section: Keys, head: bool) -> Says:
    """State rounding to the MX format of 4 bits, which torchao's linear layers cannot switch off."""
    yield section.say("weight_dtype", rounding.rounds(head, rounding.MX))
    yield section.same("activation_dtype", note="Axolotl rounds activations as the weights")
    if section.integer("group_size") != 32:
        message = "Axolotl stops at mxfp4 with another group_size than 32"
        yield section.refuse("group_size", E1145, message, "group_size: 32")
    yield section.say("group_size", {"train.qat.group_size": 32})
    yield section.learned("quantize_embedding", (False,), "recipec does not round the embedding")
    yield from section.unused((rounding.LATER,), "Axolotl does not delay the rounding to mxfp4")


def _fused_head(keys: Keys) -> bool:
    """Return whether the loss reads the output head's weight, which training then does not round."""
    if keys.flag("liger_fused_linear_cross_entropy"):
        return True
    cut = any("CutCrossEntropyPlugin" in name for name in keys.texts("plugins") or ())
    return keys.flag("cut_cross_entropy") if keys.given("cut_cross_entropy") else cut


def _optimizer(run: Run) -> Says:
    yield from say_optimizer(run.keys)


def _memory(run: Run) -> Says:
    keys = run.keys
    remat = bool(keys.value("gradient_checkpointing")) or run.launch.remat
    sets = {"remat.policy": "decoder" if remat else "none"}
    if keys.given("gradient_checkpointing"):
        yield keys.same("gradient_checkpointing", sets, "the same numbers, with less memory" if remat else "")
    yield keys.say("gradient_checkpointing", sets)


def _logs(run: Run) -> Says:
    steps = run.keys.number("logging_steps")
    whole = steps is not None and steps >= 1 and steps == int(steps)
    yield run.keys.same("logging_steps", {"train.log.every": int(steps or 1)} if whole else None)
    if run.keys.flag("use_tensorboard"):
        yield run.keys.same("use_tensorboard", {"train.log.tensorboard": True})


def _launch(run: Run) -> Says:
    """State how the run was started, according to accelerate's and DeepSpeed's files and the keys."""
    keys = run.keys
    others = keys.ledger.sources.others
    launch = (
        (yield from sharding.accelerate(keys.ledger, others["accelerate"]))
        if "accelerate" in others
        else Launch()
    )
    if "deepspeed" in others:
        yield from sharding.deepspeed(Keys(keys.ledger, others["deepspeed"], "DeepSpeed"), {})
    if isinstance(keys.value("deepspeed"), dict):
        yield from sharding.deepspeed(keys.below("deepspeed"), {})
    yield keys.same("deepspeed", note=sharding.MESH)
    remat = yield from sharding.fsdp(keys.below("fsdp_config"))
    config = keys.value("fsdp_config")
    inner = config if isinstance(config, dict) else {}
    version = keys.value("fsdp_version") or inner.get("fsdp_version") or inner.get("version")
    # Axolotl prepares FSDP2 itself, and keeps the type of the weights.
    launch = launch.with_(
        str(version) != "2" and (keys.value("fsdp") or inner),
        keys.value("deepspeed") or "deepspeed" in others,
    )
    yield from keys.passive(("fsdp", "fsdp_version", "fsdp_final_state_dict_type"), sharding.MESH)
    shared, data = launch.shared, 1
    for name in ("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree"):
        size = max(keys.integer(name) or 1, 1)
        shared *= size
        yield keys.same(name, note=sharding.sharing(size) if size > 1 else "")
    for name in ("dp_shard_size", "dp_replicate_size", "expert_parallel_size"):
        data *= max(keys.integer(name) or 1, 1)
        yield keys.same(name, note=sharding.MESH)
    processes = launch.processes or (data * shared if data > 1 else None)
    grouped = replace(launch, processes=processes, shared=shared, remat=launch.remat or remat)
    run.launch = yield from sharding.ray(keys, grouped)


def _batches(run: Run) -> Says:
    keys, launch = run.keys, run.launch
    micro, accumulation, total = (
        keys.integer(name) for name in ("micro_batch_size", "gradient_accumulation_steps", "batch_size")
    )
    micro = micro if keys.given("micro_batch_size") or not total else max(total // (accumulation or 1), 1)
    if not keys.given("gradient_accumulation_steps") and total and micro:
        accumulation = max(total // micro, 1)
    processes = sharding.devices(keys.ledger, launch)
    shared = launch.shared if processes % launch.shared == 0 else 1
    batch = training.global_batch(max(micro or 1, 1), max(accumulation or 1, 1), processes, shared)
    rows = {"train.global_batch_size": batch.rows}
    yield keys.same("batch_size", rows if total else None, "rows of a step per device")
    for key, sets in (
        ("micro_batch_size", {"train.micro_batch_size": batch.per_device, **rows}),
        ("gradient_accumulation_steps", rows),
    ):
        if keys.given(key):
            yield keys.same(key, sets, str(batch))
        yield keys.say(key, sets)
    if not keys.ledger.devices and not launch.processes:
        yield from sharding.assumed(keys, launch, rows)
    elif keys.ledger.devices:
        yield keys.defaulted("--devices", processes, rows, "--devices gives the number of GPUs")
    if keys.ledger.value("train.objective") is None:
        # Axolotl's trainer does not count a step's tokens if the model's forward has no `num_items_in_batch`.
        kept = "tokens" if batch.rows == batch.per_device or keys.flag("use_eaft") else "micro_batches"
        note = "Axolotl takes the mean of the means of a step's micro-batches, on each device"
        means = kept == "micro_batches"
        normalization = {"train.loss_normalization": kept}
        value = "mean of means" if means else "mean of tokens"
        yield keys.defaulted("loss", value, normalization, note if means else "Axolotl's default")


def _length(run: Run) -> Says:
    keys = run.keys
    epochs, note = keys.number("num_epochs"), "recipec runs this many steps, even if num_epochs ends sooner"
    if (yield from training.say_steps(keys, "max_steps", note, "num_epochs")):
        return
    yield keys.same("max_steps", note="no bound")
    if epochs is not None and epochs > 0:
        whole = max(round(epochs), 1)
        note = "" if whole == epochs else f"recipec runs {whole} whole epochs"
        yield keys.say("num_epochs", {"train.epochs": whole}, note)


def _schedule(run: Run) -> Says:
    keys = run.keys
    name = keys.text("lr_scheduler") or "cosine"
    schedule = training.schedule_of(name, keys.mapping("lr_scheduler_kwargs"), keys.number("learning_rate"))
    notes = {
        "one_cycle": "recipec uses a cosine after the warm-up, and keeps the momentum constant",
        "rex": "recipec uses a cosine instead of REX",
    }
    if schedule.name is None and name not in notes:
        yield keys.refuse("lr_scheduler", E1163, f"recipec has no schedule {name}", "lr_scheduler: cosine")
    final = keys.number("cosine_min_lr_ratio") if name == "cosine" else None
    ratio = final if final is not None else schedule.min_lr_ratio
    ends = {"train.schedule.min_lr_ratio": ratio} if 0 < ratio <= 1 else {}
    yield keys.say(
        "lr_scheduler",
        {"train.schedule.name": schedule.name or "cosine", **ends},
        schedule.note or notes.get(name, ""),
    )
    yield keys.same("lr_scheduler_kwargs", note="part of the schedule")
    if name == "cosine":
        yield keys.same("cosine_min_lr_ratio", ends or None)
    yield keys.same("cosine_min_lr_ratio", note=f"the schedule {name} does not read it")


def _warmup(run: Run) -> Says:
    """State the warm-up. Axolotl rounds a ratio down, makes two steps of one, and has a default warm-up."""
    keys = run.keys
    steps, ratio = keys.number("warmup_steps"), keys.number("warmup_ratio")
    if keys.given("warmup_steps") and keys.given("warmup_ratio"):
        message = "`warmup_steps` and `warmup_ratio` exclude each other in Axolotl"
        yield keys.refuse("warmup_ratio", E1145, message, "keep one of them")
    if steps is not None:
        warmup = training.warmup(steps)
        count = 2 if warmup.steps == 1 else warmup.steps
        sets = {"train.schedule.warmup_steps": count or 0} if warmup.ratio is None else warmup.values()
        note = "Axolotl makes two warm-up steps of one" if count == 2 != warmup.steps else warmup.note
        yield keys.say("warmup_steps", sets, note)
    elif keys.integer("max_steps") and (ratio is None or 0 < ratio < 1):
        count = int((ratio or 0.03) * (keys.integer("max_steps") or 0))
        count = 2 if count == 1 else count if ratio else min(count, 100)
        sets = {"train.schedule.warmup_steps": count}
        note = "Axolotl takes the share of num_epochs' steps if they are fewer than max_steps"
        if ratio is None:
            yield keys.default("warmup_ratio", 0.03, sets, f"Axolotl's default: {note}")
        yield keys.say("warmup_ratio", sets, note)
    elif ratio is not None:
        note = "recipec rounds up to a whole step; Axolotl rounds down" if 0 < ratio < 1 else ""
        yield keys.say("warmup_ratio", {"train.schedule.warmup_ratio": ratio} if 0 <= ratio < 1 else {}, note)
    else:
        note = "recipec takes 3 % of the run's steps, rounded up; Axolotl rounds down, and takes at most 100"
        sets = {"train.schedule.warmup_ratio": 0.03}
        yield keys.default("warmup_ratio", 0.03, sets, f"Axolotl's default: {note}")
    yield from keys.passive(("warmup_steps", "warmup_ratio"), "the other key gives the warm-up")


def _precision(run: Run) -> Says:
    keys, launch = run.keys, run.launch
    bf16 = keys.value("bf16")
    half, eight = keys.flag("fp16") or keys.flag("float16"), keys.flag("fp8")
    brain = bf16 in ("auto", "full", True) or keys.flag("bfloat16")
    sets: dict[str, Any] = {"model.dtype": "bfloat16" if brain or half or eight else "float32"}
    note = ""
    if sets["model.dtype"] == "bfloat16" and keys.ledger.value("lora", "") is None:
        held, why = launch.masters(False, bf16 != "full")
        yield keys.sets("train.optimizer.master_weights", held, why)
        cast = any(keys.value(name) for name in ("fsdp", "fsdp_config", "cut_cross_entropy"))
        if not (held or cast) and keys.ledger.value("model.attention") == "dot":
            note = UNCAST
    if keys.given("bf16") and keys.source.get("bf16") not in (True, False, "auto", "full"):
        yield keys.refuse("bf16", E1160, f"`bf16` is {bf16!r}, not auto, true, false or full", "bf16: auto")
    yield keys.say("bf16", {} if half or eight else sets, note)
    if keys.flag("bfloat16"):
        yield keys.same("bfloat16", sets)
    for name in ("fp16", "float16"):
        if keys.flag(name):
            note = "recipec uses bfloat16 instead: more range, three bits less precision, and no loss scaling"
            yield keys.say(name, sets, note)
    yield from keys.passive(("bfloat16", "fp16", "float16"), "off")
    yield keys.unless("fp8", (False,), "recipec uses bfloat16 instead: products are more precise, and slower")
    yield keys.unless("fp8_config", (), "recipec uses bfloat16 instead of fp8")
    if sets["model.dtype"] == "float32" and keys.value("tf32") is True:
        yield keys.say("tf32", {}, "the TPU computes float32 products in its own way, not in TF32")
    yield keys.same("tf32", note="it does not affect products in bfloat16")


def _attention(run: Run) -> Says:
    keys, model = run.keys, run.model
    on = [flag for flag in _FLAGS if keys.flag(flag)]
    held = keys.text("attn_implementation") or (_FLAGS[on[0]] if on else None)
    scores = images.needs_scores(keys, model)
    flashes = (model is None or model.family.flash_attention) and not scores
    sets = {"model.attention": "dot" if held in (None, "eager", "sdpa") or not flashes else "splash"}
    note = "recipec does not quantize attention scores" if held in ("sage", "fp8") else ""
    if scores and held not in (None, "eager", "sdpa"):
        note = images.BY_SCORES
    for key in ("attn_implementation", *on):
        yield keys.say(key, sets if keys.given(key) else None, note)
    yield from keys.passive(_FLAGS, "off")


def _every(keys: Keys, path: str, names: tuple[str, str, str], default: str, idle: str = "") -> Says:
    """State an interval: in steps, as a share of the run, or in epochs.

    Args:
        names: the keys for steps, for times in each epoch, and for the strategy.
        default: the default strategy.
        idle: why the keys have no effect, "" if they have one.
    """
    count = keys.number(names[0])
    total = keys.ledger.value("train.steps")
    if idle:
        yield from keys.passive(names, idle)
    elif count is not None and (count >= 1 or (count and total)):
        yield keys.say(names[0], {path: int(count) if count >= 1 else max(int(count * total), 1)})
    else:
        interval_key = next((name for name in names if keys.given(name)), None)
        if interval_key is None:
            interval = EVALUATED if default == "no" else EPOCH
            yield keys.default(
                names[2], default, {path: EVERY}, f"Axolotl's default is {default}; {interval}"
            )
        else:
            yield keys.say(interval_key, {path: EVERY}, EPOCH)
    yield from keys.passive(names, "another key gives the interval")


def _saving(run: Run) -> Says:
    keys = run.keys
    if keys.value("save_strategy") == "no":
        note = f"recipec writes checkpoints every {EVERY} steps and at the end; what is trained is the same"
        yield keys.say("save_strategy", {"checkpoint.every_steps": EVERY}, note)
    yield from _every(
        keys, "checkpoint.every_steps", ("save_steps", "saves_per_epoch", "save_strategy"), "epoch"
    )
    keep = keys.integer("save_total_limit")
    if keep and keep > 0:
        yield keys.say("save_total_limit", {"checkpoint.keep": keep})
    elif "save_total_limit" not in keys.stated:
        yield keys.default("save_total_limit", 4, {"checkpoint.keep": 4})


EVALUATED = f"recipec evaluates every {EVERY} steps and at the end"


def _evaluating(run: Run) -> Says:
    keys = run.keys
    evaluates = keys.ledger.value("data.eval_fraction") or keys.ledger.value("data.eval")
    if evaluates and keys.value("eval_strategy") == "no":
        yield keys.say("eval_strategy", {"train.eval_every": EVERY}, EVALUATED)
    yield keys.same("evaluation_strategy", note="its newer name is eval_strategy")
    idle = "" if evaluates else "the run has no evaluation data"
    yield from _every(
        keys, "train.eval_every", ("eval_steps", "evals_per_epoch", "eval_strategy"), "no", idle
    )


_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}

KEYS = table(f"""
derived model_type
exact use_wandb: wandb_project decides whether the run is logged to Weights & Biases
exact loss_watchdog_threshold loss_watchdog_patience: recipec does not stop a run whose loss explodes
exact vllm: vLLM-TPU serves the model, as the recipe's serve section describes
exact dataloader_drop_last: recipec leaves out an epoch's last batch if it is not full
exact shuffle_merged_datasets: each epoch has its own order, in Axolotl and in recipec
exact float32: model.dtype sets the precision
learned peft_layer_replication relora lisa_n_layers unfrozen_parameters use_onebitllms embedding_lr
    embedding_lr_scale lr_groups jagged_restart_steps optim_target_modules grokfast_alpha grokfast_lamb
    spectrum_top_fraction spectrum_model_name liger_use_token_scaling scaling_softmax use_pose
    fix_untrained_tokens added_tokens_overrides overrides_of_model_config model_config trainer_cls
    llmcompressor nvfp4_merge_aware nvfp4_merge_aware_start_step mora diffusion
learned dense_mixer: the gradients of experts come only from the chosen experts
anew reinit_weights
lost peft_ensure_weight_tying gptq lr_quadratic_warmup cosine_constant_lr_ratio lr_div_factor group_by_length
    sample_packing_sequentially shuffle_before_merging_datasets dataset_exact_deduplication dataset_shard_num
    overrides_of_model_kwargs model_kwargs tokenizer_use_mistral_common expert_parallel_token_capacity=null
    cls_model_config min_sample_len max_prompt_len chat_template_kwargs default_system_message
    sample_packing_group_size sample_packing_bin_size torchdistx_path wandb_watch wandb_log_model
    profiler_steps profiler_steps_start
lost fp32_norms: recipec computes norms in model.dtype, as they are stored
lost resize_token_embeddings_to_32x mean_resizing_embeddings shrink_embeddings: recipec's embedding has
    model.vocab_size rows
lost model_quantization_config: recipec reads the base model as published; only model.quantization quantizes
    it
mesh expert_parallel_backend expert_parallel_num_nvl_bytes expert_parallel_num_rdma_bytes
    expert_parallel_fallback_on_unsupported
lost quantization: recipec quantizes after training, by merge.quantization, not during training
lost max_packed_sequence_len dpo_use_logits_to_keep dpo_generate_during_eval dpo_norm_loss rpo_alpha
    s2_attention flash_attn_rms_norm: Axolotl refuses this key
lost eval_sequence_len: recipec evaluates with rows of data.max_length
lost use_dsv4_kernels use_glm_dsa_kernels dsv4_fp8_nonexpert_mode dsv4_fp8_lora_kernel
    dsv4_shared_mlp_lora_kernel dsv4_bf16_all dsv4_fp4_grouped_mode: kernels for another model
lost nonexpert_quantization gemma4_fp8_nonexpert gemma4_nf4_nonexpert: model.quantization sets how recipec
    stores weights outside the experts
lost fp8_enable_fsdp_float8_all_gather: recipec gathers weights in model.dtype
lost world_size: --devices gives the number of GPUs
lost peft_autocast_adapter_dtype: recipec keeps adapters in float32 (lora.dtype)
setting relora_prune_ratio relora_prune_method -> relora
setting lisa_step_interval lisa_layers_attribute -> lisa_n_layers
setting jagged_restart_warmup_steps jagged_restart_anneal_steps -> jagged_restart_steps
setting eaft_alpha eaft_k -> use_eaft
setting pose_split_on_token_ids pose_max_context_len pose_num_chunks -> use_pose
setting scaling_softmax_factor scaling_softmax_bias -> scaling_softmax
exact pretraining_sample_concatenation: whether texts share rows, in which each attends only to itself
setting dataset_shard_idx -> dataset_shard_num
setting model_quantization_config_kwargs -> model_quantization_config
setting fp32_norm_classes -> fp32_norms
setting heads_k_stride ring_attn_func -> context_parallel_size
setting kd_ce_alpha kd_alpha kd_temperature kd_beta kd_normalize_topk kd_online_server_base_url kd_online_topk
    kd_online_server kd_online_timeout kd_temperature_min -> kd_trainer
setting nemo_gym_dir nemo_gym_auto_clone nemo_gym_config_paths nemo_gym_head_port nemo_gym_server_timeout
    nemo_gym_verify_timeout nemo_gym_run_timeout nemo_gym_datasets nemo_gym_auto_start nemo_gym_model_name
    nemo_gym_multi_turn nemo_gym_max_turns -> nemo_gym_enabled
setting adam_epsilon2 adam_beta3 dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of qgalore_rank
    qgalore_update_proj_gap qgalore_scale qgalore_proj_type qgalore_proj_quant qgalore_proj_bits
    qgalore_proj_group_size qgalore_cos_threshold qgalore_gamma_proj qgalore_queue_size -> optimizer
setting simpo_gamma cpo_alpha kto_desirable_weight kto_undesirable_weight center_rewards_coefficient
    num_labels ebft dpo_loss_weights -> rl
lost wandb_name wandb_run_id wandb_mode wandb_entity: set it in the environment of the run: WANDB_ENTITY,
    WANDB_NAME, WANDB_MODE, WANDB_RUN_ID
lost mlflow_tracking_uri mlflow_run_name hf_mlflow_log_artifacts use_comet comet_api_key comet_workspace
    comet_project_name comet_experiment_key comet_mode comet_online comet_experiment_config use_trackio
    trackio_project_name trackio_run_name trackio_space_id use_otel_metrics otel_metrics_host
    otel_metrics_port use_swanlab swanlab_project swanlab_experiment_name swanlab_description swanlab_mode
    swanlab_workspace swanlab_api_key swanlab_log_model swanlab_web_host swanlab_api_host
    swanlab_lark_webhook_url swanlab_lark_secret swanlab_log_completions swanlab_completion_log_interval
    swanlab_completion_max_buffer: recipec does not log to this service: {training.LOGS}
lost hub_model_id hub_strategy hub_revision push_dataset_to_hub: {training.UPLOAD}
""")
"""Keys for which a row of a table is enough."""

OTHERS = table("""
E1149 reward_model process_reward_model: `{key}` starts another kind of run: it trains a reward model for
    another stage => port the supervised stage: a config with datasets and without this key
E1149 kd_trainer: `{key}` starts another kind of run: distillation needs a teacher's logits => port the
    supervised stage: a config with datasets and without this key
E1149 nemo_gym_enabled: `{key}` starts another kind of run: reinforcement learning with environments needs
    answers while training => port the supervised stage: a config with datasets and without this key
E1149 hatchery: `{key}` starts another kind of run: another service runs the training => port the supervised
    stage: a config with datasets and without this key
exact reward_model process_reward_model kd_trainer nemo_gym_enabled hatchery: off
""")
"""Keys that turn the run into another kind."""

OF_PICTURES = table("""
learned processor_kwargs=null/{}: recipec loads the processor with the checkpoint's own settings
learned image_size=null: Axolotl scales pictures and pads them to a square; the checkpoint's processor does
    not
exact image_resize_algorithm: null: Axolotl reads it with image_size
""")
FIRST_PICTURE = "of several pictures in a column Axolotl takes the first, and recipec takes them all"


def _pictures(run: Run) -> Says:
    """State what turns pictures on. Without a processor, Axolotl reads text."""
    keys = run.keys
    names = ("processor_kwargs", "image_size", "image_resize_algorithm", "role_boundaries")
    if not keys.text("processor_type"):
        yield keys.same("processor_type", note="off")
        yield from keys.passive(names, "Axolotl reads it with processor_type")
        return
    sets: dict[str, Any] = {images.IMAGES: {}}
    if not (
        yield from images.say_images(keys, "processor_type", run.model, run.objective, sets, FIRST_PICTURE)
    ):
        yield from keys.passive(names, "part of processor_type")
        return
    yield from keys.follow(OF_PICTURES)
    boundaries = "recipec finds the turns by the chat template"
    yield keys.unless("role_boundaries", (None, []), boundaries)


RULES: Sequence[Rule[Run]] = (
    _objective,
    follow(OTHERS, off=(False,)),
    _model,
    _pictures,
    _adapters,
    _data,
    places,
    _launch,
    _batches,
    _draws,
    _length,
    _optimizer,
    _schedule,
    _warmup,
    _attention,
    _precision,
    _memory,
    _saving,
    _evaluating,
    _logs,
    _qat,
    _eaft,
    _stream,
    _balance,
    _plugins,
    tokens("tokens"),
    _special_tokens,
    directory("output_dir"),
    _wandb,
    _mlflow,
    _best,
    start("lora_model_dir"),
    follow(KEYS, off=OFF),
    common(NAME),
)
