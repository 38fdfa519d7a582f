"""The loss against a plain computation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.runtime import training


def reference(logits: np.ndarray, one: dict[str, Any]) -> float:
    total = 0.0
    for row in range(logits.shape[0]):
        for t in range(1, logits.shape[1]):
            same = one["segment_ids"][row, t] == one["segment_ids"][row, t - 1]
            if one["loss_mask"][row, t] and same:
                scores = logits[row, t - 1].astype(np.float64)
                total += np.log(np.exp(scores - scores.max()).sum()) + scores.max()
                total -= scores[one["tokens"][row, t]]
    return total / float(one["norm"])


def loss_of(logits: np.ndarray, one: dict[str, Any]) -> float:
    import jax.numpy as jnp

    from runtime.loss import batch_loss

    names = ("positions", "segment_ids", "loss_mask", "norm")
    forward = SimpleNamespace(logits=lambda *_: jnp.asarray(logits))
    return float(batch_loss(forward, None, jnp.asarray(one["tokens"]), *(jnp.asarray(one[n]) for n in names)))


def test_padded_and_packed_rows() -> None:
    logits = (
        np.random.default_rng(0).standard_normal((training.ROWS, training.LENGTH, 509)).astype(np.float32)
    )
    for one in (training.batch(0), training.packed_batch()):
        assert abs(loss_of(4 * logits, one) - reference(4 * logits, one)) < 1e-5


def test_a_micro_batch_without_targets_is_zero() -> None:
    one = training.batch(0)
    one["loss_mask"][:] = False
    logits = np.zeros((training.ROWS, training.LENGTH, 509), np.float32)
    for norm in (0.0, 5.0):
        one["norm"] = np.float32(norm)
        assert loss_of(logits, one) == 0.0


def test_bfloat16_logits_are_summed_in_float32() -> None:
    import jax.numpy as jnp

    from runtime.loss import token_nll

    logits = jnp.full((1, 1, 4096), 3.0, jnp.bfloat16)
    found = token_nll(logits, jnp.zeros((1, 1), jnp.int32))
    assert found.dtype == jnp.float32
    assert abs(float(found[0, 0]) - np.log(4096)) < 1e-5


def test_attention_mask() -> None:
    import jax.numpy as jnp

    from runtime.forward import attention_mask

    mask = np.asarray(attention_mask(jnp.array([[1, 1, 2, 2, 0]])))[0]
    expected = np.zeros((5, 5), bool)
    for query, keys in ((0, [0]), (1, [0, 1]), (2, [2]), (3, [2, 3])):
        expected[query, keys] = True
    assert np.array_equal(mask, expected)
