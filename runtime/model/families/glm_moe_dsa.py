"""GLM 5: DeepSeek V3's layers, whose tokens each see the `index_topk` tokens that an indexer chooses.

In a sample of at most that many tokens, a token sees all earlier ones, whatever the indexer says.
`recipe check` refuses longer samples. The indexer's tensors are not changed, and neither is the additional
layer of a checkpoint, which predicts one more token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture
from .family import built_in, integer
from .latent import LatentFamily, listed_blocks


class GlmMoeDsa(LatentFamily):
    name = "glm_moe_dsa"
    title = "GLM 5"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 154_880,
        "hidden_size": 6144,
        "intermediate_size": 12_288,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5,
        "kv_lora_rank": 512,
        "q_lora_rank": 2048,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "index_topk": 2048,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "rope_interleave", True, self.title)
        built_in(config, "mlp_bias", False, self.title)
        integer(config, "q_lora_rank")  # the indexer reads compressed queries
        # transformers reads neither, and saves a num_experts that need not be the number of experts.
        config = {**config, "layer_types": None, "num_experts": None}
        return super().describe(config, longest=integer(config, "index_topk"), **different)

    def routed(self, config: Mapping[str, Any]) -> tuple[bool, ...]:
        return listed_blocks(config, super().routed(config))

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        sizes = dict(super().miniature(config, small))
        layers = small["num_hidden_layers"]
        indexer = {"index_n_heads": 2, "index_head_dim": 2 * sizes["qk_rope_head_dim"]}
        return {**sizes, **indexer, "indexer_types": ["full"] * layers, "layer_types": None}

    def kept(self, config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        hidden, width = integer(config, "hidden_size"), integer(config, "index_head_dim")
        heads, queries = integer(config, "index_n_heads"), integer(config, "q_lora_rank")
        shapes = {
            "wq_b.weight": (heads * width, queries),
            "wk.weight": (width, hidden),
            "k_norm.weight": (width,),
            "k_norm.bias": (width,),
            "weights_proj.weight": (heads, hidden),
        }
        layers = (f"layers.{i}.self_attn.indexer" for i in range(integer(config, "num_hidden_layers")))
        return {f"{layer}.{name}": shape for layer in layers for name, shape in shapes.items()}


FAMILY = GlmMoeDsa()
