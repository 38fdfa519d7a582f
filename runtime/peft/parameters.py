"""What PEFT adapts as parameters of a model, not as linear layers: experts, routers, and layers that it takes
for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from .known import REMAPPED, Known

if TYPE_CHECKING:
    from .adapter import PeftAdapter

OLD_NAMES = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""The names before transformers 5."""


def unwrapped(found: PeftAdapter, base: Known) -> PeftAdapter:
    """Return the adapter with parameters' own names instead of the modules that PEFT wraps for them."""
    ends = found.config.parameters
    known = parameter_names(base)
    chosen = [
        name
        for name, parameter in known.items()
        if any(f".{parameter}".endswith(f".{end}") or end.endswith(f".{parameter}") for end in ends)
    ]
    own = {wrapper: name for name, wrapper in wrapped_parameters(base, chosen).items()}

    def full(module: str) -> str:
        prefix = found.full_names[module].removesuffix(module)
        return prefix + known[own[module]] if module in own else found.full_names[module]

    return replace(
        found,
        full_names={own.get(module, module): full(module) for module in found.full_names},
        tensors={own.get(module, module): pair for module, pair in found.tensors.items()},
    )


def parameter_names(base: Known) -> dict[str, str]:
    """Return what PEFT has to adapt as parameters of the model, not as linear layers, in transformers' order:
    our names ("layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.gate") and the parameters' names.

    Linear layers are included if PEFT would mistake their names for those of experts.
    """
    out = {}
    for target in base.family.all_targets(base.architecture):
        for module in target.modules:
            if target.parameter:
                out[module] = f"layers.{target.layer}.{target.parameter}"
            elif base.family.name in REMAPPED and module.rpartition(".")[2] in OLD_NAMES:
                out[module] = f"{module}.weight"
    return out


def wrapped_parameters(base: Known, modules: Iterable[str]) -> dict[str, str]:
    """Return the modules under which PEFT stores the adapters of parameters, by our names.

    PEFT wraps a parameter's module once for each of its parameters, in transformers' order. The last wrapper
    has the module's name; the inner ones are its `base_layer`.
    """
    chosen, holders = set(modules), defaultdict(list)
    for name, parameter in parameter_names(base).items():
        if name in chosen:
            holders[parameter.rpartition(".")[0]].append(name)
    return {
        name: holder + ".base_layer" * within
        for holder, names in holders.items()
        for within, name in enumerate(reversed(names))
    }


def select_parameters(chosen: Iterable[str], known: Iterable[str], prefix: str) -> list[str]:
    """Return the simplest `target_parameters` that select exactly `chosen` among the known ones: names within
    a layer, or whole names. PEFT matches the end of a name, and supports no layer numbers here."""
    chosen = set(chosen)
    names = {name.split(".", 2)[2] for name in chosen}
    reached = {name for name in known if name.split(".", 2)[2] in names}
    return sorted(names) if reached == chosen else sorted(prefix + name for name in chosen)
