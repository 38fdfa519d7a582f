"""Tests of splash attention, interpreted on a CPU, against plain float32 attention, and of rows that context
parallelism splits over devices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
from jax.sharding import AxisType

from recipec.runtime.model import attention
from recipec.runtime.model.attention import (
    Scoring,
    block_size,
    causal_mask,
    collect,
    deal,
    splash,
    token_order,
)
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.training.losses import batch_loss, token_logps
from tests import tiny
from tests.runtime import decoders, training
from tests.runtime.training import QUICK

TOLERANCE = 1e-5
"""For outputs of up to 4. Gradients reach 20 here, and may differ by ten times as much."""

ALONE = (None, 2, 150, 4, 2, 32, None, None, True)
TOKENS_APART = ({"fsdp": 2, "cp": 2, "tp": 2}, 2, 700, 4, 2, 16, None, None, False)
CASES = {
    # name: mesh axes, rows, tokens, query heads, key/value heads, head size, window, soft-cap, sinks. If
    # values have another size than keys, the head size is a pair.
    "soft-cap, slices": ({"dcn": 2, "fsdp": 2, "tp": 2}, 4, 130, 4, 2, 24, 150, 5.0, False),
    "one key/value head for two devices": ({"fsdp": 2, "tp": 4}, 2, 130, 8, 2, 32, None, None, True),
    "tp does not divide the heads, nor fsdp the rows": (
        *({"fsdp": 2, "tp": 4}, 3, 130, 6, 2, 32, 40, None, False),
    ),
    "values of another size": ({"fsdp": 2, "tp": 2}, 2, 150, 4, 4, (24, 20), None, None, False),
    "tokens apart, a window over pieces": ({"fsdp": 2, "cp": 2, "tp": 2}, 2, 700, 4, 2, 16, 300, 5.0, True),
}
LIKE_OTHERS = ("one key/value head for two devices", "values of another size")
"""Cases of `make e2e`, whose sinks, heads and sizes the tests of whole models have too."""


def segments(rows: int, length: int) -> np.ndarray:
    """Make three segments of odd lengths in each row, then padding. The last row is only padding."""
    random = np.random.default_rng([rows, length])
    out = np.zeros((rows, length), np.int32)
    for row in out[:-1]:
        cuts = np.sort(random.choice(np.arange(1, length), 3, replace=False))
        row[:] = np.searchsorted(cuts, np.arange(length), side="right") + 1
        row[row == 4] = 0
    return out


def reference(q: Any, k: Any, v: Any, sinks: Any, ids: Any, window: int | None, softcap: float | None) -> Any:
    """Compute attention with all scores at once.

    Keys and values are repeated for their query heads. A sink, or minus infinity, is one more score.
    """
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    place = jnp.arange(q.shape[1])
    distance = place[:, None] - place[None]
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    seen = seen[None] & (ids[:, :, None] == ids[:, None, :])
    scores = jnp.where(seen[:, None], scores, -1e30)
    sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), axis=-1)[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", weights, v, precision="highest")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.e2e if name in LIKE_OTHERS else ())
        for name, case in CASES.items()
    ],
)
def test_splash_outputs_and_gradients_match_plain_attention(case: tuple[Any, ...]) -> None:
    axes, rows, length, heads, kv_heads, sizes, window, softcap, sunk = case
    size, value_size = sizes if isinstance(sizes, tuple) else (sizes, sizes)
    mesh = None
    if axes is not None:
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    random = np.random.default_rng(0)
    q = random.standard_normal((rows, length, heads, size)).astype(np.float32) / 4
    k, v = (
        random.standard_normal((rows, length, kv_heads, one)).astype(np.float32) for one in (size, value_size)
    )
    ids = segments(rows, length)
    upstream = random.standard_normal((rows, length, heads, value_size)).astype(np.float32)
    sinks = 3 * random.standard_normal(heads).astype(np.float32) if sunk else np.full(heads, -1e30)

    def kernel(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        with mesh or nullcontext():
            dealt = map(deal, (q, k, v, jnp.asarray(ids)))
            out = splash(*dealt, Scoring(window, softcap, sinks if sunk else None), mesh)
            return collect(out, length)

    def both(attend: Callable[..., Any]) -> Any:
        out, pull = jax.vjp(attend, q, k, v, sinks)
        return out, pull(upstream)

    compiled = partial(jax.jit, compiler_options=QUICK)
    found, gradients = compiled(lambda: both(kernel))()
    expected, wanted = compiled(lambda: both(lambda *four: reference(*four, ids, window, softcap)))()
    # In both, padding attends to padding, so that the comparison covers everything.
    assert np.abs(found - expected).max() < TOLERANCE
    for gradient, want in zip(gradients[: 3 + sunk], wanted[: 3 + sunk], strict=True):
        assert np.abs(want).max() > 1
        assert np.abs(gradient - want).max() < 10 * TOLERANCE


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(ALONE, id="one device"),
        pytest.param(TOKENS_APART, id="tokens apart", marks=pytest.mark.e2e),
    ],
)
def test_splash_fused_backward_kernel_matches_plain_attention(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "FUSED", 128)
    attention._kernel.cache_clear()
    test_splash_outputs_and_gradients_match_plain_attention(case)
    attention._kernel.cache_clear()


def test_backward_kernel_is_fused_while_partial_gradients_are_few() -> None:
    def fused(length: int, block: int, window: int | None = None, parts: int = 1) -> bool:
        kernel = attention._kernel(1, length, Scoring(window), block, True, parts)
        return bool(kernel.kwargs["block_sizes"].use_fused_bwd_kernel)

    assert fused(8192, 1024) and not fused(16384, 1024) and not fused(4096, 512)
    assert not fused(4096, 1024, window=1024)
    assert fused(32768, 2048, parts=8) and not fused(32768, 2048)


def test_splash_block_size_follows_row_length() -> None:
    lengths = {3072: 512, 4096: 512, 1000: 512, 2900: 512, 1280: 256, 640: 128, 1100: 128, 16: 128}
    assert {length: block_size(length) for length in lengths} == lengths
    larger = {3072: 1024, 4096: 1024, 1000: 1024, 2900: 1024, 2560: 512, 640: 128}
    assert {length: block_size(length, 1024) for length in larger} == larger


LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
ROWS, LENGTH = 8, 24
TARGETS = ("q_.*proj", "kv?_.*proj.*", "v_proj", "o_proj")


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (tokens, which carry loss) of seven samples, some longer than the models' window of 8."""
    random = np.random.default_rng(3)
    out = []
    for length in (17, 7, 11, 9, 13, 11, 20):
        loss = np.arange(length) >= random.integers(1, 5)
        out.append((random.integers(3, 500, length).astype(np.int32), loss))
    return out


def rows_of(groups: list[list[int]]) -> dict[str, np.ndarray]:
    """Pack each group's samples into a row of a micro-batch. The other rows are padding."""
    every = samples()
    out: dict[str, Any] = {
        name: np.zeros((ROWS, LENGTH), np.int32) for name in ("tokens", "positions", "segment_ids")
    }
    out["loss_mask"] = np.zeros((ROWS, LENGTH), bool)
    for row, group in enumerate(groups):
        start = 0
        for number, sample in enumerate(group, 1):
            tokens, loss = every[sample]
            place = slice(start, start + len(tokens))
            out["tokens"][row, place], out["loss_mask"][row, place] = tokens, loss
            out["positions"][row, place], out["segment_ids"][row, place] = np.arange(len(tokens)), number
            start += len(tokens)
    out["norm"] = np.float32(sum(int(loss[1:].sum()) for _, loss in every))
    return out


PACKED = rows_of([[0, 1], [2, 3], [4, 5], [6]])
PADDED = rows_of([[i] for i in range(7)])


def with_splash(built: Any) -> Any:
    """Return the model's Forward with splash attention."""
    return replace(built.forward, settings=replace(built.forward.settings, attention="splash"))


def loss_and_gradients(forward: Any, built: Any, mesh: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a function of a micro-batch's loss and its adapter gradients by path."""
    graph, adapters, rest = nnx.split(built.model, nnx.LoRAParam, ...)

    @partial(jax.jit, compiler_options=QUICK)
    def compute(adapters: Any, rest: Any, batch: Any) -> Any:
        def loss_of(adapters: Any) -> Any:
            return batch_loss(forward, nnx.merge(graph, adapters, rest), batch)

        return jax.value_and_grad(loss_of)(adapters)

    def run(batch: dict[str, Any]) -> Any:
        with mesh:
            loss, gradients = compute(adapters, rest, shard_rows(batch, mesh))
        leaves = {path: np.asarray(leaf.get_raw_value()) for path, leaf in gradients.flat_state()}
        return float(loss), leaves

    return run


def moved(built: Any) -> None:
    """Give B random values, because A's gradients are zero otherwise."""
    random = np.random.default_rng(1)
    state = nnx.state(built.model, nnx.LoRAParam)
    for path, variable in state.flat_state():
        if str(path[-1]).endswith("_b"):
            value = variable.get_raw_value()
            noise = 0.1 * random.standard_normal(value.shape).astype(np.float32)
            variable.set_raw_value(jax.device_put(noise, value.sharding))
    nnx.update(built.model, state)


def differ(one: Any, other: Any) -> tuple[float, float]:
    """Return the difference of two losses, and the largest difference of their gradients."""
    assert one[1].keys() == other[1].keys()
    return abs(one[0] - other[0]), max(float(np.abs(one[1][path] - other[1][path]).max()) for path in one[1])


def test_packed_rows_train_like_padded_rows_with_dot_and_splash(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "base", multimodal=False, **LAYERS)
    mesh, built = training.build(tmp_path / "base", {"fsdp": 4, "tp": 2}, remat="none", targets=TARGETS)
    moved(built)
    dot = loss_and_gradients(built.forward, built, mesh)
    splash = loss_and_gradients(with_splash(built), built, mesh)
    wanted = dot(PADDED)
    assert max(np.abs(gradient).max() for gradient in wanted[1].values()) > 0.05
    for found in (dot(PACKED), splash(PACKED), splash(PADDED)):
        loss, gradients = differ(found, wanted)
        assert loss < 1e-5
        assert gradients < 1e-5


SHARED = {"num_hidden_layers": 4, "layer_types": LAYERS["layer_types"] * 2, "num_kv_shared_layers": 2}
MODELS: dict[str, tuple[Callable[..., Any], dict[str, int], dict[str, Any]]] = {
    # The last two layers use the keys and values of the first two.
    "gemma4-shared": (tiny.make_gemma4, {"fsdp": 8, "tp": 1}, {**tiny.GEMMA4_E2B, **SHARED}),
    "gemma3": (tiny.make_gemma3, {"fsdp": 4, "tp": 2}, {}),
    "olmo3": (partial(decoders.make, "olmo3"), {"fsdp": 4, "tp": 2}, {}),
    "deepseek_v3": (partial(decoders.make, "deepseek_v3"), {"fsdp": 4, "tp": 2}, {"num_hidden_layers": 2}),
    # Samples of up to four whole chunks and a partial one.
    "llama4": (partial(decoders.make, "llama4"), {"fsdp": 4, "tp": 2}, {}),
}


SPLASH = ("gemma4-shared", "deepseek_v3")
"""Models of `make test`: shared keys and values, and values of another size."""


@pytest.mark.parametrize(
    "model",
    [name if name in SPLASH else pytest.param(name, marks=pytest.mark.e2e) for name in MODELS],
)
def test_splash_logits_match_dot_attention(model: str, tmp_path: Path) -> None:
    make, axes, options = MODELS[model]
    make(tmp_path / "base", **options)
    mesh, built = training.build(tmp_path / "base", axes, remat="none", targets=TARGETS)
    moved(built)
    wanted = training.logits(built, mesh, PACKED)
    found = training.logits(replace(built, forward=with_splash(built)), mesh, PACKED)
    real = PACKED["segment_ids"] > 0
    assert np.abs(wanted[real]).max() > 1
    assert np.abs(found - wanted)[real].max() < 1e-4
    assert np.isfinite(found).all()


ONE_DEVICE = {"fsdp": 1, "tp": 1}


def test_context_parallel_loss_and_gradients_match_one_device(tmp_path: Path) -> None:
    """Compare the loss and LoRA's gradients on packed rows of seven samples, some longer than the window."""
    tiny.make_gemma4(tmp_path, multimodal=False, **LAYERS)
    found = []
    for axes in (ONE_DEVICE, {"fsdp": 1, "cp": 4, "tp": 2}):
        mesh, built = training.build(tmp_path, axes)
        moved(built)
        found.append(loss_and_gradients(built.forward, built, mesh)(PACKED))
        weights = [array for array in training.placed(built.model) if array.ndim > 1]
        assert any("cp" in str(array.sharding.spec) for array in weights) == (axes is not ONE_DEVICE)
    alone, split = found
    assert max(np.abs(gradient).max() for gradient in alone[1].values()) > 0.05
    assert max(differ(split, alone)) < TOLERANCE


def test_context_parallel_log_probabilities_keep_token_order(tmp_path: Path) -> None:
    tiny.make_llama(tmp_path / "base", num_hidden_layers=1)
    found = []
    for axes in ({"fsdp": 1, "cp": 2, "tp": 1}, ONE_DEVICE):
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
    for devices in (2, 3, 8):
        places = token_order(2 * devices * 4, devices)
        assert sorted(places) == list(range(2 * devices * 4))
        assert len({int(part.sum()) for part in np.split(places, devices)}) == 1


@pytest.mark.parametrize("window", [None, 300, 1])
def test_causal_mask_blocks_match_the_splash_kernel_masks(window: int | None) -> None:
    length, block = 1536, 128
    mask = causal_mask(length, window, 3)
    shape = (length, length)
    own = kernels.CausalMask(shape) if window is None else kernels.LocalMask(shape, (window - 1, 0), 0)
    own.q_sequence = token_order(length, 3)
    blocks = [slice(start, start + block) for start in range(0, length, block)]
    kinds = set()
    for one in ((queries, keys) for queries in blocks for keys in blocks):
        found, wanted = mask[one], own[one]
        assert (found.any(), found.all()) == (wanted.any(), wanted.all())
        kinds.add(found.shape)
    assert kinds == {(1, 1), (block, block)}
