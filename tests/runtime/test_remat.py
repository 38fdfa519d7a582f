"""Tests that rematerialization changes a step's cost, and not its results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from recipec.runtime.model.loading import rematerialize
from recipec.runtime.model.remat import POLICIES
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.training.losses import batch_loss
from tests import tiny
from tests.runtime import training
from tests.runtime.built_models import randomize

NAMES = ("tokens", "positions", "segment_ids", "loss_mask", "norm")
RUN = ("none", "save_attention", "offload_dots")
"""Policies whose programs run. Other tests compare whole trainings under "block" and "decoder" with PEFT."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Build a model with dropout and a nonzero B, with its mesh."""
    directory = tmp_path_factory.mktemp("model")
    tiny.make_llama(directory, num_hidden_layers=1)
    mesh, model = training.build(directory, {"fsdp": 4, "tp": 2}, remat="none", dropout=0.1)
    randomize(model, scale=0.1)
    with jax.default_matmul_precision("highest"):
        yield mesh, model


def loss_of(built: Any, policy: str) -> Any:
    """Return the loss under a policy as a function of the model's state and a batch, and the graph."""
    forward = replace(built.forward, settings=replace(built.forward.settings, remat=policy))
    rematerialize(built.model, policy)

    def loss(model: Any, one: Any) -> Any:
        with built.provider.training(0, one["index"], len(one["tokens"])):
            return batch_loss(forward, model, one)

    return loss, *nnx.split(built.model, nnx.LoRAParam, ...)


def step(mesh: Any, built: Any, policy: str) -> Any:
    """Trace the loss and LoRA gradients under a policy, and return the arguments with it."""
    loss, graph, *states = loss_of(built, policy)

    def gradients(states: Any, one: Any) -> Any:
        of_adapters = nnx.DiffState(0, nnx.LoRAParam)
        return nnx.value_and_grad(loss, argnums=of_adapters)(nnx.merge(graph, *states), one)

    with mesh:
        arguments = states, shard_rows(training.packed_batch(), mesh)
        return jax.jit(gradients).trace(*arguments), arguments


def kept(mesh: Any, built: Any, policy: str) -> list[tuple[int, ...]]:
    """Return the shapes of the forward pass's residuals."""
    loss, graph, adapters, rest = loss_of(built, policy)

    def pull(adapters: Any, rest: Any, one: Any) -> Any:
        return jax.vjp(lambda adapters: loss(nnx.merge(graph, adapters, rest), one), adapters)[1]

    with mesh:
        left = jax.eval_shape(pull, adapters, rest, training.packed_batch())
    return [leaf.shape for leaf in jax.tree.leaves(left)]


def test_remat_policies_keep_results_and_recompute_expected_products(built: Any) -> None:
    expected: Any = None
    products = {}
    for policy in POLICIES:
        traced, arguments = step(*built, policy)
        # A CPU has only the host's memory, so that offloaded arrays stay where they are.
        assert ("MemorySpace.Host" in str(traced.jaxpr)) == (policy == "offload_dots")
        lowered = traced.lower()
        products[policy] = len(re.findall(r"stablehlo\.dot_general", lowered.as_text()))
        if policy not in RUN:
            continue
        loss, gradients = lowered.compile()(*arguments)
        found = [np.asarray(leaf) for leaf in (loss, *jax.tree.leaves(gradients))]
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            assert np.abs(one - other).max() <= 1e-6 * np.abs(other).max(), policy
    # Each policy keeps more than the one before it, and recomputes less.
    assert products["decoder"] > products["save_attention"] > products["save_dots"]
    # The scores of the one layer's attention, and no product with a weight or an adapter.
    assert products["save_dots"] == products["none"] + 1
    assert products["offload_dots"] == products["save_dots"]
    assert products["decoder"] >= products["block"] > products["none"]


def test_save_dots_keeps_gate_and_up_and_no_other_array_of_their_width(built: Any) -> None:
    rows, length = training.packed_batch()["tokens"].shape
    wide = rows, length, built[1].forward.architecture.intermediate_size
    found = {policy: kept(*built, policy).count(wide) for policy in ("none", "save_dots")}
    assert found["none"] > found["save_dots"] == 2
