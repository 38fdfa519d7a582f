"""Tests of the gated delta rule and its convolution against transformers, with packed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from recipec.runtime.model.mixers import causal_conv, gated_delta_rule
from recipec.runtime.model.sharding import arrange
from tests.runtime.training import QUICK

TOLERANCE = 1e-5
"""For an output or a gradient, relative to the largest of its array."""

CASES = {
    # name: mesh axes, key heads, value heads, tokens, the lengths of each row's sequences
    "packed, sharded": ({"fsdp": 2, "tp": 2}, 2, 6, 150, [[1, 39, 24, 1, 66], [127], [150], []]),
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


def close(found: Any, wanted: Any) -> bool:
    wanted = wanted.detach().numpy()
    assert np.abs(wanted).max() > 0.5
    return bool(np.abs(np.asarray(found) - wanted).max() < TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
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
