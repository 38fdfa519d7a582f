"""Tests of Mamba 1's scan against its plain recurrence with packed rows, and of its memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from tests.runtime.test_mamba import PACKED, check_scan


def recurrent(x: Any, step: Any, rate: Any, b: Any, c: Any) -> Any:
    """Compute one sequence [1, T, D] in torch, token by token."""
    import torch

    state = torch.zeros(1, x.shape[2], b.shape[2], dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        state = state * torch.exp(step[:, t, :, None] * rate[:, t])
        state = state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(2))
    return torch.stack(out, 1)


def test_mamba1_packed_scan_matches_separate_sequences() -> None:
    from recipec.runtime.model.mamba1 import scan

    length, features, rows = 150, 6, PACKED
    random = np.random.default_rng([length, features])
    x = random.standard_normal((len(rows), length, features))
    step = np.exp(random.uniform(-6, 2, x.shape))
    rate = -np.exp(random.uniform(-4, 3, (features, 7)))
    states = (random.standard_normal((len(rows), length, 7)) for _ in range(2))
    check_scan(scan, recurrent, [x, step, rate, *states], rows, {"fsdp": 2, "tp": 2}, (3,))


def test_the_backward_pass_does_not_keep_the_states_of_all_tokens() -> None:
    import jax
    import jax.numpy as jnp

    from recipec.runtime.model.mamba1 import scan

    length, features, states = 2048, 128, 16
    x, b = jnp.zeros((1, length, features)), jnp.zeros((1, length, states))
    arrays = (x, x, jnp.zeros((features, states)), b, b)
    ids = jnp.ones((1, length), jnp.int32)
    within = partial(scan, segment_ids=ids)
    gradients = jax.grad(lambda *arrays: within(*arrays).sum(), (0, 1, 2, 3, 4))
    used = jax.jit(gradients).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert used < length * features * states * 4
