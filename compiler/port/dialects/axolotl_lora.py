"""Axolotl's adapters, and how the frozen base is stored."""

from __future__ import annotations

from typing import Any

from compiler.catalog import Model
from compiler.port.keys import Keys, words
from compiler.port.meaning import adapters, quantization, targets

FULL = words(
    """lora_target_linear lora_target_modules lora_dropout lora_r lora_alpha lora_rank_pattern
    lora_alpha_pattern peft_use_rslora peft_init_lora_weights peft_layers_to_transform
    peft_layers_pattern peft"""
)


def port(keys: Keys, model: Model | None) -> None:
    """The keys of `lora`; `lora: null` where everything is trained."""
    adapter = keys.choice("adapter", ("lora", "qlora"))
    if adapter is None and "adapter" not in keys.said:
        _full(keys)
        return
    keys.same("adapter", note="with its base in 4 bits" if adapter == "qlora" else "")
    _sizes(keys)
    _patterns(keys)
    _targets(keys, model)
    _start(keys)
    _quantised(keys, adapter)


def _full(keys: Keys) -> None:
    """Full fine-tuning."""
    keys.ledger.set("lora", None)
    keys.same("adapter")
    if not keys.stands("adapter"):
        keys.default("adapter", None, {"lora": None}, "Axolotl's default: all parameters are trained")
    for name in ("load_in_4bit", "load_in_8bit"):
        if keys.flag(name):
            message = f"`{name}` without an adapter: a quantised base cannot be trained itself"
            keys.refuse(
                name, "E1146", message, "adapter: qlora" if name == "load_in_4bit" else "adapter: lora"
            )
        keys.same(name, note="off")
    keys.passive((*sorted(FULL), "bnb_config_kwargs"), "there are no adapters: everything is trained")


def _sizes(keys: Keys) -> None:
    rank, alpha = keys.integer("lora_r"), keys.number("lora_alpha")
    for key, value, path in (("lora_r", rank, "lora.rank"), ("lora_alpha", alpha, "lora.alpha")):
        if value is not None and value > 0:
            keys.say(key, {path: value})
        else:
            # PEFT's own, as Axolotl hands it None.
            keys.refuse(key, "E1144", f"`{key}` is missing, and Axolotl has no default for it", f"{key}: 16")
    dropout = keys.number("lora_dropout") or 0.0
    if keys.given("lora_dropout"):
        keys.say("lora_dropout", {"lora.dropout": dropout})
    else:
        keys.default("lora_dropout", 0.0, {"lora.dropout": 0.0})
        keys.same("lora_dropout")
    on = keys.flag("peft_use_rslora")
    keys.same("peft_use_rslora", {"lora.rslora": True} if on else None)


def _patterns(keys: Keys) -> None:
    """Ranks and alphas of some projections; a recipe has PEFT's own rule for them."""
    for key, path in (
        ("lora_rank_pattern", "lora.rank_pattern"),
        ("lora_alpha_pattern", "lora.alpha_pattern"),
    ):
        given = keys.mapping(key)
        keys.same(key, {path: dict(given)} if given else None)


def _targets(keys: Keys, model: Model | None) -> None:
    given = keys.texts("lora_target_modules")
    linear = keys.flag("lora_target_linear")
    layers = keys.value("peft_layers_to_transform")
    layers = [n for n in layers if isinstance(n, int)] if isinstance(layers, list) else None
    if not given and not linear:
        message = "neither `lora_target_modules` nor `lora_target_linear` says what carries adapters"
        keys.refuse("lora_target_modules", "E1148", message, "lora_target_linear: true")
        keys.passive(("lora_target_linear", "peft_layers_to_transform", "peft_layers_pattern"), "off")
        return
    spec = [given] if isinstance(given, str) and linear else given or []
    if linear and model is not None:
        # Names' last parts, as Axolotl collects them.
        names = [module.name.rpartition(".")[2] for module in targets.modules(model) if module.linear]
        spec = list(dict.fromkeys([*spec, *(name for name in names if name != "lm_head")]))
    key = "lora_target_modules" if given else "lora_target_linear"
    adapters.say_targets(keys, key, model, "all-linear" if linear and model is None else spec, layers)
    keys.passive(("lora_target_modules",), "lora_target_linear has them all")
    keys.same("lora_target_linear", note="all Linear modules but the output head" if linear else "off")
    made = {"lora.layers": chosen} if (chosen := keys.ledger.value("lora.layers")) is not None else None
    keys.same("peft_layers_to_transform", made if keys.given("peft_layers_to_transform") else None)
    keys.passive(("peft_layers_pattern",), "the model has one list of layers")


def _start(keys: Keys) -> None:
    """How adapters start."""
    start = keys.value("peft_init_lora_weights")
    if start in (True, None):
        keys.same("peft_init_lora_weights", {"lora.init": "peft"} if start else None)
    elif start is False:
        keys.say("peft_init_lora_weights", {"lora.init": "peft"}, "B starts from zero here")
    elif start == "gaussian":
        keys.say("peft_init_lora_weights", {"lora.init": "peft"}, "A is uniform here, with other values")
    else:
        why = f"A and B start from PEFT's own values here, not from {start}'s"
        keys.learnt("peft_init_lora_weights", (), why)
    why = "LoftQ's start is not computed here: A and B start from PEFT's own values"
    keys.learnt("peft", ({}, {"loftq_config": None}), why)


def _quantised(keys: Keys, adapter: str | None) -> None:
    four, eight = keys.flag("load_in_4bit"), keys.flag("load_in_8bit")
    if adapter == "qlora" and not four:
        message = "`adapter: qlora` without `load_in_4bit: true`, which Axolotl requires beside it"
        keys.refuse("load_in_4bit", "E1145", message, "load_in_4bit: true")
        four = True
    extra = keys.mapping("bnb_config_kwargs")
    kind = str(extra.get("bnb_4bit_quant_type", "nf4"))
    nested = extra.get("bnb_4bit_use_double_quant", True) is True
    if kind not in ("nf4", "fp4"):
        keys.refuse(
            "bnb_config_kwargs", "E1160", f"bitsandbytes has no type {kind}", "bnb_4bit_quant_type: nf4"
        )
        kind = "nf4"
    made = quantization.translate(4 if four else 8 if eight else None, kind, nested)
    sets: dict[str, Any] = {"lora.quantize": made.value} if made.value else {}
    for name, on in (("load_in_4bit", four), ("load_in_8bit", eight and not four)):
        if on:
            keys.say(name, sets, made.note)
        else:
            keys.same(name, note="off")
    if extra:
        keys.say("bnb_config_kwargs", sets, made.note)
    elif four:
        keys.default(
            "bnb_config_kwargs",
            {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
            sets,
            f"Axolotl's default; {quantization.NESTED}",
        )
    keys.same("bnb_config_kwargs", note="the base is not stored in 4 bits")
