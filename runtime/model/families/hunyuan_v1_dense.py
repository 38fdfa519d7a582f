"""Hunyuan, dense: Llama's layers, with norms of each head's queries and keys after the rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..rope import Rope
from .decoder_family import DecoderArchitecture, DecoderFamily, Names
from .family import MOST, UnsupportedCheckpoint, built_in, number, section


class HunyuanV1Dense(DecoderFamily):
    name = "hunyuan_v1_dense"
    title = "Hunyuan"
    names = Names(qk_norms=("query_layernorm", "key_layernorm"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 290_943,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    }
    biased = (("attention_bias", ("q", "k", "v", "o")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "use_qk_norm", True, self.title)
        built_in(config, "use_cla", False, self.title)
        return super().describe(config, qk_norm="head", qk_normed_last=True, **different)

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        """Read the rotation. Its "dynamic" kind with an `alpha` is a plain rotation with a larger base, at
        every length: base * alpha^(d / (d - 2)) for heads of d features."""
        for key in ("rope_scaling", "rope_parameters"):
            scaling = section(config, key)
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind == "dynamic" and scaling.get("alpha") and head_dim > 2:
                place = scaling if scaling.get("rope_theta") is not None else config
                base, alpha = number(place, "rope_theta", 10_000.0), number(scaling, "alpha", 1.0)
                if alpha > MOST:
                    raise UnsupportedCheckpoint(f"config.json: {key}: alpha is {alpha:g}, too large", key)
                base *= alpha ** (head_dim / (head_dim - 2))
                left_out = ("rope_scaling", "rope_parameters")
                config = {k: v for k, v in config.items() if k not in left_out} | {"rope_theta": base}
        return super().ropes(config, kinds, head_dim)


FAMILY = HunyuanV1Dense()
