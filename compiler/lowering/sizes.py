"""Sizes in bytes of numbers and of the optimizer state of each trained number; sizes of mesh axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.wording import divisors
from recipec.runtime.training.objectives import keeps_copy

if TYPE_CHECKING:
    from recipec.runtime.model.families import Architecture
    from recipec.spec.language import Recipe

BYTES = {"bfloat16": 2, "float32": 4}

MOMENTS = {"adamw": 2, "lion": 1, "adafactor": 0, "rmsprop": 1, "sgd": 0, "muon": 1}
"""The number of weight-sized arrays that each optimizer keeps, without the momentum of rmsprop and sgd, and
without muon's second moments, which only embeddings, the head and vectors have."""


def tp_sizes(architecture: Architecture, devices: int) -> list[int]:
    """Return the sizes of tp that divide the devices and the heads of every layer. A single key/value head is
    replicated on each device."""
    layers = range(architecture.num_layers)
    counts = {architecture.heads(i) for i in layers} | {architecture.kv_heads(i) for i in layers} - {1}
    return [tp for tp in divisors(devices) if all(count % tp == 0 for count in counts)]


def needs_master_weights(recipe: Recipe) -> bool:
    """Return whether training keeps a float32 copy of the weights. Adapters do not need one."""
    return recipe.lora is None and recipe.model.dtype == "bfloat16" and recipe.train.optimizer.master_weights


def beside_bytes(recipe: Recipe, size: int) -> int:
    """Return the bytes of moments, of the float32 copy and of the reference model, per trained number.

    Args:
        size: bytes of the number itself.
    """
    optimizer = recipe.train.optimizer
    moments = MOMENTS[optimizer.name] + (optimizer.name in ("rmsprop", "sgd") and optimizer.momentum > 0)
    reference = size if keeps_copy(recipe.train, recipe.lora) else 0
    return reference + (4 + moments * 4 if needs_master_weights(recipe) else moments * size)
