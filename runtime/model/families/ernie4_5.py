"""ERNIE 4.5, dense: Llama's layers, whose features rotate with their neighbors. The language model of
PaddleOCR-VL is one whose heads turn by time, row and column, and rotate in halves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..rope import Rope
from .decoder_family import MULTIMODAL, DecoderArchitecture, DecoderFamily
from .family import text_config
from .multimodal_rope import by_axes
from .rotary import read_ropes

VL = ("paddleocr_vl", "paddleocr_vl_text")


class Ernie45(DecoderFamily):
    name = "ernie4_5"
    title = "ERNIE 4.5"
    model_types = (*VL, "ernie4_5")
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    biased = (("use_bias", ("q", "k", "v", "o", "mlp")),)

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        text = text_config(config)
        if text.get("model_type") not in VL and config.get("model_type") not in VL:
            return super().architecture(config)
        return by_axes(super().architecture(config), text)

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        neighbors = config.get("model_type") not in VL
        return read_ropes(config, kinds, self.title, head_dim=head_dim, share=None, interleaved=neighbors)


FAMILY = Ernie45()
