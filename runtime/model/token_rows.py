"""Rows of the embedding that lora.train_tokens trains, as PEFT's trainable_token_indices.

The embedding stays frozen. Next to it are the trained rows [N, D] and their numbers. While a model is
computed, they take the place of the embedding's own rows, also in a head that is the embedding. No gradient
of the whole embedding is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..weights.checkpoint import HFCheckpoint
from .adapters import EMBEDDING, TOKEN_ROWS, LoraSettings
from .families.base import Parameter

NAME = EMBEDDING.rpartition(".")[2]
NUMBERS = f"{NAME}_numbers"
"""The attributes of the embedder that hold the embedding, and the numbers of its trained rows."""


@dataclass(frozen=True)
class Table:
    """The embedding with its trained rows, in place of the embedder's variable.

    Attributes:
        frozen: the embedder's variable, [V, D].
        rows: [N, D], in the type that the model computes with.
        numbers: int32[N].
    """

    frozen: Any
    rows: jax.Array
    numbers: jax.Array

    def __getitem__(self, index: Any) -> jax.Array:
        """Return the embeddings [B, T, D] of tokens, which Tunix puts into a tuple."""
        tokens = index[0] if isinstance(index, tuple) else index
        found = tokens[..., None] == self.numbers
        own = self.rows[jnp.argmax(found, -1)].astype(self.frozen.dtype)
        return jnp.where(found.any(-1)[..., None], own, self.frozen[index])

    def get_value(self) -> jax.Array:
        """Return the whole embedding, for a head."""
        frozen = self.frozen.get_value()
        return frozen.at[self.numbers].set(self.rows.astype(frozen.dtype), unique_indices=True)

    value = property(get_value)
    """The same, as Tunix reads it."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.frozen.shape)


def trained(embedder: Any) -> tuple[jax.Array, jax.Array]:
    """Return the trained rows of an embedder, and their numbers."""
    rows, numbers = getattr(embedder, TOKEN_ROWS.rpartition(".")[2]), getattr(embedder, NUMBERS)
    return rows.get_value(), numbers.get_value()


@contextmanager
def replaced(embedder: Any) -> Iterator[None]:
    """Compute with the trained rows while a model is traced."""
    own = vars(embedder)[NAME]
    vars(embedder)[NAME] = Table(own, *trained(embedder))
    try:
        yield
    finally:
        vars(embedder)[NAME] = own


def first_values(base: HFCheckpoint, embedding: Parameter, lora: LoraSettings) -> dict[str, np.ndarray]:
    """Return the rows and their numbers as training begins, by their paths: the rows are the base's own."""
    numbers = np.asarray(lora.train_tokens, np.int32)
    (source,) = embedding.sources
    rows = [base.read_rows(source, number, number + 1) for number in numbers.tolist()]
    values = np.concatenate(rows).astype(jnp.dtype(lora.dtype))
    return {TOKEN_ROWS: values, f"{EMBEDDING.rpartition('.')[0]}.{NUMBERS}": numbers}
