"""Tests of context parallelism: a row split over devices trains as on one device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.runtime import training
from tests.runtime.test_attention import LAYERS, PACKED, differ, loss_and_gradients, moved, with_splash

TOLERANCE = 1e-5
"""For a loss of 6 and gradients of up to 0.5, in float32."""
ALONE = {"fsdp": 1, "tp": 1}


def test_context_parallel_loss_and_gradients_match_one_device(tmp_path: Path) -> None:
    """Compare the loss and LoRA's gradients on packed rows of seven samples, some longer than the window."""
    tiny.make_gemma4(tmp_path, multimodal=False, **LAYERS)
    found = []
    for axes in (ALONE, {"fsdp": 1, "cp": 4, "tp": 2}):
        mesh, built = training.build(tmp_path, axes)
        moved(built)
        found.append(loss_and_gradients(built.forward, built, mesh)(PACKED))
        weights = [array for array in training.placed(built.model) if array.ndim > 1]
        assert any("cp" in str(array.sharding.spec) for array in weights) == (axes is not ALONE)
    alone, split = found
    assert max(np.abs(gradient).max() for gradient in alone[1].values()) > 0.05
    assert max(differ(split, alone)) < TOLERANCE


def test_context_parallel_log_probabilities_keep_token_order(tmp_path: Path) -> None:
    import jax
    from flax import nnx

    from recipec.runtime.model.sharding import shard_rows
    from recipec.runtime.training.logps import token_logps

    tiny.make_llama(tmp_path / "base", num_hidden_layers=1)
    found = []
    for axes in ({"fsdp": 1, "cp": 2, "tp": 1}, ALONE):
        mesh, built = training.build(tmp_path / "base", axes, remat="none")
        forward = with_splash(built)
        graph, state = nnx.split(built.model)

        @partial(jax.jit, compiler_options=training.QUICK)
        def logps(state: Any, inputs: Any, forward: Any = forward, graph: Any = graph) -> Any:
            names = ("tokens", "positions", "segment_ids")
            return token_logps(forward, nnx.merge(graph, state), *(inputs[name] for name in names))

        with mesh:
            found.append(np.asarray(logps(state, shard_rows(PACKED, mesh))))
    assert np.abs(found[1]).max() > 1
    assert np.abs(found[0] - found[1]).max() < TOLERANCE


def test_context_order_balances_causal_work_over_devices() -> None:
    from recipec.runtime.model.context import order

    for devices in (2, 3, 8):
        places = order(2 * devices * 4, devices)
        assert sorted(places) == list(range(2 * devices * 4))
        assert len({int(part.sum()) for part in np.split(places, devices)}) == 1


@pytest.mark.parametrize("window", [None, 300, 1])
def test_causal_mask_blocks_match_the_splash_kernel_masks(
    window: int | None,
) -> None:
    from jax.experimental.pallas.ops.tpu import splash_attention as kernels

    from recipec.runtime.model.attention import causal_mask
    from recipec.runtime.model.context import order

    length, block = 1536, 128
    mask = causal_mask(length, window, 3)
    shape = (length, length)
    own = kernels.CausalMask(shape) if window is None else kernels.LocalMask(shape, (window - 1, 0), 0)
    own.q_sequence = order(length, 3)
    blocks = [slice(start, start + block) for start in range(0, length, block)]
    kinds = set()
    for one in ((queries, keys) for queries in blocks for keys in blocks):
        found, wanted = mask[one], own[one]
        assert (found.any(), found.all()) == (wanted.any(), wanted.all())
        kinds.add(found.shape)
    assert kinds == {(1, 1), (block, block)}
