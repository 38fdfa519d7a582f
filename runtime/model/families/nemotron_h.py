"""Nemotron-H and Nemotron 3: each layer is a Mamba 2 mixer, attention without rotation, a feed-forward block
without a gate, or experts without gates.

Checkpoints may hold further layers under `mtp.`, which predict more tokens; they are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    Mamba,
    Names,
    Norm,
    Places,
    chosen,
    flag,
)
from .family import CHATML, FULL, LINEAR, NONE, UnsupportedCheckpoint, built_in, count, integer, number
from .glm4_moe import grouped
from .ssm import divided, limits

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""The kinds of layers by their letters in `hybrid_override_pattern`."""
KINDS = {"mamba": LINEAR, "attention": FULL, "mlp": NONE, "moe": NONE}
NEWER = {"linear_attention": "mamba", "full_attention": "attention"}
"""The names of two kinds in later versions of transformers."""
BLOCKS, PATTERN = "layers_block_type", "hybrid_override_pattern"
"""The keys that name the layers' kinds; transformers reads the second if the first is missing."""

OTHER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""Keys that transformers reads in place of others."""

TENSORS = ExpertTensors(
    block="mixer",
    expert=("experts.{}.up_proj.weight", "experts.{}.down_proj.weight"),
    together=("experts.up_proj", "experts.down_proj"),
    shared="shared_experts",
)


class NemotronH(DecoderFamily):
    name = "nemotron_h"
    title = "Nemotron-H and Nemotron 3"
    prefixes = ("backbone.", "model.")
    names = Names(
        embedding="embeddings",
        embeddings=("embedding",),  # as transformers 5 saves it
        norm="norm_f",
        attention="mixer",
        mamba="mixer",
        mlp="mixer",
        plain=("up_proj", "down_proj"),
    )
    loaded_as: Mapping[str, str] = MappingProxyType({"backbone.": "model."})
    turn_markers = CHATML
    chunk_in_torch = 128
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        for key, value in BUILT_IN.items():
            built_in(config, key, value, self.title)
        renamed = {new: config[old] for old, new in OTHER_NAMES.items() if old in config}
        config = {**config, **renamed, "hidden_act": config["mlp_hidden_act"]}
        blocks = block_types(config)
        return super().describe(
            config,
            norm=Norm(number(config, "layer_norm_epsilon", 1e-5)),
            places=Places("norm", None, "norm"),
            turns=(False,) * len(blocks),
            mamba=mamba(config),
            lone=True,
            gated=False,
            experts=experts(config) if "moe" in blocks else None,
            routed=tuple(block == "moe" for block in blocks),
            **different,
        )

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(KINDS[block] for block in block_types(config))

    def kinds(self, config: Mapping[str, Any], layers: Sequence[int]) -> Mapping[str, Any]:
        blocks = block_types(config)
        kept = [blocks[i] for i in layers]
        letters = {block: letter for letter, block in LETTERS.items()}
        return {BLOCKS: kept, PATTERN: "".join(letters[block] for block in kept)}


BUILT_IN = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "residual_in_fp32": False,
    "n_shared_experts": 1,
}
"""Keys of which the decoder computes one value."""


def block_types(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer: one of the values of LETTERS.

    Raises:
        UnsupportedCheckpoint: unless the config names known kinds, as many as num_hidden_layers if that is
            given.
    """
    blocks, key = config.get(BLOCKS, config.get("layer_types")), BLOCKS
    if blocks is None and config.get(PATTERN) is not None:
        key, pattern = PATTERN, config[PATTERN]
        blocks = [LETTERS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else pattern
    elif blocks is None:
        blocks = ["mamba", "moe", "attention", "mlp"]
    known = isinstance(blocks, list | tuple) and all(block in [*KINDS, *NEWER] for block in blocks)
    if not known or not blocks:
        raise UnsupportedCheckpoint(f"config.json: {key} names other layers than {', '.join(KINDS)}", key)
    blocks = tuple(NEWER.get(block, block) for block in blocks)
    layers = count(config, "num_hidden_layers") or len(blocks)
    if layers != len(blocks):
        raise UnsupportedCheckpoint(
            f"config.json: {key} names {len(blocks)} layers, and num_hidden_layers is {layers}", key
        )
    return blocks


def mamba(config: Mapping[str, Any]) -> Mamba:
    """Return the sizes of the mixers."""
    heads, groups = divided(config, "mamba_num_heads", "n_groups")
    biases = {"in": "use_bias", "conv": "use_conv_bias", "out": "use_bias"}
    shortest, longest = limits(config)
    return Mamba(
        heads,
        integer(config, "mamba_head_dim"),
        groups,
        integer(config, "ssm_state_size"),
        integer(config, "conv_kernel"),
        biases=tuple(part for part, key in biases.items() if flag(config, key)),
        shortest=shortest,
        longest=longest,
        norm_parts=groups,
        closed=True,
    )


def experts(config: Mapping[str, Any]) -> Experts:
    """Return the experts, including one that every token goes through."""
    total, per_token = chosen(config, 8)
    groups, chosen_groups = grouped(config, total, per_token)
    return Experts(
        total,
        per_token,
        integer(config, "moe_intermediate_size"),
        scores="sigmoid",
        normalized=flag(config, "norm_topk_prob"),
        scale=number(config, "routed_scaling_factor", 1.0),
        groups=groups,
        chosen_groups=chosen_groups,
        correction=True,
        wide=True,
        latent=count(config, "moe_latent_size"),
        shared=integer(config, "moe_shared_expert_intermediate_size"),
        tensors=TENSORS,
    )


FAMILY = NemotronH()
