"""What layers keep of earlier tokens while a model generates text.

Attention keeps keys and values. A layer with a state keeps the state, and a convolution its last inputs. The
pass over the prompts (prefill) makes these entries, and each later pass, of one token a row, replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .sharding import constrain
from .slots_read import sizes_read

FREE = 2**31 - 1
"""The position of a slot without a token: later than every query's."""

KEPT = ("fsdp", None, "tp", None)
"""The sharding of keys and values [B, S, K, H] by slot."""


class Cache:
    """The entries of all layers in one pass, which is being traced.

    A layer reads its entry with `take`, and writes the next one with `keep`. Layers do this in the order in
    which they are computed, which is the same in every pass.

    Attributes:
        slots: int32[B, S], the position of the token in each slot, FREE for none.
        first: the slot of the pass's first token, int32[]. In a later pass no slot after it is filled.
        last: int32[B], the index of each row's last token among the tokens of the pass; -1 for none.
        kept: the entries for the next pass, so far.
        prompts: the number of slots of prompts.
        ordered: whether neighboring tokens of a row have neighboring slots.
    """

    def __init__(
        self,
        slots: jax.Array,
        first: jax.Array | int,
        last: jax.Array,
        entries: Sequence[Any] | None = None,
        prompts: int = 0,
        ordered: bool = True,
    ) -> None:
        """Begin a pass with the entries that the pass before kept; None for the pass over the prompts."""
        self.slots, self.first, self.last = slots, first, last
        self.prompts, self.ordered = prompts, ordered
        self._entries = entries
        self.kept: list[Any] = []

    def take(self, initial: Callable[[], Any]) -> Any:
        """Return the next layer's entry; its initial value in the pass over the prompts."""
        return initial() if self._entries is None else self._entries[len(self.kept)]

    def keep(self, entry: Any) -> None:
        """Store the entry that the next pass gets in place of the one that was taken last."""
        self.kept.append(entry)

    def with_earlier(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keep the keys and values [B, T, K, H] of the pass's tokens, and return those to attend to.

        Returns:
            k and v themselves in the pass over the prompts, later those of all slots, [B, S, K, H].
        """

        def empty(x: jax.Array) -> jax.Array:
            return jnp.zeros((x.shape[0], self.slots.shape[1], *x.shape[2:]), x.dtype)

        before = self.take(lambda: (empty(k), empty(v)))
        after = tuple(
            constrain(jax.lax.dynamic_update_slice_in_dim(old, new, self.first, axis=1), KEPT)
            for old, new in zip(before, (k, v), strict=True)
        )
        self.keep(after)
        return (k, v) if self._entries is None else (after[0], after[1])

    def with_filled(
        self, reach: int | None, compute: Callable[..., jax.Array], *arrays: tuple[jax.Array, int]
    ) -> jax.Array:
        """Compute a later pass's attention from the slots that are filled, and that its tokens reach.

        Args:
            reach: how many of a row's latest tokens a token sees at most, itself included; None for all.
            compute: computes the attention from the arrays, cut to fewer slots.
            arrays: each with its dimension of slots.
        """
        slots = self.slots.shape[1]
        sizes = sizes_read(self.prompts, slots, reach if self.ordered else None)
        most = sizes[-1]
        filled = self.first + 1

        def of(size: int) -> Callable[[], jax.Array]:
            cut = partial(jax.lax.slice_in_dim, start_index=0, limit_index=size)
            if size == most < slots:
                start = jnp.maximum(filled - size, 0)
                cut = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
            return lambda: compute(*(cut(array, axis=axis) for array, axis in arrays))

        if len(sizes) == 1:
            return of(most)()
        number = (filled > jnp.asarray(sizes[:-1], jnp.int32)).sum(dtype=jnp.int32)
        attended: jax.Array = jax.lax.switch(number, [of(size) for size in sizes])
        return attended
