"""GLM 4.7 Flash: DeepSeek V3's layers in other sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .family import built_in
from .latent import LatentFamily, listed_blocks

FIRST = "first_k_dense_replace"


class Glm4MoeLite(LatentFamily):
    name = "glm4_moe_lite"
    title = "GLM 4.7 Flash"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 154_880,
        "hidden_size": 2048,
        "intermediate_size": 10_240,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 768,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "moe_intermediate_size": 1536,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
        FIRST: 1,
    }

    def routed(self, config: Mapping[str, Any]) -> tuple[bool, ...]:
        if config.get("mlp_layer_types") is None:
            built_in(config, FIRST, 1, self.title)  # vLLM reads it, transformers does not
        return listed_blocks(config, super().routed(config))


FAMILY = Glm4MoeLite()
