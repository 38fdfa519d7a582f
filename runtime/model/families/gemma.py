"""The common parts of Gemma 2, 3 and 4: norms around each block, scaled embeddings, and soft-caps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import AROUND, DecoderArchitecture, DecoderFamily, Norm
from .family import GEMMA, integer, number, softcap


class Gemma(DecoderFamily):
    """A family of Gemma.

    Attributes:
        offset: what norms add to their weights.
    """

    turn_markers = GEMMA
    scaled_embedding = True
    activation = "hidden_activation"
    biased = (("attention_bias", ("q", "k", "v", "o")),)
    offset: ClassVar[float] = 1.0

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        fields: dict[str, Any] = {
            "norm": Norm(number(config, "rms_norm_eps", 1e-6), offset=self.offset, wide=True),
            "places": AROUND,
            "attention_scale": number(config, "query_pre_attn_scalar", 256) ** -0.5,
            "score_softcap": softcap(config, "attn_logit_softcapping", None),
            "logit_softcap": softcap(config, "final_logit_softcapping", None),
            "embedding_scale": integer(config, "hidden_size") ** 0.5,
        }
        return super().describe(config, **{**fields, **different})
