"""The parts that layers of the decoder (decoder.py) are made of.

Modules have Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .cache import Cache
from .families.description import DecoderArchitecture, Norm
from .remat import ATTENTION, POLICIES, PROJECTION, recomputed
from .sharding import constrain
from .trained import trained_rows

STREAM = ("fsdp", None, "tp")
"""The sharding of the residual stream [B, T, D], and of features within a feed-forward block."""
HEADS = ("fsdp", None, "tp", None)
"""The sharding of queries, keys and values [B, T, N, H]."""

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), jax.nn.gelu),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}

XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The parameters of an xIELU, of which the last two are constants of the checkpoint."""


@dataclass(frozen=True)
class Config:
    """A description, the dtype of parameters and activations, and the name of a policy of remat.POLICIES."""

    architecture: DecoderArchitecture
    dtype: Any
    remat: str = "none"


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("positions", "segment_ids", "mask", "key_positions", "image_ids", "rotary_positions"),
    meta_fields=("attention_block", "cache", "longest"),
)
@dataclass(frozen=True)
class Batch:
    """What the layers read of the batch that is computed.

    Attributes:
        positions: int32[B, T], from each segment's first token.
        segment_ids: int32[B, T], 0 for padding.
        mask: bool[B, T, T], which tokens each token may attend to, by row, query and key; None for splash
            attention, which reads the segments.
        attention_block: tokens of the largest block of splash attention; None for attention.MOST.
        key_positions: int32[B, S], positions of the keys that the tokens attend to. The mask is then
            bool[B, T, S]. None for the tokens' own keys.
        cache: what layers keep of earlier tokens while text is generated; None for whole rows.
        longest: the number of positions by which rotary embeddings choose their frequencies (rope.sin_cos);
            None for those of this batch.
        image_ids: int32[B, T], which picture of its row each token stands for, from 1; 0 for text. None for a
            batch without pictures.
        rotary_positions: int32[B, T, 3], by which rotary embeddings turn in models that turn by time, row and
            column; None for `positions`.
    """

    positions: jax.Array
    segment_ids: jax.Array
    mask: jax.Array | None = None
    attention_block: int | None = None
    key_positions: jax.Array | None = None
    cache: Cache | None = None
    longest: int | None = None
    image_ids: jax.Array | None = None
    rotary_positions: jax.Array | None = None

    @classmethod
    def of(cls, positions: jax.Array, segment_ids: jax.Array) -> Batch:
        """Return a batch for attention that computes all scores."""
        return cls(positions, segment_ids, attention_mask(segment_ids))


@partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        *("patches", "patch_images", "patch_positions"),
        *("image_features", "image_ids", "rotary_positions"),
    ),
    meta_fields=(),
)
@dataclass(frozen=True)
class Images:
    """The pictures of a micro-batch.

    Attributes:
        patches: float32[B, P, F], the pictures of each row, patch by patch. The values of a patch are in the
            order of the tower's first weight.
        patch_images: int32[B, P], the picture of its row that a patch belongs to, from 1; 0 for padding.
        patch_positions: int32[B, P, 2], row and column of a patch in its picture.
        image_features: int32[B, T], which of its row's features takes the place of a token's embedding; -1
            for text. The tower makes the features in the order of the patches.
        image_ids, rotary_positions: as in `Batch`.
    """

    patches: jax.Array
    patch_images: jax.Array
    patch_positions: jax.Array
    image_features: jax.Array
    image_ids: jax.Array
    rotary_positions: jax.Array | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Images | None:
        """Return the pictures of a micro-batch by name, None if the recipe has none."""
        if "patches" not in batch:
            return None
        return cls(**{field.name: batch.get(field.name) for field in fields(cls)})


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


class Block(nnx.Module):
    """A part of a layer that may be recomputed from its input, if the config says so.

    Attributes:
        recomputed_by: the policies that recompute this part from its input.
        has_experts: whether the loads of experts leave the part (expert_load.py).
    """

    recomputed_by: tuple[str, ...] = ("block",)
    has_experts = False

    def __call__(self, *args: Any) -> Any:
        policy = self.config.remat
        if policy in self.recomputed_by:
            return recomputed(type(self).block, self.has_experts, POLICIES[policy])(self, *args)
        return self.block(*args)


def named(x: jax.Array, batch: Batch) -> jax.Array:
    """Give attention's output, before its output projection, the name that policies of recomputation know.
    The kernel of splash attention names what it keeps itself."""
    return x if batch.mask is None else checkpoint_name(x, ATTENTION)


def unit(x: jax.Array, axes: tuple[int, ...], eps: float) -> jax.Array:
    """Divide x by its root mean square over the axes, in float32."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=axes, keepdims=True) + eps)


def capped(x: jax.Array, limit: float) -> jax.Array:
    """Bend x smoothly so that it stays within plus and minus the limit."""
    return jnp.tanh(x / limit) * limit


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Multiply by a model's constant, in float32."""
    return x if scale == 1 else (x.astype(jnp.float32) * scale).astype(x.dtype)


class Einsum(nnx.Module):
    """A product with a weight, and an optional bias.

    Attributes:
        einsum_str: the product's equation.
        weight: the name of the weight's attribute: "w", or "kernel" in dense layers.
        bias: added to the product, in the shape of its last dimensions; None for no bias.
    """

    def __init__(
        self, einsum_str: str, shape: tuple[int, ...], dtype: Any, weight: str = "w", bias: int = 0
    ) -> None:
        """Create the weight, and a bias of the last `bias` dimensions of the shape; 0 for none."""
        self.einsum_str, self.weight = einsum_str, weight
        setattr(self, weight, nnx.Param(jnp.zeros(shape, dtype)))
        self.bias = nnx.Param(jnp.zeros(shape[-bias:], dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        out = jnp.einsum(self.einsum_str, x, getattr(self, self.weight).get_value())
        return checkpoint_name(out if self.bias is None else out + self.bias.get_value(), PROJECTION)


class Normalization(nnx.Module):
    """RMS or layer normalization over the last axes, in float32."""

    def __init__(self, norm: Norm, shape: tuple[int, ...], dtype: Any, over: int = 0) -> None:
        """Create the parameters. `over` axes are normalized together; 0 for all of the shape."""
        self.norm, self.over = norm, over or len(shape)
        self.w = nnx.Param(jnp.zeros(shape, dtype)) if norm.weighted else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if norm.bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        axes = tuple(range(-self.over, 0))
        wide = x.astype(jnp.float32)
        if self.norm.centered:
            wide = wide - jnp.mean(wide, axis=axes, keepdims=True)
        wide = unit(wide, axes, self.norm.eps)
        if not self.norm.wide:
            wide = wide.astype(x.dtype).astype(jnp.float32)
        if self.w is not None:
            wide = wide * (self.w.get_value().astype(jnp.float32) + self.norm.offset)
        if self.bias is not None:
            wide = wide + self.bias.get_value().astype(jnp.float32)
        return wide.astype(x.dtype)


class Embedder(nnx.Module):
    """Token embeddings, which can also serve as the output head."""

    def __init__(self, vocabulary: int, features: int, dtype: Any) -> None:
        self.input_embedding = nnx.Param(jnp.zeros((vocabulary, features), dtype))

    def encode(self, tokens: jax.Array) -> jax.Array:
        """Return [B, T, D], the embeddings of int32[B, T]; trained rows replace the table's own."""
        x = self.input_embedding[tokens]
        if (trained := trained_rows(self)) is not None:
            rows, numbers = trained
            same = tokens[..., None] == numbers
            x = jnp.where(same.any(-1)[..., None], rows[jnp.argmax(same, -1)].astype(x.dtype), x)
        return constrain(x, STREAM)

    def add_layers(self, config: Config) -> None:
        """Add what the layers' own inputs are made from."""
        a, dtype = config.architecture, config.dtype
        self.config = config
        self.per_layer_input_embedding = nnx.Param(
            jnp.zeros((a.vocab_size, a.num_layers, a.per_layer_input), dtype)
        )
        shape = a.hidden_size, a.num_layers, a.per_layer_input
        self.per_layer_model_projection = Einsum("BTD,DLP->BTLP", shape, dtype)
        self.per_layer_projection_norm = Normalization(a.norm, (a.per_layer_input,), dtype)

    def encode_layers(self, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return [B, T, L, P], the layers' own inputs.

        Args:
            tokens: int32[B, T].
            x: [B, T, D], their embeddings.
        """
        a = self.config.architecture
        projected = self.per_layer_model_projection(x) * jnp.asarray(a.hidden_size**-0.5, x.dtype)
        table = self.per_layer_input_embedding.get_value()
        layer_embeddings = table[tokens] * jnp.asarray(a.per_layer_input**0.5, table.dtype)
        return (self.per_layer_projection_norm(projected) + layer_embeddings) * jnp.asarray(2**-0.5, x.dtype)


class MLP(Block):
    """The feed-forward block of one layer, or the shared expert that every token goes through."""

    def __init__(self, config: Config, features: int) -> None:
        a = config.architecture
        self.config = config
        d, f = a.hidden_size, features
        bias = int("mlp" in a.biases)
        if a.activation == "xielu":
            for name in XIELU:
                setattr(self, name, nnx.Param(jnp.zeros(1, config.dtype)))

        def dense(features_in: int, features_out: int) -> Einsum:
            return Einsum("BTI,IO->BTO", (features_in, features_out), config.dtype, "kernel", bias)

        if not a.gated:
            self.c_fc, self.c_proj = dense(d, f), dense(f, d)
            return
        if "gate_up" in a.fused:
            self.gate_up_proj = Einsum("BTD,DCF->BTCF", (d, 2, f), config.dtype, "kernel")
        else:
            self.gate_proj, self.up_proj = dense(d, f), dense(d, f)
        self.down_proj = dense(f, d)

    def block(self, x: jax.Array) -> jax.Array:
        a = self.config.architecture
        activation = self.xielu if a.activation == "xielu" else ACTIVATIONS[a.activation]
        if not a.gated:
            return self.c_proj(constrain(activation(self.c_fc(x)), STREAM))
        if "gate_up" in a.fused:
            both = self.gate_up_proj(x)
            gate, up = both[:, :, 0], both[:, :, 1]
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        return self.down_proj(constrain(activation(scaled(gate, a.scales.gate)) * up, STREAM))

    def xielu(self, x: jax.Array) -> jax.Array:
        """Apply xIELU (https://arxiv.org/abs/2411.13010), in x's dtype."""
        alpha_p, alpha_n, beta, eps = (getattr(self, name).get_value().astype(x.dtype) for name in XIELU)
        rising = jax.nn.softplus(alpha_p) * x * x
        falling = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(x, eps)) - x)
        return jnp.where(x > 0, rising, falling) + beta * x
