"""SigLIP with the projector of Gemma 3: pictures of one size, whose features are averaged over squares."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .base import FULL, SLIDING, Parameter, UnsupportedCheckpoint, integer, number, plain, section
from .vision import VisionArchitecture, activation_of, prefixes_of

TOWERS = ("model.vision_tower.", "vision_tower.vision_model.", "vision_tower.")
PROJECTORS = ("model.multi_modal_projector.", "multi_modal_projector.")
DEFAULTS = {
    **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    **{"num_channels": 3, "image_size": 224, "patch_size": 16},
}
"""Values of transformers' config class."""


@dataclass(frozen=True, kw_only=True)
class Siglip(VisionArchitecture):
    """A SigLIP tower, and Gemma 3's projector.

    Attributes:
        side: patches along each side of a picture.
        pooled: features along each side of a picture, after averaging.
    """

    KIND: ClassVar[str] = "siglip"

    side: int
    pooled: int

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def patches_of_feature(self) -> int:
        return (self.side // self.pooled) ** 2

    def parameters(self) -> list[Parameter]:
        d, tower = self.hidden_size, "vision_tower"
        out = self.patch_embedding("patch_embedding", f"{tower}.embeddings.patch_embedding", d, bias=True)
        positions = plain(self.full_name(f"{tower}.embeddings.position_embedding.weight"), (self.patches, d))
        out.append(self.array("position_embedding", (self.patches, d), (None, "tp"), positions))
        for i in range(self.num_layers):
            layer, name = f"layers.{i}", f"{tower}.encoder.layers.{i}"
            for each in ("q_proj", "k_proj", "v_proj"):
                out += self.dense(f"{layer}.{each}", f"{name}.self_attn.{each}", (d, d))
            out += self.dense(f"{layer}.out_proj", f"{name}.self_attn.out_proj", (d, d), ("tp", "fsdp"))
            out += self.dense(f"{layer}.fc1", f"{name}.mlp.fc1", (d, self.intermediate_size))
            out += self.dense(f"{layer}.fc2", f"{name}.mlp.fc2", (self.intermediate_size, d), ("tp", "fsdp"))
            for each in ("layer_norm1", "layer_norm2"):
                out += self.norm(f"{layer}.{each}", f"{name}.{each}", d)
        out += self.norm("post_layernorm", f"{tower}.post_layernorm", d)
        projector = "multi_modal_projector"
        out += self.norm("soft_emb_norm", f"{projector}.mm_soft_emb_norm", d, bias=False)
        weight = plain(self.full_name(f"{projector}.mm_input_projection_weight"), (d, self.text_size))
        out.append(self.array("projection.kernel", (d, self.text_size), ("fsdp", "tp"), weight))
        return out


def of_gemma3(config: Mapping[str, Any], text_size: int, tensors: Iterable[str] = ()) -> Siglip:
    """Read the tower of a Gemma 3 checkpoint from its config.json.

    Args:
        text_size: the language model's hidden size.
        tensors: as in `Family.vision`.

    Raises:
        UnsupportedCheckpoint: when it is another kind of tower, or its sizes do not fit each other.
    """
    vision = {**DEFAULTS, **section(config, "vision_config")}
    if (kind := vision.get("model_type", "siglip_vision_model")) != "siglip_vision_model":
        raise UnsupportedCheckpoint(
            f"config.json: vision_config is of model_type {kind!r}; Gemma 3 has siglip_vision_model",
            "vision_config",
        )
    size, patch = integer(vision, "image_size"), integer(vision, "patch_size")
    tokens, side = integer(config, "mm_tokens_per_image", 256), size // patch
    pooled = math.isqrt(tokens)
    if pooled**2 != tokens or not pooled or side % pooled:
        raise UnsupportedCheckpoint(
            f"config.json: mm_tokens_per_image is {tokens}, and a picture has {side} x {side} patches, which "
            "do not average to a square of so many",
            "mm_tokens_per_image",
        )
    hidden, heads = integer(vision, "hidden_size"), integer(vision, "num_attention_heads")
    if hidden % heads:
        raise UnsupportedCheckpoint(
            f"config.json: hidden_size of vision_config is {hidden}, which {heads} heads do not divide",
            "vision_config",
        )
    return Siglip(
        prefixes=prefixes_of(tensors, {"vision_tower": TOWERS, "multi_modal_projector": PROJECTORS}),
        hidden_size=hidden,
        intermediate_size=integer(vision, "intermediate_size"),
        num_heads=heads,
        num_layers=integer(vision, "num_hidden_layers"),
        patch_size=patch,
        channels=integer(vision, "num_channels"),
        text_size=text_size,
        eps=number(vision, "layer_norm_eps", 1e-6),
        activation=activation_of(vision, "gelu_pytorch_tanh"),
        both_ways=(FULL, SLIDING),
        side=side,
        pooled=pooled,
    )
