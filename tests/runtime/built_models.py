"""Helpers for built models: adapters with an effect, and the traced program."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from flax import nnx

from recipec.runtime.training.losses import batch_loss
from tests.runtime import training


def randomize(built: Any, seed: int = 0, scale: float = 0.3) -> None:
    """Give B random values, because a zero B gives no delta."""
    random = np.random.default_rng(seed)
    for path, variable in nnx.iter_graph(built.model):
        name = ".".join(map(str, path))
        if isinstance(variable, nnx.LoRAParam) and name.endswith("_lora_b"):
            value = variable.get_raw_value()
            noise = scale * random.standard_normal(value.shape)
            import jax

            variable.set_raw_value(jax.device_put(noise.astype(value.dtype), value.sharding))


def jaxpr(built: Any, mesh: Any) -> str:
    graph, state = nnx.split(built.model)
    one = training.batch(0)
    with mesh:
        traced = jax.make_jaxpr(lambda state: batch_loss(built.forward, nnx.merge(graph, state), one))(state)
    return str(traced)
