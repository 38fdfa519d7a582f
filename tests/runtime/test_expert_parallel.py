"""Tests of experts sharded over devices: values and gradients equal one device's, for any routing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipec.runtime.model.families.description import Experts
from tests.runtime.training import QUICK

HIDDEN, FEATURES, EXPERTS = 12, 10, 8
IN_TILES = 256
"""A hidden size whose rows are exchanged as tiles of 128 values."""


EVEN, UNEVEN = 0.0, 50.0
"""In an uneven batch three experts get all rows."""


def results(axes: dict[str, int], hidden: int = HIDDEN) -> list[Any]:
    """Return the value and the gradients of both batches, with the experts on a mesh."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from recipec.runtime.model.experts import route, run

    draws = np.random.default_rng(0)
    shapes = {
        "gate_up": (EXPERTS, hidden, 2, FEATURES),
        "down": (EXPERTS, FEATURES, hidden),
        "gate_up_bias": (EXPERTS, 2, FEATURES),
        "down_bias": (EXPERTS, hidden),
    }
    arrays = {
        name: jnp.asarray(draws.normal(0, hidden**-0.5, shape), jnp.float32) for name, shape in shapes.items()
    }
    x = jnp.asarray(draws.standard_normal((8, 5, hidden)), jnp.float32)
    router = jnp.asarray(draws.normal(0, hidden**-0.5, (hidden, EXPERTS)), jnp.float32)
    described = Experts(EXPERTS, 3, FEATURES)

    def loss(x: Any, router: Any, arrays: Any, lean: float) -> Any:
        logits = x @ router + lean * (jnp.arange(EXPERTS) < 3)
        weights, choices = route(logits, described)
        return jnp.sum(jnp.sin(run(x, weights, choices, arrays, lambda gate, up: jax.nn.silu(gate) * up)))

    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    compute = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), compiler_options=QUICK)
    with Mesh(devices.reshape(tuple(axes.values())), tuple(axes)), jax.default_matmul_precision("highest"):
        both = [compute(x, router, arrays, lean) for lean in (EVEN, UNEVEN)]
    return [np.asarray(leaf) for leaf in jax.tree.leaves(both)]


def test_sharded_experts_match_one_device_values_and_gradients() -> None:
    expected = results({"fsdp": 1})
    for axes in ({"fsdp": 2, "ep": 2, "tp": 2}, {"ep": 4}):
        for mine, alone in zip(results(axes), expected, strict=True):
            assert np.abs(mine - alone).max() <= 1e-5 * np.abs(alone).max()


def test_rows_that_no_device_sent_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax
    import jax.numpy as jnp

    from recipec.runtime.model import experts

    expected = results({"fsdp": 1}, IN_TILES)
    monkeypatch.setattr(experts, "_kernel_tile", lambda rows: rows)
    monkeypatch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    for mine, alone in zip(results({"ep": 4}, IN_TILES), expected, strict=True):
        assert np.abs(mine - alone).max() <= 1e-5 * np.abs(alone).max()


def test_rematerialized_layer_does_not_repeat_expert_exchange() -> None:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh

    from recipec.runtime.model.experts import route, run

    shapes = {"gate_up": (EXPERTS, HIDDEN, 2, FEATURES), "down": (EXPERTS, FEATURES, HIDDEN)}
    arrays = {name: jnp.ones(shape) for name, shape in shapes.items()}

    @jax.checkpoint
    def layer(x: Any) -> Any:
        weights, choices = route(x[..., :EXPERTS], Experts(EXPERTS, 3, FEATURES))
        return run(x, weights, choices, arrays, lambda gate, up: jax.nn.silu(gate) * up).sum()

    with Mesh(np.array(jax.devices()[:4]), ("ep",)):
        traced = str(jax.make_jaxpr(jax.grad(layer))(jnp.ones((8, 5, HIDDEN))))
    assert traced.count(" while[") == 2  # forward and backward
