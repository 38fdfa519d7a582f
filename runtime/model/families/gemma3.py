"""Gemma 3: five local layers to one global layer, each kind with its rotary base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..rope import Rope
from .decoder_family import MULTIMODAL, DecoderArchitecture
from .family import FULL, SLIDING, built_in, section
from .gemma import Gemma

THETAS = {SLIDING: ("rope_local_base_freq", 10_000.0), FULL: ("rope_theta", 1_000_000.0)}
"""The key of the rotary base in older config.json files, by kind of layer, and its default."""


class Gemma3(Gemma):
    name = "gemma3"
    title = "Gemma 3"
    model_types = ("gemma3", "gemma3_text")
    prefixes = MULTIMODAL
    full_every = "sliding_window_pattern"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "use_bidirectional_attention", False, self.title)
        return super().describe(config, qk_norm="head", **different)

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        by_type = {**config, "rope_scaling": None, "rope_parameters": by_kind(config)}
        return super().ropes(by_type, kinds, head_dim)

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Scale queries as the original does, with a number that the other way of scaling does not give."""
        a = self.architecture(config)
        if a.attention_scale == a.head_dim**-0.5:
            return {}
        head_dim, per_head = small["head_dim"], small["hidden_size"] // small["num_attention_heads"]
        return {
            "query_pre_attn_scalar": per_head,
            "head_dim": 2 * head_dim if head_dim == per_head else head_dim,
        }


def by_kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation of each kind of layer, from either spelling of transformers."""
    sections = section(config, "rope_parameters")
    older = {SLIDING: {}, FULL: section(config, "rope_scaling")}
    return {
        kind: {
            "rope_theta": config.get(key) or default,
            **older[kind],
            **section(sections, kind),
        }
        for kind, (key, default) in THETAS.items()
    }


FAMILY = Gemma3()
