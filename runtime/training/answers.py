"""Write greedy answers with the model in training, on its mesh, for train.samples.

No KV cache is kept: each new token runs the forward pass over the whole rows again. An answer of N tokens
costs N forward passes, and the code that computes them is the training code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..data.prompts import Prompts
from ..model import context
from ..model.forward import Forward
from ..model.sharding import Rows

Answer = Callable[[Any, Any, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(trained, base, {tokens int32[B, T], lengths int32[B]}) -> both, with the answers behind the prompts."""


def jit_answers(
    forward: Forward, merge: Callable[[Any, Any], Any], mesh: Any, most: int, ends: Sequence[int]
) -> Answer:
    """Compile the loop that appends one token to each row, until `most` tokens or until all rows have ended.

    Args:
        merge: builds the model from its trained arrays and its other arrays.
        mesh: in scope while the loop is traced.
        most: the largest number of tokens of an answer.
        ends: tokens that end an answer; such a token is the answer's last.
    """
    stops = jnp.asarray(ends, jnp.int32)

    def next_tokens(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        rows = (tokens, places, (places < lengths[:, None]).astype(jnp.int32))
        hidden = forward.hidden(model, *(map(context.deal, rows) if forward.dealt else rows))
        if forward.dealt:
            hidden = context.collect(hidden, tokens.shape[1])
        newest = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        head = forward.head(model)
        return jnp.argmax(head.logits(newest, *head.placed(head.arrays))[:, 0], axis=-1).astype(jnp.int32)

    def answer(trained: Any, base: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, lengths = batch["tokens"], batch["lengths"]
        rows = jnp.arange(len(tokens))

        def goes_on(state: tuple[jax.Array, ...]) -> jax.Array:
            _, _, ended, count = state
            return (count < most) & ~ended.all()

        def write(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tokens, lengths, ended, count = state
            new = next_tokens(merge(trained, base), tokens, lengths)
            tokens = tokens.at[rows, lengths].set(jnp.where(ended, tokens[rows, lengths], new))
            lengths = lengths + ~ended
            return tokens, lengths, ended | (new[:, None] == stops).any(1), count + 1

        state = (tokens, lengths, lengths == 0, jnp.int32(0))
        tokens, lengths, _, _ = jax.lax.while_loop(goes_on, write, state)
        return tokens, lengths

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(answer, out_shardings=(whole, whole))


def answered(
    answer: Callable[[dict[str, jax.Array]], tuple[jax.Array, jax.Array]], prompts: Prompts, rows: Rows
) -> list[dict[str, Any]]:
    """Return the answers to all prompts, in the form that samples.jsonl stores.

    Args:
        answer: the compiled loop, with the model's current weights.
        rows: the rows of a micro-batch, computed at once; each process places its own.
    """
    out = []
    for start in range(0, len(prompts.texts), rows.total):
        chosen = [start + row for row in rows.here if start + row < len(prompts.texts)]
        tokens = np.zeros((len(rows.here), prompts.tokens.shape[1]), np.int32)
        lengths = np.zeros(len(rows.here), np.int32)
        tokens[: len(chosen)], lengths[: len(chosen)] = prompts.tokens[chosen], prompts.lengths[chosen]
        found, ends = map(np.asarray, answer(rows.place({"tokens": tokens, "lengths": lengths})))
        for row in range(min(rows.total, len(prompts.texts) - start)):
            written = found[row, prompts.lengths[start + row] : ends[row]].tolist()
            out.append(
                {
                    "prompt": prompts.texts[start + row],
                    "answer": prompts.decode(written),
                    "tokens": len(written),
                    "ended": bool(written) and written[-1] in prompts.ends,
                }
            )
    return out
