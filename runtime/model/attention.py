"""Attention within segments, over padded and packed rows: from all scores, or by the splash kernel.

Splash attention is the TPU's block-sparse kernel. It gets the segments, never holds the [T, T] scores, and
skips the blocks that the causal mask or the window leaves empty.

Context parallelism splits the tokens of a row over the devices of the mesh axis cp. The last tokens of a row
cost the most, because splash attention skips what the causal mask hides. For splash attention a row is
therefore cut into twice as many pieces as there are devices. Each device takes one piece from the front and
its mirror image from the back, so that all devices compute the same number of blocks. Queries stay in place;
keys and values are gathered. Attention from all scores has the row's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as kernels
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .layers import Batch, capped
from .partition_rules import TOKENS, dealt_length, row_axes
from .sharding import mesh_in_scope, on_tpu

BLOCKS = (2048, 1024, 512, 256, 128)
"""Sizes of a block, in tokens. With larger blocks the kernel visits fewer of them, but computes more scores
that the mask drops, and needs more VMEM."""

MOST = 512
"""The largest block where a recipe does not set one, in tokens: it compiles for all TPUs and head sizes."""

FUSED = 1024
"""From this block size on, in tokens, the backward pass is one kernel, which computes the scores once for all
gradients. It writes a partial gradient of the queries for each block of keys. With small blocks these cost
more than they save (blocks of 512, Llama 3.2 1B on v5e: a step takes 1.5 % longer by the time model)."""

PARTIAL_TOKENS = 2**17
"""The most tokens of partial gradients that one kernel for the backward pass may write: the tokens of the
device's queries, times the blocks of keys."""

PADDING = 1 / 8
"""The share of a row that may be added as padding, so that the row splits into larger blocks."""

RESIDUALS = "attention"
"""The name of the kernel's output and its row sums in jax.checkpoint's policies. If they are saved, the
backward pass does not run the forward kernel again."""


@dataclass(frozen=True)
class Scoring:
    """What attention does with its scores, in addition to the mask and the softmax.

    Attributes:
        window: how many tokens a token sees, itself included; None for all earlier ones.
        softcap: s becomes tanh(s / softcap) * softcap; None for none.
        sinks: [N], for each query head an extra score without a value; None for none.
        chunk: how many tokens of a segment belong together, from its first one: tokens see only tokens of
            their own chunk; None for whole segments.
        both_ways: whether the tokens of one picture see each other, whatever their order.
        within_window: whether they do so only within the window.
        causal: whether a token sees only itself and earlier tokens; of the splash kernel.
    """

    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    chunk: int | None = None
    both_ways: bool = False
    within_window: bool = False
    causal: bool = True


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, batch: Batch, scale: float, scoring: Scoring
) -> jax.Array:
    """Compute attention from all scores, or without a mask by the splash kernel.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H], K dividing N: query head n reads head n * K // N. Values may have another width.
            S is T, unless the batch has `key_positions`.
        scale: factor of the scores.
        scoring: what attention does with the scores.

    Returns:
        [B, T, N, H] in q's dtype, with the values' width.
    """
    if batch.mask is not None and batch.cache is not None and batch.key_positions is not None:

        def compute(k: jax.Array, v: jax.Array, mask: jax.Array, positions: jax.Array) -> jax.Array:
            mask = visible(mask, replace(batch, key_positions=positions), scoring)
            return attend_by_scores(q, k, v, mask, scale, scoring)

        reach = min((size for size in (scoring.window, scoring.chunk) if size is not None), default=None)
        arrays = (k, 1), (v, 1), (batch.mask, 2), (batch.key_positions, 1)
        return batch.cache.with_filled(reach, compute, *arrays)
    if batch.mask is not None:
        return attend_by_scores(q, k, v, visible(batch.mask, batch, scoring), scale, scoring)
    q = q if scale == 1 else q * scale
    ids = batch.segment_ids
    if scoring.chunk is not None:
        ids = chunks(ids, batch.positions, scoring.chunk)
    return splash_in_scope(q, k, v, ids, scoring, batch.attention_block)


def visible(mask: jax.Array, batch: Batch, scoring: Scoring) -> jax.Array:
    """Return bool[B, T, S], which keys each token attends to: of the mask, those within window and chunk."""
    window, chunk = scoring.window, scoring.chunk
    if batch.key_positions is None:
        if window is not None and window < mask.shape[1]:
            place = jnp.arange(mask.shape[1])
            mask = mask & (place[:, None] - place[None, :] < window)
        if chunk is not None:
            parts = chunks(batch.segment_ids, batch.positions, chunk)
            mask = mask & (parts[:, :, None] == parts[:, None, :])
        if batch.image_ids is not None and scoring.both_ways:
            mask = mask | of_one_picture(batch.image_ids, window if scoring.within_window else None)
        return mask
    queries, keys = batch.positions[:, :, None], batch.key_positions[:, None]
    if window is not None:
        mask = mask & (queries - keys < window)
    return mask if chunk is None else mask & (queries // chunk == keys // chunk)


def of_one_picture(image_ids: jax.Array, window: int | None) -> jax.Array:
    """Return bool[B, T, T], which tokens stand for the same picture.

    Args:
        image_ids: int32[B, T], from 1 in each row; 0 for text.
        window: a token does not see those so many tokens before it; None for any distance.
    """
    same = (image_ids[:, :, None] == image_ids[:, None, :]) & (image_ids > 0)[:, :, None]
    if window is None:
        return same
    place = jnp.arange(image_ids.shape[1])
    return same & (place[:, None] - place[None, :] < window)


def attend_by_scores(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, scoring: Scoring
) -> jax.Array:
    """Compute attention from its full scores, which are normalized in float32.

    Args:
        q: [B, T, N, H].
        k, v: [B, S, K, H], K dividing N: query head n reads head n * K // N. Values may have another width.
        mask: bool[B, T, S], what each token sees, by row, query and key.
        scale: factor of the scores.
        scoring: the scores' softcap and sinks.

    Returns:
        [B, T, N, H] in q's dtype, with the values' width.
    """
    rows, length, heads, features = q.shape
    grouped = q.reshape(rows, length, k.shape[2], -1, features)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k)
    scores = scores if scale == 1 else scores * scale
    if scoring.softcap is not None:
        scores = capped(scores, scoring.softcap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
    scores = scores.astype(jnp.float32)
    if scoring.sinks is not None:
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        total = jnp.logaddexp(total, scoring.sinks.astype(jnp.float32).reshape(k.shape[2], -1, 1, 1))
        weights = jnp.exp(scores - total).astype(v.dtype)
    else:
        weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(rows, length, heads, v.shape[-1])


def chunks(segment_ids: jax.Array, positions: jax.Array, size: int) -> jax.Array:
    """Number the chunks of all segments; the numbers of padding belong to no segment.

    Args:
        segment_ids: int32[B, T], 0 for padding.
        positions: int32[B, T], from each segment's first token.
        size: tokens of a chunk.

    Returns:
        int32[B, T].
    """
    most = positions.shape[1] // size + 1
    return segment_ids * most + positions // size


def splash_in_scope(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scoring: Scoring,
    most: int | None = None,
) -> jax.Array:
    """Compute `splash` over the mesh that is in scope when a layer is traced.

    Args:
        most: tokens of the largest block; None for MOST.
    """
    return splash(q, k, v, segment_ids, scoring, mesh_in_scope(), most or MOST)


def splash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array,
    scoring: Scoring,
    mesh: Mesh | None,
    most: int = MOST,
) -> jax.Array:
    """Compute attention within segments. Scoring and sums are float32.

    Rows are split over the mesh's dcn and fsdp and heads over tp, each where it divides. Query head n uses
    key/value head n * K // N; nothing is repeated. A row is padded to a multiple of the block. Padding
    attends to padding, so that no row of scores is empty. Over cp each device has the queries of its tokens,
    in the order of `deal`, and gathers all keys and values.

    Args:
        q: [B, T, N, H], multiplied by the attention's scale.
        k, v: [B, T, K, H], K dividing N.
        segment_ids: int32[B, T], segments or chunks of them; tokens of one lie together.
        scoring: what attention does with its scores, except for the chunk.
        mesh: None for one device.
        most: tokens of the largest block.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    length, parts = q.shape[1], 1 if mesh is None else mesh.shape.get(TOKENS, 1)
    block = block_size(length, most) if parts == 1 else _dividing(length // (2 * parts), most)
    extra = -length % block

    def rows(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))).swapaxes(1, 2)

    interpret = not on_tpu(mesh)
    plain = replace(scoring, sinks=None)
    kernel = partial(
        _kernel, length=length + extra, scoring=plain, block=block, parts=parts, interpret=interpret
    )
    sinks = None if scoring.sinks is None else scoring.sinks.astype(q.dtype)
    operands = (rows(q), rows(k), rows(v), jnp.pad(segment_ids, ((0, 0), (0, extra))), sinks)
    out = _sharded(kernel, mesh, *operands) if mesh else _attend(kernel(heads=q.shape[2]), *operands)
    return out.swapaxes(1, 2)[:, :length]


def block_size(length: int, most: int = MOST) -> int:
    """Return the largest block, of at most `most` tokens, for which padding a row to a multiple of it adds
    little work."""
    allowed = [block for block in BLOCKS if block <= most]
    return next((block for block in allowed if -length % block <= PADDING * length), BLOCKS[-1])


def _dividing(length: int, most: int) -> int:
    """Return the largest block, of at most `most` tokens, that divides a piece of a row."""
    return next((block for block in BLOCKS if block <= most and length % block == 0), BLOCKS[-1])


def _sharded(
    kernel: Callable[..., Any],
    mesh: Mesh,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    """Compute the attention of each device's rows, heads and tokens: [B, N, T, H].

    Args:
        kernel: makes the kernel for a device's number of heads.
    """
    tp, heads, kv_heads = mesh.shape.get("tp", 1), q.shape[1], k.shape[1]
    rows = row_axes(q.shape[0], mesh.shape)
    # A device's query heads need complete groups of key/value heads, or all the same one.
    split = "tp" in mesh.shape and heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)
    shared = split and kv_heads % tp != 0
    tokens = TOKENS if TOKENS in mesh.shape else None
    local = kernel(heads=heads // tp if split else heads)

    def attend(
        local: Any, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, sinks: jax.Array | None
    ) -> jax.Array:
        if shared:
            head = jax.lax.axis_index("tp") * kv_heads // tp
            k, v = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (k, v))
        if tokens is None:
            return _attend(local, q, k, v, ids, sinks)
        k, v = (_gather(x, 2) for x in (k, v))
        return _attend(local, q, k, v, ids, sinks, _gather(ids, 1))

    queries = PartitionSpec(rows, "tp" if split else None, tokens)
    keys = PartitionSpec(rows, "tp" if split and not shared else None, tokens)
    tables = local.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, tokens)))
    specs = (tables, queries, keys, keys, PartitionSpec(rows, tokens), PartitionSpec("tp" if split else None))
    placed = jax.shard_map(attend, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
    return placed(local, q, k, v, ids, sinks)


def _attend(
    kernel: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: jax.Array,
    sinks: jax.Array | None,
    key_ids: jax.Array | None = None,
) -> jax.Array:
    """Compute [B, N, T, H] on one device, with T a multiple of the block.

    Args:
        key_ids: segments of the keys; None if they are the queries' segments.
    """
    segments = kernels.SegmentIds(q=ids, kv=ids if key_ids is None else key_ids)
    return jax.vmap(lambda *row: kernel(*row, sinks=sinks))(q, k, v, segments)


class _Causal(kernels.LocalMask):
    """The mask of what a token sees: itself and earlier tokens, within a window if there is one.

    The kernel's tables are made by asking for each block of this mask. The corners of a block show whether it
    is all visible or all hidden. So for rows of 131,072 tokens only the other blocks' entries are computed.
    """

    def __init__(self, length: int, window: int | None) -> None:
        super().__init__((length, length), (None if window is None else window - 1, 0), offset=0)
        self.window = window

    def __getitem__(self, block: tuple[slice, slice]) -> np.ndarray:
        queries, keys = self.q_sequence[block[0]], block[1]
        nearest, farthest = queries[0] - (keys.stop - 1), queries[-1] - keys.start
        if nearest >= 0 and (self.window is None or farthest < self.window):
            return np.ones((1, 1), bool)
        if farthest < 0 or (self.window is not None and nearest >= self.window):
            return np.zeros((1, 1), bool)
        seen: np.ndarray = super().__getitem__(block)
        return seen


def causal_mask(length: int, window: int | None = None, parts: int = 1) -> Any:
    """Return the kernel's mask of a row.

    Args:
        window: how many tokens a token sees, itself included; None for all earlier ones.
        parts: devices of cp, to which the row is dealt.
    """
    mask = _Causal(length, window)
    mask.q_sequence = token_order(length, parts)
    return mask


@lru_cache(maxsize=64)
def _kernel(
    heads: int,
    length: int,
    scoring: Scoring,
    block: int,
    interpret: bool,
    parts: int = 1,
) -> Any:
    """Return the kernel with its tables of blocks to visit, for all devices of cp, one after the other.

    If its backward pass is one kernel, the queries' gradient is summed afterwards over the blocks of keys,
    from partial gradients in the queries' own type. With a window the backward pass is two kernels, whose
    grids leave out the blocks that the window leaves empty.

    Args:
        scoring: without sinks, which the kernel takes with the queries.
    """
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    mask = causal_mask(length, window, parts) if scoring.causal else kernels.FullMask((length, length))
    partial_tokens = length // parts * (length // block)
    fused = block >= FUSED and partial_tokens <= PARTIAL_TOKENS and window is None
    with jax.ensure_compile_time_eval():
        kernel = kernels.make_splash_mha(
            kernels.MultiHeadMask([mask] * heads),
            block_sizes=kernels.BlockSizes(
                block_q=block,
                block_kv=block,
                block_q_dkv=block,
                block_kv_dkv=block,
                block_q_dq=None if fused else block,
                block_kv_dq=None if fused else block,
                use_fused_bwd_kernel=fused,
            ),
            head_shards=1,
            q_seq_shards=parts,
            attn_logits_soft_cap=scoring.softcap,
            residual_checkpoint_name=RESIDUALS,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, kernel)


def token_devices() -> int:
    """Return the number of devices in the mesh in scope that the tokens of a row are split over."""
    return int(pxla.thread_resources.env.physical_mesh.shape.get(TOKENS, 1))


def token_order(length: int, count: int) -> np.ndarray:
    """Return int32[length]: for each token of the dealt row, its place in the original row.

    Args:
        length: of the dealt row.
    """
    pieces = np.arange(length, dtype=np.int32).reshape(2 * count, -1)
    return np.stack([pieces[:count], pieces[count:][::-1]], 1).reshape(-1)


def deal(x: jax.Array) -> jax.Array:
    """Put the tokens of [B, T, ...] in the order in which the devices of cp hold them, with zeros at the end.

    Everything computed from a batch is then in this order. Without cp it is the row's own order.
    """
    if (count := token_devices()) == 1:
        return x
    padding = dealt_length(x.shape[1], count) - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0) for _ in x.shape[2:])))
    return x[:, token_order(x.shape[1], count)]


def collect(x: jax.Array, length: int) -> jax.Array:
    """Return [B, dealt tokens, ...] in the row's own order, [B, length, ...]."""
    if (count := token_devices()) == 1:
        return x
    return x[:, np.argsort(token_order(x.shape[1], count))[:length]]


def _gather(x: jax.Array, axis: int) -> jax.Array:
    """Gather all tokens of an array that is split over cp, in the row's order. For use within jax.shard_map.

    Args:
        axis: the axis of the tokens.
    """
    front, back = jnp.split(x, 2, axis)
    front = jax.lax.all_gather(front, TOKENS, axis=axis, tiled=True)
    back = jnp.flip(jax.lax.all_gather(back, TOKENS, axis=axis), axis)
    return jnp.concatenate([front, back.reshape(front.shape)], axis)
