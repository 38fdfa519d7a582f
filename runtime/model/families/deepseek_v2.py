"""DeepSeek V2 and V2.5: experts are chosen by a softmax, in V2 and V2.5 from the groups with the best expert.

yarn's `mscale_all_dim` scales the scores, as in the code that was published with the checkpoints and in vLLM.
transformers 5.12 leaves this out, and cannot choose within groups: it reads a `num_experts` that is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import Experts
from .family import UnsupportedCheckpoint, built_in
from .latent import LatentFamily

GREEDY, LIMITED = "greedy", "group_limited_greedy"


class DeepseekV2(LatentFamily):
    name = "deepseek_v2"
    title = "DeepSeek V2"
    scores = "softmax"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 1407,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,  # as published; transformers has no default
        "topk_method": GREEDY,
    }

    def experts(self, config: Mapping[str, Any]) -> Experts:
        built_in(config, "norm_topk_prob", False, self.title)
        built_in(config, "rope_interleave", True, self.title)
        built_in(config, "mlp_bias", False, self.title)
        method = config["topk_method"]
        if method == GREEDY:  # n_group and topk_group are not read
            config = {**config, "n_group": 1, "topk_group": 1}
        elif method != LIMITED:
            raise UnsupportedCheckpoint(
                f"config.json: topk_method is {method!r}; known are {GREEDY} and {LIMITED}", "topk_method"
            )
        return replace(super().experts({**config, "topk_method": self.method}), summed=1, balanced=False)


FAMILY = DeepseekV2()
