"""Estimate the device memory of a training step, precisely enough to choose a configuration.

`recipe plan` reports the compiler's figure, but takes minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.plan.bound import Layer, Shapes, kept_bytes, rows, shapes, state_bytes
from recipec.compiler.wording import split_layer

KEPT: dict[str, float] = {"none": 2.3}
"""Size of what a policy keeps, relative to what every step needs. Without recomputation, results of norms,
rotations, activation functions and adapters are kept as well: 2.2 times as much in the compiled flagship."""

LOSS_BYTES = 2**30
"""Bytes of one chunk's float32 logits with their gradient, and of smaller buffers."""

HEADROOM = 0.15
"""Share of the memory that an estimate has to leave free."""


@dataclass(frozen=True)
class Need:
    """Bytes that one device needs.

    Attributes:
        state: weights, adapters and the optimizer's state.
        total: of the whole step.
    """

    state: float
    total: float


@dataclass
class Probe:
    """A model as a program on one device, with what is the same in every configuration."""

    program: Program
    _shapes: dict[int, Shapes] = field(default_factory=dict)

    def shapes(self, length: int) -> Shapes:
        """Return the model's shapes for rows of `length` tokens."""
        if length not in self._shapes:
            self._shapes[length] = shapes(self.program, length)
        return self._shapes[length]

    @cached_property
    def largest_layer(self) -> int:
        """Numbers in the weights of the largest layer, including all experts."""
        layers: Counter[int] = Counter()
        for parameter in self.program.parameters:
            layer = split_layer(parameter.path)[1]
            if layer is not None:
                layers[layer] += math.prod(parameter.shape)
        return max(layers.values(), default=0)


def need(probe: Probe, program: Program) -> Need:
    """Estimate the memory of a program's step; on a CPU, only of its state.

    Args:
        program: the probe's program in another configuration.
    """
    policy, length = program.recipe.remat.policy, program.recipe.data.max_length
    state = state_bytes(program)
    if program.accelerator.platform == "cpu":
        return Need(state, state)
    kept = kept_bytes(program, probe.shapes(length), length) * KEPT.get(policy, 1.0)
    return Need(state, state + kept + _working(probe, program, policy == "none"))


def fits(accelerator: Accelerator, needed: Need) -> bool:
    """Return whether a step fits a device with room to spare. CPU devices share the host's memory."""
    available = accelerator.hbm_bytes_per_device
    return not available or needed.total <= available * (1 - HEADROOM)


def _working(probe: Probe, program: Program, kept_whole: bool) -> float:
    """Return the bytes that one layer needs while it is computed, and the loss.

    Args:
        kept_whole: whether the layer's intermediate results are already counted as kept.
    """
    length, size = program.recipe.data.max_length, BYTES[program.recipe.model.dtype]
    model, axes = probe.shapes(length), program.recipe.mesh.axes
    largest = max(model.layers, key=lambda layer: layer.weights)
    # Weights of a layer and of the next one, which is fetched meanwhile.
    gathered = 2 * probe.largest_layer + model.head if axes["fsdp"] > 1 else 0.0
    tokens = rows(program) * length
    one = 0.0 if kept_whole else KEPT["none"] * _numbers(program, largest) * tokens * size
    scores = 0.0
    if program.recipe.model.attention == "dot":
        # Attention scores in float32, with their gradient.
        scores = 8.0 * program.architecture.num_heads * tokens * length
    return gathered * size / axes["tp"] + (one + scores) / math.prod(axes.values()) + LOSS_BYTES


def _numbers(program: Program, layer: Layer) -> float:
    """Return how many intermediate numbers a layer computes per token."""
    return 2.0 * program.architecture.hidden_size + layer.attended + sum(layer.products.values())
