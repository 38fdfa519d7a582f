"""LoRA as PEFT has it: target modules, ranks and what has no counterpart, from the keys of a tool."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compiler.catalog import Model
from compiler.port.keys import Keys
from compiler.port.meaning import targets
from compiler.wording import listing
from spec.language.lora import PROJECTIONS

GEMMA4 = r".*language_model\..*\.(q_proj|v_proj)"

FEATURES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((None, False), "plain LoRA: no magnitudes of their own are trained"),
    "modules_to_save": ((None, ()), "whole modules stay frozen here: fewer parameters are trained"),
    "lora_bias": ((None, False), "no bias of B is trained"),
    "bias": ((None, "none"), "biases stay frozen"),
    "trainable_token_indices": ((None,), "the embedding stays frozen: new tokens are not learnt"),
    "layer_replication": ((None,), "the model keeps its own layers"),
    "target_parameters": ((None, ()), "parameters that are no linear layers (experts) carry no adapter"),
    "alora_invocation_tokens": ((None,), "the adapter applies to all tokens"),
    "use_qalora": ((None, False), "A takes all inputs, not pooled ones"),
    "use_bdlora": ((None, False), "A and B are whole, not block-diagonal"),
    "arrow_config": ((None,), "one adapter, without a router"),
    "kasa_config": ((None,), "the base's weights stay as they are"),
    "monteclora_config": ((None,), "nothing is sampled beside A and B"),
    "velora_config": ((None,), "activations are kept whole"),
}
"""Keys without a counterpart, by their values that switch them off and what the others change."""


def default_targets(model: Model | None) -> str | list[str] | None:
    """PEFT's target_modules where none are given; None for a model that it has none for."""
    if model is None or not targets.is_multimodal(model):
        return ["q_proj", "v_proj"]
    return GEMMA4 if model.family.name == "gemma4" else None


def say_targets(
    keys: Keys,
    key: str,
    model: Model | None,
    spec: str | Sequence[str],
    layers: Sequence[int] | None = None,
    exclude: str | Sequence[str] | None = None,
    note: str = "",
) -> None:
    """Says what PEFT's target modules become: `lora.targets` and `lora.layers`.

    Args:
        key: that names them.
        note: what else is to be said of it, "" for nothing.
    """
    if model is None:
        _without_model(keys, key, spec)
        return
    try:
        chosen = targets.choose(model, spec, layers, exclude)
    except re.error as error:
        keys.refuse(key, "E1164", f"not a regular expression: {error}", f"{key}: all-linear")
        return
    if not chosen.targets:
        known = listing(PROJECTIONS)
        keys.refuse(
            key,
            "E1164",
            f"nothing of {model.title} that can carry an adapter has these names",
            f"its projections are {known}",
        )
        return
    notes = [note] if note else []
    if chosen.beyond:
        notes.append(f"{listing(chosen.beyond)} carries no adapter here: fewer parameters are trained")
    if chosen.unmatched:
        notes.append(f"{listing(chosen.unmatched)} names nothing of {model.title}")
    made = {"lora.targets": list(chosen.targets), "lora.layers": chosen.layers}
    if notes and keys.given(key):
        keys.say(key, made, "; ".join(notes))
    elif chosen.vision:
        keys.same(key, made, "nothing of the vision tower: the model that is trained here has none")
    else:
        keys.say(key, made)


def say_head(keys: Keys, key: str) -> None:
    """Says what becomes of a switch for an adapter on the output head."""
    if keys.flag(key):
        keys.say(key, {}, "lm_head carries no adapter here: fewer parameters are trained")
    keys.same(key, note="off")


def _without_model(keys: Keys, key: str, spec: str | Sequence[str]) -> None:
    if not isinstance(spec, str) and set(spec) <= set(PROJECTIONS):
        keys.say(key, {"lora.targets": list(spec)})
    elif spec == "all-linear":
        keys.say(key, {"lora.targets": list(PROJECTIONS)})
    else:
        what = "names of modules that can be told once the model is known"
        keys.refuse(
            key, "E1164", what, f"port it with --set 'lora.targets=[{PROJECTIONS[0]}, {PROJECTIONS[2]}]'"
        )


def say_features(keys: Keys) -> None:
    """Says what becomes of PEFT's keys beside A and B, under PEFT's own names."""
    for key, (idle, note) in FEATURES.items():
        keys.learnt(key, [list(value) if value == () else value for value in idle], note)
