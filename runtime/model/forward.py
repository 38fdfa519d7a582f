"""Run a model as the recipe describes it. All code that runs a model goes through here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from ..sections import FakeQuantization
from ..settings import ModelSettings
from . import sharding
from .attention import collect, deal
from .decoder import Decoder
from .families import Architecture, Family
from .families.family import Spec
from .layers import Batch, Images
from .quantize import rounded_operands, rounding
from .trained import trained_rows


@dataclass(frozen=True)
class Head:
    """The output head, which turns final hidden states into logits.

    Attributes:
        weight: [V, D] if the embedding serves as head, else [D, V].
        bias: [V], added to the product; None for none.
        tied: whether the embedding serves as head.
        softcap: logits become softcap * tanh(logits / softcap); None for none.
        cap_dtype: the dtype of that computation; None for the product's.
        scale: factor of the logits.
        rows: [N, D], trained rows of the embedding that replace the weight's; None for none.
        numbers: int32[N], which rows they are.
        qat: how hidden states and weight are rounded if it rounds heads; None for not at all.
    """

    weight: jax.Array
    tied: bool
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
        return self.weight, *(array for array in (self.bias, self.rows) if array is not None)

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
        """Return the logits, float32[B, T, V].

        Args:
            hidden: [B, T, D].
            weight, rest: `self.arrays`, placed for this product.
        """
        dtype = jnp.promote_types(hidden.dtype, weight.dtype)
        equation = "BTD,VD->BTV" if self.tied else "BTD,DV->BTV"
        operands = hidden.astype(dtype), weight.astype(dtype)
        if self.qat is not None and self.qat.head:
            operands = rounded_operands(equation, *operands, self.qat)
        logits = jnp.einsum(equation, *operands)
        if self.rows is not None:
            trained = jnp.einsum("BTD,ND->BTN", hidden.astype(dtype), rest[0].astype(dtype))
            logits = logits.at[..., self.numbers].set(trained, unique_indices=True)
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
        images: the pictures of the batch that is computed, None for none.
    """

    family: Family
    architecture: Architecture
    settings: ModelSettings
    images: Images | None = None

    def of(self, batch: Mapping[str, Any]) -> Forward:
        """Return how a micro-batch is computed, with its pictures."""
        images = Images.of(batch)
        return self if images is None else replace(self, images=images)

    @property
    def dealt(self) -> bool:
        """Whether tokens are in the order of `attention.deal`, which balances splash attention."""
        return self.settings.attention == "splash"

    def logits(
        self, model: Decoder, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Return the logits [B, T, V] of a whole batch, in the rows' own order.

        Args:
            model: merged with its arrays.
            tokens, positions, segment_ids: int32[B, T].
        """
        length, rows = tokens.shape[1], (tokens, positions, segment_ids)
        hidden = self.hidden(model, *(map(deal, rows) if self.dealt else rows))
        head = self.head(model)
        logits = head.logits(hidden, *head.placed(head.arrays))
        return collect(logits, length) if self.dealt else logits

    def hidden(
        self, model: Decoder, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
    ) -> jax.Array:
        """Return [B, T, D], the hidden states after the final norm, which `head` turns into logits.

        The arguments are those of `logits`. If `dealt`, arguments and result are in the order of
        `attention.deal`.
        """
        return self.computed(model, tokens, self.batch(positions, segment_ids))

    def batch(self, positions: jax.Array, segment_ids: jax.Array) -> Batch:
        """Return what layers read of a batch; the arguments are those of `hidden`."""
        batch = Batch.of(positions, segment_ids)
        if self.dealt:
            batch = Batch(positions, segment_ids, None, self.settings.attention_block)
        if (images := self.images) is None:
            return batch
        return replace(batch, image_ids=images.image_ids, rotary_positions=images.rotary_positions)

    def computed(self, model: Decoder, tokens: jax.Array, batch: Batch) -> jax.Array:
        """Return [B, T, D], the hidden states of int32[B, T], with the recipe's rounding."""
        with rounding(self.settings.qat):
            out: jax.Array = model(tokens, batch, self.images)
        return out

    def head(self, model: Decoder) -> Head:
        """Return the output head of a model: its own, or the embedding."""
        a, head = model.config.architecture, getattr(model, "lm_head", None)
        bias = getattr(head, "bias", None)
        rows, numbers = (None if head is not None else trained_rows(model.embedder)) or (None, None)
        return Head(
            weight=(model.embedder.input_embedding if head is None else head.w).get_value(),
            tied=head is None,
            softcap=a.logit_softcap,
            cap_dtype=jnp.float32 if self.family.caps_in_float32 else None,
            scale=a.logit_scale,
            bias=None if bias is None else bias.get_value(),
            rows=rows,
            numbers=numbers,
            qat=self.settings.qat,
        )
