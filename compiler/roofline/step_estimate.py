"""Estimate the memory that a training step takes on a device, from shapes alone.

`recipe plan` reports the compiler's figure, but takes minutes.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.roofline.training_step import Layer, Shapes, kept_bytes, rows, shapes, state_bytes
from recipec.compiler.wording import split_layer

KEPT: dict[str, float] = {"none": 2.3}
"""Size of what a policy keeps, relative to what every step needs. Without recomputation, results of norms,
rotations, activation functions and adapters are kept as well: 2.2 times as much in the compiled flagship."""

LOSS_BYTES = 2**30
"""Bytes of one chunk's float32 logits with their gradient, and of smaller buffers."""

LEAST_SHARE: dict[str, float] = {"none": 0.92, "save_attention": 0.3, "decoder": 0.59}
"""The least that the estimate was of a plan's memory, by policy, over the plans of recipes/estimates.json
(2026-11-28). The upper bound of a step's memory is the estimate divided by it."""


@dataclass(frozen=True)
class Need:
    """Bytes that one device needs.

    Attributes:
        state: weights, adapters and the optimizer's state.
        total: of the whole step.
        most: the upper bound of the whole step, which no recorded plan exceeds.
    """

    state: float
    total: float
    most: float


def need(program: Program) -> Need:
    """Estimate the memory of a program's step; on a CPU, only of its state."""
    policy, length = program.recipe.remat.policy, program.recipe.data.max_length
    state = state_bytes(program)
    if program.accelerator.platform == "cpu":
        return Need(state, state, state)
    model = shapes(program, length)
    kept = kept_bytes(program, model, length) * KEPT.get(policy, 1.0)
    total = state + kept + _working(program, model, policy == "none")
    return Need(state, total, total / LEAST_SHARE.get(policy, min(LEAST_SHARE.values())))


def fits(accelerator: Accelerator, needed: float) -> bool:
    """Return whether a step of `needed` bytes fits a device. CPU devices share the host's memory."""
    available = accelerator.hbm_bytes_per_device
    return not available or needed <= available


def _working(program: Program, model: Shapes, kept_whole: bool) -> float:
    """Return the bytes that one layer needs while it is computed, and the loss.

    Args:
        kept_whole: whether the layer's intermediate results are already counted as kept.
    """
    length, size = program.recipe.data.max_length, BYTES[program.recipe.model.dtype]
    axes = program.recipe.mesh.axes
    largest = max(model.layers, key=lambda layer: layer.weights)
    # Weights of a layer and of the next one, which is fetched meanwhile.
    gathered = 2 * _largest_layer(program) + model.head if axes["fsdp"] > 1 else 0.0
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


def _largest_layer(program: Program) -> int:
    """Return how many numbers the weights of the largest layer have, including all experts."""
    layers: Counter[int] = Counter()
    for parameter in program.parameters:
        layer = split_layer(parameter.path)[1]
        if layer is not None:
            layers[layer] += math.prod(parameter.shape)
    return max(layers.values(), default=0)
