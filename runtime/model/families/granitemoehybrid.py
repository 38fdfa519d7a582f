"""Granite 4: Granite's multipliers, Mamba 2 mixers or attention, and one expert for all tokens, alone or next
to others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, Experts, Mamba, Names, chosen, listed_types
from .family import FULL, LINEAR, built_in, count, integer
from .granite import Granite
from .granitemoe import TENSORS
from .ssm import mixer

KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
"""The kinds of layers by their names in config.json, old and new."""
TYPES, BLOCKS = "layer_types", "layers_block_type"
"""The keys that name the layers' kinds; transformers reads the second as another name of the first."""
POSITIONS = "position_embedding_type"
MINIATURE = 16
"""Features of a mixer's head in a miniature."""


class GraniteMoeHybrid(Granite):
    name = "granitemoehybrid"
    title = "Granite 4"
    names = Names(mlp="shared_mlp", joined=("input_linear", "output_linear"))
    defaults: ClassVar[Mapping[str, Any]] = {
        **Granite.defaults,
        "max_position_embeddings": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
    }
    biased = (("attention_bias", ("q", "k", "v", "o")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "hidden_act", "silu", self.title)
        kinds, shared = self.layer_types(config), integer(config, "shared_intermediate_size")
        experts = None
        if count(config, "num_local_experts"):
            size = integer(config, "intermediate_size")
            tensors = replace(TENSORS, shared="shared_mlp", beside=True)
            experts = Experts(*chosen(config, 8), size=size, scores="chosen", shared=shared, tensors=tensors)
        described = super().describe(
            config,
            layer_types=kinds,
            turns=(config.get(POSITIONS) == "rope",) * len(kinds),
            fused=("gate_up",),
            mamba=mamba(config) if LINEAR in kinds else None,
            experts=experts,
            **different,
        )
        return described if experts is not None else replace(described, intermediate_size=shared)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        layers = integer(config, "num_hidden_layers")
        types = config.get(TYPES, config.get(BLOCKS)) or ("mamba",) * layers
        return tuple(KINDS[kind] for kind in listed_types(types, layers, tuple(KINDS)))

    def kinds(self, config: Mapping[str, Any], layers: Sequence[int]) -> Mapping[str, Any]:
        types = self.architecture(config).layer_types
        return {TYPES: ["mamba" if types[i] == LINEAR else "attention" for i in layers]}

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return sizes of the mixers: transformers checks them even in a model without such layers."""
        features = integer({**self.defaults, **small}, "mamba_expand") * integer(small, "hidden_size")
        return {"mamba_n_heads": features // MINIATURE, "mamba_d_head": MINIATURE}


def mamba(config: Mapping[str, Any]) -> Mamba:
    """Return the sizes of the mixers."""
    inner = integer(config, "mamba_expand") * integer(config, "hidden_size")
    biases = {"in": "mamba_proj_bias", "conv": "mamba_conv_bias", "out": "mamba_proj_bias"}
    return mixer(config, inner, "mamba_expand", biases, norm_parts=1)


FAMILY = GraniteMoeHybrid()
