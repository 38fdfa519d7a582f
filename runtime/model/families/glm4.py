"""GLM 4 of April 2025 (GLM-4-0414): GLM 4 of 2024 with norms around each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .decoder_family import DecoderArchitecture, Places
from .glm import Glm

PLACES = Places(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


class Glm4(Glm):
    name = "glm4"
    title = "GLM 4"

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, places=PLACES, **different)


FAMILY = Glm4()
