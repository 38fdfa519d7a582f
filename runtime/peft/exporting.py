"""Write trained adapters as a PEFT adapter (peft 0.21): adapter_model.safetensors, adapter_config.json."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..checkpoints.trained_weights import Delta
from ..model.adapters import LoraSettings, Value, compiled, means
from ..model.families.towers import HOLDER, TEXT_IN_WHOLE, VISION, holder, in_transformers, is_of_tower
from ..settings import ModelSettings
from ..weights.checkpoint import HFCheckpoint
from ..weights.safetensors_files import Writable, write_arrays
from .peft_names import (
    WRAPPER,
    has_parameters,
    keys_as_values,
    parameter_names,
    plain,
    select_parameters,
    tied_embedding,
    tower_names,
    whole_sources,
    wrapped_parameters,
)

WEIGHT = ".weight"
KINDS = ("A.weight", "B.weight", "magnitude_vector")


def _adapter_arrays(
    base: HFCheckpoint, settings: LoraSettings, deltas: Mapping[str, Delta]
) -> list[tuple[str, np.ndarray]]:
    """Return the tensors of adapter_model.safetensors, by PEFT's names.

    If keys also serve as values, k_proj's tensors are written again under the name of v_proj: vLLM 0.32 keeps
    that weight twice, and adds an adapter of k_proj only to the keys. PEFT ignores the second name.

    Args:
        deltas: by module name without prefix ("layers.0.self_attn.q_proj").
    """
    wrapped = dict[str, str]()
    if has_parameters(base):
        wrapped = wrapped_parameters(base, deltas)
    copies = {
        values: deltas[keys]
        for keys, values in keys_as_values(base, deltas)
        if same_scale(settings, keys, values)
    }
    return [
        (f"{WRAPPER}{full_name(base, wrapped.get(name, name))}.lora_{which}", matrix)
        for name, delta in {**deltas, **copies}.items()
        for which, matrix in zip(KINDS, (delta.a, delta.b, delta.magnitude), strict=True)
        if matrix is not None
    ]


def same_scale(settings: LoraSettings, keys: str, values: str) -> bool:
    """Return whether two modules have the same rank and alpha: vLLM uses the name that it reads."""
    ranks, alphas = settings.rank_of, settings.alpha_of
    return (ranks(keys), alphas(keys)) == (ranks(values), alphas(values))


def write_weights(
    file: Writable,
    base: HFCheckpoint,
    settings: LoraSettings,
    deltas: Mapping[str, Delta],
    whole: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write adapter_model.safetensors.

    Args:
        whole: tensors that were trained whole, by their names in the base.
    """
    arrays = _adapter_arrays(base, settings, deltas)
    arrays += [(f"{WRAPPER}{_transformers_name(base, name)}", array) for name, array in (whole or {}).items()]
    if whole and (tied := tied_embedding(base, settings)) is not None:
        # PEFT gives the head a copy of its own, and loads only copies that the file holds.
        head = f"{WRAPPER}{base.family.names.head}.weight"
        arrays.append((head, whole[tied.full_name(base.prefix)]))
    write_arrays(file, arrays, {"format": "pt"})


def _transformers_name(base: HFCheckpoint, name: str) -> str:
    """Return the name of a checkpoint's tensor in transformers' model."""
    if name in (tower := tower_names(base)):
        return tower[name]
    return module_prefix(base) + name.removeprefix(base.prefix) if name.startswith(base.prefix) else name


def config_bytes(config: Mapping[str, Any]) -> bytes:
    """Return the bytes of adapter_config.json."""
    return (json.dumps(config, indent=2) + "\n").encode()


def adapter_config(
    base: HFCheckpoint, model: ModelSettings, settings: LoraSettings, modules: Iterable[str]
) -> dict[str, Any]:
    """Return adapter_config.json for adapters on `modules`, and on nothing else of the model."""
    prefix, known = module_prefix(base), dict[str, str]()
    if has_parameters(base):
        known = parameter_names(base)
    modules = list(modules)
    names = {name: full_name(base, known.get(name, name)) for name in modules}
    alphas = {names[name]: plain(settings.alpha_of(name)) for name in modules}
    ranks = {names[name]: settings.rank_of(name) for name in modules}
    parameters = [known[name] for name in modules if name in known]
    linear = {names[name] for name in modules if name not in known}
    targets, layers = select_modules(linear, _module_names(base), prefix)
    alpha_pattern = {key: plain(value) for key, value in settings.alpha_pattern.items()}
    return {
        "alpha_pattern": peft_pattern(alpha_pattern, alphas, plain(settings.alpha)),
        "auto_mapping": None,
        "base_model_name_or_path": model.id,
        "bias": "none",
        **({} if tied_embedding(base, settings) is None else {"ensure_weight_tying": True}),
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None if layers is None else base.family.names.layers,
        "layers_to_transform": layers,
        "lora_alpha": plain(settings.alpha),
        "lora_dropout": 0.0 if parameters else settings.dropout,  # PEFT does not support it for parameters
        "modules_to_save": _saved_modules(base, settings),
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": peft_pattern(settings.rank_pattern, ranks, settings.rank),
        "revision": model.revision,
        "target_modules": targets,
        **(
            {"target_parameters": select_parameters(parameters, known.values(), prefix)} if parameters else {}
        ),
        "task_type": "CAUSAL_LM",
        **({"trainable_token_indices": [*settings.trainable_tokens]} if settings.trainable_tokens else {}),
        "use_dora": settings.kind == "dora",
        "use_rslora": settings.rslora,
    }


def _saved_modules(base: HFCheckpoint, settings: LoraSettings) -> list[str] | None:
    """Return modules_to_save: names that match only the modules trained whole, or None.

    A head that is the trained embedding is named too. PEFT ties the two copies, if it knows the embedding by
    its name; otherwise both copies hold the same values.
    """
    names = {
        _transformers_name(base, source.full_name(base.prefix)) for source in whole_sources(base, settings)
    }
    modules = {name.rpartition(".")[0] for name in names}
    # A module that has parameters of its own is saved with the modules in it.
    modules = {name for name in modules if not any(name.startswith(f"{other}.") for other in modules)}
    if tied_embedding(base, settings) is not None:
        modules.add(base.family.names.head)
    return sorted(modules) or None


def peft_pattern(
    values: Mapping[str, Value], wanted: Mapping[str, Value], default: Value
) -> dict[str, Value]:
    """Return a rank_pattern or alpha_pattern with which PEFT gives each module its trained value.

    It is the recipe's own pattern if PEFT reads it the same way: PEFT matches only full names, and the
    recipe's may lack the checkpoint's prefix. Otherwise it has full names, escaped. The order matters: PEFT
    takes the first key that matches.

    Args:
        values: the recipe's pattern.
        wanted: the value of each trained module, by its full name.
        default: the value of modules that no key matches.
    """

    def read(name: str) -> Value:
        return next((value for key, value in values.items() if means(key, name)), default)

    if all(read(name) == value for name, value in wanted.items()) and all(map(compiled, values)):
        return dict(values)
    return {_pattern(name): value for name, value in wanted.items() if value != default}


def _pattern(name: str) -> str:
    """Return a full name as a regular expression, in which a parameter's own name is optional."""
    module = name.removesuffix(WEIGHT)
    return re.escape(module) + ("" if module == name else rf"({re.escape(WEIGHT)})?")


def module_prefix(base: HFCheckpoint) -> str:
    """Return the prefix of a text module's name in transformers' model.

    The published Qwen 2 VL, Qwen 2.5 VL and PaddleOCR-VL name their text tensors as a text model does.
    """
    if base.prefix == HOLDER and VISION in base.config:
        return TEXT_IN_WHOLE
    return base.family.loaded_as.get(base.prefix, base.prefix)


def full_name(base: HFCheckpoint, module: str) -> str:
    """Return the name of an adapted module in transformers' model."""
    return (holder(base.config) if is_of_tower(module) else module_prefix(base)) + module


def _module_names(base: HFCheckpoint) -> set[str]:
    """Return the names of all modules of transformers' model that the checkpoint's tensors show."""
    out: set[str] = set()
    tower = tower_names(base)
    for name in base.tensors:
        if name in tower:
            name = tower[name]
        elif (part := in_transformers(base.config, name)) is not None:
            name = part  # of the tower, and none of the arrays that features are made of
        elif name.startswith(base.prefix):
            name = module_prefix(base) + name.removeprefix(base.prefix)
        parts = name.split(".")
        out.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return out


def select_modules(
    chosen: set[str], modules: set[str], prefix: str
) -> tuple[list[str] | str, list[int] | None]:
    """Return the simplest `target_modules` and `layers_to_transform` that select exactly `chosen`.

    PEFT users and most tools expect a list of names. But PEFT matches a name at the end of any module's name,
    so "q_proj" also selects the vision tower's. If names would select more than `chosen`, the result is a
    regular expression on whole module names.

    Args:
        chosen: full names of the trained modules.
        modules: full names of all modules.
        prefix: prefix of the text modules.
    """
    names = sorted({name.rpartition(".")[2] for name in chosen})
    named = {module for module in modules if module.rpartition(".")[2] in names}
    if named == chosen:
        return names, None
    tower = {name for name in chosen if is_of_tower(name.removeprefix(HOLDER))}
    text, layers = _select_text(chosen - tower, modules, prefix, (names, named))
    if not tower:
        return (names if layers is not None else text), layers
    regex = "|".join(part for part in (text, _tower_pattern(tower, modules)) if part)
    if _matched(regex, modules) != chosen:
        raise AssertionError(f"{regex} does not match the trained modules alone")
    return regex, None


def _select_text(
    chosen: set[str], modules: set[str], prefix: str, named: tuple[list[str], set[str]]
) -> tuple[str, list[int] | None]:
    """Return a regular expression that matches exactly the chosen text modules, "" for none; and the layers
    in which names alone select them, None if those would select others too.

    Args:
        named: the names, and all modules that they match.
    """
    if not chosen:
        return "", None
    slots: dict[int, set[str]] = defaultdict(set)
    for name in chosen:
        _, layer, slot = name.removeprefix(prefix).split(".", 2)
        slots[int(layer)].add(slot)
    (holder,) = {name.removeprefix(prefix).partition(".")[0] for name in chosen}
    pattern = re.compile(rf".*\.{holder}\.(\d+)\.")
    layers = sorted(slots)
    within = {m for m in named[1] if (matched := pattern.match(m)) and int(matched[1]) in slots} == chosen
    every_slot = {slot for group in slots.values() for slot in group}
    start = rf"{re.escape(prefix)}{holder}\."
    regex = rf"{start}\d+\.{_alternatives(every_slot)}"
    if _matched(regex, modules) == chosen:
        return regex, layers if within else None
    groups: dict[frozenset[str], list[str]] = defaultdict(list)
    for number in layers:
        groups[frozenset(slots[number])].append(str(number))
    parts = [rf"{_alternatives(group)}\.{_alternatives(slot)}" for slot, group in groups.items()]
    regex = rf"{start}{parts[0] if len(parts) == 1 else '(' + '|'.join(parts) + ')'}"
    if _matched(regex, modules) != chosen:
        raise AssertionError(f"{regex} does not match the trained modules alone")
    return regex, layers if within else None


def _tower_pattern(chosen: set[str], modules: set[str]) -> str:
    """Return a regular expression that matches exactly the chosen modules of a vision tower."""
    slots: dict[str, set[str]] = defaultdict(set)
    for name in chosen:
        numbered = re.fullmatch(r"(.+?\.)\d+\.(.+)", name)
        start, slot = (re.escape(numbered[1]) + r"\d+\.", numbered[2]) if numbered else ("", name)
        slots[start].add(slot)
    regex = "|".join(start + _alternatives(group) for start, group in sorted(slots.items()))
    return regex if _matched(regex, modules) == chosen else _alternatives(chosen)


def _matched(regex: str, modules: set[str]) -> set[str]:
    return {module for module in modules if re.fullmatch(regex, module)}


def _alternatives(names: Iterable[str]) -> str:
    ordered = sorted(names, key=lambda name: (int(name) if name.isdigit() else 0, name))
    escaped = [re.escape(name) for name in ordered]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"
