"""SigLIP (https://arxiv.org/abs/2303.15343) with the projector of Gemma 3."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from ..families.description import Norm
from ..families.siglip import Siglip
from ..layers import ACTIVATIONS, Config, Normalization
from ..sharding import constrain
from .parts import PATCHES, attend, dense, layer_norm, split_heads


class SiglipLayer(nnx.Module):
    """Attention among the patches of a picture, and a feed-forward block, each after a layer norm."""

    def __init__(self, vision: Siglip, dtype: jnp.dtype) -> None:
        self.vision, d = vision, vision.hidden_size
        self.layer_norm1, self.layer_norm2 = (layer_norm(d, vision.eps, dtype) for _ in range(2))
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (dense(d, d, dtype) for _ in range(4))
        self.fc1 = dense(d, vision.intermediate_size, dtype)
        self.fc2 = dense(vision.intermediate_size, d, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self.layer_norm1(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (split_heads(one(normed), self.vision.num_heads) for one in projections)
        out = attend(q, k, v, None, self.vision.head_dim**-0.5)
        x = constrain(x + self.out_proj(out.reshape(x.shape)), PATCHES)
        inner = constrain(ACTIVATIONS[self.vision.activation](self.fc1(self.layer_norm2(x))), PATCHES)
        return constrain(x + self.fc2(inner), PATCHES)


class SiglipTower(nnx.Module):
    """The tower, and the projector: features are averaged over squares, normalized, and multiplied by a
    matrix."""

    def __init__(self, config: Config) -> None:
        vision, dtype = config.architecture.vision, config.dtype
        assert isinstance(vision, Siglip)
        self.vision, d = vision, vision.hidden_size
        self.patch_embedding = dense(vision.patch_features, d, dtype)
        self.position_embedding = nnx.Param(jnp.zeros((vision.patches, d), dtype))
        self.layers = nnx.List([SiglipLayer(vision, dtype) for _ in range(vision.num_layers)])
        self.post_layernorm = layer_norm(d, vision.eps, dtype)
        self.soft_emb_norm = Normalization(Norm(vision.eps, offset=1.0, wide=True), (d,), dtype)
        self.projection = dense(d, vision.text_size, dtype, bias=False)

    def __call__(self, patches: jax.Array, patch_images: jax.Array, patch_positions: jax.Array) -> jax.Array:
        """Return features [1, B, R, D], of which each picture has `pooled` squared.

        Args:
            patches: float[B, P, F], whole pictures one after the other.
            patch_images, patch_positions: not used: all pictures are of one size.
        """
        vision, rows = self.vision, patches.shape[0]
        table = self.position_embedding
        x = patches.reshape(-1, vision.patches, vision.patch_features).astype(table.dtype)
        x = constrain(self.patch_embedding(x) + table.get_value(), PATCHES)
        for layer in self.layers:
            x = layer(x)
        x = self.post_layernorm(x)
        square = vision.side // vision.pooled
        x = x.reshape(-1, vision.pooled, square, vision.pooled, square, vision.hidden_size)
        pooled = x.astype(jnp.float32).mean((2, 4)).astype(x.dtype)
        pooled = pooled.reshape(-1, vision.pooled**2, vision.hidden_size)
        out = self.projection(self.soft_emb_norm(pooled))
        return constrain(out.reshape(rows, -1, vision.text_size), PATCHES)[None]
