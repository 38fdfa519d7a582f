"""LLaMA-Factory's YAML or JSON (0.9.5), with its dataset_info.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.lowering.format_keys import ALONE
from recipec.compiler.wording import listing
from recipec.port.common_keys import say_start
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import OFF, Keys, defaults_of, keys_of, table, tools, words
from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import (
    adapters,
    conversion,
    datasets,
    experts,
    freezing,
    images,
    losses,
    rows,
    sharding,
    templates,
    training_arguments,
)
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1142, E1143, E1145, E1146, E1147, E1149, E1150, E1163, E1180
from recipec.port.rules import balance, common, follow, model, places, tokens
from recipec.port.tool_names import of_model
from recipec.runtime.data.messages import ALIASES, CALLS, ROLES
from recipec.runtime.training.objectives import OBJECTIVES
from recipec.spec.codes import Code

NAME = "llamafactory"
TITLE = "LLaMA-Factory"
MARKS = words(
    """stage finetuning_type lora_rank lora_target template cutoff_len dataset dataset_dir max_samples
    preprocessing_num_workers overwrite_cache plot_loss val_size flash_attn quantization_bit
    quantization_method pref_beta pref_loss mask_history train_on_prompt neat_packing do_train"""
)

OWN = (
    "recipec uses the tokenizer's own template; LLaMA-Factory also trains on a line break that ends an answer"
)
CUT = "recipec truncates the end; LLaMA-Factory shortens questions and answers in proportion"
MIXED = "recipec's samples of a row do not attend to each other, as with neat_packing"
BLOCKS = (
    "LLaMA-Factory joins all texts and cuts the result into rows; recipec splits each text by itself, and a "
    "text attends only to itself"
)
BEGINS = (
    "a text begins with the bos token if the tokenizer adds it; in LLaMA-Factory, if add_bos_token is set"
)
LLAMA3_ENDS = "LLaMA-Factory ends each text with <|end_of_text|>, recipec with the tokenizer's eos token"
TURN_ENDS = "recipec trains on the end of text only after the last answer"


BALANCED = ("granitemoe", "mixtral", "olmoe", "qwen3_moe")
"""Families to whose models LLaMA-Factory passes `moe_aux_loss_coef`."""


@dataclass
class LlamaFactory(Run):
    """A run of LLaMA-Factory.

    Attributes:
        stage: sft, dpo, kto or pt.
        method: lora, full or freeze.
    """

    stage: str = "sft"
    method: str = "lora"
    lora: bool = True


def opened(ledger: Ledger) -> LlamaFactory:
    """Return the run of a file."""
    defaults = {"optim": "adamw_torch_fused", **defaults_of(NAME, "train")}
    return LlamaFactory(Keys(ledger, ledger.sources.main, TITLE, defaults))


def _optimizer(run: LlamaFactory) -> Says:
    run.learning_rate = run.keys.number("learning_rate") or 0.0
    run.muon = yield from _muon(run.keys, run.lora)


def _launch(run: LlamaFactory) -> Says:
    run.launch = yield from sharding.ray(run.keys, (yield from training_arguments.launched(run.keys)))


def _groups(run: LlamaFactory) -> Says:
    run.launch = replace(run.launch, shared=run.launch.shared * (yield from _megatron(run.keys)))
    for name in ("fsdp", "deepspeed"):
        if not isinstance(run.keys.value(name), dict):
            yield run.keys.same(name, note=sharding.MESH)


def _trained(run: LlamaFactory) -> Says:
    """State which parameters are trained: adapters, some modules, or all."""
    if run.lora:
        yield from _lora(run.keys, run.model)
    elif run.method == "freeze":
        yield from freezing.say_layers(run.keys, run.model)


def _training(run: LlamaFactory) -> Says:
    yield from training_arguments.say_run(run, run.keys, (yield from _dtype(run)))


def _rows_of_kto(run: LlamaFactory) -> Says:
    if run.stage == "kto" and run.ledger.value("train.micro_batch_size") == 1:
        yield run.keys.sets("train.micro_batch_size", 2)
        yield run.keys.amend("train.micro_batch_size", Verdict.APPROXIMATED, BY_TWO)


def _processes(run: LlamaFactory) -> Says:
    if run.ledger.devices is None and run.launch.processes is None:
        rows = {"train.global_batch_size": run.ledger.value("train.global_batch_size")}
        yield from sharding.assumed(run.keys, run.launch, rows)


def _order(run: LlamaFactory) -> Says:
    keys = run.keys
    yield keys.same("warmup_ratio")
    if keys.flag("disable_shuffling"):
        yield keys.say("disable_shuffling", {"data.shuffle_seed": None})
    yield keys.same("disable_shuffling", note="off")
    yield from datasets.say_stream(keys, "streaming", ("buffer_size",), 16384)


def _memory(run: LlamaFactory) -> Says:
    off = run.keys.flag("disable_gradient_checkpointing") and not run.launch.remat
    yield run.keys.say("disable_gradient_checkpointing", {"remat.policy": "none" if off else "decoder"})


def _evaluation(run: LlamaFactory) -> Says:
    held = run.ledger.value("data.eval_fraction") or run.ledger.value("data.eval")
    if not (yield from training_arguments.evaluation(run.keys)) and held:
        note = "LLaMA-Factory does not evaluate but holds out the rows; recipec evaluates on them"
        sets = {"train.eval_every": 100}
        yield run.keys.default("eval_strategy", "no", sets, f"LLaMA-Factory's default is {note}")
    yield from training_arguments.bookkeeping(run.keys)


def _start(run: LlamaFactory) -> Says:
    if not run.keys.flag("create_new_adapter"):
        yield from say_start(run.keys, "adapter_name_or_path", of_base=True)


def _stage(run: LlamaFactory) -> Says:
    keys = run.keys
    stage = keys.text("stage") or "sft"
    only = next((key for key in ("do_predict", "do_eval") if keys.flag(key)), None)
    idle = "do_train" if keys.given("do_train") else only
    if idle and not keys.flag("do_train"):
        message = "the file does not train: `do_train` is off"
        yield keys.refuse(idle, E1149, message, "--set do_train=true, if the run is to train")
    if stage not in ("sft", "dpo", "kto", "pt"):
        message = f"`stage: {stage}` is another kind of training: recipes have {listing(OBJECTIVES)}"
        yield keys.refuse("stage", E1149, message, "stage: sft; or dpo or kto with preferences")
        stage = "sft"
    run.stage = stage
    loss = keys.text("pref_loss") or "sigmoid"
    if stage == "kto":
        yield keys.say("stage", {"train.objective": "kto"}, OTHERS)
        yield keys.say("pref_beta", {"train.beta": keys.number("pref_beta")})
        yield from losses.weights(keys, "kto_chosen_weight", "kto_rejected_weight")
        yield from keys.passive(OF_PREFERENCES - {"pref_beta", "pref_ftx"}, "the stage kto does not read it")
        return
    if stage != "dpo":
        yield keys.same("stage", {"train.objective": "sft"}, BEGINS if stage == "pt" else "")
        yield from keys.passive(OF_PREFERENCES, f"the stage {stage} does not read it")
        return
    if loss not in LOSSES:
        message = f"`pref_loss: {loss}` has no counterpart: recipes have {listing(LOSSES)}"
        yield keys.refuse("pref_loss", E1163, message, "pref_loss: sigmoid")
    sets = LOSSES.get(loss, LOSSES["sigmoid"])
    yield keys.say("stage", {"train.objective": sets["train.objective"]})
    yield keys.same("pref_loss", sets if keys.given("pref_loss") else None)
    yield keys.say("pref_beta", {"train.beta": keys.number("pref_beta")})
    smoothing = keys.number("dpo_label_smoothing")
    yield keys.same("dpo_label_smoothing", {"train.label_smoothing": smoothing} if smoothing else None)
    if loss == "simpo":
        yield keys.say("simpo_gamma", {"train.simpo_gamma": keys.number("simpo_gamma")})


GROUPS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
MEGATRON = words(
    """expert_model_parallel_size sequence_parallel use_distributed_optimizer overlap_param_gather
    overlap_grad_reduce bias_activation_fusion apply_rope_fusion masked_softmax_fusion moe_grouped_gemm
    cross_entropy_loss_fusion moe_token_dispatcher_type moe_shared_expert_overlap recompute_granularity
    recompute_method recompute_num_layers virtual_pipeline_model_parallel_size export_hf_on_finish
    variable_seq_lengths"""
)


def _megatron(keys: Keys) -> Statements[int]:
    """State the keys of runs on Megatron (USE_MCA=1). Return the number of GPUs that share their rows."""
    shared = 1
    for key in GROUPS:
        if keys.stands(key):
            size = max(keys.integer(key) or 1, 1)
            shared *= size
            yield keys.same(key, note=sharding.sharing(size))
    yield from keys.passive(
        MEGATRON, "how Megatron divides and fuses the work, which affects speed and memory"
    )
    yield keys.learned("use_packed_sequences", OFF, "recipec packs by `packing`")
    yield keys.learned("mixed_precision", (*OFF, "bf16_mixed"), "recipec computes in model.dtype")
    return shared


def _token_loss(run: LlamaFactory) -> Says:
    keys, stage = run.keys, run.stage
    if stage != "sft":
        yield from keys.passive(
            (*WEIGHTED, "eaft_alpha", "asft_alpha"), f"the stage {stage} does not read it"
        )
    on = [key for key in WEIGHTED if keys.flag(key) and key not in keys.stated]
    for key in on[:1]:
        if WEIGHTED[key] == "asft" and run.lora:
            message = "LLaMA-Factory makes no reference for `use_asft_loss` with adapters, and stops"
            yield keys.refuse(key, E1145, message, "finetuning_type: full")
        yield from losses.weighted(keys, key, WEIGHTED[key])
        for other in on[1:]:
            message = f"`{key}` and `{other}` are different losses, and LLaMA-Factory uses only one"
            yield keys.refuse(other, E1145, message, "keep one of them")
        if alpha := {"eaft": "eaft_alpha", "asft": "asft_alpha"}.get(WEIGHTED[key]):
            yield keys.say(alpha, {f"train.{alpha}": keys.number(alpha)})
    yield from keys.passive(WEIGHTED, "off")


def _muon(keys: Keys, lora: bool) -> Statements[str]:
    """Return the key that selects Muon, "" if the run has another optimizer."""
    if lora:
        yield keys.learned("use_muon", OFF, "recipec's muon does not train adapters")
    first = next((key for key in BEFORE_MUON if keys.value(key) not in OFF), None)
    if first or lora or not keys.flag("use_muon"):
        yield keys.same("use_muon", note=f"{first} comes first" if first else "off")
        return ""
    return "use_muon"


def _undivided(run: LlamaFactory) -> Says:
    """Correct what the run says of batches and clipping for asft.

    LLaMA-Factory adds up the means of its micro-batches, and transformers does not divide a custom loss.
    """
    keys = run.keys
    ledger, count = keys.ledger, keys.integer("gradient_accumulation_steps") or 1
    if ledger.value("train.loss_type") != "asft":
        return
    note = "with asft, LLaMA-Factory takes a mean over each micro-batch"
    yield keys.sets("train.loss_normalization", "micro_batches", note)
    norm, path = ledger.value("train.optimizer.max_grad_norm"), "train.optimizer.max_grad_norm"
    if norm and count > 1:
        note = f"with asft, LLaMA-Factory clips the sum of {count} micro-batches' gradients, not their mean"
        yield keys.sets(path, norm / count, note)
        yield keys.amend(path, Verdict.APPROXIMATED, note)


def _method(run: LlamaFactory) -> Says:
    keys = run.keys
    method = keys.text("finetuning_type") or "lora"
    if method not in ("lora", "full", "freeze"):
        message = f"`finetuning_type: {method}` has no counterpart: recipes have lora, full and freeze"
        yield keys.refuse("finetuning_type", E1149, message, "finetuning_type: lora")
        return
    run.method, run.lora = method, method == "lora"
    if method != "lora":
        what = (
            "all parameters are trained"
            if method == "full"
            else "it trains the modules of train.trainable_modules"
        )
        yield keys.same("finetuning_type", {"lora": None}, what)
        names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora")
        yield from keys.passive(names, f"the run has no adapters: {what}")
    yield keys.same("finetuning_type", note="it adds the lora section")
    if not keys.stands("finetuning_type"):
        yield keys.default("finetuning_type", "lora", {})


def _attention(run: LlamaFactory) -> Says:
    if run.named is None:
        return
    flashes = run.model is None or run.model.family.flash_attention
    fused = run.keys.value("flash_attn") in ("fa2", "fa3") and flashes
    scores = images.needs_scores(run.keys, run.model)
    sets = {"model.attention": "splash" if fused and not scores else "dot"}
    note = images.BY_SCORES if fused and scores else ""
    yield run.keys.say("flash_attn", sets if run.keys.given("flash_attn") else None, note)


def _lora(keys: Keys, model: Model | None) -> Says:
    rank = keys.integer("lora_rank") or 8
    yield keys.say("lora_rank", {"lora.rank": rank})
    alpha = keys.number("lora_alpha") if keys.given("lora_alpha") else None
    if alpha:
        yield keys.say("lora_alpha", {"lora.alpha": alpha})
    else:
        note = "LLaMA-Factory's default: twice the rank"
        yield keys.default("lora_alpha", 2 * rank, {"lora.alpha": 2 * rank}, note)
    yield from keys.follow(adapters.KINDS)
    if keys.flag("pissa_init"):
        iterations = keys.integer("pissa_iter") or -1
        yield keys.say(
            "pissa_init", {"lora.init": f"pissa_niter_{iterations}" if iterations > 0 else "pissa"}
        )
        yield keys.same("pissa_iter", note="part of lora.init")
        note = "merge.py writes the adapter for the unchanged base model, with twice the rank"
        yield keys.same("pissa_convert", note=note)
    yield from keys.passive(("pissa_init", "pissa_iter", "pissa_convert"), "off")
    names = _targets(keys)
    spec: str | list[str] = "all-linear" if names == ["all"] else names
    if model is not None:
        spec = target_modules(model, names)
    yield from adapters.say_dropout(keys, (yield from adapters.say_targets(keys, "lora_target", model, spec)))


def _targets(keys: Keys) -> list[str]:
    targets = keys.texts("lora_target") or "all"
    return [name.strip() for name in targets.split(",")] if isinstance(targets, str) else targets


def target_modules(
    model: Model, names: list[str], freeze_tower: bool = True, freeze_projector: bool = True
) -> list[str]:
    """Return LLaMA-Factory's targets for PEFT: find_all_linear_modules for `all`, and patch_target_modules.

    In a model with a vision tower, these are all modules whose name contains one of the targets.
    """
    composite = of_model(NAME, "towers", model=model) if adapters.is_multimodal(model) else None
    projector, tower, conflicts = (
        (composite or {}).get(part, ()) for part in ("projector", "tower", "conflicts")
    )
    every = [module for module in adapters.modules(model) if module.linear]
    if names == ["all"]:
        forbidden = ("lm_head", *projector, *(tower if freeze_tower else ()))
        kept = [module.name for module in every if not any(part in module.name for part in forbidden)]
        names = list(dict.fromkeys(name.rpartition(".")[2] for name in kept))
    if composite is None:
        return names
    frozen = (*(projector if freeze_projector else ()), *(tower if freeze_tower else ()))
    forbidden = (*frozen, *conflicts)
    return [
        module.name
        for module in adapters.modules(model)
        if not module.parameter
        if any(name in module.name for name in names) and not any(part in module.name for part in forbidden)
    ]


def _quantized(run: LlamaFactory) -> Says:
    keys, model = run.keys, run.model
    details = ("quantization_type", "double_quantization", "quantization_method")
    bits = keys.integer("quantization_bit")
    if bits is None or not run.lora:
        yield from adapters.refuse_quantized(keys, "quantization_bit", "finetuning_type: lora")
        yield from keys.passive(("quantization_bit", *details), "the base model is not quantized")
        return
    method = str(keys.value("quantization_method") or "bnb").lower()
    other = (
        "" if method in ("bnb", "bitsandbytes") else f"recipec uses nf4 or int8 instead of {method}'s codes"
    )
    kind = keys.choice("quantization_type", ("nf4", "fp4")) or "nf4"
    nested = keys.flag("double_quantization") and bits == 4 and not other
    try:
        quantization = adapters.quantized(bits, kind, nested, experts.has_experts(model))
    except ValueError:
        message = f"a base model in {bits} bits has no counterpart: recipes have nf4 and int8"
        yield keys.refuse("quantization_bit", E1146, message, "quantization_bit: 4")
        yield from keys.passive(details, "part of model.quantization")
        return
    sets = {"model.quantization": quantization.value}
    yield keys.say("quantization_bit", sets, "; ".join(filter(None, (quantization.note, other))))
    for name in details:
        yield keys.same(name, sets if keys.given(name) else None, "part of model.quantization")


def _dtype(run: LlamaFactory) -> Statements[str]:
    keys = run.keys
    pure = keys.flag("pure_bf16")
    yield keys.same("pure_bf16", {"model.dtype": "bfloat16"} if pure else None)
    if pure or not run.lora:
        return "bfloat16" if pure else "float32"
    return "float16" if keys.flag("fp16") else "bfloat16" if keys.flag("bf16") else "auto"


def _data(run: LlamaFactory) -> Says:
    """State the keys of `data`."""
    keys, model, stage = run.keys, run.model, run.stage
    chosen = yield from _chosen(run, "dataset", "data.train")
    others = yield from _chosen(run, "eval_dataset", "data.eval")
    chosen = yield from _form(keys, chosen, others, stage)
    yield from _mixing(keys, chosen)
    yield from keys.passive(("dataset", "eval_dataset", "dataset_dir", "max_samples"), "")
    yield from _template(keys, model, stage)
    yield from _lengths(keys, stage)
    yield from _masks(keys, stage)
    yield from _held_out(keys, bool(others))
    if keys.flag("split_special_tokens"):
        yield keys.say("split_special_tokens", {"data.special_tokens": "text"}, SPLIT)
    yield keys.same("split_special_tokens", note="off")


def _names(keys: Keys, key: str) -> list[str]:
    value = keys.texts(key)
    parts = value.split(",") if isinstance(value, str) else value or []
    return [name.strip() for name in parts if name.strip()]


E1151 = Code(
    "E1151",
    "data set that is not in dataset_info.json",
    cause="LLaMA-Factory describes its data sets in a separate file. It is not among the files, or "
    "does not contain this name.",
    cure="Name dataset_info.json after the config, and correct the name of the data set.",
)


def _chosen(run: LlamaFactory, key: str, path: str) -> Statements[list[DataSet]]:
    keys = run.keys
    names = _names(keys, key)
    if not names:
        if key == "dataset":
            help = "dataset: my_data, and its dataset_info.json"
            yield keys.refuse(key, E1143, "the file names no data set", help)
        return []
    info, folder = _info(keys)
    entries = (info.source.get(info.prefix.rstrip(".")) if info else None) or {}
    limit = keys.integer("max_samples")
    out, notes = [], []
    for name in names:
        if keys.value("dataset_dir") == "ONLINE":
            transform = conversion.alpaca(conversion.Alpaca(), False)
            out.append(DataSet(datasets.source(f"hf://{name}", None, None, limit), "chat", {}, transform))
        elif info is None and not folder.startswith("REMOTE:") and (entry := own_data_set(name)):
            entries = datasets.unwritten(keys, {name: entry})
            out.append((yield from _data_set(run, entries.below(name), name, folder, limit)))
            notes.append((yield from datasets.retold(keys, key, entries)))
            if file := entry.get("file_name"):
                notes.append(own_file(f"data/{file}"))
        elif info is None:
            message = f"`{name}` is in LLaMA-Factory's dataset_info.json, which is not among the files"
            help = f"recipe port {keys.source.path.name} {folder}/dataset_info.json"
            yield keys.refuse(key, E1151, message, help)
        elif not isinstance(info.source.get(f"{info.prefix}{name}"), dict):
            close = get_close_matches(name, list(entries), n=1)
            help = f"did you mean `{close[0]}`?" if close else f"add `{name}` to {info.source.file}"
            yield keys.refuse(key, E1151, f"`{name}` is not in {info.source.file}", help)
        else:
            out.append((yield from _data_set(run, info.below(name), name, folder, limit)))
    if info:
        used = {*_names(keys, "dataset"), *_names(keys, "eval_dataset")}
        yield from info.unused(
            [name for name in entries if name not in used], "this run does not use the data set"
        )
    sources = [data_set.source for data_set in out if data_set.source is not None]
    if sources:
        yield keys.withdraw(key)
        yield keys.say(key, {path: sources}, "; ".join(dict.fromkeys(filter(None, notes))))
        if limit:
            yield keys.same("max_samples", {path: sources}, f"the first {limit} rows of each source")
    return out


def own_data_set(name: str) -> Mapping[str, Any] | None:
    """Return a data set's entry in LLaMA-Factory's own dataset_info.json, or None if it has none."""
    entry = keys_of(NAME, "datasets").get(name)
    return entry[1] if entry else None


def own_file(path: str) -> str:
    """Say where to get a file of rows that is in LLaMA-Factory's repository, but not in its package."""
    return f"{path} is LLaMA-Factory's own: get it from its repository at v{tools()[NAME]['version']}"


def _info(keys: Keys) -> tuple[Keys | None, str]:
    """Return dataset_info.json, and the folder of its files."""
    folder = keys.value("dataset_dir")
    if isinstance(folder, dict):
        return keys.below("dataset_dir"), ""
    file = keys.ledger.sources.others.get("dataset_info")
    if file is None:
        return None, str(folder)
    cached = keys.sections.setdefault("\0dataset_info", Keys(keys.ledger, file, "LLaMA-Factory"))
    return cached, str(folder)


def _form(keys: Keys, chosen: list[DataSet], others: list[DataSet], stage: str) -> Statements[list[DataSet]]:
    """Set the form of the rows: once for all data sets, or for each if they differ."""
    data_sets = _joined([*chosen, *others])
    for data_set in data_sets:
        if (data_set.format if data_set.format in ALONE else "") != JUDGED.get(stage, "") and stage != "pt":
            has = "with kto_tag" if data_set.format == losses.UNPAIRED else "without kto_tag"
            has = has if losses.UNPAIRED in (data_set.format, JUDGED.get(stage)) else ""
            has = has or f"with{'' if data_set.ranking else 'out'} ranking"
            message = f"a data set {has} is not for the stage {stage}"
            yield keys.withdraw("dataset")
            help = "stage: dpo for preferences, kto for rows with kto_tag, sft for the others"
            yield keys.refuse("dataset", E1142, message, help)
            return chosen
    if not rows.alike(data_sets):
        separate = yield from rows.apart(keys, [(data_set.source, data_set) for data_set in data_sets])
        data_sets = [
            replace(data_set, source=source) for data_set, source in zip(data_sets, separate, strict=True)
        ]
        yield from rows.say_sources(keys, separate, len(chosen))
    elif data_sets:
        yield from rows.say_form(keys, data_sets[0], "LLaMA-Factory joins columns in its own way")
    return data_sets[: len(chosen)]


def _mixing(keys: Keys, data_sets: list[DataSet]) -> Says:
    strategy = keys.text("mix_strategy") or "concat"
    if strategy == "concat" or len(data_sets) < 2:
        yield keys.same("mix_strategy")
        yield keys.same("interleave_probs", note="the data sets are concatenated")
        return
    probabilities = keys.value("interleave_probs")
    shares = str(probabilities).split(",") if isinstance(probabilities, str) else probabilities or []
    sources: list[Any] = [data_set.source for data_set in data_sets]
    try:
        weights = [float(share) for share in shares]
        sources = [
            rows.with_own(entry, {"weight": weight}) for entry, weight in zip(sources, weights, strict=True)
        ]
    except (TypeError, ValueError):
        pass
    note = "recipec draws by weights until it has gone through each source"
    yield keys.say("mix_strategy", {"data.train": sources}, note)
    yield keys.same("interleave_probs", {"data.train": sources})


def _template(keys: Keys, model: Model | None, stage: str) -> Says:
    name, system, thinking = keys.text("template"), keys.text("default_system"), keys.flag("enable_thinking")
    if stage == "pt":
        of_chats = ("template", "default_system", "enable_thinking", "preserve_thinking")
        if name == "llama3":
            yield keys.say("template", {}, LLAMA3_ENDS)
        yield from keys.passive(of_chats, "plain text has no template")
        return
    template = templates.llamafactory(name, model, thinking, system)
    if not template.known:
        near = get_close_matches(str(name), templates.LLAMAFACTORY, n=3, cutoff=0.0)
        message = templates.unknown("the template", name, template)
        way = "leave it out to use the tokenizer's own template"
        yield keys.refuse("template", E1147, message, f"{way}; similar names are {listing(near)}")
    elif mark := templates.missing_end(template.ends, model, str(keys.value("add_special_tokens"))):
        assert model is not None
        yield keys.sets("data.chat_template", template.sets["data.chat_template"])
        message = templates.spelled(mark, model, "LLaMA-Factory")
        yield keys.refuse("template", E1180, message, f"--set 'add_special_tokens={mark}'")
    elif keys.given("template"):
        notes = (template.note, templates.PIECES, TURN_ENDS if template.last else "")
        yield keys.say("template", template.sets, "; ".join(filter(None, notes)))
    else:
        yield keys.default("template", None, {}, OWN)
    for key in ("default_system", "enable_thinking"):
        yield keys.same(key, template.sets if keys.given("template") and keys.given(key) else None)
    note = "with mask_history, recipec always keeps the reasoning of earlier turns"
    yield keys.unless("preserve_thinking", (False,), note)


def _lengths(keys: Keys, stage: str) -> Says:
    length = keys.integer("cutoff_len") or 2048
    neat = keys.flag("neat_packing")
    asked = neat or keys.flag("packing")
    # Packing takes one token off only if the file asks for it. The stage pt switches it on after that point.
    sets: dict[str, Any] = {"data.max_length": length - 1 if asked else length}
    if keys.given("cutoff_len"):
        yield keys.same("cutoff_len", sets, "LLaMA-Factory packs rows of one token less" if asked else "")
    else:
        yield keys.default("cutoff_len", length, sets)
    packs = asked or (stage == "pt" and keys.value("packing") is None)
    over = {"data.overlong": "split" if stage == "pt" and packs else "truncate"}
    if stage == "pt":
        way = "of all texts together" if packs else "at cutoff_len"
        yield keys.defaulted("truncation", way, over, BLOCKS if packs else "the same as here")
    else:
        yield keys.sets("data.overlong", "truncate", CUT)
        yield keys.defaulted("truncation", "in proportion", over, CUT)
    sets = {"data.packing": packs}
    if neat:
        yield keys.say("neat_packing", sets, "recipec fills rows in another order: other samples share a row")
        yield keys.same("packing", note="neat_packing holds")
    else:
        yield keys.same("neat_packing", note="off")
        yield keys.say("packing", sets, (BLOCKS if stage == "pt" else MIXED) if packs else "")
    if "data.packing" not in keys.ledger.lines:
        yield keys.default("packing", packs, sets, BLOCKS if stage == "pt" and packs else "")


def _masks(keys: Keys, stage: str) -> Says:
    whole, last = keys.flag("train_on_prompt"), keys.flag("mask_history")
    if stage in JUDGED:
        yield from keys.passive(
            ("train_on_prompt", "mask_history"), "the loss compares the answers of preferences"
        )
        return
    if whole and last:
        message = "`mask_history` and `train_on_prompt` exclude each other in LLaMA-Factory"
        yield keys.refuse("mask_history", E1145, message, "keep one of them")
    sets = {"data.loss_on": "all" if whole or stage == "pt" else "last_assistant" if last else "assistant"}
    yield keys.say("train_on_prompt", sets)
    yield keys.same("mask_history", sets if last else None)


def _held_out(keys: Keys, others: bool) -> Says:
    size = keys.number("val_size") or 0.0
    if size and others:
        message = "`val_size` and `eval_dataset` exclude each other in LLaMA-Factory"
        yield keys.refuse("val_size", E1145, message, "keep one of them")
    sets, note = datasets.evaluation(keys, size, keys.integer("seed") or 0)
    if sets:
        yield keys.say("val_size", sets, note)
    elif size >= 1:
        yield keys.unless("val_size", (0, 0.0), datasets.ROWS_HELD_OUT)
    yield keys.same("val_size", note="the run holds out no rows")


COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
OF_TAGS = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}
JUDGED = {"dpo": "preference", "kto": losses.UNPAIRED}
"""The `data.format` of stages with judged answers."""
OTHERS = "recipec takes the row before in a micro-batch; LLaMA-Factory in the data set"
BY_TWO = "recipec's micro-batches have two rows, for each other's answers"
OTHER_ROWS = "use a data set of text"
OF_PICTURES = table("""
lost image_min_pixels=1024: recipec does not enlarge small pictures
learned image_do_pan_and_scan=false crop_to_patches=false: recipec does not cut pictures into crops
learned freeze_vision_tower=true freeze_multi_modal_projector=true: recipec keeps the vision tower and its
    projector frozen
exact freeze_mm_modules video_max_pixels video_min_pixels video_fps video_maxlen audio_sampling_rate
    use_audio_in_video: it is not about pictures
""")
ORDER = "LLaMA-Factory leaves out rows whose turns do not alternate; recipec keeps them"
TOOLS = "recipec may leave out rows that call tools, and tells the model of no tools"


@dataclass(frozen=True)
class DataSet:
    """One data set.

    Attributes:
        source: its entry in `data.train`, None after an error.
        format, fields, transform: as in `data`.
        ranking: whether its rows are preferences.
        note: how its rows differ.
        columns: the columns of instructions, None for other rows.
    """

    source: Any
    format: str = "chat"
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    ranking: bool = False
    note: str = ""
    columns: conversion.Alpaca | None = None


def _data_set(
    run: LlamaFactory, keys: Keys, name: str, folder: str, limit: int | None
) -> Statements[DataSet]:
    """Read an entry of dataset_info.json, and record each of its keys."""
    source = yield from _source(keys, name, folder, limit)
    columns = yield from _named(keys, "columns", COLUMNS)
    tags = yield from _named(keys, "tags", TAGS)
    formatting = keys.choice("formatting", ("alpaca", "sharegpt", "openai")) or "alpaca"
    ranking = keys.flag("ranking")
    stage = run.stage
    yield from _media(run, keys, columns)
    if stage == "pt":
        data_set = DataSet(source, "text", {"text": columns.get("prompt") or "text"})
    elif formatting == "alpaca":
        data_set = _alpaca(source, columns, ranking)
    else:
        data_set = _conversations(source, columns, tags, formatting, ranking)
    yield keys.say(
        "formatting", {"data.format": data_set.format} if keys.given("formatting") else None, data_set.note
    )
    yield keys.same("ranking", note="two answers of a prompt" if ranking else "")
    return data_set


def _joined(data_sets: list[DataSet]) -> list[DataSet]:
    """Give instructions and conversations one form, whose transform distinguishes rows by their columns."""
    asked = [data_set for data_set in data_sets if data_set.columns and data_set.format == "chat"]
    talks = [data_set for data_set in data_sets if data_set.format == "chat" and not data_set.transform]
    if not asked or not talks or len(asked) + len(talks) != len(data_sets):
        return data_sets
    (columns, fields) = (asked[0].columns, talks[0].fields)
    if any(data_set.columns != columns for data_set in asked) or any(
        data_set.fields != fields for data_set in talks
    ):
        return data_sets
    if columns is None or fields["messages"] in vars(columns).values():
        return data_sets
    transform = conversion.alpaca(columns, False, fields)
    return [replace(data_set, fields=fields, transform=transform) for data_set in data_sets]


def _source(keys: Keys, name: str, folder: str, limit: int | None) -> Statements[Any]:
    hub, file, cloud = (keys.text(key) for key in ("hf_hub_url", "file_name", "cloud_file_name"))
    if hub or cloud:
        place = datasets.Place(f"hf://{hub}") if hub else datasets.place(str(cloud))
    elif file:
        place = datasets.Place(f"{folder.rstrip('/')}/{file}" if folder else file)
    else:
        place = datasets.Place(None, "it is not on the Hugging Face Hub")
    if place.path is None:
        places = ("hf_hub_url", "file_name", "cloud_file_name", "ms_hub_url", "om_hub_url", "script_url")
        where = next((key for key in places if keys.given(key)), "file_name")
        message = f"recipec cannot read the data set `{name}`: {place.note}"
        yield keys.refuse(where, E1143, message, "give it as file_name, or as hf_hub_url")
    count = keys.integer("num_samples")
    rows = min(n for n in (count, limit) if n) if count or limit else None
    split = keys.text("split")
    source = datasets.source(
        place.path or name, None if split == "train" else split, keys.text("subset"), rows
    )
    yield from keys.follow(OF_SOURCES)
    if count:
        yield keys.say(
            "num_samples", {}, f"recipec takes the first {count} rows; LLaMA-Factory draws {count} rows"
        )
    return source if place.path else None


def _named(keys: Keys, section: str, defaults: Mapping[str, str]) -> Statements[dict[str, str]]:
    """Return columns or tags: only the file's if it has any, otherwise LLaMA-Factory's defaults."""
    if not keys.stands(section):
        return dict(defaults)
    named = {str(name): str(value) for name, value in keys.mapping(section).items() if value is not None}
    yield from keys.below(section).passive(named, "")
    return named


def _media(run: LlamaFactory, keys: Keys, columns: Mapping[str, str]) -> Says:
    """State the columns of pictures, and refuse those of video and sound."""
    below = keys.below("columns")
    for name in ("videos", "audios"):
        if name in columns:
            yield below.withdraw(name)
            yield below.refuse(name, E1150, f"`{name}`: recipec's models read text and pictures", OTHER_ROWS)
    if "images" in columns:
        yield below.withdraw("images")
        sets = {MOST_PIXELS: _most_pixels(run.keys)}
        yield from images.say_images(below, "images", run.model, run.stage, sets, help=OTHER_ROWS)


MOST_PIXELS = "data.images.max_pixels"


def _most_pixels(keys: Keys) -> int:
    """Return the pixels to which larger pictures are scaled down."""
    return keys.integer("image_max_pixels") or 768 * 768


def _pictures(run: LlamaFactory) -> Says:
    """State how pictures are scaled, and what of the tower is trained."""
    keys = run.keys
    if not images.trained_on(keys):
        return
    sets = {MOST_PIXELS: _most_pixels(keys)}
    if keys.given("image_max_pixels"):
        yield keys.same("image_max_pixels", sets)
    else:
        yield keys.default("image_max_pixels", sets[MOST_PIXELS], sets, "LLaMA-Factory's default")
    yield from _tower(run)
    yield from keys.follow(OF_PICTURES)
    if media := keys.text("media_dir"):
        yield keys.same("media_dir", {"data.images.folder": media})
    yield keys.same("media_dir", note="pictures are named from the folder of the data")


FREEZES = ("freeze_vision_tower", "freeze_multi_modal_projector")


def _tower(run: LlamaFactory) -> Says:
    """State adapters in the vision tower and its projector, which are frozen by default."""
    keys, model = run.keys, run.model
    freezes = [keys.flag(key) for key in FREEZES]
    if all(freezes) or not run.lora or model is None:
        return
    chosen = adapters.choose(model, target_modules(model, _targets(keys), *freezes))
    if chosen.tower:
        targets = adapters.with_tower(model, chosen.targets, chosen.tower)
        yield from keys.passive(FREEZES, "part of lora.vision and lora.targets")
        yield keys.sets("lora.vision", True)
        yield keys.sets("lora.targets", targets)


def _alpaca(source: Any, columns: Mapping[str, str], ranking: bool) -> DataSet:
    names = ("prompt", "query", "response", "history", "system", "chosen", "rejected")
    named = {name: columns.get(name) for name in names} | {
        "label": columns.get("kto_tag"),
        "images": columns.get("images"),
    }
    asked = conversion.Alpaca(**named)
    transform = conversion.alpaca(asked, ranking)
    note = TOOLS if "tools" in columns else ""
    return DataSet(source, _format(columns, ranking), {}, transform, ranking, note, asked)


def _format(columns: Mapping[str, str], ranking: bool) -> str:
    """Return the `data.format` of rows that are not plain text."""
    return "preference" if ranking else losses.UNPAIRED if "kto_tag" in columns else "chat"


def _conversations(
    source: Any, columns: Mapping[str, str], tags: Mapping[str, str], formatting: str, ranking: bool
) -> DataSet:
    messages = columns.get("messages") or "conversations"
    role, content = tags.get("role_tag") or "from", tags.get("content_tag") or "value"
    usual = {**ALIASES, **{name: name for name in (*ROLES, *CALLS)}}
    words = {word: OF_TAGS[tag] for tag, word in tags.items() if tag in OF_TAGS}
    known = all(usual.get(word) in (meant, "function_call") for word, meant in words.items())
    notes = (ORDER if formatting == "sharegpt" else "", TOOLS if "tools" in columns else "")
    note = "; ".join(filter(None, notes))
    if known and not ranking and "system" not in columns and "kto_tag" not in columns:
        fields = {
            **{"messages": messages, "role": role, "content": content},
            **{name: columns.get(name) for name in ("tools", "images")},
        }
        return DataSet(source, "chat", {here: there for here, there in fields.items() if there}, note=note)
    turns = {word: "assistant" if meant == "function_call" else meant for word, meant in words.items()}
    chosen, rejected = (columns.get(name) or name if ranking else None for name in ("chosen", "rejected"))
    transform = conversion.tagged(
        conversion.Tagged(
            *(messages, role, content, turns, columns.get("system")),
            chosen=chosen,
            rejected=rejected,
            label=columns.get("kto_tag"),
            images=columns.get("images"),
        )
    )
    return DataSet(source, _format(columns, ranking), {}, transform, ranking, note)


LOSSES: Mapping[str, Mapping[str, Any]] = {
    "sigmoid": {"train.objective": "dpo"},
    "hinge": {"train.objective": "dpo", "train.loss_type": "hinge"},
    "ipo": {"train.objective": "dpo", "train.loss_type": "ipo"},
    "simpo": {"train.objective": "cpo", "train.loss_type": "simpo", "train.cpo_alpha": 0.0},
    "orpo": {"train.objective": "orpo"},
}
"""The values of pref_loss."""
BEFORE_MUON = ("use_galore", "use_apollo", "loraplus_lr_ratio", "use_badam", "use_adam_mini")
"""Keys that select other optimizers, which LLaMA-Factory checks before use_muon."""
WEIGHTED = {"use_dft_loss": "dft", "use_eaft_loss": "eaft", "use_asft_loss": "asft"}
"""Keys that select a loss of supervised fine-tuning, in LLaMA-Factory's order, with the recipe's loss."""
OF_PREFERENCES = words("pref_beta pref_loss dpo_label_smoothing pref_ftx pref_bco_weight ld_alpha")

OF_SOURCES = table("""
exact hf_hub_url file_name cloud_file_name subset split
exact ms_hub_url om_hub_url: recipec reads the Hugging Face Hub
exact script_url: recipec runs no code of a data set
lost folder=null
""")

SPLIT = (
    "control tokens in the data become ordinary text; LLaMA-Factory also splits those that its template "
    "writes, which recipec keeps"
)

KEYS = table("""
generation infer_backend infer_dtype use_kv_cache vllm_maxlen vllm_gpu_util vllm_enforce_eager
    vllm_max_lora_rank vllm_config sglang_maxlen sglang_mem_fraction sglang_tp_size sglang_config
    sglang_lora_backend do_sample temperature top_p top_k num_beams max_length max_new_tokens
    repetition_penalty length_penalty skip_special_tokens eval_num_beams generation_max_length
    generation_num_beams
launch device_map
derived compute_dtype model_max_length block_diag_attn
method kto_chosen_weight kto_rejected_weight simpo_gamma ppo_buffer_size ppo_epochs ppo_score_norm ppo_target
    ppo_whiten_rewards reward_model reward_model_adapters reward_model_quantization_bit reward_model_type
    freeze_trainable_layers freeze_trainable_modules freeze_extra_modules module_dropout oft_rank
    oft_block_size oft_target
part eval_on_each_dataset
exact gradient_checkpointing: disable_gradient_checkpointing decides whether activations are kept
learned create_new_adapter use_llama_pro use_galore use_apollo use_badam use_adam_mini freeze_language_model
    add_tokens new_special_tokens_config shift_attn mixture_of_depths pref_ftx
    pref_bco_weight ld_alpha ref_model ref_model_adapters
anew train_from_scratch
learned tokenized_path: with it, LLaMA-Factory tokenizes rows, or trains on rows that an earlier step
    tokenized
lost use_mca use_hyper_parallel use_kt ref_model_quantization_bit
lost resize_vocab: recipec's embedding has model.vocab_size rows
lost upcast_layernorm: recipec keeps norms in model.dtype
lost upcast_lmhead_output: recipec computes logits in model.dtype, and their loss in float32
lost tool_format: only the template writes tools in recipec
setting init_special_tokens -> add_special_tokens
setting galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise ->
    use_galore
setting apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type
    apollo_scale_type apollo_layerwise apollo_scale_front -> use_apollo
setting badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio
    badam_mask_mode -> use_badam
setting hyper_parallel_args -> use_hyper_parallel
setting asft_alpha -> use_asft_loss
setting eaft_alpha -> use_eaft_loss
setting kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num
    kt_lora_expert_intermediate_size -> use_kt
setting fp8_backend fp8_enable_fsdp_float8_all_gather -> fp8
""")
"""Keys for which a row of a table is enough, without transformers' TrainingArguments."""


RULES: Sequence[Rule[LlamaFactory]] = (
    _stage,
    _method,
    model("model_name_or_path", "model_revision"),
    _optimizer,
    _launch,
    training_arguments.placement,
    _groups,
    _trained,
    _quantized,
    balance("moe_aux_loss_coef", *BALANCED),
    _data,
    _pictures,
    places,
    _attention,
    _token_loss,
    _training,
    _undivided,
    _rows_of_kto,
    _processes,
    _order,
    _memory,
    _evaluation,
    _start,
    tokens("add_special_tokens", "resize_vocab"),
    follow(KEYS, off=OFF),
    common(NAME),
)
