"""Tunix's model, computed as the recipe means it.

Tunix fixes some things that checkpoints or recipes leave open: rotary frequencies, masks, what is
recomputed. Whatever has to differ is replaced in Tunix's modules while a model is traced, and put back
afterwards, so that several models can live in one process. Everything that runs a model goes through
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from runtime import sharding
from runtime.families import Architecture, Family
from runtime.settings import ModelSettings


@dataclass(frozen=True)
class Forward:
    """How one model is computed.

    Attributes:
        family, architecture: of the model.
        settings: of the recipe.
    """

    family: Family
    architecture: Architecture
    settings: ModelSettings

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Puts the replacements in place while a model is traced."""
        with ExitStack() as stack:
            for owner, name, value in self._replacements():
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def logits(
        self, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """[B, T, V] of a batch, whole.

        Args:
            model: Tunix's, merged with its arrays.
            tokens, positions, segment_ids: int32[B, T].
        """
        with self.replaced():
            # The argument is named `tokens` in Gemma 4 and `last_tokens` in Gemma 3.
            return model(tokens, positions, None, attention_mask(segment_ids))[0]

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """(owner, attribute, value) of everything that is replaced."""
        from tunix.utils import sharding_utils

        module = self.family.tunix_module()
        yield sharding_utils, "shard", sharding.constrain
        if hasattr(module, "shard"):
            yield module, "shard", sharding.constrain
        yield from self.family.replacements(self.architecture)


def attention_mask(segment_ids: jax.Array) -> jax.Array:
    """What each token may attend to: the earlier tokens of its own segment; nothing from padding.

    Args:
        segment_ids: int32[B, T], 0 for padding.

    Returns:
        bool[B, T, T], indexed by row, query and key.
    """
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids > 0)[:, :, None]
