"""PEFT's adapter_config.json, as a recipe's `lora` section."""

from __future__ import annotations

import re
from typing import Any

from compiler.port import known
from compiler.port.keys import Keys, as_number
from compiler.port.ledger import Ledger
from compiler.port.meaning import adapters
from compiler.port.meaning.models import Named
from compiler.port.source import Source
from compiler.wording import flow

TITLE = "PEFT"

INITS = {
    "gaussian": "A starts uniform with the bound 1/sqrt(fan_in) here, normal with the deviation 1/rank there",
    "orthogonal": "A starts uniform here and B at zero; there both with orthogonal rows",
    "eva": "A starts uniform here; there with the directions of the activations",
}
"""Starts of A that leave the base as it is, and how they differ."""


def read(ledger: Ledger, source: Source) -> Keys:
    """The file's keys."""
    return Keys(ledger, source, TITLE, {**known.defaults("peft", "lora"), "init_lora_weights": True})


def speak(keys: Keys, named: Named | None) -> None:
    """Says what became of every key of the file."""
    ledger = keys.ledger
    if str(keys.value("peft_type") or "LORA").upper() != "LORA":
        message = f"{keys.value('peft_type')} is no LoRA, and has no counterpart here"
        keys.refuse("peft_type", "E1149", message, "peft_type: LORA")
    keys.say("r", {"lora.rank": keys.integer("r")})
    keys.say("lora_alpha", {"lora.alpha": keys.number("lora_alpha")})
    keys.say("lora_dropout", {"lora.dropout": keys.number("lora_dropout")})
    keys.same("use_rslora", {"lora.rslora": True} if keys.flag("use_rslora") else None, "alpha / sqrt(rank)")
    _targets(keys, named)
    _patterns(keys)
    _init(keys)
    ledger.set("lora.dtype", "float32", "PEFT keeps adapters in float32")
    adapters.say_features(keys)
    keys.passive(
        ("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path"), "what it is"
    )
    keys.passive(("revision", "inference_mode", "runtime_config", "megatron_core"), "it trains nothing")
    keys.unless("megatron_config", (None,), "transformers' layers, not Megatron's")
    keys.unless("fan_in_fan_out", (False,), "no model that is trained here stores its weights as [in, out]")
    keys.unless("task_type", ("CAUSAL_LM",), "a language model is trained here")
    keys.passive(("qalora_group_size", "ensure_weight_tying", "loftq_config"), "of a feature that is off")
    keys.passive(("eva_config", "corda_config", "lora_ga_config"), "of init_lora_weights")


def _targets(keys: Keys, named: Named | None) -> None:
    model = named.model if named else None
    spec = keys.texts("target_modules")
    if spec is None:
        spec = adapters.default_targets(model)
        keys.defaults = {**keys.defaults, "target_modules": spec}
    layers = keys.value("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers
    if layers is not None and not (isinstance(layers, list) and all(isinstance(n, int) for n in layers)):
        message = f"layers_to_transform is {flow(layers)}, which is no list of numbers"
        keys.refuse("layers_to_transform", "E1160", message, "layers_to_transform: [0, 1, 2]")
        layers = None
    pattern = keys.texts("layers_pattern")
    usual: tuple[Any, ...] = ("layers", ["layers"], [], "", None)
    if spec is None:
        message = "PEFT has no target modules of its own for this model"
        keys.refuse("target_modules", "E1148", message, 'target_modules: "all-linear"')
    else:
        exclude = keys.texts("exclude_modules")
        adapters.say_targets(
            keys, "target_modules", model, spec, layers if pattern in usual else None, exclude
        )
    keys.passive(("layers_to_transform", "exclude_modules"), "part of lora.targets and lora.layers")
    keys.unless("layers_pattern", usual, "layers are counted in the decoder")


def _patterns(keys: Keys) -> None:
    """rank_pattern and alpha_pattern: each key the end of a module's name, or a regular expression."""
    for key, target, kind in (
        ("rank_pattern", "lora.rank_pattern", int),
        ("alpha_pattern", "lora.alpha_pattern", float),
    ):
        found = keys.mapping(key)
        made: dict[str, Any] = {}
        for name, value in found.items():
            number = as_number(value)
            if number is None or isinstance(value, str) or number <= 0:
                keys.refuse(
                    key, "E1160", f"{key}: {value!r} is no number above zero", f"{key}: {{{name}: 16}}"
                )
                break
            made[_spelling(str(name))] = kind(number)
        keys.same(key, {target: made} if made else None, "one for all" if not made else "")


def _spelling(name: str) -> str:
    """A pattern of PEFT's without what the whole names begin with, which a recipe's targets leave out."""
    return re.sub(r"^\^?(?:model\.)?(?:language_model\.)?(?=layers\.|layers\\\.)", "", name)


def _init(keys: Keys) -> None:
    found = keys.value("init_lora_weights")
    name = str(found).lower()
    if found is True or name == "true":
        keys.say("init_lora_weights", {"lora.init": "peft"})
    elif name in INITS:
        keys.say("init_lora_weights", {"lora.init": "peft"}, INITS[name])
    elif found is False or name == "false":
        keys.say("init_lora_weights", {"lora.init": "peft"}, "B starts at zero here, not at random")
    else:
        note = f"{name} starts from other weights of the base; here from the checkpoint's own, and B at zero"
        keys.learnt("init_lora_weights", (), note)
        keys.ledger.set("lora.init", "peft")
