"""Mistral Small 4: latent attention with queries that grow with their position. A softmax chooses experts.

Unlike in DeepSeek's families, yarn's `mscale_all_dim` does not scale the scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..rope import Rope
from . import ministral3
from .decoder_family import MULTIMODAL, DecoderArchitecture, Experts
from .family import UnsupportedCheckpoint, integer, number, section
from .latent import LatentFamily
from .rotary import SHARE

YARN = {**ministral3.YARN, "rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
"""The default of transformers' Mistral4Config without `rope_parameters`."""


class Mistral4(LatentFamily):
    name = "mistral4"
    title = "Mistral 4"
    wrappers = ("mistral3",)
    prefixes = MULTIMODAL
    scaled = False
    scores = "softmax"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "max_position_embeddings": 1_048_576,
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        rope, growth = ministral3.growing(config, YARN)
        return super().describe({**config, "rope_parameters": rope}, query_growth=growth, **different)

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        """Return the rotations. Here a share is one of a whole head: it gives qk_rope_head_dim once more."""
        turned = integer(config, "qk_rope_head_dim")
        key = "rope_scaling" if section(config, "rope_scaling") else "rope_parameters"
        rope = dict(section(config, key))
        places = [place for place in (rope, config) if place.get(SHARE) is not None]
        for share in (number(place, SHARE, 1.0) for place in places):
            if share > 1 or int(head_dim * share) != turned:
                raise UnsupportedCheckpoint(
                    f"config.json: {SHARE} is {share:g}, and {turned} of a head's {head_dim} features rotate",
                    SHARE,
                )
        rope.pop(SHARE, None)
        return super().ropes({**config, key: rope, SHARE: None}, kinds, head_dim)

    def experts(self, config: Mapping[str, Any]) -> Experts:
        experts_of_base = super().experts(config)
        together = replace(experts_of_base.tensors, apart=False)
        return replace(experts_of_base, balanced=False, wide=False, tensors=together)


FAMILY = Mistral4()
