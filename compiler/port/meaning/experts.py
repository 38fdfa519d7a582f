"""Experts as PEFT and transformers have them: parameters, no linear layers, and a loss that balances them.

transformers 5 holds gate and up of all experts of a layer in one parameter, and down in another, which PEFT's
`target_parameters` names; so it does with most routers. Files for transformers 4, where each expert was of
linear layers, name those in `target_modules`, and PEFT takes the names for the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.lowering.catalog import Model
from recipec.compiler.port.keys import Keys, as_number
from recipec.compiler.port.names import known
from recipec.compiler.wording import listing


class Halved(ValueError):
    """Of two modules that are one parameter, one alone is named.

    Attributes:
        others: those that are missing.
    """

    def __init__(self, named: Sequence[str], others: Sequence[str]) -> None:
        super().__init__(f"{listing(named)} of an expert is one parameter with {listing(others)}")
        self.others = others


@dataclass(frozen=True)
class Read:
    """What PEFT makes of target modules.

    Attributes:
        modules: those that stay modules.
        parameters: names of parameters, and their ends.
        doubled: those of them that hold two of the named modules.
    """

    modules: str | Sequence[str]
    parameters: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()


def has_experts(model: Model | None) -> bool:
    """Whether layers of a model have experts."""
    return model is not None and bool(model.family.expert_targets(model.architecture))


def read(model: Model, spec: str | Sequence[str], linear: Sequence[str], every: Sequence[str]) -> Read:
    """What PEFT makes of target modules of a model, by what its experts' layers were called once.

    Args:
        spec: a list of names and their ends, or a text: "all-linear" or a regular expression.
        linear: the whole names of the Linear modules without the output head.
        every: the whole names of all modules and parameters.

    Raises:
        re.error: for a text that is no regular expression.
        Halved: where one of two modules is named that are one parameter.
    """
    table: Mapping[str, str] = known("experts", "renamed").get(model.family.name, {})
    whole = isinstance(spec, str) and spec.lower() == "all-linear"
    if not table:
        return Read(linear if whole else spec)
    if whole:
        spec = [*dict.fromkeys(name.rpartition(".")[2] for name in linear), *table]
    elif isinstance(spec, str):
        spec = _leaves(spec, table, every)
    kept, found = [], dict[str, list[str]]()
    for name in dict.fromkeys(spec):
        old = next((old for old in table if name == old or name.endswith(f".{old}")), None)
        if old is None:
            kept.append(name)
        else:
            found.setdefault(table[old], []).append(old)
    needed = {new: [old for old in table if table[old] == new] for new in found}
    for new, olds in needed.items():
        if missing := [old for old in olds if old not in found[new]]:
            raise Halved(found[new], missing)
    return Read(kept, tuple(found), tuple(new for new, olds in needed.items() if len(olds) > 1))


def _leaves(pattern: str, table: Mapping[str, str], every: Sequence[str]) -> list[str]:
    """The last parts of the names that a regular expression matches, also of names that there are no more."""
    matched = dict.fromkeys(name.rpartition(".")[2] for name in every if re.fullmatch(pattern, name))
    for old, new in table.items():
        within = (name.removesuffix(new) for name in every if name.endswith(f".{new}"))
        if any(re.fullmatch(pattern, inside + old) for inside in within):
            matched[old] = None
    return list(matched)


LEFT = "experts are quantized too here; there they stay in 16 bits, as they are no linear layers"

AUX = "train.router_aux_loss_coef"
MEANS = "over all tokens of a micro-batch here; there over those of each device by itself"


def coefficient(model: Model | None) -> float | None:
    """Of the load-balancing loss, by a model's config.json; None where transformers has no such loss."""
    usual: Mapping[str, float] = known("experts", "balanced")
    if model is None or model.family.name not in usual:
        return None
    text: Mapping[str, Any] = model.config.get("text_config") or model.config
    value = text.get("router_aux_loss_coef")
    return usual[model.family.name] if value is None else float(value)


def say_coefficient(keys: Keys, key: str, model: Model | None, to: Sequence[str] = ()) -> None:
    """Says what becomes of a key with the load-balancing loss's coefficient.

    Args:
        to: the families whose models get it from the tool; () for all for which there is such a loss.
    """
    value = keys.number(key)
    if model is None:
        note = "whether the model has experts is not known here: train.router_aux_loss_coef would be the key"
        keys.unless(key, (0, 0.0), note)
    elif coefficient(model) is None or (to and model.family.name not in to):
        keys.same(key, note=f"{keys.tool} adds no such loss to {model.title}")
    elif keys.given(key):
        keys.say(key, {AUX: value}, MEANS if value else "")


def say_overrides(keys: Keys, key: str, model: Model | None) -> bool:
    """Says what becomes of overrides of config.json that are of the load-balancing loss alone.

    Returns:
        Whether they were.
    """
    given = keys.mapping(key)
    if not given or set(given) - {"output_router_logits", "router_aux_loss_coef"}:
        return False
    usual = coefficient(model)
    if usual is None:
        keys.same(key, note="transformers has no load-balancing loss for the model")
        return True
    if given.get("output_router_logits") is True:
        value = as_number(given.get("router_aux_loss_coef", usual))
        keys.say(key, {AUX: value}, MEANS)
    keys.same(key, note="without output_router_logits there is no load-balancing loss")
    return True
