"""gpt-oss: experts in every layer, attention sinks, every second layer with a window.

It is published with its experts in MXFP4 (runtime/weights/quantized_formats.py). It is trained in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, ExpertTensors, Norm, chosen
from .family import HARMONY, built_in, integer, number, section

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The default of transformers' GptOssConfig without `rope_parameters`."""

TENSORS = ExpertTensors(router="router", apart=False, inputs_first=True, alternate=True)


class GptOss(DecoderFamily):
    name = "gpt_oss"
    title = "gpt-oss"
    quantized = ("mxfp4",)
    eager = True
    turn_markers = HARMONY
    full_every = 2
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "attention_bias": True,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "swiglu_limit", 7.0, self.title)
        rope = section(config, "rope_scaling") or section(config, "rope_parameters") or YARN
        experts = Experts(
            *chosen(config, 128),
            size=integer(config, "intermediate_size"),
            scores="chosen",
            biases=True,
            clamped=True,
            tensors=TENSORS,
        )
        norm = Norm(number(config, "rms_norm_eps", 1e-5), wide=True)
        return super().describe(
            {**config, "rope_parameters": rope}, norm=norm, sinks=True, experts=experts, **different
        )


FAMILY = GptOss()
