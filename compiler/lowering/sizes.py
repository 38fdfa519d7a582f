"""Bytes of numbers, and of what an optimizer keeps beside each number that it trains; sizes of a mesh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.wording import divisors
from recipec.runtime.training.objectives import keeps_copy

if TYPE_CHECKING:
    from recipec.runtime.model.families import Architecture
    from recipec.spec.language import Recipe

BYTES = {"bfloat16": 2, "float32": 4}

MOMENTS = {"adamw": 2, "lion": 1, "adafactor": 0, "sgd": 0}
"""Arrays as large as the weights that each optimizer keeps, without sgd's momentum."""


def tp_sizes(architecture: Architecture, devices: int) -> list[int]:
    """The sizes of tp that divide the devices and the heads of every layer; one key/value head is kept whole
    on each device."""
    layers = range(architecture.num_layers)
    counts = {architecture.heads(i) for i in layers} | {architecture.kv_heads(i) for i in layers} - {1}
    return [tp for tp in divisors(devices) if all(count % tp == 0 for count in counts)]


def needs_master_weights(recipe: Recipe) -> bool:
    """Whether a float32 copy of the weights is kept, which adapters do not need."""
    return recipe.lora is None and recipe.model.dtype == "bfloat16" and recipe.train.optimizer.master_weights


def beside_bytes(recipe: Recipe, size: int) -> int:
    """Bytes of moments, of the float32 copy and of the reference, for each number that is trained.

    Args:
        size: bytes of the number itself.
    """
    optimizer = recipe.train.optimizer
    moments = MOMENTS[optimizer.name] + (optimizer.name == "sgd" and optimizer.momentum > 0)
    reference = size if keeps_copy(recipe.train.objective, recipe.lora) else 0
    return reference + (4 + moments * 4 if needs_master_weights(recipe) else moments * size)
