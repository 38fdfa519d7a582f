"""Run a model as the recipe describes it.

Tunix fixes some things that checkpoints or recipes leave open: rotary frequencies, masks, what is recomputed.
While a model is traced, this module replaces the attributes of Tunix's modules that have to differ.
Afterwards it puts them back, so that several models can live in one process. All code that runs a model goes
through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import jax
import jax.numpy as jnp

from ..settings import ModelSettings
from . import sharding
from .adapters import TOKEN_ROWS
from .families import Architecture, Family
from .families.base import Spec
from .recomputed import OF_TUNIX

if TYPE_CHECKING:
    from ..sections import FakeQuantization

UNTIED_HEAD = "BTD,DV->BTV"
"""The einsum of an output head with its own weight; it identifies Tunix's module for the head."""


@dataclass(frozen=True)
class Head:
    """The output head, which turns final hidden states into logits.

    Attributes:
        weight: [V, D] if the embedding serves as head, else [D, V].
        bias: [V], added to the product; None for none.
        tied: whether the embedding serves as head.
        dtype: of the product and its operands; None for the type that the operands promote to.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        cap_dtype: the dtype of that computation; None for the product's.
        scale: factor of the logits.
        rows: [N, D], trained rows of the embedding that replace the weight's; None for none.
        numbers: int32[N], which rows they are.
        qat: how hidden states and weight are rounded if it rounds heads; None for not at all.
    """

    weight: jax.Array
    tied: bool
    dtype: Any
    softcap: float | None
    cap_dtype: Any
    scale: float = 1.0
    bias: jax.Array | None = None
    rows: jax.Array | None = None
    numbers: jax.Array | None = None
    qat: FakeQuantization | None = None

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        """Return the weight and, if there is one, the bias, or the rows: a tied head has no bias."""
        return self.weight, *(one for one in (self.bias, self.rows) if one is not None)

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0 if self.tied else 1]

    @property
    def spec(self) -> Spec:
        """Return the weight's sharding for computing logits: the vocabulary over tp, features whole."""
        return ("tp", None) if self.tied else (None, "tp")

    def placed(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return `arrays` with the weight placed for computing logits."""
        return sharding.constrain_weight(arrays[0], self.spec), *arrays[1:]

    def logits(self, hidden: jax.Array, weight: jax.Array, *rest: jax.Array) -> jax.Array:
        """Return float32[B, T, V], bit for bit as Tunix computes the logits.

        Args:
            hidden: [B, T, D].
            weight, rest: `self.arrays`, placed for this product.
        """
        dtype = self.dtype or jnp.promote_types(hidden.dtype, weight.dtype)
        equation = "BTD,VD->BTV" if self.tied else UNTIED_HEAD
        operands = hidden.astype(dtype), weight.astype(dtype)
        if self.qat is not None and self.qat.head:
            from . import quantize

            operands = quantize.rounded_operands(equation, *operands, self.qat)
        logits = jnp.einsum(equation, *operands)
        if self.rows is not None:
            own = jnp.einsum("BTD,ND->BTN", hidden.astype(dtype), rest[0].astype(dtype))
            logits = logits.at[..., self.numbers].set(own, unique_indices=True)
        elif rest:
            logits = logits + rest[0].astype(dtype)
        if self.softcap is not None:
            logits = logits.astype(self.cap_dtype or dtype)
            logits = jnp.tanh(logits / self.softcap) * self.softcap
        logits = logits.astype(jnp.float32)
        return logits if self.scale == 1 else logits * self.scale


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

    @property
    def dealt(self) -> bool:
        """Whether tokens are in the order of `context.deal`, which balances splash attention."""
        return self.settings.attention == "splash"

    @contextmanager
    def replaced(self, segment_ids: jax.Array) -> Iterator[None]:
        """Replace attributes of Tunix's modules while a model is traced on a batch of these segments."""
        with ExitStack() as stack:
            for owner, name, value in self._replacements(segment_ids):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def logits(
        self, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Return the logits [B, T, V] of a whole batch, in the rows' own order.

        Args:
            model: Tunix's, merged with its arrays.
            tokens, positions, segment_ids: int32[B, T].
        """
        length = tokens.shape[1]
        if self.dealt:
            from .context import collect, deal

            tokens, positions, segment_ids = map(deal, (tokens, positions, segment_ids))
        with self.replaced(segment_ids), _rows(model):
            # The argument is named `tokens` in Gemma 4 and `last_tokens` in Gemma 3.
            logits: jax.Array = model(tokens, positions, None, self._mask(segment_ids))[0]
        return collect(logits, length) if self.dealt else logits

    def hidden(
        self, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Return [B, T, D], the hidden states after the final norm, which `head` turns into logits.

        The arguments are those of `logits`. If `dealt`, arguments and result are in the order of
        `context.deal`.
        """
        module = self.family.tunix_module()
        captured: list[jax.Array] = []

        def decode(embedder: Any, x: jax.Array) -> jax.Array:
            captured.append(x)
            return x

        with self.replaced(segment_ids), _rows(model):
            projection: Callable[..., jax.Array] = module.Einsum.__call__

            def einsum(self: Any, x: jax.Array) -> jax.Array:
                return decode(self, x) if self.einsum_str == UNTIED_HEAD else projection(self, x)

            with (
                mock.patch.object(module.Embedder, "decode", decode),
                mock.patch.object(module.Einsum, "__call__", einsum),
            ):
                # The model's own logits from these states are dropped.
                model(tokens, positions, None, self._mask(segment_ids))
        (hidden,) = captured
        return hidden

    def head(self, model: Any) -> Head:
        """Return the output head of a model: its own, or the embedding."""
        own = getattr(model, "lm_head", None)
        holder = model.embedder if own is None else own
        bias = getattr(own, "bias", None)
        rows = None
        if own is None and _has_rows(model):
            from .trained import trained_rows

            rows = trained_rows(model.embedder)
        config = getattr(holder, "config", None)
        softcap = getattr(model.config, "final_logit_softcap", None)
        return Head(
            weight=(model.embedder.input_embedding if own is None else own.w).get_value(),
            tied=own is None,
            dtype=getattr(holder, "dtype", getattr(config, "dtype", None)),
            softcap=softcap,
            cap_dtype=jnp.float32 if self.family.caps_in_float32 else None,
            scale=getattr(model.config, "logit_scale", 1.0),
            bias=None if bias is None else bias.get_value(),
            rows=None if rows is None else rows[0],
            numbers=None if rows is None else rows[1],
            qat=self.settings.qat,
        )

    def _mask(self, segment_ids: jax.Array) -> jax.Array | None:
        """Return the mask for Tunix's attention; splash attention takes the segments themselves."""
        return None if self.settings.attention == "splash" else attention_mask(segment_ids)

    def _replacements(self, segment_ids: jax.Array) -> Iterator[tuple[Any, str, Any]]:
        """Yield (owner, attribute, value) for everything that is replaced."""
        module = self.family.tunix_module()
        if module.__name__.startswith("tunix."):
            from tunix.utils import sharding_utils

            yield sharding_utils, "shard", sharding.constrain
            if hasattr(module, "shard"):
                yield module, "shard", sharding.constrain
        yield from self.family.replacements(self.architecture)
        yield from self.family.within(segment_ids)
        if self.settings.attention == "splash":
            from .attention import attend_within

            yield from self.family.splash(attend_within(segment_ids, self.settings.attention_block))
        if self.settings.qat is not None:
            from . import quantize

            yield quantize, "ACTIVE", self.settings.qat
        if self.settings.remat not in OF_TUNIX:
            from . import remat

            yield from remat.replacements(module, self.settings, bool(self.architecture.expert_layers))


def _has_rows(model: Any) -> bool:
    return hasattr(model.embedder, TOKEN_ROWS.rpartition(".")[2])


def _rows(model: Any) -> AbstractContextManager[None]:
    """Compute the model with the trained rows of its embedding, if it has any."""
    if not _has_rows(model):
        return nullcontext()
    from .trained import with_trained_rows

    return with_trained_rows(model.embedder)


def attention_mask(segment_ids: jax.Array) -> jax.Array:
    """Return which tokens each token may attend to: the earlier ones of its segment; none from padding.

    Args:
        segment_ids: int32[B, T], 0 for padding.

    Returns:
        bool[B, T, T], indexed by row, query and key.
    """
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids > 0)[:, :, None]
