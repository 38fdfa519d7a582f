"""About what a training step takes of a device's memory, on paper: enough to choose a configuration by.

`recipe plan` has the compiler's figure, minutes later.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.plan.bound import kept_bytes, rows, state_bytes
from recipec.compiler.plan.shapes import Layer, Shapes, shapes
from recipec.compiler.wording import split_layer

KEPT: dict[str, float] = {"none": 2.3}
"""What a policy keeps, in multiples of what no step does without. Without recomputation, results of norms,
rotations, activation functions and adapters stay as well: 2.2 times as much in the compiled flagship."""

LOSS_BYTES = 2**30
"""Of a chunk's float32 logits with their gradient, and of what else stands about."""

HEADROOM = 0.15
"""Share of the memory that a choice on paper leaves free."""


@dataclass(frozen=True)
class Need:
    """Bytes of one device.

    Attributes:
        state: weights, adapters and the optimizer's state.
        total: of the whole step.
    """

    state: float
    total: float


@dataclass
class Probe:
    """A model as a program on one device, and what of it is the same in every configuration."""

    program: Program
    _shapes: dict[int, Shapes] = field(default_factory=dict)

    def shapes(self, length: int) -> Shapes:
        """The model's for rows of so many tokens."""
        if length not in self._shapes:
            self._shapes[length] = shapes(self.program, length)
        return self._shapes[length]

    @cached_property
    def largest_layer(self) -> int:
        """Numbers in the weights of the largest layer, all experts' among them."""
        layers: Counter[int] = Counter()
        for parameter in self.program.parameters:
            layer = split_layer(parameter.path)[1]
            if layer is not None:
                layers[layer] += math.prod(parameter.shape)
        return max(layers.values(), default=0)


def need(probe: Probe, program: Program) -> Need:
    """What a program's step takes, about; of a CPU's, its state alone.

    Args:
        program: the probe's in another configuration.
    """
    policy, length = program.recipe.remat.policy, program.recipe.data.max_length
    state = state_bytes(program)
    if program.accelerator.platform == "cpu":
        return Need(state, state)
    kept = kept_bytes(program, probe.shapes(length), length) * KEPT.get(policy, 1.0)
    return Need(state, state + kept + _working(probe, program, policy == "none"))


def fits(accelerator: Accelerator, needed: Need) -> bool:
    """Whether a step fits a device with room to spare; virtual CPU devices share the host's memory."""
    available = accelerator.hbm_bytes_per_device
    return not available or needed.total <= available * (1 - HEADROOM)


def _working(probe: Probe, program: Program, kept_whole: bool) -> float:
    """What one layer takes while it is computed, and the loss.

    Args:
        kept_whole: whether what a layer computes is counted as kept already.
    """
    length, size = program.recipe.data.max_length, BYTES[program.recipe.model.dtype]
    model, axes = probe.shapes(length), program.recipe.mesh.axes
    largest = max(model.layers, key=lambda layer: layer.weights)
    # Of a layer and the next one, whose weights are fetched meanwhile.
    gathered = 2 * probe.largest_layer + model.head if axes["fsdp"] > 1 else 0.0
    tokens = rows(program) * length
    one = 0.0 if kept_whole else KEPT["none"] * _numbers(program, largest) * tokens * size
    scores = 0.0
    if program.recipe.model.attention == "dot":
        # In float32, with their gradient.
        scores = 8.0 * program.architecture.num_heads * tokens * length
    return gathered * size / axes["tp"] + (one + scores) / math.prod(axes.values()) + LOSS_BYTES


def _numbers(program: Program, layer: Layer) -> float:
    """Numbers a token that a layer computes on its way."""
    return 2.0 * program.architecture.hidden_size + layer.attended + sum(layer.products.values())
