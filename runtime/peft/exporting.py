"""Trained adapters as a PEFT adapter (peft 0.21): adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..checkpoints.adapter_reader import Delta
from ..model.adapters import LoraSettings, Value, means
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from ..weights.safetensors_files import Writable, write_arrays
from .adapter import WRAPPER, plain
from .fitting import keys_as_values, parameter_names, whole_sources, wrapped_parameters

WEIGHT = ".weight"


def _adapter_arrays(
    base: HFCheckpoint, settings: LoraSettings, deltas: Mapping[str, Delta]
) -> list[tuple[str, np.ndarray]]:
    """The tensors of adapter_model.safetensors, by PEFT's names.

    Where keys serve as values too, k_proj's are there once more under the name of v_proj: vLLM 0.32 keeps
    that weight twice, and adds an adapter of k_proj to the keys alone. PEFT passes over the second name.

    Args:
        deltas: by module name without prefix ("layers.0.self_attn.q_proj").
    """
    prefix, wrapped = module_prefix(base), wrapped_parameters(base, deltas)
    copies = {
        values: deltas[keys]
        for keys, values in keys_as_values(base, deltas)
        if same_scale(settings, keys, values)
    }
    return [
        (f"{WRAPPER}{prefix}{wrapped.get(name, name)}.lora_{which}", matrix)
        for name, delta in {**deltas, **copies}.items()
        for which, matrix in (
            ("A.weight", delta.a),
            ("B.weight", delta.b),
            ("magnitude_vector", delta.magnitude),
        )
        if matrix is not None
    ]


def same_scale(settings: LoraSettings, keys: str, values: str) -> bool:
    """Whether two modules have one rank and one alpha: vLLM goes by the name that it reads."""
    return (settings.rank_of(keys), settings.alpha_of(keys)) == (
        settings.rank_of(values),
        settings.alpha_of(values),
    )


def write_weights(
    file: Writable,
    base: HFCheckpoint,
    settings: LoraSettings,
    deltas: Mapping[str, Delta],
    whole: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Writes adapter_model.safetensors.

    Args:
        whole: tensors that were trained whole, by their names in the base.
    """
    arrays = _adapter_arrays(base, settings, deltas)
    arrays += [(f"{WRAPPER}{_transformers_name(base, name)}", array) for name, array in (whole or {}).items()]
    write_arrays(file, arrays, {"format": "pt"})


def _transformers_name(base: HFCheckpoint, name: str) -> str:
    """What a tensor of the checkpoint is called in transformers' model."""
    return module_prefix(base) + name.removeprefix(base.prefix) if name.startswith(base.prefix) else name


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """adapter_config.json as it is written."""
    return (json.dumps(config, indent=2) + "\n").encode()


def adapter_config(
    base: HFCheckpoint, model: ModelSettings, settings: LoraSettings, modules: Iterable[str]
) -> dict[str, Any]:
    """adapter_config.json for adapters on `modules`, and on nothing else that the model has."""
    prefix, known = module_prefix(base), parameter_names(base)
    modules = list(modules)
    alphas = {prefix + known.get(name, name): plain(settings.alpha_of(name)) for name in modules}
    ranks = {prefix + known.get(name, name): settings.rank_of(name) for name in modules}
    parameters = [known[name] for name in modules if name in known]
    linear = {prefix + name for name in modules if name not in known}
    targets, layers = select_modules(linear, _module_names(base), prefix)
    alpha_pattern = {key: plain(value) for key, value in settings.alpha_pattern.items()}
    return {
        "alpha_pattern": peft_pattern(alpha_pattern, alphas, plain(settings.alpha)),
        "auto_mapping": None,
        "base_model_name_or_path": model.id,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None if layers is None else "layers",
        "layers_to_transform": layers,
        "lora_alpha": plain(settings.alpha),
        "lora_dropout": 0.0 if parameters else settings.dropout,  # PEFT has none of parameters
        "modules_to_save": _saved_modules(base, settings),
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": peft_pattern(settings.rank_pattern, ranks, settings.rank),
        "revision": model.revision,
        "target_modules": targets,
        **(
            {"target_parameters": _select_parameters(parameters, known.values(), prefix)}
            if parameters
            else {}
        ),
        "task_type": "CAUSAL_LM",
        "use_dora": settings.kind == "dora",
        "use_rslora": settings.rslora,
    }


def _saved_modules(base: HFCheckpoint, settings: LoraSettings) -> list[str] | None:
    """modules_to_save of what is trained whole: names that mean nothing else of the model, or None."""
    names = (source.full_name(module_prefix(base)) for source in whole_sources(base, settings))
    return sorted({name.rpartition(".")[0] for name in names}) or None


def peft_pattern(given: Mapping[str, Value], wanted: Mapping[str, Value], default: Value) -> dict[str, Value]:
    """A rank_pattern or alpha_pattern by which PEFT gives each module the value that it was trained with.

    The recipe's own, where PEFT reads it so; PEFT knows modules by their full names alone, and the recipe's
    may lack the checkpoint's prefix. Otherwise full names, escaped. The order counts: PEFT takes
    the first key that matches.

    Args:
        given: the recipe's.
        wanted: the value of each trained module, by its full name.
        default: for modules that no key matches.
    """

    def read(name: str) -> Value:
        return next((value for key, value in given.items() if means(key, name)), default)

    if all(read(name) == value for name, value in wanted.items()) and all(map(_compiles, given)):
        return dict(given)
    return {_pattern(name): value for name, value in wanted.items() if value != default}


def _pattern(name: str) -> str:
    """A full name as an expression. PEFT knows a parameter by its own name, and an import by its module's."""
    module = name.removesuffix(WEIGHT)
    return re.escape(module) + ("" if module == name else rf"({re.escape(WEIGHT)})?")


def module_prefix(base: HFCheckpoint) -> str:
    """What stands before a text module's name in transformers' model."""
    return base.family.loaded_as.get(base.prefix, base.prefix)


def _module_names(base: HFCheckpoint) -> set[str]:
    """Names of all modules of transformers' model, as far as the checkpoint's tensors tell them."""
    out: set[str] = set()
    for name in base.tensors:
        if name.startswith(base.prefix):
            name = module_prefix(base) + name.removeprefix(base.prefix)
        parts = name.split(".")
        out.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return out


def select_modules(
    chosen: set[str], modules: set[str], prefix: str
) -> tuple[list[str] | str, list[int] | None]:
    """The simplest `target_modules` and `layers_to_transform` that mean `chosen` and nothing else.

    A list of names is what PEFT users know, and what most tools read; but PEFT matches a name at the
    end of any module's name, so "q_proj" means the vision tower's too. Where the names would reach
    further than `chosen`, the answer is a regular expression on whole module names.

    Args:
        chosen: full names of the trained modules.
        modules: full names of all modules.
        prefix: of the text modules.
    """
    names = sorted({name.rpartition(".")[2] for name in chosen})
    named = {module for module in modules if module.rpartition(".")[2] in names}
    if named == chosen:
        return names, None
    slots: dict[int, set[str]] = defaultdict(set)
    for name in chosen:
        _, layer, slot = name.removeprefix(prefix).split(".", 2)
        slots[int(layer)].add(slot)
    pattern = re.compile(r".*\.layers\.(\d+)\.")
    layers = sorted(slots)
    if {m for m in named if (found := pattern.match(m)) and int(found[1]) in slots} == chosen:
        return names, layers
    every_slot = {slot for group in slots.values() for slot in group}
    regex = rf"{re.escape(prefix)}layers\.\d+\.{_alternatives(every_slot)}"
    if _matched(regex, modules) == chosen:
        return regex, None
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for number in layers:
        groups[frozenset(slots[number])].append(str(number))
    parts = [rf"{_alternatives(group)}\.{_alternatives(slot)}" for slot, group in groups.items()]
    regex = rf"{re.escape(prefix)}layers\.{parts[0] if len(parts) == 1 else '(' + '|'.join(parts) + ')'}"
    if _matched(regex, modules) != chosen:
        raise AssertionError(f"{regex} does not match the trained modules alone")
    return regex, None


def _select_parameters(chosen: Iterable[str], known: Iterable[str], prefix: str) -> list[str]:
    """The simplest `target_parameters` that mean `chosen` and no other of the known ones: their names within
    a layer, or whole names, as PEFT matches the end of a name and knows of no layers here."""
    chosen = set(chosen)
    names = {name.split(".", 2)[2] for name in chosen}
    reached = {name for name in known if name.split(".", 2)[2] in names}
    return sorted(names) if reached == chosen else sorted(prefix + name for name in chosen)


def _compiles(regex: str) -> bool:
    try:
        re.compile(regex)
    except re.error:
        return False
    return True


def _matched(regex: str, modules: set[str]) -> set[str]:
    return {module for module in modules if re.fullmatch(regex, module)}


def _alternatives(names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: (int(name) if name.isdigit() else 0, name))
    escaped = [re.escape(name) for name in ordered]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
