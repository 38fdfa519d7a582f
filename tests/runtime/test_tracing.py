"""Tests that the time to trace a training step grows linearly with its layers.

It grew quadratically when jax described where a traced value came from. That walks over all operations so
far, for each unanswered question about a value, such as its sharding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax._src.interpreters import partial_eval

from recipec.runtime.model.adapters import LoraSettings
from recipec.runtime.model.families import family_of
from recipec.runtime.model.loading import abstract_model
from recipec.runtime.settings import ModelSettings
from recipec.runtime.training.losses import batch_loss
from tests import tiny
from tests.runtime import training


def descriptions(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Count jax's walks through the trace of model and step, and the trace's operations."""
    walks = 0
    (frame,) = {
        kind
        for kind in vars(partial_eval).values()
        if isinstance(kind, type) and "find_progenitors" in vars(kind)
    }
    walk = frame.find_progenitors

    def counted(*args: Any) -> Any:
        nonlocal walks
        walks += 1
        return walk(*args)

    monkeypatch.setattr(frame, "find_progenitors", counted)
    kinds = ["sliding_attention"] * (layers - 1) + ["full_attention"]
    config = tiny.gemma4_text(num_hidden_layers=layers, layer_types=kinds, vocab_size=512)
    config["model_type"] = "gemma4_text"
    family = family_of(config)
    settings = ModelSettings(id="none", family=family.name, remat="decoder")
    lora = LoraSettings(rank=2, alpha=2.0, targets=training.TARGETS, dropout=0.1)
    axes = {"fsdp": 8, "tp": 1}
    built = abstract_model(family, family.architecture(config), settings, lora, axes)
    graph, state = nnx.split(built.model)

    def step(state: Any, one: Any) -> Any:
        model = nnx.merge(graph, state)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.LoRAParam)

        def loss_of(model: Any) -> Any:
            assert built.provider is not None
            with built.provider.training(0, one["index"], len(one["tokens"])):
                return batch_loss(built.forward, model, one)

        loss, gradients = nnx.value_and_grad(loss_of, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, gradients)
        return loss, nnx.state(model, nnx.LoRAParam)

    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.asarray(x).dtype), training.batch(0))
    jaxpr = jax.make_jaxpr(step)(state, one)
    monkeypatch.setattr(frame, "find_progenitors", walk)
    return walks, str(jaxpr).count("\n")


def test_jax_trace_walks_do_not_increase_with_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    shallow, few = descriptions(1, monkeypatch)
    deep, many = descriptions(2, monkeypatch)
    assert many > 1.3 * few
    assert shallow == deep <= 4
