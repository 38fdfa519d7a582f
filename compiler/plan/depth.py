"""Choose the layers that are compiled to the end; the times of their operations stand for all layers.

A model is split into stretches of layers that repeat one pattern. Layers that share keys and values, or that
have no adapter, form separate stretches. The model that is compiled to the end has a short piece of each
stretch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.fewer_layers import by_layer, with_layers
from recipec.compiler.wording import split_layer
from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.families import Architecture, UnsupportedCheckpoint
from recipec.runtime.model.families.transformers import TransformersArchitecture

LEAST = 3
"""The fewest layers of a stretch that are compiled to the end. The compiler schedules the first and the last
layer differently from those between them."""
LEAST_OF_EXPERTS = 2
"""The same for layers with experts, each of which takes minutes to compile."""
STRETCHES = 3
"""A model with more stretches than this is compiled whole."""


@dataclass(frozen=True)
class Part:
    """One compile of a plan.

    Attributes:
        layers: indices of the layers that are compiled.
        scheduled: whether the compile stops after the schedule, before code is generated.
    """

    layers: tuple[int, ...]
    scheduled: bool = False


def parts(program: Program, exact: bool = False) -> tuple[Part, ...]:
    """Return the compiles of a plan.

    Usually there are two: the schedule of all layers, and some layers compiled to the end. If the layers are
    few or follow no pattern, one compile of all layers goes to the end.

    Args:
        exact: compile all layers to the end.
    """
    every = tuple(range(program.architecture.num_layers))
    few = every if exact else _few(program)
    return (Part(every),) if few == every else (Part(every, scheduled=True), Part(few))


def _few(program: Program) -> tuple[int, ...]:
    every = tuple(range(program.architecture.num_layers))
    architecture = program.architecture
    unseen = isinstance(architecture, TransformersArchitecture) and not architecture.uniform
    if unseen or _names_layers(program):  # unseen: layers may differ although tensors have the same shapes
        return every
    stretches = _stretches(_kinds(program))
    if len(stretches) > STRETCHES:
        return every
    least = LEAST_OF_EXPERTS if program.architecture.expert_layers else LEAST
    layers = [layer for stretch in stretches for layer in _whole_patterns(*stretch, least)]
    return tuple(layers) if 2 * len(layers) < len(every) and _named(program, layers) else every


def probed(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the two sets of layers that a probe runs, whose difference gives the time of a layer.

    The first set is the layers that a plan compiles to the end. The second set has about twice as many layers
    of the longest stretch. If a plan compiles all layers to the end, the only set is all layers.
    """
    few = _few(program)
    if len(few) == program.architecture.num_layers:
        return (few,)
    start, length, _ = max(_stretches(_kinds(program)), key=lambda stretch: stretch[1])
    own = [layer for layer in few if start <= layer < start + length]
    more = range(start, start + min(length, 2 * len(own)))
    both = tuple(sorted({*few, *more}))
    return few, both if _named(program, both) else tuple(range(program.architecture.num_layers))


def _named(program: Program, layers: Sequence[int]) -> bool:
    """Return whether a config.json can name the kinds of these layers: Jamba's has only periods."""
    try:
        with_layers(program.config, layers)
    except UnsupportedCheckpoint:
        return False
    return True


def shortened(architecture: Architecture, layers: Sequence[int]) -> Architecture:
    """Return an architecture with only some of its layers, renumbered from 0."""
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
    """Return LoRA settings for a model with only some of its layers."""
    if lora is None or lora.layers is None:
        return lora
    return replace(lora, layers=tuple(new for new, old in enumerate(layers) if old in lora.layers))


def _whole_patterns(start: int, length: int, pattern: int, least: int) -> range:
    """Return the first layers of a stretch: the fewest whole patterns that have at least `least` layers."""
    return range(start, start + min(length, pattern * -(-least // pattern)))


def _stretches(kinds: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Split layers into stretches, greedily from the first: (first layer, layers, layers of the pattern)."""
    out = []
    start = 0
    while start < len(kinds):
        end, pattern = max(_reach(kinds, start), key=lambda reach: (reach[0], -reach[1]))
        out.append((start, end - start, pattern))
        start = end
    return out


def _reach(kinds: Sequence[Any], start: int) -> list[tuple[int, int]]:
    """Return how far a pattern of each length repeats from layer `start`: (end, length)."""
    out = []
    for length in range(1, min(16, len(kinds) - start) + 1):
        end = start + length
        while end < len(kinds) and kinds[end] == kinds[end - length]:
            end += 1
        out.append((end, length))
    # Keep only patterns that occur at least twice.
    repeated = [(end, length) for end, length in out if end - start >= 2 * length]
    return repeated or [(start + 1, 1)]


def _names_layers(program: Program) -> bool:
    """Return whether a pattern may name layers by number. Numbers change when layers are left out."""
    patterns = [*(match for match, _ in program.rules), *program.recipe.train.trainable_modules]
    if program.lora is not None:
        patterns += [*program.lora.targets, *program.lora.rank_pattern, *program.lora.modules_to_save]
    return any(re.search(r"\d", pattern) for pattern in patterns)


def _kinds(program: Program) -> list[Any]:
    """Describe each layer, with equal values for layers that differ only in the values of their weights."""
    kinds = [list(kind) for kind in zip(*by_layer(program.architecture).values(), strict=True)]
    for parameter in program.parameters:
        path, layer = split_layer(parameter.path)
        if layer is not None:
            kinds[layer].append((path, parameter.shape, parameter.spec, parameter.trainable))
    for adapter in program.adapters:
        path, layer = split_layer(adapter.a_path)
        if layer is not None:
            kinds[layer].append((path, *((shape, spec) for _, shape, spec in adapter.arrays)))
    return [tuple(kind) for kind in kinds]
