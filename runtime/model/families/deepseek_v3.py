"""DeepSeek V3 and R1, and Moonlight, which has the same layers.

Checkpoints may hold an additional layer, which predicts one more token; it is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .latent import LatentFamily


class DeepseekV3(LatentFamily):
    name = "deepseek_v3"
    title = "DeepSeek V3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
    }


FAMILY = DeepseekV3()
