"""Which layers are compiled to the end, to price the operations of all.

A model is split into stretches of layers that repeat one pattern (the layers that share keys and values, or
carry no adapter, are stretches of their own). What is compiled to the end has each of them short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.lowering.fewer_layers import by_layer
from recipec.compiler.lowering.program import Program
from recipec.compiler.wording import split_layer
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.families import Architecture
from recipec.runtime.model.families.transformers import TransformersArchitecture

LEAST = 3
"""Layers of a stretch in what is compiled to the end, at least: the first and the last layers are scheduled
unlike those between them."""
LEAST_OF_EXPERTS = 2
"""The same where layers have experts, which take minutes each."""
STRETCHES = 3
"""A model of more stretches is compiled whole."""


@dataclass(frozen=True)
class Part:
    """One compile of a plan.

    Attributes:
        layers: indices of the layers that it has.
        scheduled: whether it ends with the schedule, before code is generated.
    """

    layers: tuple[int, ...]
    scheduled: bool = False


def parts(program: Program, exact: bool = False) -> tuple[Part, ...]:
    """The compiles of a plan: the schedule of all layers, and some of them compiled to the end; all of them
    compiled to the end when they are few or follow no pattern.

    Args:
        exact: compile all layers to the end.
    """
    every = tuple(range(program.architecture.num_layers))
    few = every if exact else _few(program)
    return (Part(every),) if few == every else (Part(every, scheduled=True), Part(few))


def _few(program: Program) -> tuple[int, ...]:
    every = tuple(range(program.architecture.num_layers))
    if _names_layers(program) or _differ_unseen(program.architecture):
        return every
    stretches = _stretches(_kinds(program))
    if len(stretches) > STRETCHES:
        return every
    least = LEAST_OF_EXPERTS if program.architecture.expert_layers else LEAST
    found = [layer for stretch in stretches for layer in _whole_patterns(*stretch, least)]
    return tuple(found) if 2 * len(found) < len(every) else every


def probed(program: Program) -> tuple[tuple[int, ...], ...]:
    """The layers that are run to tell what one takes: those that are compiled to the end, and as many whole
    patterns of the longest stretch again; all layers alone where these are all."""
    few = _few(program)
    if len(few) == program.architecture.num_layers:
        return (few,)
    start, length, _ = max(_stretches(_kinds(program)), key=lambda stretch: stretch[1])
    own = [layer for layer in few if start <= layer < start + length]
    more = range(start, start + min(length, 2 * len(own)))
    return few, tuple(sorted({*few, *more}))


def shortened(architecture: Architecture, layers: Sequence[int]) -> Architecture:
    """An architecture with only some of its layers, which are numbered anew."""
    if isinstance(architecture, TransformersArchitecture):
        return architecture.shortened(layers)
    changes: dict[str, Any] = {
        name: tuple(values[i] for i in layers) for name, values in by_layer(architecture).items()
    }
    shared = getattr(architecture, "kv_shared_layers", 0)
    if shared:
        changes["kv_shared_layers"] = sum(i >= architecture.num_layers - shared for i in layers)
    return replace(architecture, **changes)


def renumbered(lora: LoraSettings | None, layers: Sequence[int]) -> LoraSettings | None:
    """LoRA settings for a model that has only some of its layers."""
    if lora is None or lora.layers is None:
        return lora
    return replace(lora, layers=tuple(new for new, old in enumerate(layers) if old in lora.layers))


def _whole_patterns(start: int, length: int, pattern: int, least: int) -> range:
    """The first layers of a stretch, as many whole patterns as have `least` layers."""
    return range(start, start + min(length, pattern * -(-least // pattern)))


def _stretches(kinds: Sequence[Any]) -> list[tuple[int, int, int]]:
    """(first layer, layers, layers of the pattern) of each stretch: as few as can be, from the front."""
    out = []
    start = 0
    while start < len(kinds):
        end, pattern = max(_reach(kinds, start), key=lambda found: (found[0], -found[1]))
        out.append((start, end - start, pattern))
        start = end
    return out


def _reach(kinds: Sequence[Any], start: int) -> list[tuple[int, int]]:
    """How far each length of a pattern goes from a layer on: (end, length)."""
    out = []
    for length in range(1, min(16, len(kinds) - start) + 1):
        end = start + length
        while end < len(kinds) and kinds[end] == kinds[end - length]:
            end += 1
        out.append((end, length))
    # A pattern that is not even repeated once explains nothing.
    repeated = [(end, length) for end, length in out if end - start >= 2 * length]
    return repeated or [(start + 1, 1)]


def _differ_unseen(architecture: Architecture) -> bool:
    """Whether layers may differ in what their tensors do not show."""
    return isinstance(architecture, TransformersArchitecture) and not architecture.uniform


def _names_layers(program: Program) -> bool:
    """Whether a pattern may speak of layers by their numbers, which change when some are left out."""
    patterns = [match for match, _ in program.rules]
    if program.lora is not None:
        patterns += [*program.lora.targets, *program.lora.rank_pattern, *program.lora.train_also]
    return any(re.search(r"\d", pattern) for pattern in patterns)


def _kinds(program: Program) -> list[Any]:
    """What each layer is made of: equal for layers that compute the same with other weights."""
    kinds = [list(kind) for kind in zip(*by_layer(program.architecture).values(), strict=True)]
    for parameter in program.parameters:
        path, layer = split_layer(parameter.path)
        if layer is not None:
            kinds[layer].append((path, parameter.shape, parameter.spec, bool(parameter.sources)))
    for adapter in program.adapters:
        path, layer = split_layer(adapter.a_path)
        if layer is not None:
            kinds[layer].append((path, *((shape, spec) for _, shape, spec in adapter.arrays)))
    return [tuple(kind) for kind in kinds]
