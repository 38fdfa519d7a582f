"""Tests of Mamba 1's scan against its plain recurrence with packed rows, and of its memory."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.runtime.test_delta import by_sequence, close, segments
from tests.runtime.test_mamba import PACKED
from tests.runtime.training import QUICK

CASES = {
    # name: mesh axes, features, tokens, the lengths of each row's sequences, features of one device
    "packed": ({"fsdp": 2, "tp": 2}, 6, 150, PACKED, 3),
    "less than a chunk, tp divides nothing": ({"fsdp": 1, "tp": 2}, 5, 9, [[4, 4], [9], []], 5),
}


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


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_mamba1_packed_scan_matches_separate_sequences(case: tuple[Any, ...]) -> None:
    """Compare outputs and gradients with the recurrence and torch's autograd in float64."""
    import jax
    import torch

    from recipec.runtime.model.mamba1 import scan
    from recipec.runtime.model.mesh import arrange

    axes, features, length, rows, of_device = case
    ids, count = segments(length, rows), len(rows)
    random = np.random.default_rng([length, features])
    x = random.standard_normal((count, length, features))
    step = np.exp(random.uniform(-6, 2, x.shape))
    rate = -np.exp(random.uniform(-4, 3, (features, 7)))
    b, c = (random.standard_normal((count, length, 7)) for _ in range(2))
    arrays = [one.astype(np.float32) for one in (x, step, rate, b, c)]
    upstream = random.standard_normal(x.shape).astype(np.float32)
    upstream[ids == 0] = 0

    tensors = [torch.tensor(one, dtype=torch.float64, requires_grad=True) for one in arrays]
    wide = [*tensors[:2], tensors[2].expand(count, length, *rate.shape), *tensors[3:]]
    wanted = by_sequence(recurrent, ids, *wide)
    wanted.backward(torch.tensor(upstream, dtype=torch.float64))

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(partial(scan, segment_ids=ids), *arrays)
        return out, pull(upstream)

    with arrange(axes, jax.devices()[: np.prod(list(axes.values()))]):
        out, gradients = jax.jit(both, compiler_options=QUICK).lower(*arrays).compile()(*arrays)
    assert np.isfinite(out).all()
    assert close(np.asarray(out) * (ids > 0)[..., None], wanted)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert close(gradient, tensor.grad)
    assert out.sharding.shard_shape(out.shape) == (count // axes["fsdp"], length, of_device)


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
