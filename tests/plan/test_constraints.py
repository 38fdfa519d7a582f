"""Tests that a planned step has the same activation constraints as a step on a TPU.

Tunix omits the constraints if the default backend is a CPU, and every machine that plans has a CPU backend.
The reference is Tunix's own helper with a faked TPU backend.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any
from unittest import mock

import pytest

from recipec.compiler.lowering.program import Program
from recipec.runtime.model import forward
from tests.plan.plans import abstract, lowered

SETS = (
    "mesh.axes={fsdp: 2, tp: 2}",
    "model.attention=dot",
    "train.global_batch_size=2",
    "data.max_length=64",
)
LAYERS = (4, 5)
"""A sliding and a global layer of Gemma 4 31B, at their real sizes: nothing is computed."""


@pytest.fixture(scope="module")
def program() -> Program:
    return lowered("gemma4-31b-v5p8", *SETS)


def constraints(program: Program) -> Counter[str]:
    """Count the shardings that the step's HLO constrains arrays to, before partitioning."""
    _, text = abstract(program, LAYERS, lowering=True)
    found = re.findall(r"sdy\.sharding_constraint %\S+ (<.*?>) : (tensor<\S+>)", text)
    assert found or "sharding_constraint" not in text
    return Counter(f"{array} {spec}" for spec, array in found)


@pytest.fixture(scope="module")
def ours(program: Program) -> Counter[str]:
    return constraints(program)


def test_planned_step_has_the_same_constraints_as_tunix_on_a_tpu(
    program: Program, ours: Counter[str]
) -> None:
    with tunix_on_a_tpu():
        theirs = constraints(program)
    assert ours == theirs
    # Queries, keys, values, the feed-forward block and both results, in each layer.
    assert sum(ours.values()) >= len(LAYERS) * 7
    assert any('"tp"' in key for key in ours) and any('"fsdp"' in key for key in ours)


def test_constraint_count_falls_if_the_constrain_helper_does_nothing(
    program: Program, ours: Counter[str]
) -> None:
    with mock.patch.object(forward.sharding, "constrain", lambda x, spec, eager=False: x):
        dropped = constraints(program)
    assert sum(dropped.values()) < sum(ours.values()) / 2


def tunix_on_a_tpu() -> Any:
    """Replace our helper by Tunix's, which is made to see a TPU backend."""
    import jax
    from tunix.utils import sharding_utils

    class Tpu:
        platform = "tpu"

    shard = sharding_utils.shard
    fake = mock.Mock(wraps=jax)
    fake.devices = lambda: [Tpu()]

    def on_a_tpu(x: Any, spec: Any, eager: bool = False) -> Any:
        with mock.patch.object(sharding_utils, "jax", fake):
            return shard(x, spec, eager)

    return mock.patch.object(forward.sharding, "constrain", on_a_tpu)
