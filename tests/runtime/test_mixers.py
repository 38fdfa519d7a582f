"""Tests of the layers that carry a state, packed rows against separate sequences: gated delta nets against
transformers, the scans of Mamba 1 and 2 against plain recurrences, and Mamba 2's mixer against transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from recipec.runtime.model.layers import Batch
from recipec.runtime.model.mixers import causal_conv, gated_delta_rule, mamba1_scan, mamba2_scan
from recipec.runtime.model.sharding import arrange
from tests.runtime import decoders, training
from tests.runtime.training import QUICK

TOLERANCE = 1e-5
"""For an output or a gradient, relative to the largest of its array."""

PACKED = [[1, 39, 24, 1, 66], [127], [150], []]
DELTA_CASES = {
    # name: mesh axes, key heads, value heads, tokens, the lengths of each row's sequences
    "packed, sharded": ({"fsdp": 2, "tp": 2}, 2, 6, 150, PACKED),
    "less than a chunk, tp does not divide": ({"fsdp": 1, "tp": 2}, 3, 3, 9, [[4, 4], [9], []]),
}


def segments(length: int, rows: list[list[int]]) -> np.ndarray:
    """Return int32[B, T]: sequences one after the other, then padding."""
    out = np.zeros((len(rows), length), np.int32)
    for row, lengths in zip(out, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return out


def by_sequence(compute: Callable[..., Any], ids: np.ndarray, *arrays: Any) -> Any:
    """Apply a function of torch tensors [1, T, ...] to each sequence alone, with zeros for padding."""
    rows = []
    for row, segment_ids in enumerate(ids):
        parts = []
        for number in np.unique(segment_ids):
            place = np.flatnonzero(segment_ids == number)
            out = compute(*(x[row : row + 1, place[0] : place[-1] + 1] for x in arrays))[0]
            parts.append((place[0], out if number else torch.zeros_like(out)))
        rows.append(torch.cat([out for _, out in sorted(parts, key=lambda part: part[0])]))
    return torch.stack(rows)


def inputs(keys: int, values: int, length: int, rows: int) -> list[np.ndarray]:
    """Return q, k, v, g and beta.

    The decay keeps anything from all to nothing of a state. The last rows repeat one key.
    """
    random = np.random.default_rng([length, keys])
    q, k = (random.standard_normal((rows, length, keys, 5)) for _ in range(2))
    k[2:] = k[2:, :1]
    v = random.standard_normal((rows, length, values, 7))
    g = -np.exp(random.uniform(-6, 4, (rows, length, values)))
    g[2:] /= 1000
    beta = 1 / (1 + np.exp(-4 * random.standard_normal((rows, length, values))))
    return [x.astype(np.float32) for x in (q, k, v, g, beta)]


def close(values: Any, wanted: Any) -> bool:
    wanted = wanted.detach().numpy()
    assert np.abs(wanted).max() > 0.5
    return bool(np.abs(np.asarray(values) - wanted).max() < TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("case", DELTA_CASES.values(), ids=DELTA_CASES.keys())
def test_gated_delta_rule_on_packed_rows_matches_separate_sequences(case: tuple[Any, ...]) -> None:
    """Compare outputs and gradients with transformers' recurrent form and torch's autograd."""
    axes, keys, values, length, rows = case
    ids, arrays = segments(length, rows), inputs(keys, values, length, len(rows))
    upstream = np.random.default_rng(0).standard_normal(arrays[2].shape).astype(np.float32)
    upstream[ids == 0] = 0

    def recurrent(q: Any, k: Any, *rest: Any) -> Any:
        q, k = (x.repeat_interleave(values // keys, dim=2) for x in (q, k))
        return torch_recurrent_gated_delta_rule(q, k, *rest, None, False, use_qk_l2norm_in_kernel=True)[0]

    tensors = [torch.tensor(x, requires_grad=True) for x in arrays]
    wanted = by_sequence(recurrent, ids, *tensors)
    wanted.backward(torch.tensor(upstream))

    def both(*arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *arrays: gated_delta_rule(*arrays, ids), *arrays)
        return out, pull(upstream)

    with arrange(axes, jax.devices()[: np.prod(list(axes.values()))]):
        compiled = jax.jit(both, compiler_options=QUICK).lower(*arrays).compile()
        out, gradients = compiled(*arrays)
    assert np.isfinite(out).all()
    assert close(np.asarray(out) * (ids > 0)[..., None, None], wanted)
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert close(gradient, tensor.grad)
    if keys % axes["tp"] == 0:
        assert out.sharding.shard_shape(out.shape) == (len(rows) // 2, length, values // 2, 7)


def test_convolution_on_packed_rows_matches_separate_sequences() -> None:
    random = np.random.default_rng(0)
    ids = segments(11, [[1, 2, 5, 3], [7], []])
    x, weight = (random.standard_normal(shape).astype(np.float32) for shape in ((3, 11, 6), (6, 4)))

    def convolved(x: Any) -> Any:
        out = torch.nn.functional.conv1d(x.mT, torch.tensor(weight)[:, None], padding=3, groups=6)
        return out[..., : x.shape[1]].mT

    out = jax.jit(partial(causal_conv, segment_ids=ids))(x, weight)
    assert close(np.asarray(out) * (ids > 0)[..., None], by_sequence(convolved, ids, torch.tensor(x)))
    assert causal_conv(x[:, :2], weight, ids[:, :2]).shape == (3, 2, 6)


MAMBA2_CASES = {
    # name: mesh axes, groups, heads, tokens, the lengths of each row's sequences, heads of one device
    "packed, groups split": ({"fsdp": 2, "tp": 2}, 2, 6, 150, PACKED, 3),
    "packed, a group's heads split": ({"fsdp": 2, "tp": 2}, 1, 4, 150, PACKED, 2),
}


def recurrent(x: Any, step: Any, rate: Any, b: Any, c: Any) -> Any:
    """Compute one sequence [1, T, ...] in torch, token by token."""
    repeat = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(repeat, dim=2) for part in (b, c))
    state = torch.zeros(1, x.shape[2], b.shape[3], x.shape[3], dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        kept = torch.exp(step[:, t] * rate[0, 0])[..., None, None]
        state = state * kept + b[:, t, :, :, None] * (step[:, t, :, None] * x[:, t])[:, :, None]
        out.append((state * c[:, t, :, :, None]).sum(2))
    return torch.stack(out, 1)


def check_scan(
    scan: Any, recurrent: Any, inputs: list[Any], rows: Any, axes: dict[str, int], of_device: tuple[int, ...]
) -> None:
    """Compare outputs and gradients of packed rows with the recurrence and torch's autograd in float64.

    Args:
        inputs: x, the steps, the rates, B and C.
        of_device: the dimensions of the output after its tokens, on one device.
    """
    arrays = [array.astype(np.float32) for array in inputs]
    x, _, rate, *_ = arrays
    count, length = x.shape[:2]
    ids = segments(length, rows)
    real = (ids > 0).reshape(count, length, *[1] * (x.ndim - 2))
    upstream = (np.random.default_rng(0).standard_normal(x.shape) * real).astype(np.float32)

    tensors = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in arrays]
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


@pytest.mark.parametrize("case", MAMBA2_CASES.values(), ids=MAMBA2_CASES.keys())
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
    batch = Batch(ids, ids)
    with jax.default_matmul_precision("highest"):
        out = built.model.layers[0].mamba.block(x, batch)
    assert close(np.asarray(out) * (ids > 0)[..., None], wanted)


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
