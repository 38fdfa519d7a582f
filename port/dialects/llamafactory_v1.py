"""LLaMA-Factory's v1 (USE_V1=1, the sft_trainer of 0.9.5): its YAML, and the YAML that describes its data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipec.compiler.wording import listing
from recipec.port.common_keys import say_start
from recipec.port.dialects.llamafactory import E1151, LOSSES, own_file, target_modules
from recipec.port.engine import Rule, Says, Statements
from recipec.port.keys import REASONS, Keys, defaults_of, keys_of, table, words
from recipec.port.ledger import Ledger, Verdict
from recipec.port.meaning import (
    adapters,
    datasets,
    experts,
    freezing,
    rows,
    sharding,
    templates,
    training,
)
from recipec.port.meaning.run import Run
from recipec.port.refusals import E1142, E1143, E1145, E1147, E1149, E1160, E1163
from recipec.port.rules import common, directory, follow, model
from recipec.spec.core_schema import flow

NAME = "llamafactory_v1"
TITLE = "LLaMA-Factory v1"
MARKS = words(
    """model_class train_dataset eval_dataset dist_config kernel_config sample_backend peft_config
    quant_config batching_strategy batching_workers optim_config lr_scheduler_config init_config
    custom_chat_template enable_activation_checkpointing"""
)
KEYS = table("""
learned peft_config.adapter_name_or_path optim_config
files sample_backend max_new_tokens trust_remote_code batching_workers
kernels kernel_config
mesh dp_size mp_replicate_size mp_shard_size cp_mode
speed init_config full_determinism
log logging_steps
launch dist_timeout
checkpoints save_steps save_epochs save_ckpt_as_hf save_total_limit resume_from_checkpoint
evaluation eval_dataset
method pref_loss pref_beta pref_ftx simpo_gamma dpo_label_smoothing ld_alpha
learned lr_scheduler_config: the learning rate stays at its peak
""")
OF_LORA = table("""
integer r -> lora.rank
number lora_alpha -> lora.alpha
export export_dir export_size export_hub_model_id export_legacy_format infer_dtype
exact name: a setting of the training
""")
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": "all"}
"""The defaults of LLaMA-Factory's get_lora_model for keys that the section lacks."""
MUON: dict[str, Any] = {"wd": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
MUON |= {"adamw_betas": [0.9, 0.95], "adamw_eps": 1e-8}
"""The defaults of LLaMA-Factory's create_muon_optimizer."""
ADAMW = table("""
sets -> train.optimizer.name=adamw: torch.optim.AdamW's own settings
sets -> train.optimizer.b1=0.9: torch.optim.AdamW's own settings
sets -> train.optimizer.b2=0.999: torch.optim.AdamW's own settings
sets -> train.optimizer.eps=1e-8: torch.optim.AdamW's own settings
sets -> train.optimizer.weight_decay=0.01: torch.optim.AdamW's own settings
""")
OF_MUON = table("""
number wd -> train.optimizer.weight_decay
number momentum -> train.optimizer.momentum
number adamw_eps -> train.optimizer.eps
""")
CONVERTERS = {"alpaca": "instruction", "sharegpt": "chat", "pair": "preference"}
PAIRS = "LLaMA-Factory's command says what pairs are for, dpo or rm; recipec takes dpo"
TOGETHER = "recipec truncates each answer with its prompt; LLaMA-Factory truncates a pair as a whole"
BY_TOKENS = "recipec averages a step's pairs; LLaMA-Factory weights micro-batches by their tokens"
OPENING = "LLaMA-Factory also trains on `<|im_start|>assistant` before an answer"
OWN = "recipec does not read rows in LLaMA-Factory's own form"
DRAWN = "recipec takes the first rows; LLaMA-Factory draws as many, some of them twice"
JOINED = "recipec puts a line break between instruction and input; LLaMA-Factory puts nothing"


def opened(ledger: Ledger) -> Run:
    """Return the run of a file."""
    defaults = {**defaults_of(NAME, "args"), "template": "qwen3_nothink"}
    return Run(Keys(ledger, ledger.sources.main, TITLE, defaults))


def _kind(run: Run) -> Says:
    keys = run.keys
    if keys.choice("model_class", ("llm", "cls", "other")) not in (None, "llm"):
        yield keys.refuse("model_class", E1149, "a classifier is not a language model", "model_class: llm")
    yield keys.same("model_class", note="a language model")


def _lora(run: Run) -> Says:
    keys = run.keys
    section = keys.below("peft_config", LORA)
    whole, name = not keys.mapping("peft_config"), section.text("name")
    if whole or name == "freeze":
        if whole:
            yield keys.same("peft_config", {"lora": None}, "full fine-tuning")
            yield keys.sets("lora", None, "full fine-tuning")
        else:
            yield section.same("name", note="it trains the modules of train.trainable_modules")
            yield from freezing.say_layers(section, run.model)
        help = "peft_config: {name: lora}, or remove quant_config"
        yield from adapters.refuse_quantized(keys, "quant_config", help)
        yield keys.same("quant_config", note="not quantized")
        return
    if name != "lora":
        message = f"peft_config is of {name or 'no name'}: only lora and freeze have a counterpart"
        yield section.refuse("name", E1149, message, "name: lora")
        freeze = ("trainable_layers", "trainable_modules", "extra_modules")
        yield from section.passive([f"freeze_{key}" for key in freeze], REASONS["method"])
    run.lora = True
    yield from section.follow(OF_LORA, training.OFF)
    yield from section.follow(adapters.KINDS)
    names = section.listed("target_modules") or ["all"]
    spec: str | list[str] = "all-linear" if names == ["all"] else names
    if run.model is not None:
        spec = target_modules(run.model, names)
    yield from adapters.say_dropout(
        section, (yield from adapters.say_targets(section, "target_modules", run.model, spec))
    )
    yield from say_start(section, "adapter_name_or_path")
    yield keys.sets("lora.dtype", "float32", "PEFT keeps adapters in float32")
    quant = keys.below("quant_config", {"quantization_bit": 4, "double_quantization": True})
    if keys.mapping("quant_config"):
        bits, kind = quant.integer("quantization_bit"), quant.text("quantization_type") or "nf4"
        try:
            nested, left = quant.flag("double_quantization"), experts.has_experts(run.model)
            quantization = adapters.quantized(bits, kind, nested, left)
        except ValueError as error:
            yield quant.refuse(
                "quantization_bit", E1145, f"no such quantization: {error}", "quantization_bit: 4"
            )
        else:
            yield quant.say("quantization_bit", {"model.quantization": quantization.value}, quantization.note)
        names = ["name", "quantization_type", "double_quantization", "compute_dtype"]
        yield from quant.passive(names, "part of model.quantization")
    yield keys.same("quant_config", note="not quantized")


def _batch(run: Run) -> Says:
    keys = run.keys
    dist = keys.below("dist_config")
    shared = max(keys.integer("cp_size") or 1, dist.integer("cp_size") or 1)
    processes = sharding.devices(keys.ledger, sharding.Launch(shared=shared))
    micro = keys.integer("micro_batch_size") or 1
    batch = yield from training.say_groups(keys, "cp_size", micro, 1, processes, shared)
    total = keys.integer("global_batch_size") or batch.rows
    if total % batch.rows:
        message = f"a global_batch_size of {total} is not a multiple of {batch.rows} ({batch})"
        yield keys.refuse("global_batch_size", E1145, message, f"global_batch_size: {batch.rows}")
    yield keys.say("micro_batch_size", {"train.micro_batch_size": micro})
    yield keys.same("global_batch_size", {"train.global_batch_size": total} if total > 0 else None)
    yield keys.sets("train.loss_normalization", "tokens")
    yield keys.same("cp_size", note=sharding.sharing(shared))
    yield from dist.passive(keys.mapping("dist_config"), sharding.MESH)
    yield keys.same("dist_config", note=sharding.MESH)
    kinds = ("normal", "padding_free", "dynamic_batching", "dynamic_padding_free")
    strategy = keys.choice("batching_strategy", kinds)
    if str(strategy).startswith("dynamic"):
        note = "recipec's steps have as many rows each, not as many tokens"
        yield keys.learned("batching_strategy", (), note)
    yield keys.same("batching_strategy", note=REASONS["padding"])
    if not (yield from training.say_steps(keys, "max_steps", "", "num_train_epochs")):
        yield keys.say("num_train_epochs", {"train.epochs": keys.integer("num_train_epochs")})
        yield keys.same("max_steps", note="whole epochs")


def _seed(run: Run) -> Says:
    seed = run.keys.integer("seed")
    sets = {"train.seed": seed, "data.shuffle_seed": seed}
    yield run.keys.same("seed", sets, "another random generator: other draws")


def _optimizer(run: Run) -> Says:
    keys = run.keys
    section = keys.below("optim_config", MUON)
    if run.lora or keys.mapping("optim_config").get("name") != "muon":
        yield from keys.follow(ADAMW)
        return
    yield section.same("name", {"train.optimizer.name": "muon"})
    yield from section.follow(OF_MUON)
    betas = section.value("adamw_betas")
    if isinstance(betas, list) and len(betas) == 2 and all(isinstance(beta, float) for beta in betas):
        yield section.say("adamw_betas", {"train.optimizer.b1": betas[0], "train.optimizer.b2": betas[1]})
    else:
        message = f"`optim_config.adamw_betas` are {flow(betas)}, not two numbers"
        yield section.refuse("adamw_betas", E1160, message, "adamw_betas: [0.9, 0.95]")
    for key, held in (("nesterov", True), ("ns_steps", 5)):
        if section.value(key) == held:
            yield section.same(key, note="the same in recipec")
        yield section.learned(key, (), f"in recipec's muon it is {flow(held)}")
    yield section.same("lr", note="learning_rate overrides it")
    yield keys.same("optim_config")


def _data(run: Run) -> Says:
    keys, model = run.keys, run.model
    name = keys.text("train_dataset")
    file = keys.ledger.sources.others.get("v1_datasets")
    entries: list[tuple[str, Any]] = []
    included = {} if file else keys_of(NAME, "datasets").get(str(name), ["", {}])[1]
    if included:
        described = datasets.unwritten(keys, included)
        entries = yield from _described(described)
        files = [own_file(row["path"]) for row in included.values() if row.get("source") == "local"]
        notes = [(yield from datasets.retold(keys, "train_dataset", described)), *files]
        yield keys.say("train_dataset", {}, "; ".join(filter(None, notes)))
    elif name and name.endswith((".yaml", ".yml")):
        if file is None:
            help = f"recipe port {keys.source.path.name} {name}"
            message = f"{name} describes the data sets, and is not among the files"
            yield keys.refuse("train_dataset", E1151, message, help)
        else:
            entries = yield from _described(Keys(keys.ledger, file, TITLE))
    else:
        place = datasets.place(name) if name else datasets.Place(None, "the file names no data set")
        if place.path is None:
            help = "--set train_dataset=OWNER/NAME"
            yield keys.refuse("train_dataset", E1143, f"recipec cannot read the data: {place.note}", help)
        else:
            help = "a YAML with its path and its converter, alpaca or sharegpt, as train_dataset"
            yield keys.refuse("train_dataset", E1143, OWN, help)
    forms = list(dict.fromkeys(form for form, _ in entries if form))
    if len(forms) > 1:
        message = f"the data sets have several forms: {listing(forms)}"
        yield keys.refuse("train_dataset", E1142, message, "use only data sets of one form")
    yield keys.same("train_dataset", note=f"read from {file.file}" if file else "")
    yield keys.sets("data.train", [entry for _, entry in entries if entry])
    if forms:
        yield keys.sets("data.format", forms[0])
        if forms[0] != "preference":
            yield keys.sets("data.loss_on", "assistant" if forms[0] == "chat" else "completion")
    jinja, chosen = keys.text("custom_chat_template"), keys.text("template")
    template = templates.llamafactory(chosen, model)
    if jinja:
        yield keys.say("custom_chat_template", {"data.chat_template": jinja})
    elif template.known:
        yield keys.say("template", template.sets, "; ".join(filter(None, (OPENING, template.note))))
    else:
        message = templates.unknown("the template", chosen, template)
        yield keys.refuse("template", E1147, message, "template: qwen3_nothink")
    yield keys.same("template", note="custom_chat_template holds")
    yield keys.same("custom_chat_template", note="null: the same as without the key")
    pairs = forms[:1] == ["preference"]
    yield from datasets.length(keys, "cutoff_len", TOGETHER if pairs else "")
    if pairs:
        yield from _preferences(keys)
    yield keys.sets("data.packing", False, "LLaMA-Factory makes one sample of each row")


def _preferences(keys: Keys) -> Says:
    keys.defaults = {"pref_beta": 0.1, "simpo_gamma": 0.5, **keys.defaults}
    loss = keys.text("pref_loss") or "sigmoid"
    if loss not in ("sigmoid", "simpo"):
        message = f"`pref_loss: {loss}` has no counterpart: recipes have LLaMA-Factory's sigmoid and simpo"
        yield keys.refuse("pref_loss", E1163, message, "pref_loss: sigmoid")
        loss = "sigmoid"
    for path, value in LOSSES[loss].items():
        yield keys.sets(path, value)
    yield keys.same("pref_loss", LOSSES[loss] if keys.given("pref_loss") else None)
    yield keys.say("pref_beta", {"train.beta": keys.number("pref_beta")})
    if loss == "simpo":
        yield keys.say("simpo_gamma", {"train.simpo_gamma": keys.number("simpo_gamma")})
    elif smoothing := keys.number("dpo_label_smoothing"):
        yield keys.same("dpo_label_smoothing", {"train.label_smoothing": smoothing})
    yield keys.learned(
        "pref_ftx", training.OFF, "recipec does not add the supervised loss of the chosen answer"
    )
    yield keys.learned("ld_alpha", training.OFF, "recipec does not weight answers by their length")
    if keys.ledger.value("train.global_batch_size", 1) > keys.ledger.value("train.micro_batch_size", 1):
        yield keys.amend("train.micro_batch_size", Verdict.APPROXIMATED, BY_TOKENS)


def _described(file: Keys) -> Statements[list[tuple[str, Any]]]:
    entries = []
    for name in file.source.data:
        entry = Keys(file.ledger, file.source, TITLE, {"split": "train"}, f"{name}.")
        entries.append((yield from _entry(entry)))
    return entries


def _entry(keys: Keys) -> Statements[tuple[str, Any]]:
    source = yield from datasets.given(keys, "path", "path: OWNER/NAME, or a file", None)
    limit, kind = keys.integer("size"), keys.text("converter")
    if kind not in CONVERTERS:
        message = f"recipec does not read rows of the converter {kind}" if kind else OWN
        yield keys.refuse("converter", E1143, message, f"converter: {listing(CONVERTERS, 'or')}")
    form = CONVERTERS.get(str(kind), "")
    yield keys.say("converter", {}, {"instruction": JOINED, "preference": PAIRS}.get(form, ""))
    yield keys.unless(
        "weight",
        (None, 1, 1.0),
        "recipec takes all rows once; LLaMA-Factory draws as many rows as the weight says",
    )
    if limit and source is not None:
        source = rows.with_own(source, {"limit": limit})
        yield keys.say("size", {}, DRAWN)
    yield from keys.passive(("path", "source", "split", "size", "weight", "streaming"), "part of data.train")
    return form, source


def _precision(run: Run) -> Says:
    keys = run.keys
    half = keys.flag("bf16") or run.lora
    yield keys.say("bf16", {"model.dtype": "bfloat16" if half else "float32"})
    if half and not run.lora:
        yield keys.sets(
            "train.optimizer.master_weights", True, "the weights are float32, rounded for each product"
        )
    fused = keys.value("flash_attn") == "flash_attention_2"
    yield keys.same("flash_attn", {"model.attention": "splash"} if fused else None, "the same attention")


RULES: Sequence[Rule[Run]] = (
    _kind,
    model("model", "model_revision"),
    _lora,
    _batch,
    follow("""
    number learning_rate -> train.optimizer.learning_rate
    sets -> train.schedule.name=constant: without lr_scheduler_config the learning rate is constant
    positive max_grad_norm -> train.optimizer.max_grad_norm
    """),
    _seed,
    _optimizer,
    _data,
    _precision,
    follow("either enable_activation_checkpointing -> remat.policy=decoder/none"),
    directory("output_dir"),
    follow("""
    count save_steps -> checkpoint.every_steps
    count save_total_limit -> checkpoint.keep
    """),
    follow(KEYS, off=training.OFF),
    common(NAME, off=training.OFF),
)
