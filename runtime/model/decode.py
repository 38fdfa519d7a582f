"""Generate completions of prompts with a cache, from the arrays that a step trains.

One pass over the prompts fills the cache (prefill). A loop then computes one token of each row at a time,
until all rows have ended. `jit_generate` makes one program of both. With `Stepwise` the loop stops after any
number of tokens, and continues later, so that a caller reads tokens while the rest is generated. The layers
are the decoder's own; cache.py holds what they keep. A row has P slots for its prompt, padded on the left,
and then C slots for its completion. Rows differ in the positions of their slots. The loop takes as many
passes as the longest completion has tokens. A pass reads the slots that are filled, and in layers with a
window only those of the window.
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
from .attention import collect, deal, token_devices
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
        likeliest: of so many of each step's likeliest tokens the log-probabilities are kept, see `Decoding`.
    """

    most: int
    ends: tuple[int, ...]
    sampling: Sampling = GREEDY
    longest: int | None = None
    likeliest: int = 0


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
padding on either side; `salts` uint32[B], from `sampling.salts_of`. A row without tokens is not completed.
`ends` int32[B, E], the tokens that end each row, -1 for none, in place of `Generation.ends`, is optional."""


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
    generation = _resolved(forward, generation, prompts["tokens"].shape[1] + generation.most)
    rows, state = _prefill(forward, model(), prompts, generation)
    state = _continued(forward, model, rows, state, generation.most, generation)
    return Completions(state.tokens, state.lengths, state.logps, state.ended & (state.lengths > 0))


class Stepwise:
    """Generation that is read while it runs. Its methods are called within `with mesh:`.

    Args:
        forward, merge, generation: as for `jit_generate`.
    """

    def __init__(self, forward: Forward, merge: Callable[[Any, Any], Any], generation: Generation) -> None:
        def model(trained: Any, base: Any) -> Any:
            merged = merge(trained, base)
            rematerialize(merged, "none")
            return merged

        def begin(trained: Any, base: Any, prompts: Prompts) -> tuple[Rows, Decoding]:
            width = prompts["tokens"].shape[1]
            resolved = _resolved(forward, generation, width + generation.most)
            return _prefill(forward, model(trained, base), prompts, resolved)

        def advance(trained: Any, base: Any, rows: Rows, state: Decoding, until: jax.Array) -> Decoding:
            resolved = _resolved(forward, generation, rows.slots.shape[1])
            return _continued(forward, lambda: model(trained, base), rows, state, until, resolved)

        self._begin, self._advance = jax.jit(begin), advance
        self._compiled: Any = None

    def begin(self, trained: Any, base: Any, prompts: Prompts) -> tuple[Rows, Decoding]:
        """Compute the prompts and the first token of each row.

        Raises:
            UserError: as `generate`.
        """
        began: tuple[Rows, Decoding] = self._begin(trained, base, prompts)
        return began

    def advance(self, trained: Any, base: Any, rows: Rows, state: Decoding, until: int) -> Decoding:
        """Continue until rows that have not ended have `until` tokens. `state` is not usable afterwards."""
        if self._compiled is None:  # a state keeps its layout, so that one program continues all
            layout = jax.tree.map(lambda array: array.sharding, state)
            self._compiled = jax.jit(self._advance, donate_argnums=3, out_shardings=layout)
        further: Decoding = self._compiled(trained, base, rows, state, np.int32(until))
        return further


def check_length(forward: Forward, tokens: int) -> None:
    """Raise UserError if some tokens of so long a sequence would not see all earlier ones."""
    longest = getattr(forward.architecture, "longest", None)
    if longest is not None and tokens > longest:
        raise UserError(
            f"prompts and completions have up to {tokens:,} tokens, and {forward.family.title} is computed "
            f"here for at most {longest:,}",
            "shorten the prompts or the completions",
        )


class Rows(NamedTuple):
    """What the loop reads, and does not change.

    Attributes:
        lengths: int32[B], tokens of the prompts.
        slots: int32[B, S], the slots' positions.
        salts: uint32[B].
        ends: int32[B, E] or int32[E].
    """

    lengths: jax.Array
    slots: jax.Array
    salts: jax.Array
    ends: jax.Array


class Decoding(NamedTuple):
    """What the loop carries.

    Attributes:
        count: int32[], tokens that every row that has not ended has.
        entries: of the layers (cache.py).
        tokens, logps, lengths, ended: as in Completions; rows without a prompt have ended.
        likeliest, likeliest_logps: int32 and float32[B, C, K], each step's `Generation.likeliest` likeliest
            tokens, and their log-probabilities by the logits alone, without the sampling.
    """

    count: jax.Array
    entries: list[Any]
    tokens: jax.Array
    logps: jax.Array
    lengths: jax.Array
    ended: jax.Array
    likeliest: jax.Array
    likeliest_logps: jax.Array


def _continued(
    forward: Forward,
    model: Callable[[], Any],
    rows: Rows,
    state: Decoding,
    until: jax.Array | int,
    generation: Generation,
) -> Decoding:
    """Compute tokens until all rows have ended, or have `until` tokens."""
    prompt_slots = rows.slots.shape[1] - generation.most

    def goes_on(state: Decoding) -> jax.Array:
        return (state.count < until) & ~state.ended.all()

    def step(state: Decoding) -> Decoding:
        place = rows.lengths + state.count - 1
        first = prompt_slots + state.count - 1
        last = jnp.zeros_like(rows.lengths)
        cache = Cache(rows.slots, first, last, state.entries, prompt_slots, _ordered(forward))
        batch = Batch(
            place[:, None],
            jnp.ones_like(place)[:, None],
            mask=(rows.slots <= place[:, None])[:, None],
            key_positions=rows.slots,
            cache=cache,
            longest=generation.longest,
        )
        newest = jax.lax.dynamic_slice_in_dim(state.tokens, state.count - 1, 1, axis=1)
        merged = model()
        hidden = forward.computed(merged, newest, batch)
        return _write(state, _logits(forward, merged, hidden), cache, rows, generation)

    further: Decoding = jax.lax.while_loop(goes_on, step, state)
    return further


def _ordered(forward: Forward) -> bool:
    """Return whether neighboring tokens of a row have neighboring slots."""
    return not forward.dealt or token_devices() == 1


def _resolved(forward: Forward, generation: Generation, slots: int) -> Generation:
    """Return what is generated with `longest` set, for rows of so many slots."""
    longest = generation.longest or slots
    check_length(forward, longest)
    return replace(generation, longest=longest)


def _prefill(forward: Forward, model: Any, prompts: Prompts, generation: Generation) -> tuple[Rows, Decoding]:
    """Compute the prompts, and each row's first token."""
    tokens, segment_ids = prompts["tokens"], prompts["segment_ids"]
    (count, width), real = tokens.shape, segment_ids > 0
    lengths = real.sum(1, dtype=jnp.int32)
    places = jnp.arange(width, dtype=jnp.int32)
    beyond = jnp.where(real, places, -1).max(1, keepdims=True) + 1
    tokens, segment_ids = (
        jnp.take_along_axis(array, (places + beyond) % width, axis=1) for array in (tokens, segment_ids)
    )  # now padded on the left: the latest tokens of all rows have the same slots
    real, last = segment_ids > 0, jnp.where(lengths > 0, width - 1, -1)
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
    empty = Decoding(
        count=jnp.int32(0),
        entries=[],
        tokens=jnp.zeros((count, generation.most), jnp.int32),
        logps=jnp.zeros((count, generation.most), jnp.float32),
        lengths=jnp.zeros(count, jnp.int32),
        ended=lengths == 0,
        likeliest=jnp.zeros((count, generation.most, generation.likeliest), jnp.int32),
        likeliest_logps=jnp.zeros((count, generation.most, generation.likeliest), jnp.float32),
    )
    ends = jnp.asarray(prompts.get("ends", generation.ends), jnp.int32)
    rows = Rows(lengths, slots, prompts["salts"], ends)
    return rows, _write(empty, _logits(forward, model, newest), cache, rows, generation)


def _logits(forward: Forward, model: Any, hidden: jax.Array) -> jax.Array:
    """Return float32[B, V] of [B, 1, D]."""
    head = forward.head(model)
    return head.logits(hidden, *head.placed(head.arrays))[:, 0]


def _write(state: Decoding, logits: jax.Array, cache: Cache, rows: Rows, generation: Generation) -> Decoding:
    """Choose each row's next token, and write it into the rows that have not ended."""
    new, logps = choose(logits, generation.sampling, rows.salts, state.count)
    ended, likeliest, likeliest_logps = state.ended, state.likeliest, state.likeliest_logps

    def written(kept: jax.Array, value: jax.Array) -> jax.Array:
        value = jnp.where(ended.reshape(-1, *[1] * (value.ndim - 1)), 0, value)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(kept, value, state.count, axis=1)

    if generation.likeliest:
        largest, numbers = jax.lax.top_k(logits, generation.likeliest)
        likeliest = written(likeliest, numbers.astype(jnp.int32))
        likeliest_logps = written(likeliest_logps, largest - jax.nn.logsumexp(logits, -1, keepdims=True))
    return Decoding(
        count=state.count + 1,
        entries=cache.kept,
        tokens=written(state.tokens, new),
        logps=written(state.logps, logps),
        lengths=state.lengths + ~ended,
        ended=ended | (new[:, None] == rows.ends).any(1),
        likeliest=likeliest,
        likeliest_logps=likeliest_logps,
    )
