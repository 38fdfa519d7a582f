"""LLaMA-Factory's YAML or JSON (0.9.5), with its dataset_info.json."""

from __future__ import annotations

from compiler.catalog import Model
from compiler.port import known
from compiler.port.dialects import llamafactory_data
from compiler.port.dialects import llamafactory_keys as tables
from compiler.port.keys import Keys
from compiler.port.ledger import Ledger
from compiler.port.meaning import adapters, models, quantization, sharding, targets, trainer
from compiler.port.meaning.sharding import Launch
from compiler.port.meaning.trainer import Run

NAME = "llamafactory"
TITLE = "LLaMA-Factory"
MARKS = [
    "stage",
    "finetuning_type",
    "lora_rank",
    "lora_target",
    "template",
    "cutoff_len",
    "dataset",
    "dataset_dir",
    "max_samples",
    "preprocessing_num_workers",
    "overwrite_cache",
    "plot_loss",
    "val_size",
    "flash_attn",
    "quantization_bit",
    "quantization_method",
    "pref_beta",
    "pref_loss",
    "mask_history",
    "train_on_prompt",
    "neat_packing",
    "do_train",
]

COMPOSITE = {
    "gemma3": (("multi_modal_projector",), ("vision_tower",), ()),
    "gemma4": (
        ("model.embed_vision", "model.embed_audio"),
        ("vision_tower", "audio_tower"),
        ("per_layer_projection_norm",),
    ),
}
"""Of models with a vision tower: parts of the names of its projector and of the tower, and of what carries
no adapter."""


def port(ledger: Ledger) -> None:
    """Says of every key what became of it."""
    keys = Keys(
        ledger, ledger.sources.main, TITLE, {"optim": "adamw_torch_fused"} | known.defaults(NAME, "train")
    )
    stage = _stage(keys)
    method = _method(keys)
    model = _model(keys)
    run = Run(method == "lora", keys.number("learning_rate") or 0.0)
    file = ledger.sources.others.get("accelerate")
    expected = trainer.for_deepspeed(keys, ledger.devices or 1)
    launch = sharding.accelerate(ledger, file, expected) if file is not None else Launch()
    launch, taken = trainer.placement(keys, sharding.ray(keys, launch))
    for name in ("fsdp", "deepspeed"):
        if not isinstance(keys.value(name), dict):
            keys.same(name, note=sharding.MESH)
    if run.lora:
        _lora(keys, model)
    _quantised(keys, run)
    llamafactory_data.port(keys, model, stage)
    trainer.batch(keys, launch)
    if ledger.devices is None and launch.processes is None:
        rows = {"train.global_batch_size": ledger.value("train.global_batch_size")}
        note = (
            "the files do not say on how many GPUs the run was: one is taken, and --devices N says otherwise"
        )
        ledger.defaulted("--devices", 1, rows, note)
    trainer.length(keys)
    trainer.optimizer(keys, run, taken)
    trainer.schedule(keys, run, taken)
    keys.same("warmup_ratio")
    trainer.precision(keys, run, launch, _dtype(keys, run))
    _order(keys)
    _memory(keys, launch)
    _evaluation(keys)
    trainer.bookkeeping(keys)
    _tables(keys)


def _stage(keys: Keys) -> str:
    """sft, dpo or pt, with the keys that only preferences read."""
    stage = keys.text("stage") or "sft"
    only = next((key for key in ("do_predict", "do_eval") if keys.flag(key)), None)
    idle = "do_train" if keys.given("do_train") else only
    if idle and not keys.flag("do_train"):
        message = "the file trains nothing: `do_train` is off"
        keys.refuse(idle, "E1149", message, "--set do_train=true, where the run is to train")
    if stage not in ("sft", "dpo", "pt"):
        message = f"`stage: {stage}` is another kind of training: recipes have sft, dpo and orpo"
        keys.refuse("stage", "E1149", message, "stage: sft, or stage: dpo with preferences")
        stage = "sft"
    loss = keys.text("pref_loss") or "sigmoid"
    if stage != "dpo":
        note = "texts are learnt as they are" if stage == "pt" else ""
        keys.say("stage", {"train.objective": "sft"}, note)
        preference = (
            "pref_beta",
            "pref_loss",
            "dpo_label_smoothing",
            "pref_ftx",
            "pref_bco_weight",
            "ld_alpha",
        )
        keys.passive(preference, f"the stage {stage} does not read it")
        return stage
    if loss not in ("sigmoid", "orpo"):
        message = f"`pref_loss: {loss}` has no counterpart: recipes have dpo's sigmoid loss, and orpo's"
        keys.refuse("pref_loss", "E1163", message, "pref_loss: sigmoid")
    objective = "orpo" if loss == "orpo" else "dpo"
    keys.say("stage", {"train.objective": objective})
    keys.same("pref_loss", {"train.objective": objective} if keys.given("pref_loss") else None)
    keys.say("pref_beta", {"train.beta": keys.number("pref_beta")})
    smoothing = keys.number("dpo_label_smoothing")
    keys.same("dpo_label_smoothing", {"train.label_smoothing": smoothing} if smoothing else None)
    return stage


def _method(keys: Keys) -> str:
    """lora or full."""
    method = keys.text("finetuning_type") or "lora"
    if method not in ("lora", "full"):
        message = f"`finetuning_type: {method}` has no counterpart: recipes have lora and full"
        keys.refuse("finetuning_type", "E1149", message, "finetuning_type: lora")
        return "lora"
    if method == "full":
        keys.same("finetuning_type", {"lora": None}, "everything is trained")
        names = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora")
        keys.passive(names, "there are no adapters: everything is trained")
    keys.same("finetuning_type", note="the lora section")
    if not keys.stands("finetuning_type"):
        keys.default("finetuning_type", "lora", {})
    return method


def _model(keys: Keys) -> Model | None:
    name = keys.text("model_name_or_path")
    if name is None:
        message = "`model_name_or_path` is missing"
        keys.refuse("model_name_or_path", "E1144", message, "model_name_or_path: Qwen/Qwen3-8B")
        return None
    found = models.resolve(name, keys.source.path.parent)
    keys.say("model_name_or_path", {"model.id": found.id}, found.note)
    revision = keys.text("model_revision")
    kept = revision not in (None, "main") and not found.note
    keys.same("model_revision", {"model.revision": revision} if kept else None)
    attention = keys.value("flash_attn")
    fused = attention in ("fa2", "fa3") and (found.model is None or found.model.family.flash_attention)
    given = keys.given("flash_attn")
    keys.same("flash_attn", {"model.attention": "splash" if fused else "dot"} if given else None)
    return found.model


def _lora(keys: Keys, model: Model | None) -> None:
    rank = keys.integer("lora_rank") or 8
    keys.say("lora_rank", {"lora.rank": rank})
    alpha = keys.number("lora_alpha") if keys.given("lora_alpha") else None
    if alpha:
        keys.say("lora_alpha", {"lora.alpha": alpha})
    else:
        note = "LLaMA-Factory's default: twice the rank"
        keys.default("lora_alpha", 2 * rank, {"lora.alpha": 2 * rank}, note)
    keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout") or 0.0})
    keys.same("use_rslora", {"lora.rslora": True} if keys.flag("use_rslora") else None, "alpha / sqrt(rank)")
    given = keys.texts("lora_target") or "all"
    names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
    if model is None:
        spec: str | list[str] = "all-linear" if names == ["all"] else names
    else:
        spec = target_modules(model, names, keys.flag("freeze_vision_tower"))
    adapters.say_targets(keys, "lora_target", model, spec)


def target_modules(model: Model, names: list[str], freeze_tower: bool = True) -> list[str]:
    """What LLaMA-Factory hands to PEFT: find_all_linear_modules for `all`, and patch_target_modules.

    Of a model with a vision tower it takes every module whose name holds one of the targets.
    """
    composite = COMPOSITE.get(model.family.name) if targets.is_multimodal(model) else None
    projector, tower, conflicts = composite or ((), (), ())
    every = [module for module in targets.modules(model) if module.linear]
    if names == ["all"]:
        forbidden = ("lm_head", *projector, *(tower if freeze_tower else ()))
        kept = [module.name for module in every if not any(part in module.name for part in forbidden)]
        names = list(dict.fromkeys(name.rpartition(".")[2] for name in kept))
    if composite is None:
        return names
    # The projector is frozen by default; whether it is bears on nothing here.
    forbidden = (*projector, *(tower if freeze_tower else ()), *conflicts)
    return [
        module.name
        for module in targets.modules(model)
        if any(name in module.name for name in names) and not any(part in module.name for part in forbidden)
    ]


def _quantised(keys: Keys, run: Run) -> None:
    details = ("quantization_type", "double_quantization", "quantization_method")
    bits = keys.integer("quantization_bit")
    if bits is None:
        keys.passive(("quantization_bit", *details), "the base is not quantised")
        return
    if not run.lora:
        message = "`quantization_bit` with full fine-tuning: a quantised base cannot be trained itself"
        keys.refuse("quantization_bit", "E1146", message, "finetuning_type: lora")
        keys.passive(details, "the base is not quantised")
        return
    method = str(keys.value("quantization_method") or "bnb").lower()
    other = "" if method in ("bnb", "bitsandbytes") else f"nf4 or int8 here, in place of {method}'s codes"
    kind = keys.choice("quantization_type", ("nf4", "fp4")) or "nf4"
    nested = keys.flag("double_quantization")
    try:
        made = quantization.translate(bits, kind, nested and bits == 4 and not other)
    except ValueError:
        message = f"a base in {bits} bits has no counterpart: recipes have nf4 and int8"
        keys.refuse("quantization_bit", "E1146", message, "quantization_bit: 4")
        keys.passive(details, "part of lora.quantize")
        return
    sets = {"lora.quantize": made.value}
    keys.say("quantization_bit", sets, "; ".join(note for note in (made.note, other) if note))
    for name in details:
        keys.same(name, sets if keys.given(name) else None, "part of lora.quantize")


def _dtype(keys: Keys, run: Run) -> str:
    """The type that trained weights are held in."""
    pure = keys.flag("pure_bf16")
    keys.same("pure_bf16", {"model.dtype": "bfloat16"} if pure else None, "")
    if not run.lora and not pure:
        return "float32"
    if keys.flag("fp16") and not pure:
        return "float16"
    return "bfloat16" if pure or keys.flag("bf16") else "auto"


def _order(keys: Keys) -> None:
    trainer.order(keys)
    if keys.flag("disable_shuffling"):
        keys.say("disable_shuffling", {"data.shuffle_seed": None})
    keys.same("disable_shuffling", note="off")


def _memory(keys: Keys, launch: Launch) -> None:
    off = keys.flag("disable_gradient_checkpointing") and not launch.remat
    keys.say("disable_gradient_checkpointing", {"remat.policy": "none" if off else "decoder"})


def _evaluation(keys: Keys) -> None:
    held = keys.ledger.value("data.eval_fraction") or keys.ledger.value("data.eval")
    if not trainer.evaluation(keys) and held:
        note = (
            "LLaMA-Factory's default is no evaluation; the rows are held out all the same, and evaluated here"
        )
        keys.default("eval_strategy", "no", {"train.eval_every": 100}, note)


def _tables(keys: Keys) -> None:
    for note, names in tables.PASSIVE.items():
        keys.passive(names.split(), note)
    for name, why in tables.LEARNT.items():
        keys.learnt(name, tables.OFF, why)
    for name, why in tables.FEATURES.items():
        keys.unless(name, tables.OFF, why)
    for switch, names in tables.SETTINGS.items():
        on = keys.given(switch) and keys.value(switch) not in tables.OFF
        for name in names.split():
            if on:
                keys.unless(name, (), f"a setting of {switch}, which there is not here")
            else:
                keys.same(name, note=f"without {switch} it says nothing")
    keys.passive(tables.OF_STAGES.split(), "a setting of another stage or method")
