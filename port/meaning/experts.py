"""Experts as PEFT and transformers store them, as parameters instead of linear layers, and the load-balancing
loss.

transformers 5 stores gate and up of all experts of a layer in one parameter, and down in another one. PEFT's
`target_parameters` names such parameters. Most routers are stored in the same way. In transformers 4 each
expert had linear layers. Files for it name these in `target_modules`, and PEFT maps them to the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.catalog import Model
from recipec.compiler.wording import listing
from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys, as_number
from recipec.port.tool_names import known


class Halved(ValueError):
    """Only one of two modules is named, although they are one parameter."""

    def __init__(self, named: Sequence[str], others: Sequence[str]) -> None:
        super().__init__(f"{listing(named)} of an expert is one parameter with {listing(others)}")
        self.others = others


@dataclass(frozen=True)
class Read:
    """PEFT's reading of target modules."""

    modules: str | Sequence[str]
    parameters: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()


def has_experts(model: Model | None) -> bool:
    """Return whether layers of a model have experts."""
    return model is not None and bool(model.family.expert_targets(model.architecture))


def read(model: Model, spec: str | Sequence[str], linear: Sequence[str], every: Sequence[str]) -> Read:
    """Read a model's target modules as PEFT does, including the former names of its experts' layers.

    Args:
        spec: a list of names and their ends, or a text: "all-linear" or a regular expression.
        linear: the full names of the Linear modules, without the output head.
        every: the full names of all modules and parameters.

    Raises:
        re.error: the text is not a regular expression.
        Halved: only one of two modules is named that are one parameter.
    """
    table: Mapping[str, str] = known("experts", "renamed").get(model.family.name, {})
    whole = isinstance(spec, str) and spec.lower() == "all-linear"
    if not table:
        return Read(linear if whole else spec)
    if whole:
        spec = [*dict.fromkeys(name.rpartition(".")[2] for name in linear), *table]
    elif isinstance(spec, str):
        spec = _leaves(spec, table, every)
    kept, parts = [], dict[str, list[str]]()
    for name in dict.fromkeys(spec):
        old = next((old for old in table if name == old or name.endswith(f".{old}")), None)
        if old is None:
            kept.append(name)
        else:
            parts.setdefault(table[old], []).append(old)
    needed = {new: [old for old in table if table[old] == new] for new in parts}
    for new, olds in needed.items():
        if missing := [old for old in olds if old not in parts[new]]:
            raise Halved(parts[new], missing)
    return Read(kept, tuple(parts), tuple(new for new, olds in needed.items() if len(olds) > 1))


def _leaves(pattern: str, table: Mapping[str, str], every: Sequence[str]) -> list[str]:
    """Return the last parts of the names that a regular expression matches, including former names."""
    matched = dict.fromkeys(name.rpartition(".")[2] for name in every if re.fullmatch(pattern, name))
    for old, new in table.items():
        within = (name.removesuffix(new) for name in every if name.endswith(f".{new}"))
        if any(re.fullmatch(pattern, inside + old) for inside in within):
            matched[old] = None
    return list(matched)


LEFT = "recipec quantizes experts too; the tool keeps them in 16 bits, because they are not linear layers"

AUX = "train.router_aux_loss_coef"
MEANS = "recipec computes it over all tokens of a micro-batch; the tool computes it on each device by itself"


def coefficient(model: Model | None) -> float | None:
    """Return a model's load-balancing coefficient (config.json), or None if transformers has no such loss."""
    usual: Mapping[str, float] = known("experts", "balanced")
    if model is None or model.family.name not in usual:
        return None
    text: Mapping[str, Any] = model.config.get("text_config") or model.config
    value = text.get("router_aux_loss_coef")
    return usual[model.family.name] if value is None else float(value)


def say_coefficient(keys: Keys, key: str, model: Model | None, to: Sequence[str] = ()) -> Says:
    """State a key with the coefficient of the load-balancing loss."""
    value = keys.number(key)
    if model is None:
        note = "recipec does not know whether the model has experts; the key is train.router_aux_loss_coef"
        yield keys.unless(key, (0, 0.0), note)
    elif coefficient(model) is None or (to and model.family.name not in to):
        yield keys.same(key, note=f"{keys.tool} adds no such loss to {model.title}")
    elif keys.given(key):
        yield keys.say(key, {AUX: value}, MEANS if value else "")


def say_overrides(keys: Keys, key: str, model: Model | None) -> Statements[bool]:
    """State overrides of config.json if they only affect the load-balancing loss.

    Returns:
        Whether they do.
    """
    overrides = keys.mapping(key)
    if not overrides or set(overrides) - {"output_router_logits", "router_aux_loss_coef"}:
        return False
    usual = coefficient(model)
    if usual is None:
        yield keys.same(key, note="transformers has no load-balancing loss for the model")
        return True
    if overrides.get("output_router_logits") is True:
        value = as_number(overrides.get("router_aux_loss_coef", usual))
        yield keys.say(key, {AUX: value}, MEANS)
    yield keys.same(key, note="there is no load-balancing loss without output_router_logits")
    return True
