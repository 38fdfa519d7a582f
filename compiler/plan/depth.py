"""Choose the compiles of a plan: which layers, and how far.

A model is split into stretches of layers that repeat one pattern. Layers that share keys and values, or that
have no adapter, form separate stretches.

- To the end, a plan compiles two layers of each stretch, or one of each kind in its pattern. The times of
  their operations stand for all layers.
- To the schedule, it compiles all layers.
- Before that, it schedules a short piece of each stretch, and that piece with one stretch longer, for each
  stretch. Memory and time grow by the same amount with each pattern, so these compiles foretell all layers.
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

LEAST_TO_END = 2
"""The fewest layers of a stretch that are compiled to the end. The compiler schedules the first and the last
layer differently."""
LEAST_SCHEDULED = 4
"""The fewest layers of a stretch in the compiles that foretell all layers."""
LEAST_PROBED, LEAST_PROBED_EXPERTS = 3, 2
"""The fewest layers of a stretch that a probe runs, and those with experts."""
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


@dataclass(frozen=True)
class Parts:
    """The compiles of a plan.

    Attributes:
        whole: all layers. To the end if no fewer layers stand for them, to the schedule otherwise.
        end: the layers that are compiled to the end; None if that is `whole`.
        shallow: schedules of fewer layers, from which `shares` foretells all layers; () where none do.
        shares: a figure of all layers is the sum of the shallow figures, each times its share.
    """

    whole: Part
    end: Part | None = None
    shallow: tuple[Part, ...] = ()
    shares: tuple[float, ...] = ()

    @property
    def refined(self) -> tuple[Part, ...]:
        """The compiles of the plan's own figures, the whole first."""
        return (self.whole,) if self.end is None else (self.whole, self.end)

    @property
    def few(self) -> tuple[Part, ...]:
        """The compiles of few layers that stand for all, the one to the end first; () without any."""
        return (self.end, *self.shallow) if self.end is not None and self.shallow else ()


def parts(program: Program, exact: bool = False) -> Parts:
    """Return the compiles of a plan.

    Args:
        exact: compile all layers to the end.
    """
    every = tuple(range(program.architecture.num_layers))
    stretches = () if exact else _alike(program)
    end = tuple(layer for stretch in stretches for layer in stretch.to_end())
    if not stretches or 2 * len(end) >= len(every) or not _named(program, end):
        return Parts(Part(every))
    return Parts(Part(every, scheduled=True), Part(end), *_shallow(program, stretches))


def probed(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the two sets of layers that a probe runs, whose difference gives the time of a layer.

    The first set has a few whole patterns of each stretch. The second set has about twice as many layers of
    the longest stretch. If the layers follow no pattern, or are few, the only set is all layers.
    """
    every = tuple(range(program.architecture.num_layers))
    least = LEAST_PROBED_EXPERTS if program.architecture.expert_layers else LEAST_PROBED
    stretches = _alike(program)
    few = tuple(layer for stretch in stretches for layer in stretch.first(stretch.whole(least)))
    if not stretches or 2 * len(few) >= len(every) or not _named(program, few):
        return (every,)
    longest = max(stretches, key=lambda stretch: stretch.length)
    more = longest.first(2 * longest.whole(least))
    both = tuple(sorted({*few, *more}))
    return few, both if _named(program, both) else every


@dataclass(frozen=True)
class Stretch:
    """Layers that repeat one pattern.

    Attributes:
        start: the first layer.
        kinds: the kind of each layer; equal for layers that are computed alike.
        pattern: layers of the pattern.
    """

    start: int
    kinds: tuple[Any, ...]
    pattern: int

    @property
    def length(self) -> int:
        return len(self.kinds)

    def first(self, count: int) -> range:
        """Return the first layers of the stretch, at most `count`."""
        return range(self.start, self.start + min(count, self.length))

    def whole(self, least: int) -> int:
        """Return the layers of the fewest whole patterns that have at least `least` layers."""
        return self.pattern * -(-least // self.pattern)

    def to_end(self) -> tuple[int, ...]:
        """Return the first layer of each kind, and at least `LEAST_TO_END` layers."""
        first = {kind: self.start + index for index, kind in reversed([*enumerate(self.kinds)])}
        return (
            tuple(sorted(first.values())) if len(first) >= LEAST_TO_END else tuple(self.first(LEAST_TO_END))
        )


def _alike(program: Program) -> tuple[Stretch, ...]:
    """Return the stretches of a program; () where few layers cannot stand for all."""
    architecture = program.architecture
    unseen = isinstance(architecture, TransformersArchitecture) and not architecture.uniform
    if unseen or _names_layers(program):  # unseen: layers may differ although tensors have the same shapes
        return ()
    kinds = _kinds(program)
    stretches = [
        Stretch(start, tuple(kinds[start : start + length]), pattern)
        for start, length, pattern in _stretches(kinds)
    ]
    return tuple(stretches) if len(stretches) <= STRETCHES else ()


def _shallow(program: Program, stretches: Sequence[Stretch]) -> tuple[tuple[Part, ...], tuple[float, ...]]:
    """Return the schedules that foretell all layers, and their shares; none where they save too little.

    The base has whole patterns of each stretch, and the layers of a pattern that is not whole. For each
    stretch with more layers, another schedule has more whole patterns of it.
    """
    base: list[int] = []
    for stretch in stretches:
        step = stretch.whole(LEAST_SCHEDULED)
        base.append(min(stretch.length, step + stretch.length % stretch.pattern))
    deeper = [n for n, stretch in enumerate(stretches) if base[n] < stretch.length]
    counts = [base]
    shares = []
    for n in deeper:
        step = stretches[n].whole(LEAST_SCHEDULED)
        counts.append([count + step * (i == n) for i, count in enumerate(base)])
        shares.append((stretches[n].length - base[n]) / step)
    layers = [
        tuple(
            layer for stretch, count in zip(stretches, lengths, strict=True) for layer in stretch.first(count)
        )
        for lengths in counts
    ]
    saves = 2 * max(map(len, layers)) < program.architecture.num_layers
    if not deeper or not saves or not all(_named(program, schedule) for schedule in layers):
        return (), ()
    return tuple(Part(schedule, scheduled=True) for schedule in layers), (1 - sum(shares), *shares)


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
