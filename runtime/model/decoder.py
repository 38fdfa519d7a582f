"""The decoder of every family.

A DecoderArchitecture chooses its parts. decode.py generates text with it, one token a row at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .attention import Scoring, attend
from .experts import Mixture
from .families.description import Norm
from .families.family import CHUNKED
from .layers import (
    ACTIVATIONS,
    HEADS,
    MLP,
    STREAM,
    Batch,
    Block,
    Config,
    Einsum,
    Embedder,
    Images,
    Normalization,
    named,
    scaled,
    unit,
)
from .mixers import DeltaNet, Mamba, Mamba1, ShortConv
from .noise import with_noise
from .remat import OF_LAYERS
from .rope import rotate, sin_cos
from .sharding import constrain
from .vision import Tower, is_trained

Turn = tuple[jax.Array, jax.Array]
"""Sines and cosines of a batch's positions."""

KeysAndValues = tuple[jax.Array, jax.Array]
"""Rotated keys [B, T, K, H] and values [B, T, K, H] of a layer."""


class Attention(Block):
    """Causal self-attention of one layer."""

    def __init__(self, config: Config, layer: int) -> None:
        a, dtype = config.architecture, config.dtype
        self.config, self.layer = config, layer
        self.add_projections(config, layer)
        out = a.num_heads, a.value_dim(layer), a.hidden_size
        self.o_proj = Einsum("BTNH,NHD->BTD", out, dtype, bias=int("o" in a.biases))
        self.sinks = nnx.Param(jnp.zeros(a.num_heads, dtype)) if a.sinks else None

    def add_projections(self, config: Config, layer: int) -> None:
        """Add what makes queries, keys and values."""
        a, dtype = config.architecture, config.dtype
        d, n, k, h = a.hidden_size, a.num_heads, a.kv_heads(layer), a.layer_head_dim(layer)
        letters = a.projections(layer)
        projected = {letter: n if letter == "q" else k for letter in letters}
        if "qkv" in a.fused:
            projected = {"qkv": n + 2 * k}
        if "groups" in a.fused:
            bias = 3 * ("q" in a.biases)
            self.qkv_proj = Einsum("BTD,DKGH->BTKGH", (d, k, n // k + 2, h), dtype, bias=bias)
            projected = {}
        for name, heads in projected.items():
            bias = 2 if name in a.biases else 0
            shape = d, heads, a.query_width(layer) if name == "q" else h
            setattr(self, f"{name}_proj", Einsum("BTD,DNH->BTNH", shape, dtype, bias=bias))
        if a.gate_apart:
            self.gate_proj = Einsum("BTD,DNH->BTNH", (d, n, h), dtype)
        norm = Norm(a.norm.eps, a.qk_norm == "each", offset=a.norm.offset, wide=a.norm.wide)
        for name, heads in (("q", n), ("k", k)) if a.qk_norm else ():
            if name not in letters:
                continue
            over = (h,) if a.qk_norm == "head" else (heads, h)
            setattr(self, f"{name}_norm", Normalization(norm, over, dtype, int(a.qk_norm == "each")))

    def block(
        self,
        x: jax.Array,
        batch: Batch,
        turn: Turn | None,
        kv: KeysAndValues | None = None,
    ) -> tuple[jax.Array, KeysAndValues | None]:
        """Return the output [B, T, D], and the keys and values if a later layer reads them.

        Args:
            kv: what an earlier layer attended to, if this layer has no keys and values.
        """
        a = self.config.architecture
        q, k, v, gate = self.inputs(x, turn) if kv is None else (self.queries(x, turn), *kv, None)
        grown = a.query_growth
        if grown is not None and not (grown.unturned and turn is not None):
            times = jnp.floor((batch.positions + grown.shift).astype(jnp.float32) / grown.length)
            growth = 1 + grown.beta * jnp.log1p(times)
            q = (q * growth[..., None, None]).astype(q.dtype)
        if kv is None and batch.cache is not None:
            k, v = batch.cache.with_earlier(k, v)
        window = a.window(self.layer)
        chunked = a.layer_types[self.layer] == CHUNKED and window is not None and window < k.shape[1]
        sinks = None if self.sinks is None else self.sinks.get_value()
        scoring = Scoring(window, a.score_softcap, sinks, window if chunked else None)
        if (vision := a.vision) is not None and a.layer_types[self.layer] in vision.both_ways:
            scoring = replace(scoring, both_ways=True, within_window=vision.within_window)
        out = attend(q, k, v, batch, a.attention_scale, scoring)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return constrain(self.o_proj(named(out, batch)), STREAM), (k, v) if a.lends_kv(self.layer) else None

    def queries(self, x: jax.Array, turn: Turn | None) -> jax.Array:
        """Return rotated queries [B, T, N, H] of a layer without keys and values of its own."""
        q = self.q_norm(constrain(self.q_proj(x), HEADS))
        return q if turn is None else self.turned(q, turn)

    def inputs(self, x: jax.Array, turn: Turn | None) -> tuple[Any, ...]:
        """Return rotated queries [B, T, N, H], keys and values [B, T, K, H], and a gate or None."""
        a = self.config.architecture
        q, k, v = (constrain(array, HEADS) for array in self.projected(x))
        if a.value_norm:
            v = unit(v.astype(jnp.float32), (-1,), a.norm.eps).astype(v.dtype)
        gate = None
        if a.gate_apart:
            gate = constrain(self.gate_proj(x), HEADS)
        elif a.output_gate:
            q, gate = jnp.split(q, 2, axis=-1)
        if a.clip is not None:
            q, k, v = (jnp.clip(array, -a.clip, a.clip) for array in (q, k, v))
        if a.qk_norm and not a.qk_normed_last:
            q, k = self.q_norm(q), self.k_norm(k)
        if turn is not None:
            q, k = (self.turned(array, turn) for array in (q, k))
            if a.normed_turns:
                q, k = (
                    unit(array.astype(jnp.float32), (-1,), a.norm.eps).astype(x.dtype) for array in (q, k)
                )
        if a.qk_norm and a.qk_normed_last:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, gate

    def turned(self, x: jax.Array, turn: Turn) -> jax.Array:
        """Rotate each head of [B, T, N, H]."""
        rope = self.config.architecture.rope(self.layer)
        assert rope is not None
        return rotate(x, *turn, rope.interleaved)

    def projected(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return queries [B, T, N, H] (with a gate: [B, T, N, 2 H]), keys and values [B, T, K, H]."""
        a = self.config.architecture
        if "groups" in a.fused:
            queries = a.num_heads // a.num_kv_heads
            q, k, v = jnp.split(self.qkv_proj(x), (queries, queries + 1), axis=3)
            return q.reshape(*x.shape[:2], a.num_heads, a.head_dim), k[:, :, :, 0], v[:, :, :, 0]
        if "qkv" in a.fused:
            return tuple(jnp.split(self.qkv_proj(x), (a.num_heads, a.num_heads + a.num_kv_heads), axis=2))
        k = self.k_proj(x)
        return self.q_proj(x), k, k if a.keys_as_values(self.layer) else self.v_proj(x)


class LatentAttention(Attention):
    """Causal self-attention whose keys and values come from one compressed vector of each token.

    The keys and values of all heads are computed, as in transformers. A cache keeps these too.
    """

    def add_projections(self, config: Config, layer: int) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.latent is not None
        for name, shape in a.latent_projections.items():
            equation, weight = ("BTI,IO->BTO", "kernel") if len(shape) == 2 else ("BTD,DNH->BTNH", "w")
            setattr(self, name, Einsum(equation, shape, dtype, weight))
        for name, features in a.latent_norms.items():
            setattr(self, name, Normalization(Norm(a.latent.eps), (features,), dtype))

    def inputs(self, x: jax.Array, turn: Turn | None) -> tuple[Any, ...]:
        a = self.config.architecture
        latent = a.latent
        assert latent is not None
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if latent.queries else self.q_proj(x)
        q, q_turned = jnp.split(constrain(q, HEADS), (latent.plain,), axis=-1)
        compressed, k_turned = jnp.split(self.kv_a_proj_with_mqa(x), (latent.keys,), axis=-1)
        kv = constrain(self.kv_b_proj(self.kv_a_layernorm(compressed)), HEADS)
        k, v = jnp.split(kv, (latent.plain,), axis=-1)
        k_turned = k_turned[:, :, None]
        if turn is not None:
            q_turned, k_turned = (self.turned(array, turn) for array in (q_turned, k_turned))
        k_turned = jnp.broadcast_to(k_turned, q_turned.shape)
        q, k = (jnp.concatenate(both, axis=-1) for both in ((q, q_turned), (k, k_turned)))
        return constrain(q, HEADS), constrain(k, HEADS), v, None


class DecoderLayer(Block):
    """One layer: attention, a state, or both, and the feed-forward block, with their norms."""

    recomputed_by = OF_LAYERS

    def __init__(self, config: Config, layer: int) -> None:
        a, dtype = config.architecture, config.dtype
        self.config = config
        for name in a.places.names:
            setattr(self, name, Normalization(a.norm, (a.hidden_size,), dtype))
        self.has_experts = bool(a.expert_layers)
        parts = a.parts(layer)
        self.attn = _attention(config, layer, parts)
        self.mamba = _mamba(config) if "mamba" in parts else None
        self.conv = ShortConv(config) if "conv" in parts else None
        self.mixes = parts != ("mlp",)
        self.mlp = _feed_forward(config, layer) if "mlp" in parts else None
        experts = a.experts_of(layer)
        if experts is not None and experts.added:
            self.moe = Mixture(config, experts)
        if a.per_layer_input:
            self.per_layer_input_gate = Einsum(
                "BTI,IO->BTO", (a.hidden_size, a.per_layer_input), dtype, "kernel"
            )
            self.per_layer_projection = Einsum(
                "BTI,IO->BTO", (a.per_layer_input, a.hidden_size), dtype, "kernel"
            )
            self.post_per_layer_input_norm = Normalization(a.norm, (a.hidden_size,), dtype)
        self.layer_scalar = nnx.Param(jnp.zeros(1, dtype)) if a.layer_scalar else None

    def block(
        self,
        x: jax.Array,
        batch: Batch,
        turn: Turn | None,
        layer_input: jax.Array | None = None,
        kv: KeysAndValues | None = None,
    ) -> tuple[jax.Array, KeysAndValues | None]:
        """Return the output [B, T, D], and the layer's keys and values if a later layer reads them.

        Args:
            layer_input: [B, T, P], the layer's own input; None in models without.
            kv: keys and values of an earlier layer, if this layer has none.
        """
        places = self.config.architecture.places
        if self.mixes:
            normed = self.normed(places.before_attention, x)
            mixed, kv = self.mixed(normed, batch, turn, kv)
            mixed = self.normed(places.after_attention, mixed)
            if places.parallel:
                read = normed if places.before_mlp is None else self.normed(places.before_mlp, x)
                return x + self.scaled(mixed) + self.scaled(self.fed(read)), kv
            x = x + self.scaled(mixed)
        if self.mlp is not None:
            out = self.fed(self.normed(places.before_mlp, x))
            if places.before_experts is not None:
                routed = self.moe(self.normed(places.before_experts, x), x)
                out = self.normed(places.after_dense, out) + self.normed(places.after_experts, routed)
            x = x + self.scaled(self.normed(places.after_mlp, out))
        if layer_input is not None:
            activation = ACTIVATIONS[self.config.architecture.activation]
            read = self.per_layer_projection(activation(self.per_layer_input_gate(x)) * layer_input)
            x = x + self.post_per_layer_input_norm(read)
        return (x if self.layer_scalar is None else x * self.layer_scalar.get_value()), kv

    def mixed(
        self,
        x: jax.Array,
        batch: Batch,
        turn: Turn | None,
        kv: KeysAndValues | None,
    ) -> tuple[jax.Array, KeysAndValues | None]:
        """Return the output of attention, of what carries a state, or their sum; and attention's keys and
        values if a later layer reads them."""
        scales, out = self.config.architecture.scales, []
        if self.mamba is not None:
            out.append(scaled(self.mamba(x, batch), scales.mamba_output))
        if self.conv is not None:
            out.append(self.conv(x, batch))
        if isinstance(self.attn, Attention):
            attended, kv = self.attn(scaled(x, scales.attention_input), batch, turn, kv)
            out.append(scaled(attended, scales.attention_output))
        elif self.attn is not None:
            out.append(self.attn(x, batch))
        return sum(out[1:], out[0]), kv

    def fed(self, x: jax.Array) -> jax.Array:
        assert self.mlp is not None
        return scaled(self.mlp(x), self.config.architecture.scales.mlp_output)

    def normed(self, name: str | None, x: jax.Array) -> jax.Array:
        return x if name is None else getattr(self, name)(x)

    def scaled(self, x: jax.Array) -> jax.Array:
        return scaled(x, self.config.architecture.residual_scale)


def _attention(config: Config, layer: int, parts: Collection[str]) -> nnx.Module | None:
    if "attention" in parts:
        return (Attention if config.architecture.latent is None else LatentAttention)(config, layer)
    return DeltaNet(config) if "delta" in parts else None


def _mamba(config: Config) -> nnx.Module:
    sizes = config.architecture.mamba
    return Mamba1(config) if sizes is not None and sizes.rank else Mamba(config)


def _feed_forward(config: Config, layer: int) -> nnx.Module:
    experts = config.architecture.replaced_by(layer)
    if experts is None:
        return MLP(config, config.architecture.mlp_features(layer))
    return Mixture(config, experts)


class Decoder(nnx.Module):
    """The whole model."""

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        self.config = config
        self.embedder = Embedder(a.vocab_size, a.hidden_size, dtype)
        if a.per_layer_input:
            self.embedder.add_layers(config)
        self.layers = nnx.List([DecoderLayer(config, i) for i in range(a.num_layers)])
        self.final_norm = Normalization(a.norm, (a.hidden_size,), dtype)
        if not a.tied:
            bias = int("head" in a.biases)
            self.lm_head = Einsum("BTD,DV->BTV", (a.hidden_size, a.vocab_size), dtype, bias=bias)
        if a.vision is not None:
            self.vision = Tower(config)

    def __call__(self, tokens: jax.Array, batch: Batch, images: Images | None = None) -> jax.Array:
        """Return [B, T, D], the hidden states after the final norm, of which forward.Head makes logits.

        Args:
            tokens: int32[B, T].
            images: pictures among the tokens; None for text alone.
        """
        a = self.config.architecture
        x = with_noise(self.embedder.encode(tokens))
        if a.embedding_scale != 1:
            x = x * jnp.asarray(a.embedding_scale, x.dtype)
        added: Sequence[jax.Array] = ()
        if images is not None:
            assert a.vision is not None
            x, added = self.with_pictures(x, images)
            tokens = jnp.where(images.image_features >= 0, a.vision.padding, tokens)
        layer_inputs = self.embedder.encode_layers(tokens, x) if a.per_layer_input else None
        turned = {kind: (rope, a.turned_dim(kind)) for kind, rope in a.ropes}
        axes: Sequence[int] = ()
        positions = batch.positions
        if batch.rotary_positions is not None:
            positions, axes = batch.rotary_positions, a.turned_axes
        turns = {
            (rope, size): sin_cos(rope, positions, size, batch.longest, axes)
            for rope, size in turned.values()
        }
        lent: dict[int, KeysAndValues | None] = {}
        for i, layer in enumerate(self.layers):
            turn = None if a.rope(i) is None else turns[turned[a.layer_types[i]]]
            kv = lent[a.kv_layer(i)] if a.shares_kv(i) else None
            x, lent[i] = layer(x, batch, turn, None if layer_inputs is None else layer_inputs[:, :, i], kv)
            if i < len(added):
                x = x + added[i]
        return self.final_norm(x)

    def with_pictures(self, x: jax.Array, images: Images) -> tuple[jax.Array, list[jax.Array]]:
        """Return embeddings [B, T, D], with features of pictures in the places of their tokens; and what is
        added to the outputs of the first layers, [B, T, D] each.

        Of a frozen tower no gradient is computed, and nothing is kept.
        """
        features = self.vision(images.patches, images.patch_images, images.patch_positions)
        if not is_trained(self.vision):
            features = jax.lax.stop_gradient(features)
        index = images.image_features[..., None]
        first, *further = (
            jnp.take_along_axis(feature, jnp.maximum(index, 0), axis=1)
            for feature in features.astype(x.dtype)
        )
        placed = constrain(jnp.where(index >= 0, first, x), STREAM)
        return placed, [constrain(jnp.where(index >= 0, feature, 0), STREAM) for feature in further]
