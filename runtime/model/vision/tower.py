"""The tower of every kind of vision model, with its projector.

Patches of all pictures of a row lie one after the other, and attention stays within a picture, or within a
square window of it. A tower that reads tiles of one size computes each tile by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..families.vision import CLIPS, Turning, VisionLayers
from ..layers import ACTIVATIONS, HEADS, STREAM, Block, Config, Einsum, Normalization, unit
from ..remat import POLICIES
from ..rope import rotate
from ..sharding import constrain
from .parts import attend
from .steps import Patches, Steps

Turn = tuple[jax.Array, jax.Array]
"""Sines and cosines of the patches' angles."""


class Clipped(Einsum):
    """A product whose inputs and outputs are bounded by numbers of the checkpoint."""

    def __init__(self, clipped: bool, *args: Any) -> None:
        super().__init__(*args)
        self.clipped = clipped
        for bound in CLIPS if clipped else ():
            setattr(self, bound, nnx.Param(jnp.zeros(1, args[2])))

    def __call__(self, x: jax.Array) -> jax.Array:
        if not self.clipped:
            return super().__call__(x)
        least, most, lowest, highest = (getattr(self, bound).get_value() for bound in CLIPS)
        return jnp.clip(super().__call__(jnp.clip(x, least, most)), lowest, highest)


class VisionAttention(nnx.Module):
    """Self-attention of a tower's layer, in both directions."""

    def __init__(self, layers: VisionLayers, dtype: Any) -> None:
        self.layers = layers
        d, n, k, h = layers.hidden_size, layers.num_heads, layers.num_kv_heads, layers.head_dim
        if layers.fused:
            self.qkv = Einsum("BPD,DCNH->BPCNH", (d, 3, n, h), dtype, "w", 3 * ("q" in layers.biases))
        for letter, heads in {} if layers.fused else {"q": n, "k": k, "v": k}.items():
            bias = 2 * (letter in layers.biases)
            product = Clipped(layers.clipped, "BPD,DNH->BPNH", (d, heads, h), dtype, "w", bias)
            setattr(self, f"{letter}_proj", product)
        out = (n, h, d)
        self.o_proj = Clipped(layers.clipped, "BPNH,NHD->BPD", out, dtype, "w", int("o" in layers.biases))
        self.q_norm = Normalization(layers.norm, (h,), dtype) if layers.qk_norm else None
        self.k_norm = Normalization(layers.norm, (h,), dtype) if layers.qk_norm else None

    def __call__(self, x: jax.Array, groups: jax.Array | None, turn: Turn | None) -> jax.Array:
        """Return [B, P, D].

        Args:
            groups: as `groups` returns them.
        """
        layers = self.layers
        if layers.fused:
            q, k, v = (self.qkv(x)[:, :, i] for i in range(3))
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (constrain(heads, HEADS) for heads in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if layers.value_norm:
            v = unit(v.astype(jnp.float32), (-1,), layers.norm.eps).astype(v.dtype)
        if turn is not None and layers.turning is not None:
            q, k = (turned(heads, turn, layers.turning) for heads in (q, k))
        return constrain(self.o_proj(attend(q, k, v, groups, layers.scale)), STREAM)


class VisionMLP(nnx.Module):
    """The feed-forward block of a tower's layer."""

    def __init__(self, layers: VisionLayers, dtype: Any) -> None:
        self.layers = layers
        bias = int("mlp" in layers.biases)
        for name, shape in layers.projections().items():
            setattr(self, name, Clipped(layers.clipped, "BPI,IO->BPO", shape, dtype, "kernel", bias))

    def __call__(self, x: jax.Array) -> jax.Array:
        activation = ACTIVATIONS[self.layers.activation]
        if self.layers.gated:
            return self.down_proj(constrain(activation(self.gate_proj(x)) * self.up_proj(x), STREAM))
        return self.fc2(constrain(activation(self.fc1(x)), STREAM))


class VisionLayer(Block):
    """A layer of a tower, which is recomputed from its input with every policy of recomputation."""

    recomputed_by = tuple(name for name in POLICIES if name != "none")

    def __init__(self, config: Config, layers: VisionLayers) -> None:
        self.config, self.described, dtype = config, layers, config.dtype
        for name in layers.places.names:
            setattr(self, name, Normalization(layers.norm, (layers.hidden_size,), dtype))
        self.attn = VisionAttention(layers, dtype)
        self.mlp = VisionMLP(layers, dtype)

    def block(self, x: jax.Array, groups: jax.Array | None, turn: Turn | None) -> jax.Array:
        places = self.described.places
        attended = self.attn(self.normed(places.before_attention, x), groups, turn)
        x = x + self.normed(places.after_attention, attended)
        return x + self.normed(places.after_mlp, self.mlp(self.normed(places.before_mlp, x)))

    def normed(self, name: str | None, x: jax.Array) -> jax.Array:
        return x if name is None else getattr(self, name)(x)


class Tower(nnx.Module):
    """A vision tower with its projector."""

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture.vision, config.dtype
        assert a is not None
        self.architecture, self.dtype = a, dtype
        self.embedder = Steps(a.embedder, dtype)
        layers = a.layers
        self.layers = nnx.List(
            [] if layers is None else [VisionLayer(config, layers) for _ in range(layers.count)]
        )
        self.pooler = Steps(a.pooler, dtype)
        self.projector = Steps(a.projector, dtype)
        self.deepstack = nnx.List([Steps(steps, dtype) for _, steps in a.deepstack])

    def __call__(self, patches: jax.Array, patch_images: jax.Array, patch_positions: jax.Array) -> jax.Array:
        """Return the features [1 + S, B, R, D] that stand for the pictures in the decoder's input, and for
        the outputs of its first S layers.

        Args:
            patches: float32[B, P, F], block by block, 0 for padding.
            patch_images: int32[B, P], 1, 2, ... for the picture of a patch, 0 for padding.
            patch_positions: int32[B, P, 2], the row and column of a patch in its picture or tile.
        """
        a, rows = self.architecture, patches.shape[0]
        at = Patches(patch_images, patch_positions)
        if a.patches is not None:
            patches = patches.reshape(-1, a.patches, patches.shape[-1])
            at = Patches(None, patch_positions.reshape(-1, a.patches, 2))
        x = self.embedder(patches, at)
        turn = None if a.layers is None else angles(a.layers, at, x.shape[1])
        compute = self.unrolled if is_trained(self.layers) else self.scanned
        x, projected = compute(x, at, turn)
        further = [steps(read, at) for steps, read in zip(self.deepstack, projected, strict=True)]
        out = [self.projector(self.pooler(x, at), at), *further]
        return jnp.stack([features.reshape(rows, -1, features.shape[-1]) for features in out])

    def unrolled(self, x: jax.Array, at: Patches, turn: Turn | None) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Return the last layer's output, [B, P, D], and the outputs that are projected too. Each layer has
        code of its own: layers that are trained may differ in their adapters."""
        out = {}
        for i, layer in enumerate(self.layers):
            out[i] = x = layer(x, groups(layer.described, at, i in layer.described.full), turn)
        return x, [out[i] for i, _ in self.architecture.deepstack]

    def scanned(self, x: jax.Array, at: Patches, turn: Turn | None) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Return the same of layers that are not trained. One layer's code serves all, because libtpu takes
        up to a minute for a layer's. They have no backward pass that would recompute them."""
        described, places = self.architecture.layers, [i for i, _ in self.architecture.deepstack]
        if described is None:
            return x, ()
        graphs, states = zip(*map(nnx.split, self.layers), strict=True)
        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)
        every = range(described.count)
        full = np.array([i in described.full for i in every])
        # Where a layer's output is kept: those that nothing reads have the last place.
        place = np.array([places.index(i) if i in places else len(places) for i in every])

        def layer(carry: tuple[jax.Array, jax.Array | None], scanned: Any) -> tuple[Any, None]:
            (x, kept), (state, is_full, place) = carry, scanned
            x = nnx.merge(graphs[0], state).block(x, groups(described, at, is_full), turn)
            return (x, None if kept is None else kept.at[place].set(x)), None

        kept = jnp.zeros((len(places) + 1, *x.shape), x.dtype) if places else None
        (x, kept), _ = jax.lax.scan(layer, (x, kept), (stacked, full, place))
        return x, () if kept is None else [kept[i] for i in range(len(places))]


def is_trained(part: nnx.Module) -> bool:
    """Return whether a part of a model has adapters, or arrays that are trained with them."""
    return any(isinstance(node, nnx.LoRAParam) for _, node in nnx.iter_graph(part))


def groups(layers: VisionLayers, at: Patches, full: jax.Array | bool) -> jax.Array | None:
    """Return int32[B, P, G]: patches with the same G numbers see each other in a layer; None if all of a row
    do.

    Args:
        full: whether the layer's attention spans a picture, where that of others stays within a window.
    """
    if at.images is None:
        return None
    picture = at.images[..., None]
    if not layers.window:
        return picture
    return jnp.concatenate([picture, jnp.where(full, 0, at.positions // layers.window)], axis=-1)


def angles(layers: VisionLayers, at: Patches, length: int) -> Turn | None:
    """Return sines and cosines by which heads rotate, two of float32[B, P, H / 2]; None for no rotation.

    Args:
        length: places of a row. Those after the patches do not rotate.
    """
    turning, positions = layers.turning, at.positions
    if turning is None:
        return None
    shared = layers.head_dim if turning.alternating else layers.head_dim // 2
    frequencies = (1 / turning.theta ** (np.arange(0, shared, 2, dtype=np.float32) / shared)).astype(
        np.float32
    )
    of_axes = (frequencies[0::2], frequencies[1::2]) if turning.alternating else (frequencies, frequencies)
    places = (positions + turning.first).astype(jnp.float32)
    places = places if turning.axes == "yx" else places[..., ::-1]
    parts = [places[..., i, None] * frequencies for i, frequencies in enumerate(of_axes)]
    angle = jnp.pad(jnp.concatenate(parts, axis=-1), ((0, 0), (0, length - positions.shape[1]), (0, 0)))
    return jnp.sin(angle), jnp.cos(angle)


def turned(x: jax.Array, turn: Turn, turning: Turning) -> jax.Array:
    """Rotate each head of [B, P, N, H]."""
    if turning.pairs != "parts":
        return rotate(x, *turn, turning.pairs == "neighbors")
    parts = zip(jnp.split(x, 2, axis=-1), *(jnp.split(angles, 2, axis=-1) for angles in turn), strict=True)
    return jnp.concatenate([rotate(*part) for part in parts], axis=-1)
