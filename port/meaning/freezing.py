"""Full fine-tuning of some modules: `train.trainable_modules` for a tool's patterns of parameter names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from recipec.compiler.catalog import Model
from recipec.compiler.wording import listing, split_layer
from recipec.port.engine import Says
from recipec.port.keys import OFF, Keys
from recipec.port.meaning import adapters
from recipec.port.refusals import E1148
from recipec.runtime.model.adapters import matches

NAMES = "recipec uses the checkpoint's names of modules; transformers may have other names for some of them"


def chosen_by(model: Model, keeps: Callable[[str], bool]) -> list[str]:
    """Return `train.trainable_modules` for the tensors that a tool trains."""
    sources = [s for p in model.family.parameters(model.architecture) if p.trainable for s in p.sources]
    names = {s.module: s.name if s.whole else f"model.{s.name}" for s in sources}
    chosen = {module for module, name in names.items() if keeps(name)}
    layers: dict[str, list[int]] = {}
    for module in names:
        stem, layer = split_layer(module)
        if module in chosen:
            layers.setdefault(stem, []).extend(() if layer is None else (layer,))
    alike: dict[tuple[int, ...], list[str]] = {}
    for stem, numbers in layers.items():
        alike.setdefault(tuple(numbers), []).append(stem)
    short = [pattern for numbers, stems in alike.items() for pattern in _patterns(numbers, stems)]
    if {module for module in names if any(matches(pattern, module) for pattern in short)} == chosen:
        return short
    return sorted(chosen)


def _patterns(layers: Sequence[int], stems: Sequence[str]) -> list[str]:
    """Return patterns for modules that the same layers have, () for modules outside layers."""
    if not layers:
        return list(stems)
    number = str(layers[0]) if len(layers) == 1 else f"({'|'.join(map(str, layers))})"
    out = []
    for stem in stems:
        before, _, after = stem.partition("{}")
        inner = re.sub(r"\d+", r"\\d+", re.escape(after))
        out.append(f"{re.escape(before)}{number}{inner}")
    return list(dict.fromkeys(out))


def say_layers(keys: Keys, model: Model | None) -> Says:
    """State LLaMA-Factory's freeze tuning: some of the last layers are trained, or of the first ones."""
    yield keys.sets("lora", None, "the run has no adapters")
    count = keys.integer("freeze_trainable_layers") if keys.given("freeze_trainable_layers") else 2
    values = {key: keys.texts(key) for key in ("freeze_trainable_modules", "freeze_extra_modules")}
    modules, extra = (
        [name.strip() for name in (value.split(",") if isinstance(value, str) else value or ())]
        for value in values.values()
    )
    if model is not None:
        only, lacking = of_layers(model, count or 0, modules or ["all"], extra)
        if lacking:
            message = f"{model.title} has no modules {listing(lacking)}"
            yield keys.refuse("freeze_trainable_modules", E1148, message, "freeze_trainable_modules: all")
        yield keys.sets("train.trainable_modules", only, "the modules that freeze tuning trains")
    for key in ("freeze_trainable_layers", *values):
        yield keys.say(key, {})
    yield from keys.passive(("cast_trainable_params_to_fp32",), "part of train.optimizer.master_weights")


def of_layers(
    model: Model, count: int, modules: Sequence[str], extra: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return `train.trainable_modules` for LLaMA-Factory's freeze tuning, and names that the model lacks.

    Args:
        count: how many of the last layers are trained; if negative, of the first ones.
        modules: the modules of these layers, or "all".
        extra: modules outside layers.
    """
    total = model.architecture.num_layers
    layers = range(max(0, total - count), total) if count > 0 else range(min(-count, total))
    number = f"({'|'.join(map(str, layers))})" if len(layers) != 1 else str(layers[0])
    start = rf"{model.family.names.layers}\.{number}\."
    inside = [rf"{start}.*" if name == "all" else rf"{start}{name}.*" for name in modules]
    names = [s.module for p in model.family.parameters(model.architecture) if p.trainable for s in p.sources]
    only = [*inside, *extra]
    lacking = [name for name in only if not any(matches(name, module) for module in names)]
    return only, lacking


def unfrozen(keys: Keys, key: str, model: Model) -> list[str]:
    """Return `train.trainable_modules` for Axolotl's patterns of trained parameters, [] without any."""
    patterns = _unfreezing(keys, key)
    return chosen_by(model, lambda name: any(pattern.match(name) for pattern in patterns))


def say_adapters(keys: Keys, key: str, model: Model | None) -> Says:
    """State Axolotl's patterns next to adapters, of which it freezes all whose names no pattern matches.

    PEFT's names begin with `base_model.model.`, so patterns of the model's own names leave nothing to train.
    """
    patterns = _unfreezing(keys, key)
    names = [
        f"base_model.model.{module.name}.lora_{which}.default.weight"
        for module in (adapters.modules(model) if model is not None else ())
        for which in "AB"
    ]
    matched = [any(pattern.match(name) for pattern in patterns) for name in names]
    if patterns and matched and all(matched):
        yield keys.same(key, note="the patterns match all adapters")
    note = "Axolotl freezes all adapters whose names no pattern matches"
    if patterns and matched and not any(matched):
        note = "no pattern matches PEFT's names of adapters, so Axolotl trains nothing"
    yield keys.learned(key, OFF, note)


def _unfreezing(keys: Keys, key: str) -> list[re.Pattern[str]]:
    """Return the patterns of a key, [] if one selects rows of a weight.

    They match the beginning of a parameter's name. A dot stands for itself, except in `.+`.
    """
    value = keys.texts(key) or []
    patterns = [value] if isinstance(value, str) else value
    if any(re.search(r"\[\d*(:\d*)?\]$", pattern) for pattern in patterns):
        return []
    try:
        return [re.compile(re.sub(r"\.(?!\+)", r"\\.", pattern)) for pattern in patterns]
    except re.error:
        return []
