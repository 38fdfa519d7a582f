"""Generate completions of prompts with a cache, in one program, from the arrays that a step trains.

One pass over the prompts fills the cache (prefill). A loop then computes one token of each row at a time,
until all rows have ended. The layers are the decoder's own; cache.py holds what they keep. A row has P slots
for its prompt, padded on either side, and then C slots for its completion. Rows differ in the positions of
their slots. The loop takes as many passes as the longest completion has tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import UserError
from .attention import collect, deal
from .cache import FREE, Cache
from .forward import Forward
from .layers import Batch
from .loading import rematerialize
from .sampling import GREEDY, Sampling, choose


@dataclass(frozen=True)
class Generation:
    """What a program of `jit_generate` generates.

    Attributes:
        most: the largest number of tokens of a completion.
        ends: the tokens that end a completion, each of them as its last token.
        sampling: how tokens are chosen.
        longest: the most tokens of a prompt with its completion; None for the slots of a row. Rotary
            embeddings of the kinds "dynamic" and "longrope" choose their frequencies by it: the same ones for
            all rows and tokens, so that no batch changes a completion.
    """

    most: int
    ends: tuple[int, ...]
    sampling: Sampling = GREEDY
    longest: int | None = None


class Completions(NamedTuple):
    """The completions of a batch of prompts.

    Attributes:
        tokens: int32[B, C], the token that ended a row included, and 0 after a row's last token.
        lengths: int32[B], tokens of each row.
        logps: float32[B, C], their log-probabilities as in `sampling.choose`, and 0 after a row's last token.
        ended: bool[B], whether one of the ends is the last token; otherwise the row was cut.
    """

    tokens: jax.Array
    lengths: jax.Array
    logps: jax.Array
    ended: jax.Array


Prompts = Mapping[str, Any]
"""`tokens` int32[B, P]; `segment_ids` int32[B, P], 1 for a prompt's tokens, which are adjacent, and 0 for
padding on either side; `salts` uint32[B], from `sampling.salts_of`. A row without tokens is not completed."""


def right_padded(tokens: Any, lengths: Any, salts: Any = None) -> dict[str, np.ndarray]:
    """Return a batch of prompts.

    Args:
        tokens: int32[B, P].
        lengths: int32[B].
        salts: uint32[B]; None if nothing is drawn.
    """
    tokens, lengths = np.asarray(tokens, np.int32), np.asarray(lengths, np.int32)
    real = np.arange(tokens.shape[1]) < lengths[:, None]
    salts = np.zeros(len(tokens), np.uint32) if salts is None else np.asarray(salts, np.uint32)
    return {"tokens": tokens, "segment_ids": real.astype(np.int32), "salts": salts}


def jit_generate(
    forward: Forward, merge: Callable[[Any, Any], Any], mesh: Mesh, generation: Generation
) -> Callable[[Any, Any, Prompts], Completions]:
    """Compile (trained, base, prompts) -> Completions, whole on every device.

    Call it within `with mesh:`. Rows are split over the mesh's data-parallel devices if these divide them.

    Args:
        merge: builds the model from its trained arrays and its other arrays.
    """

    def run(trained: Any, base: Any, prompts: Prompts) -> Completions:
        def model() -> Any:
            merged = merge(trained, base)
            rematerialize(merged, "none")  # what layers keep would not leave a part that is recomputed
            return merged

        return generate(forward, model, prompts, generation)

    return jax.jit(run, out_shardings=NamedSharding(mesh, PartitionSpec()))


def generate(
    forward: Forward, model: Callable[[], Any], prompts: Prompts, generation: Generation
) -> Completions:
    """Complete prompts. To be traced.

    Args:
        model: builds the model, once for each of the two passes that are traced, without rematerialization.

    Raises:
        UserError: if prompts and completions are longer than the model computes exactly.
    """
    longest = generation.longest or prompts["tokens"].shape[1] + generation.most
    check_length(forward, longest)
    generation = replace(generation, longest=longest)
    stops = jnp.asarray(generation.ends, jnp.int32)
    state, lengths, slots = _prefill(forward, model(), prompts, generation)
    prompt_slots = slots.shape[1] - generation.most

    def goes_on(state: _State) -> jax.Array:
        return (state.count < generation.most) & ~state.ended.all()

    def step(state: _State) -> _State:
        place = lengths + state.count - 1
        cache = Cache(slots, prompt_slots + state.count - 1, jnp.zeros_like(lengths), state.entries)
        batch = Batch(
            place[:, None],
            jnp.ones_like(place)[:, None],
            mask=(slots <= place[:, None])[:, None],
            key_positions=slots,
            cache=cache,
            longest=generation.longest,
        )
        newest = jax.lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
        merged = model()
        hidden = forward.computed(merged, newest, batch)
        return _write(state, _logits(forward, merged, hidden), cache, prompts["salts"], stops, generation)

    state = jax.lax.while_loop(goes_on, step, state)
    return Completions(state.tokens, state.lengths, state.logps, state.ended & (state.lengths > 0))


def check_length(forward: Forward, tokens: int) -> None:
    """Raise UserError if some tokens of so long a sequence would not see all earlier ones."""
    longest = getattr(forward.architecture, "longest", None)
    if longest is not None and tokens > longest:
        raise UserError(
            f"prompts and completions have up to {tokens:,} tokens, and {forward.family.title} is computed "
            f"here for at most {longest:,}",
            "shorten the prompts or the completions",
        )


class _State(NamedTuple):
    """What the loop carries.

    Attributes:
        count: int32[], tokens that every row that has not ended has.
        entries: of the layers (cache.py).
        tokens, logps, lengths, ended: as in Completions; rows without a prompt have ended.
    """

    count: jax.Array
    entries: list[Any]
    tokens: jax.Array
    logps: jax.Array
    lengths: jax.Array
    ended: jax.Array


def _prefill(
    forward: Forward, model: Any, prompts: Prompts, generation: Generation
) -> tuple[_State, jax.Array, jax.Array]:
    """Compute the prompts, and each row's first token.

    Returns:
        The loop's state; the prompts' lengths, int32[B]; and the slots' positions, int32[B, S].
    """
    tokens, segment_ids = prompts["tokens"], prompts["segment_ids"]
    (rows, width), real = tokens.shape, segment_ids > 0
    lengths = real.sum(1, dtype=jnp.int32)
    last = jnp.where(real, jnp.arange(width, dtype=jnp.int32), -1).max(1)
    positions = jnp.maximum(jnp.cumsum(real, axis=1, dtype=jnp.int32) - 1, 0)
    ordered = (tokens, positions, segment_ids)
    if forward.dealt:
        ordered = tuple(map(deal, ordered))
    filled = jnp.where(ordered[2] > 0, ordered[1], FREE)
    slots = jnp.concatenate([filled, lengths[:, None] + jnp.arange(generation.most, dtype=jnp.int32)], axis=1)
    cache = Cache(slots, 0, last)
    batch = replace(forward.batch(*ordered[1:]), cache=cache, longest=generation.longest)
    hidden = forward.computed(model, ordered[0], batch)
    if forward.dealt:
        hidden = collect(hidden, width)
    newest = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)
    empty = _State(
        count=jnp.int32(0),
        entries=[],
        tokens=jnp.zeros((rows, generation.most), jnp.int32),
        logps=jnp.zeros((rows, generation.most), jnp.float32),
        lengths=jnp.zeros(rows, jnp.int32),
        ended=lengths == 0,
    )
    stops = jnp.asarray(generation.ends, jnp.int32)
    logits = _logits(forward, model, newest)
    return _write(empty, logits, cache, prompts["salts"], stops, generation), lengths, slots


def _logits(forward: Forward, model: Any, hidden: jax.Array) -> jax.Array:
    """Return float32[B, V] of [B, 1, D]."""
    head = forward.head(model)
    return head.logits(hidden, *head.placed(head.arrays))[:, 0]


def _write(
    state: _State,
    logits: jax.Array,
    cache: Cache,
    salts: jax.Array,
    stops: jax.Array,
    generation: Generation,
) -> _State:
    """Choose each row's next token, and write it into the rows that have not ended."""
    new, logps = choose(logits, generation.sampling, salts, state.count)
    ended = state.ended

    def written(kept: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(ended, 0, value)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(kept, value, state.count, axis=1)

    return _State(
        count=state.count + 1,
        entries=cache.kept,
        tokens=written(state.tokens, new),
        logps=written(state.logps, logps),
        lengths=state.lengths + ~ended,
        ended=ended | (new[:, None] == stops).any(1),
    )
