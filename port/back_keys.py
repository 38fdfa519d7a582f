"""Write a recipe in the keys of GPU tools, for `recipe port --to`. back.py ports the result back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from recipec.compiler.catalog import Model, find
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import warmup_steps
from recipec.port.common_keys import SINGLE
from recipec.port.dialects.llamafactory import LOSSES, WEIGHTED
from recipec.port.meaning import experts, templates
from recipec.port.meaning.adapters import modules, prefix_of
from recipec.port.tool_names import known
from recipec.port.tools import WRITTEN
from recipec.runtime.model.adapters import principal
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec.language import Lora, Recipe
from recipec.spec.language import Source as DataSource

DIRECT = """
model.id                       model_name_or_path    =                    base_model
model.revision                 model_revision        =                    revision_of_model
model.tokenizer                -                     -                    tokenizer_config
lora.rank                      lora_r                lora_rank            lora_r
lora.alpha                     lora_alpha            =                    =
lora.rslora                    use_rslora            =                    peft_use_rslora
lora.dropout                   lora_dropout          =                    =
lora.rank_pattern              -                     -                    lora_rank_pattern
lora.alpha_pattern             -                     -                    lora_alpha_pattern
lora.loraplus_lr_ratio                -                     loraplus_lr_ratio    =
train.neftune_noise_alpha      neftune_noise_alpha   =                    =
data.max_length                max_length            cutoff_len           sequence_len
data.eval_fraction             test_split_size       val_size             val_set_size
data.stream_window             -                     buffer_size          streaming_multipack_buffer_size
train.steps                    max_steps             =                    =
train.epochs                   num_train_epochs      =                    num_epochs
train.optimizer.learning_rate  learning_rate         =                    =
train.optimizer.b1             adam_beta1            =                    =
train.optimizer.b2             adam_beta2            =                    =
train.optimizer.eps            adam_epsilon          =                    =
train.optimizer.weight_decay   weight_decay          =                    =
train.optimizer.max_grad_norm  max_grad_norm         =                    =
train.schedule.warmup_steps    warmup_steps          =                    =
train.schedule.warmup_ratio    warmup_ratio          =                    =
train.seed                     seed                  =                    =
train.log.every                logging_steps         =                    =
train.log.wandb_project        -                     -                    wandb_project
train.log.mlflow_experiment    -                     -                    mlflow_experiment_name
checkpoint.every_steps         save_steps            =                    =
checkpoint.keep                save_total_limit      =                    =
"""
"""Recipe values with a key of their own: the path, and each tool's key in the order of WRITTEN. = repeats
the previous key."""

PATIENCE = {"llamafactory": "early_stopping_steps", "axolotl": "early_stopping_patience"}
"""The key for the number of evaluations without progress. TRL's command line has no key for its callback."""
OPTIMIZERS = {
    "adamw": "adamw_torch",
    "adafactor": "adafactor",
    "lion": "lion_32bit",
    "rmsprop": "rmsprop",
    "sgd": "sgd",
    "muon": "adamw_torch",
}
READERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
"""The reader of `datasets` by a file's suffix."""
USUAL = ("loss_type", "sigmoid")
"""A key and the value at which it need not be written."""
ALPACA = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "history": "history",
    "system": "system",
}
"""LLaMA-Factory 0.9.5's columns of alpaca rows, with the matching names of data.fields."""
ACCELERATE, TEMPLATE, INFO = "accelerate.yaml", "chat_template.jinja", "dataset_info.json"
"""Files next to a config."""


def direct(tool: str) -> dict[str, str]:
    """Return the tool's keys by the recipe's paths."""
    out = {}
    for row in DIRECT.strip().splitlines():
        path, *names = row.split()
        for at, name in enumerate(names):
            names[at] = names[at - 1] if name == "=" else name
        name = names[WRITTEN.index(tool)]
        out.update({path: name} if name != "-" else {})
    return out


@dataclass
class Config:
    """A tool's config while it is written.

    Attributes:
        tool: one of WRITTEN.
        devices: the number of GPUs.
        folder: the folder of the config; paths in it are relative to that folder.
        keys: the config's keys and values.
        beside: the data of the files next to the config, by name; a text is written unchanged.
    """

    program: Program
    tool: str
    devices: int
    folder: Path
    keys: dict[str, Any] = field(default_factory=dict)
    beside: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recipe: Recipe = moved(self.program.recipe, self.program.source.parent, self.folder)
        self.model: Model = find(self.program.recipe.model.id, self.program.source.parent)

    @property
    def sites(self) -> list[str]:
        """The projections that carry adapters."""
        return [adapter.name for adapter in self.program.adapters]

    def direct(self, section: str) -> None:
        """Set the keys that hold a value of the section unchanged."""
        for path, key in direct(self.tool).items():
            value = attrgetter(path)(self.recipe) if path.startswith(f"{section}.") else None
            if key == "lora_alpha" and self.tool != "axolotl" and value is not None:
                value = int(value) if value.is_integer() else None  # the tool takes whole numbers only
            if value not in (None, {}):
                self.keys[key] = value

    def start(self, key: str) -> None:
        """Set the adapter that training starts from, if it is a folder."""
        adapter = self.recipe.lora.start_from if self.recipe.lora else None
        if adapter is not None and "://" not in adapter:
            self.keys[key] = adapter

    @property
    def new_tokens(self) -> list[str]:
        """The tokens to add, [] if one of them replaces another token."""
        tokens = self.recipe.model.add_tokens
        return [] if any(place is not None for place in tokens.values()) else [*tokens]

    @property
    def saved_modules(self) -> list[str]:
        """PEFT's names of the modules that are trained whole, [] if one of them is another expression."""
        wanted = self.recipe.lora.modules_to_save if self.recipe.lora else []
        names = [re.sub(r"\\(.)", r"\1", pattern.removeprefix(".*")) for pattern in wanted]
        patterns = [name if name in SINGLE else f".*{re.escape(name)}" for name in names]
        return names if patterns == wanted else []

    def batches(self, micro: str) -> None:
        """Set the rows of a GPU's micro-batch, and the micro-batches of a step."""
        train = self.recipe.train
        rows = train.global_batch_size // self.devices
        at_once = max(n for n in range(1, min(train.micro_batch_size, rows) + 1) if rows % n == 0)
        self.keys |= {micro: at_once, "gradient_accumulation_steps": rows // at_once}

    @property
    def masters(self) -> bool:
        """Whether float32 weights are trained, and the computation uses bfloat16."""
        whole = self.recipe.lora is None and self.recipe.model.dtype == "bfloat16"
        return whole and self.recipe.train.optimizer.master_weights

    @property
    def flashes(self) -> bool:
        """Whether attention has a fused kernel. Without it, packed samples would attend to each other."""
        wanted = self.recipe.model.attention == "splash" or self.recipe.data.packing
        return wanted and self.model.family.flash_attention


def written(program: Program, tool: str, devices: int, folder: Path) -> Config:
    """Write a recipe as a tool's config, as far as the tool has keys for it."""
    config = Config(program, tool, devices, folder)
    config.direct("model")
    config.direct("lora") if program.recipe.lora else None
    WRITERS[tool](config)
    if program.recipe.data.stream_window is not None:
        _stream(config)
    if devices > 1:
        config.beside[ACCELERATE] = _accelerate(config)
    return config


def _stream(config: Config) -> None:
    """Switch streaming on. transformers' Trainer always shuffles a stream; TRL's SFT needs a key for it."""
    train, data = config.recipe.train, config.recipe.data
    single = config.tool == "trl" and "datasets" not in config.keys
    config.keys["dataset_streaming" if single else "streaming"] = True
    if config.tool == "trl" and train.objective == "sft" and data.shuffle_seed is not None:
        config.keys["shuffle_dataset"] = True


def moved(recipe: Recipe, before: Path, after: Path) -> Recipe:
    """Return the recipe with its relative paths rewritten for another folder."""
    if before.resolve() == after.resolve():
        return recipe

    def path(text: str) -> str:
        far = "://" in text or text.startswith(("/", "~"))
        return text if far else PurePosixPath(os.path.relpath(before / text, after)).as_posix()

    data, model = recipe.data, recipe.model

    def template(text: str | None) -> str | None:
        return path(text) if text and "{" not in text else text

    def source(entry: DataSource) -> DataSource:
        update = {"path": path(entry.path), "chat_template": template(entry.chat_template)}
        return entry.model_copy(update=update)

    sets: dict[str, Any] = {name: [*map(source, getattr(data, name))] for name in ("train", "eval")}
    sets["chat_template"] = template(data.chat_template)
    local = {"id": path(model.id)} if model.id.startswith(".") else {}
    update: dict[str, Any] = {"data": data.model_copy(update=sets), "model": model.model_copy(update=local)}
    if recipe.lora is not None and recipe.lora.start_from is not None:
        begun = {"start_from": path(recipe.lora.start_from)}
        update["lora"] = recipe.lora.model_copy(update=begun)
    return recipe.model_copy(update=update)


def _accelerate(config: Config) -> dict[str, Any]:
    mixed = "bf16" if config.recipe.model.dtype == "bfloat16" else "no"
    settings: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "mixed_precision": mixed}
    settings |= {"num_machines": 1, "num_processes": config.devices}
    if config.recipe.model.quantization:
        return {**settings, "distributed_type": "MULTI_GPU"}
    fsdp = {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    fsdp |= {"fsdp_reshard_after_forward": True, "fsdp_state_dict_type": "FULL_STATE_DICT"}
    return {**settings, "distributed_type": "FSDP", "fsdp_config": fsdp}


def _trl(config: Config) -> None:
    recipe, keys = config.recipe, config.keys
    narrow = recipe.model.dtype == "bfloat16"
    keys |= {"dtype": "bfloat16" if narrow and not config.masters else "float32", "bf16": narrow}
    keys["attn_implementation"] = "flash_attention_2" if config.flashes else "sdpa"
    keys["use_peft"] = recipe.lora is not None
    if recipe.lora is not None:
        keys |= {"use_dora": True} if recipe.lora.kind == "dora" else {}
        names, regular, parameters = targets(config)
        keys["lora_target_modules"] = [regular] if regular else names
        keys |= {"lora_target_parameters": parameters} if parameters else {}
        if recipe.model.quantization == "nf4":
            keys |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": False}
        elif recipe.model.quantization == "int8":
            keys["load_in_8bit"] = True
    _trl_sources(config)
    config.direct("data")
    _trl_rows(config)
    if recipe.train.router_aux_loss_coef or experts.coefficient(config.model) is not None:
        keys["router_aux_loss_coef"] = recipe.train.router_aux_loss_coef
    _trainer(config)
    keys["gradient_checkpointing"] = recipe.remat.policy != "none"
    if config.devices > 1 and recipe.train.objective in ("sft", "dpo", "kto"):
        keys["accelerate_config"] = ACCELERATE


def _trl_sources(config: Config) -> None:
    """Write a single data set by name if TRL can evaluate on one of its splits, else a mixture."""
    data, keys = config.recipe.data, config.keys
    first, held = data.train[0], data.eval[:1]
    alike = all((entry.path, entry.config) == (first.path, first.config) for entry in held)
    plain = all(_is_hub(entry) and "[" not in (_split(entry) or "") for entry in (first, *held))
    if len(data.train) == 1 and len(data.eval) < 2 and alike and plain and data.eval_fraction is None:
        keys |= {"dataset_name": first.path.removeprefix("hf://"), "dataset_train_split": _split(first)}
        keys |= {"dataset_config": first.config} if first.config else {}
        keys |= {"dataset_test_split": _split(held[0])} if held else {}
        return
    keys["datasets"] = []
    for source in data.train:
        place = {"path": source.path.removeprefix("hf://"), "name": source.config}
        if not _is_hub(source) and reader(source.path):
            place = {"path": reader(source.path), "data_files": source.path}
        keys["datasets"].append({**_given(place), "split": _split(source)})


def _trl_rows(config: Config) -> None:
    recipe, keys = config.recipe, config.keys
    data, train = recipe.data, recipe.train
    if train.objective == "sft":
        keys |= {"label_smoothing_factor": train.label_smoothing} if train.label_smoothing else {}
        keys |= {"loss_type": "dft"} if train.loss_type == "dft" else {}
        keys |= {"packing": data.packing, **({"packing_strategy": "bfd"} if data.packing else {})}
    else:
        read = OBJECTIVES[train.objective].reads(train.loss_type)
        keys |= {name: getattr(train, name) for name in read if (name, train.loss_type) != USUAL}
        keys["disable_dropout"] = not (recipe.lora and recipe.lora.dropout)
    if data.format == "chat":
        keys["assistant_only_loss"] = data.loss_on == "assistant"
    elif data.format == "prompt_completion":
        keys["completion_only_loss"] = data.loss_on == "completion"
    elif data.format == "text":
        keys["dataset_text_field"] = data.fields.get("text", "text")
    if data.chat_template and "{" in data.chat_template:
        config.beside[TEMPLATE] = data.chat_template
    if data.chat_template or recipe.model.tokenizer:
        template = TEMPLATE if TEMPLATE in config.beside else data.chat_template
        keys["chat_template_path"] = template or recipe.model.tokenizer


def _llamafactory(config: Config) -> None:
    recipe, keys = config.recipe, config.keys
    data, train, lora = recipe.data, recipe.train, recipe.lora
    keys["stage"] = train.objective if train.objective in ("sft", "kto") else "dpo"
    keys["stage"] = "pt" if data.format == "text" else keys["stage"]
    keys |= {"do_train": True, "finetuning_type": "lora" if lora else "full"}
    keys["flash_attn"] = "fa2" if config.flashes else "sdpa"
    if lora is not None:
        keys |= {"use_dora": True} if lora.kind == "dora" else {}
        if lora.init.startswith("pissa"):
            iterations = int(lora.init.partition("_niter_")[2] or -1)
            keys |= {"pissa_init": True, "pissa_iter": iterations, "pissa_convert": True}
        keys["lora_target"] = ",".join(targets(config)[0])
        keys |= {"additional_target": ",".join(config.saved_modules)} if config.saved_modules else {}
        config.start("adapter_name_or_path")
        if recipe.model.quantization in ("nf4", "int8"):
            keys |= {"quantization_bit": 4 if recipe.model.quantization == "nf4" else 8}
            keys |= {"quantization_type": "nf4", "double_quantization": False}
    if config.new_tokens and not any("," in token for token in config.new_tokens):
        keys |= {"add_special_tokens": ",".join(config.new_tokens), "resize_vocab": True}
    narrow = recipe.model.dtype == "bfloat16"
    keys["pure_bf16" if narrow and not lora and not config.masters else "bf16"] = narrow
    keys["dataset_dir"] = "."
    info = config.beside.setdefault(INFO, {})
    for key, sources in (("dataset", data.train), ("eval_dataset", data.eval)):
        names = [f"{recipe.name}-{key}-{number + 1}" for number in range(len(sources))]
        info |= {name: _entry(config, source) for name, source in zip(names, sources, strict=True)}
        keys |= {key: ",".join(names)} if names else {}
    shares = [source.weight for source in data.train]
    if len(set(shares)) > 1:
        keys["mix_strategy"] = "interleave_under"
        keys["interleave_probs"] = ",".join(f"{share / sum(shares):g}" for share in shares)
    config.direct("data")
    keys |= _template(config) if data.chat_template else {}
    if train.objective == "sft":
        keys |= {"label_smoothing_factor": train.label_smoothing} if train.label_smoothing else {}
        keys |= {key: True for key, loss in WEIGHTED.items() if loss == train.loss_type}
        keys |= {"eaft_alpha": train.eaft_alpha} if train.loss_type == "eaft" else {}
        keys |= {"asft_alpha": train.asft_alpha} if train.loss_type == "asft" else {}
        keys["packing"] = data.packing
        if data.packing and data.format != "text":
            keys["neat_packing"] = True
        keys["cutoff_len"] = data.max_length + data.packing
        learned = ("last_assistant", "completion") if data.format == "instruction" else ("last_assistant",)
        keys |= {"train_on_prompt": data.loss_on == "all", "mask_history": data.loss_on in learned}
    elif train.objective == "kto":
        keys["pref_beta"] = train.beta
        keys |= {"kto_chosen_weight": train.desirable_weight, "kto_rejected_weight": train.undesirable_weight}
    else:
        loss = "orpo" if train.objective == "orpo" else train.loss_type
        keys |= {"pref_loss": loss if loss in LOSSES else "sigmoid", "pref_beta": train.beta}
        keys["dpo_label_smoothing"] = train.label_smoothing
        keys |= {"simpo_gamma": train.simpo_gamma} if loss == "simpo" else {}
    if train.router_aux_loss_coef:
        keys["moe_aux_loss_coef"] = train.router_aux_loss_coef
    _trainer(config)
    keys["disable_gradient_checkpointing"] = recipe.remat.policy == "none"


def _template(config: Config) -> dict[str, Any]:
    """Return LLaMA-Factory's name for a template of its own, or {} for other templates: it reads no Jinja."""
    text = (config.recipe.data.chat_template or "").rstrip("\n")
    for name in templates.LLAMAFACTORY:
        for thinking in (True, False):
            template = templates.llamafactory(name, config.model, thinking)
            if template.sets["data.chat_template"].rstrip("\n") == text:
                return {"template": name, "enable_thinking": thinking}
    return {}


def _entry(config: Config, source: DataSource) -> dict[str, Any]:
    data, text = config.recipe.data, config.recipe.data.format == "text"
    hub = _is_hub(source)
    entry = {"hf_hub_url": source.path.removeprefix("hf://")} if hub else {"file_name": source.path}
    entry |= _given({"subset": source.config, "split": _split(source)})
    named = dict(data.fields)
    if text:
        return {**entry, "formatting": "alpaca", "columns": {"prompt": named.get("text", "text")}}
    if data.format == "instruction":
        return {**entry, "formatting": "alpaca", "columns": alpaca(named)}
    columns = {"messages": named.get("messages", "messages")}
    tags = {"role_tag": named.get("role", "role"), "content_tag": named.get("content", "content")}
    for role in ("user", "assistant", "system"):
        tags[f"{role}_tag"] = role
    tags |= {"observation_tag": "tool", "function_tag": "function_call"}
    return {**entry, "formatting": "sharegpt", "columns": columns, "tags": tags}


def alpaca(fields: Mapping[str, str]) -> dict[str, str]:
    """Return LLaMA-Factory's columns of instruction rows.

    The tool stops if a row lacks a column that is named. So an optional column is named only if `fields`
    names it, and `input` also if the rows have their usual names.

    Args:
        fields: the recipe's `data.fields`.
    """
    named = {"instruction": "instruction", "output": "output", **(fields or {"input": "input"})}
    return {column: named[name] for column, name in ALPACA.items() if name in named}


def _axolotl(config: Config) -> None:
    recipe, keys = config.recipe, config.keys
    data, train, lora = recipe.data, recipe.train, recipe.lora
    keys["attn_implementation"] = "flash_attention_2" if config.flashes else "sdpa"
    keys["bf16"] = recipe.model.dtype == "bfloat16"
    keys |= {"tokens": config.new_tokens} if config.new_tokens else {}
    if lora is not None:
        keys |= {"lora_modules_to_save": config.saved_modules} if config.saved_modules else {}
        keys["adapter"] = "qlora" if recipe.model.quantization == "nf4" else "lora"
        keys |= {"peft_use_dora": True} if lora.kind == "dora" else {}
        names, regular, parameters = targets(config)
        keys["lora_target_modules"] = regular or names
        keys |= {"lora_target_parameters": parameters} if parameters else {}
        if lora.trainable_tokens and all(isinstance(token, int) for token in lora.trainable_tokens):
            keys["peft_trainable_token_indices"] = [*lora.trainable_tokens]
        if lora.init == "gaussian" or (principal(lora.init) and lora.init != "loftq"):
            keys["peft_init_lora_weights"] = lora.init
        config.start("lora_model_dir")
        if recipe.model.quantization == "nf4":
            exact = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False}
            keys |= {"load_in_4bit": True, "bnb_config_kwargs": exact}
        elif recipe.model.quantization == "int8":
            keys["load_in_8bit"] = True
        if recipe.model.quantization and experts.has_experts(config.model):
            keys["quantize_moe_experts"] = True
    if train.objective != "sft":
        keys["rl"] = "simpo" if train.objective == "cpo" else train.objective
        keys["orpo_alpha" if train.objective == "orpo" else "rl_beta"] = train.beta
        keys |= {"dpo_label_smoothing": train.label_smoothing} if train.label_smoothing else {}
        if train.objective == "kto":
            weights = {name: getattr(train, name) for name in ("desirable_weight", "undesirable_weight")}
            keys |= {f"kto_{name}": weight for name, weight in weights.items()}
        elif train.objective == "cpo":
            keys |= {"simpo_gamma": train.simpo_gamma, "cpo_alpha": train.cpo_alpha}
        elif train.loss_type != "sigmoid":
            keys["dpo_loss_type"] = [train.loss_type]
    keys["datasets"] = [_rows(config, source) for source in data.train]
    keys |= {"test_datasets": [_rows(config, source) for source in data.eval]} if data.eval else {}
    if not data.formats.isdisjoint(("chat", "preference")):
        keys["chat_template"] = "jinja" if data.chat_template else "tokenizer_default"
        keys |= {"chat_template_jinja": data.chat_template} if data.chat_template else {}
        marks = config.model.family.markers(config.model.architecture)
        keys |= {"eot_tokens": [marks[1]]} if marks and not data.chat_template else {}
    keys["train_on_inputs"] = data.loss_on == "all" and data.format != "text"
    config.direct("data")
    strategies = {"error": "raise", "split": "drop"}  # it splits texts in any case
    keys["excess_length_strategy"] = strategies.get(data.overlong, data.overlong)
    if train.objective == "sft":
        keys["sample_packing"] = data.packing
    if train.loss_type == "eaft":
        keys |= {"use_eaft": True, "eaft_alpha": train.eaft_alpha, "eaft_k": train.eaft_top_k}
    config.batches("micro_batch_size")
    config.direct("train")
    _optimizer(config, "optimizer")
    name, schedule = _schedule(config)
    keys["lr_scheduler"] = "constant_with_warmup" if name == "constant" and _warms(recipe) else name
    if name == "cosine_with_min_lr":
        keys |= {"lr_scheduler": "cosine", "cosine_min_lr_ratio": recipe.train.schedule.min_lr_ratio}
    elif schedule:
        keys["lr_scheduler_kwargs"] = schedule
    if not _warms(recipe) or train.steps is not None:  # of max_steps, Axolotl rounds a share down
        keys.pop("warmup_ratio", None)
        keys["warmup_steps"] = warmup_steps(recipe, train.steps or 0)
    keys |= {"eval_steps": train.eval_every} if data.evaluates else {}
    ordered = data.shuffle_seed is None and train.objective != "kto"  # KTO keeps the order anyway
    keys |= {"curriculum_sampling": True} if ordered else {}
    keys |= {"use_tensorboard": True} if train.log.tensorboard else {}
    if train.router_aux_loss_coef:
        balance = {"output_router_logits": True, "router_aux_loss_coef": train.router_aux_loss_coef}
        keys["overrides_of_model_config"] = balance
    keys["gradient_checkpointing"] = recipe.remat.policy != "none"
    config.direct("checkpoint")
    _best(config)
    keys["output_dir"] = _folder(recipe)


def _rows(config: Config, source: DataSource) -> dict[str, Any]:
    data = config.recipe.data.of(source)
    named = {name: there for name, there in data.fields.items() if name != there}
    entry = {"path": source.path.removeprefix("hf://"), "name": source.config, "split": _split(source)}
    if not _is_hub(source) and reader(source.path):
        entry["ds_type"] = reader(source.path)
    if data.format == "text":
        return {**_given(entry), "type": "completion", "field": named.get("text", "text")}
    if data.format == "prompt_completion":
        columns = (named.get("prompt", "prompt"), named.get("completion", "completion"))
        plain = {"format": "{instruction}", "no_input_format": "{instruction}"}
        type_keys = {"field_instruction": columns[0], "field_output": columns[1], **plain}
        return {**_given(entry), "type": type_keys}
    if data.format == "unpaired_preference":
        type_keys = {f"field_{name}": there for name, there in named.items()}
        return {**_given(entry), **({"type": type_keys} if type_keys else {})}
    if data.format == "preference":
        if not named and config.recipe.train.objective != "orpo":
            return {**_given(entry), "type": "passthrough.default"}
        entry |= {"field_chosen": named.get("chosen"), "field_rejected": named.get("rejected")}
    entry |= {"field_messages": named.get("messages"), "field_tools": named.get("tools")}
    turned = {name: named[name] for name in ("role", "content") if name in named}
    mapped = {"message_property_mappings": turned} if turned else {}
    argilla = {"dpo": ".argilla_chat", "cpo": ".argilla_chat", "orpo": ".argilla"}
    kind = f"chat_template{argilla.get(config.recipe.train.objective, '')}"
    learned = data.loss_on if isinstance(data.loss_on, list) else ["assistant"]
    roles = {} if data.format == "preference" else {"roles_to_train": learned}
    marked = {"message_field_training": named["weight"]} if "weight" in named else {}
    template = source.chat_template
    written = {"chat_template": "jinja", "chat_template_jinja": template} if template else {}
    return {**_given(entry), "type": kind, **mapped, **roles, **marked, **written}


WRITERS: Mapping[str, Callable[[Config], None]] = {
    "trl": _trl,
    "llamafactory": _llamafactory,
    "axolotl": _axolotl,
}


def _trainer(config: Config) -> None:
    recipe, keys = config.recipe, config.keys
    train = recipe.train
    config.batches("per_device_train_batch_size")
    config.direct("train")
    _optimizer(config, "optim")
    name, schedule = _schedule(config)
    keys["lr_scheduler_type"] = "constant_with_warmup" if name == "constant" and _warms(recipe) else name
    keys |= {"lr_scheduler_kwargs": schedule} if schedule else {}
    if train.objective == "sft":
        keys["average_tokens_across_devices"] = True
    evaluates = recipe.data.evaluates and (config.tool != "trl" or _held(config))
    keys |= {"eval_strategy": "steps" if evaluates else "no"}
    keys |= {"eval_steps": train.eval_every} if evaluates else {}
    if recipe.data.shuffle_seed is not None:
        keys["data_seed"] = recipe.data.shuffle_seed
        if config.tool == "trl" and train.loss_type == "apo_zero_unpaired":
            keys["train_sampling_strategy"] = "random"  # TRL's KTOTrainer has another default
    elif config.tool == "trl":
        keys["train_sampling_strategy"] = "sequential"
    else:
        keys["disable_shuffling"] = True
    loggers = ["tensorboard"] * train.log.tensorboard + ["wandb"] * (train.log.wandb_project is not None)
    loggers += ["mlflow"] * (train.log.mlflow_experiment is not None)
    keys["report_to"] = loggers or "none"
    config.direct("checkpoint")
    _best(config)
    keys["output_dir"] = _folder(recipe)


def _best(config: Config) -> None:
    """Write the keys for the best model and early stopping, as far as the tool has them.

    transformers can only load the best of the saved checkpoints, so one has to be saved at each evaluation.
    """
    train, checkpoint = config.recipe.train, config.recipe.checkpoint
    if "eval_steps" not in config.keys:
        return
    if checkpoint.keep_best and checkpoint.every_steps % train.eval_every == 0:
        config.keys["load_best_model_at_end"] = True
    stopping, key = train.early_stopping, PATIENCE.get(config.tool)
    if stopping is not None and key is not None and not stopping.min_delta:
        config.keys |= {key: stopping.patience, "metric_for_best_model": "eval_loss"}


def _held(config: Config) -> bool:
    return bool({"dataset_test_split", "test_split_size"}.intersection(config.keys))


def _optimizer(config: Config, key: str) -> None:
    optimizer = config.recipe.train.optimizer
    config.keys[key] = OPTIMIZERS[optimizer.name]
    if optimizer.name == "muon" and config.tool == "llamafactory":
        config.keys["use_muon"] = True
    unused = {"adamw": (), "muon": (), "lion": ("eps",)}.get(optimizer.name, ("b1", "b2", "eps"))
    for name in unused:
        config.keys.pop(direct(config.tool)[f"train.optimizer.{name}"])
    if optimizer.name == "sgd":
        config.keys["optim_args"] = f"momentum={optimizer.momentum}"
    if optimizer.name == "rmsprop":
        config.keys["optim_args"] = f"alpha={optimizer.b2},eps={optimizer.eps},momentum={optimizer.momentum}"
    if optimizer.max_grad_norm is None:
        config.keys["max_grad_norm"] = 0.0


def _schedule(config: Config) -> tuple[str, dict[str, Any]]:
    """Return transformers' name of the schedule, and its arguments."""
    schedule, rate = config.recipe.train.schedule, config.recipe.train.optimizer.learning_rate
    if schedule.name == "constant" or not schedule.min_lr_ratio:
        return schedule.name, {}
    if schedule.name == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": schedule.min_lr_ratio}
    return "polynomial", {"lr_end": schedule.min_lr_ratio * rate, "power": 1.0}


def _warms(recipe: Recipe) -> bool:
    return bool(recipe.train.schedule.warmup_steps or recipe.train.schedule.warmup_ratio)


def _folder(recipe: Recipe) -> str:
    remote = "://" in recipe.checkpoint.directory
    return recipe.checkpoint.directory if remote else f"out/{recipe.name}"


def _is_hub(source: DataSource) -> bool:
    return source.path.startswith("hf://")


def _split(source: DataSource) -> str | None:
    """Return the split ("train" if none is named), limited to its first rows if the source has a limit."""
    name = source.split or "train"
    return f"{name}[:{source.limit}]" if source.limit and "[" not in name else name


def reader(path: str) -> str | None:
    """Return the reader of `datasets` for a file, or None for a folder or an unreadable file."""
    name = PurePosixPath(path.removesuffix(".gz").removesuffix(".zst"))
    return READERS.get(name.suffix)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def targets(config: Config) -> tuple[list[str], str, list[str]]:
    """Return the modules that carry adapters, as PEFT names them.

    Returns:
        target_modules as a list; the same as a regular expression if only some layers have them, else "";
        target_parameters.
    """
    lora, model = config.recipe.lora, config.model
    assert isinstance(lora, Lora)
    adapted = set(config.sites)
    every = [module for module in modules(model) if module.site is not None]
    chosen = [module for module in every if module.site in adapted]
    tensors = [module.tensor for module in modules(model)]
    parameters = _ends([module.tensor for module in chosen if module.parameter], tensors)
    linear = [module.name for module in chosen if not module.parameter]
    ends = _ends(linear, [module.name for module in modules(model) if not module.parameter])
    if ends != linear or known("experts", "renamed").get(model.family.name):
        return ends, "", parameters  # for such models PEFT reads only the last names of an expression
    all_of_them = _layers(model, [module.name for module in every if not module.parameter])
    by_layers: dict[str, list[str]] = {}
    for slot, layers in _layers(model, linear).items():
        numbers = r"\d+" if layers == all_of_them[slot] else f"({'|'.join(layers)})"
        by_layers.setdefault(numbers, []).append(re.escape(slot))
    ways = [rf"{numbers}\.({'|'.join(slots)})" for numbers, slots in by_layers.items()]
    any_of_them = ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"
    return linear, rf"{re.escape(_holder(model))}{any_of_them}", parameters


def _holder(model: Model) -> str:
    """Return the names of layers in transformers' model, up to their numbers: "model.layers."."""
    return f"{prefix_of(model)}{model.family.names.layers}."


def _layers(model: Model, names: Iterable[str]) -> dict[str, list[str]]:
    """Return the numbers of the layers that have a projection, by its name within the layer."""
    out: dict[str, list[str]] = {}
    for name in names:
        layer, _, slot = name.removeprefix(_holder(model)).partition(".")
        out.setdefault(slot, []).append(layer)
    return out


def _ends(names: Iterable[str], every: Iterable[str]) -> list[str]:
    """Shorten names to their last parts, as long as these match no others of `every`."""
    wanted = list(names)
    others = set(every).difference(wanted)
    for parts in (1, 2):
        ends = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in wanted)
        if not any(f".{name}".endswith(tuple(f".{end}" for end in ends)) for name in others):
            return list(ends)
    return wanted


def dumped(name: str, data: Any) -> str:
    """Return the text of a file next to a config."""
    if isinstance(data, str):
        return data
    if Path(name).suffix == ".json":
        return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
