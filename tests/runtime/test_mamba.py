"""Tests of the scans of Mamba 1 and 2 against plain recurrences with packed rows, and of Mamba 2's mixer."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from recipec.runtime.model import layers
from recipec.runtime.model.mixers import mamba1_scan, mamba2_scan
from recipec.runtime.model.sharding import arrange
from tests.runtime import decoders, training
from tests.runtime.test_delta import by_sequence, close, segments
from tests.runtime.training import QUICK

PACKED = [[1, 39, 24, 1, 66], [127], [150], []]
CASES = {
    # name: mesh axes, groups, heads, tokens, the lengths of each row's sequences, heads of one device
    "packed, groups split": ({"fsdp": 2, "tp": 2}, 2, 6, 150, PACKED, 3),
    "packed, a group's heads split": ({"fsdp": 2, "tp": 2}, 1, 4, 150, PACKED, 2),
}


def recurrent(x: Any, step: Any, rate: Any, b: Any, c: Any) -> Any:
    """Compute one sequence [1, T, ...] in torch, token by token."""
    repeat = x.shape[2] // b.shape[2]
    b, c = (one.repeat_interleave(repeat, dim=2) for one in (b, c))
    state = torch.zeros(1, x.shape[2], b.shape[3], x.shape[3], dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        kept = torch.exp(step[:, t] * rate[0, 0])[..., None, None]
        state = state * kept + b[:, t, :, :, None] * (step[:, t, :, None] * x[:, t])[:, :, None]
        out.append((state * c[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1)


def check_scan(
    scan: Any, recurrent: Any, given: list[Any], rows: Any, axes: dict[str, int], of_device: tuple[int, ...]
) -> None:
    """Compare outputs and gradients of packed rows with the recurrence and torch's autograd in float64.

    Args:
        given: x, the steps, the rates, B and C.
        of_device: the dimensions of the output after its tokens, on one device.
    """
    arrays = [one.astype(np.float32) for one in given]
    x, _, rate, *_ = arrays
    count, length = x.shape[:2]
    ids = segments(length, rows)
    real = (ids > 0).reshape(count, length, *[1] * (x.ndim - 2))
    upstream = (np.random.default_rng(0).standard_normal(x.shape) * real).astype(np.float32)

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
    assert close(np.asarray(out) * real, wanted)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert close(gradient, tensor.grad)
    assert out.sharding.shard_shape(out.shape) == (count // axes["fsdp"], length, *of_device)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_mamba2_packed_scan_matches_separate_sequences(case: tuple[Any, ...]) -> None:
    axes, groups, heads, length, rows, of_device = case
    random = np.random.default_rng([length, groups])
    x = random.standard_normal((len(rows), length, heads, 7))
    step = np.exp(random.uniform(-6, 2, x.shape[:3]))
    rate = -np.exp(random.uniform(-4, 2, heads))
    states = (random.standard_normal((len(rows), length, groups, 5)) for _ in range(2))
    check_scan(mamba2_scan, recurrent, [x, step, rate, *states], rows, axes, (of_device, 7))


@pytest.mark.parametrize(
    "changes",
    [
        {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "time_step_limit": [0.05, 0.3]},
        {"mamba_rms_norm": True, "mamba_norm_before_gate": True, "mamba_conv_bias": False},
    ],
    ids=["norm after the gate, short steps", "norm before the gate"],
)
def test_mamba2_mixer_matches_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    """Compare packed sequences in the first layer's mixer with each sequence alone in transformers."""
    model = decoders.make("falcon_h1", tmp_path, num_hidden_layers=1, **changes)
    _, built = training.build(tmp_path, {"fsdp": 1, "tp": 1}, remat="none", targets=("q_proj",))
    ids = segments(21, [[9, 12], [3, 5, 8]])
    x = np.random.default_rng(0).standard_normal((2, 21, 48)).astype(np.float32)
    with torch.no_grad():
        wanted = by_sequence(model.model.layers[0].mamba.torch_forward, ids, torch.tensor(x))
    own = layers.segments
    try:
        layers.segments = lambda: ids
        with jax.default_matmul_precision("highest"):
            found = built.model.layers[0].mamba.block(x)
    finally:
        layers.segments = own
    assert close(np.asarray(found) * (ids > 0)[..., None], wanted)


def recurrent_of_mamba1(x: Any, step: Any, rate: Any, b: Any, c: Any) -> Any:
    """Compute one sequence [1, T, D] in torch, token by token."""
    state = torch.zeros(1, x.shape[2], b.shape[2], dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        state = state * torch.exp(step[:, t, :, None] * rate[:, t])
        state = state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
        out.append((state * c[:, t, None]).sum(2))
    return torch.stack(out, 1)


def test_mamba1_packed_scan_matches_separate_sequences() -> None:
    length, features, rows = 150, 6, PACKED
    random = np.random.default_rng([length, features])
    x = random.standard_normal((len(rows), length, features))
    step = np.exp(random.uniform(-6, 2, x.shape))
    rate = -np.exp(random.uniform(-4, 3, (features, 7)))
    states = (random.standard_normal((len(rows), length, 7)) for _ in range(2))
    check_scan(mamba1_scan, recurrent_of_mamba1, [x, step, rate, *states], rows, {"fsdp": 2, "tp": 2}, (3,))


def test_the_backward_pass_does_not_keep_the_states_of_all_tokens() -> None:
    length, features, states = 2048, 128, 16
    x, b = jnp.zeros((1, length, features)), jnp.zeros((1, length, states))
    arrays = (x, x, jnp.zeros((features, states)), b, b)
    ids = jnp.ones((1, length), jnp.int32)
    within = partial(mamba1_scan, segment_ids=ids)
    gradients = jax.grad(lambda *arrays: within(*arrays).sum(), (0, 1, 2, 3, 4))
    used = jax.jit(gradients).lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert used < length * features * states * 4
