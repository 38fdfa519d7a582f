"""Compare every family of the shared decoder with transformers, and refuse configs that it does not cover.

The models are tiny, with random float32 weights of awkward shapes. Rows are padded and packed, on a mesh of
2 x 2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from recipec.runtime.model.families import family_of
from tests.runtime import training
from tests.runtime.decoders import CASES, EVERY, LIMIT, YARN, make
from tests.runtime.references import logits_apart

AXES = {"fsdp": 2, "tp": 2}
TWO = {"num_hidden_layers": 2}
WINDOW_AND_FULL = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_AND_FULL = {**TWO, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION_AND_FULL = {**TWO, "layer_types": ["conv", "full_attention"]}
FEWER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen3", "olmo3", "cohere2"), WINDOW_AND_FULL),
    "qwen3_moe": {**TWO, "mlp_only_layers": [0]},
    "afmoe": WINDOW_AND_FULL,
    **dict.fromkeys(("gpt_oss", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), TWO),
    **dict.fromkeys(("qwen3_5", "qwen3_next"), LINEAR_AND_FULL),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION_AND_FULL),
    "granitemoehybrid": {**TWO, "layer_types": ["mamba", "attention"]},
}
"""One layer of each kind, where a case has some twice: what XLA compiles grows with the layers."""
OF_OTHERS = (
    *("deepseek_v2", "ernie4_5", "glm", "qwen2_moe", "seed_oss", "granitemoe", "mixtral", "olmoe"),
    *("qwen3_5_moe", "qwen3_moe-windows"),
)
"""Whose parts other cases have too: Qwen 3's and Qwen 3 Next's, gpt-oss's, GLM's."""

VARIANTS = (
    *("phi3-longrope", "deepseek_v3-half", "granitemoehybrid-dense", "jamba-dense", "lfm2-biases"),
    *("falcon-one-norm", "falcon-one-key", "gpt_neox-serial", "stablelm-parallel"),
)
"""Cases of `make e2e`: other settings of a family that `make test` has."""

ALONE = ("mistral-mistral3", "mistral4-mistral3")
"""Of the multimodal cases, one, and that of a family whose text model has no class in transformers' table."""


@pytest.mark.usefixtures("highest")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly)
        if ("wrapper" in values and case not in ALONE) or case in OF_OTHERS
        else pytest.param(case, marks=pytest.mark.e2e)
        if case in VARIANTS
        else case
        for case, values in CASES.items()
    ],
)
def test_logits_match_transformers(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Compare padded rows, and packed samples with each sample by itself."""
    model = make(case, tmp_path, **FEWER.get(case, {}))
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    difference, size = logits_apart(model, built, mesh)
    record_property("logits", difference / size)
    print(f"\n{case}: logits differ by {difference:.1e} of {size:.1f}")
    assert size > 5, "logits are not flat"
    assert difference <= LIMIT * size


@pytest.mark.usefixtures("highest")
def test_olmo3_scales_rope_frequencies_only_in_full_attention_layers(tmp_path: Path) -> None:
    """Compare with transformers 5.12, whose layers with a window get a rotary embedding of their own here."""
    model = make("olmo3", tmp_path, rope_parameters=YARN)
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    scaled, size = logits_apart(model, built, mesh)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
    plain = type(model.model.rotary_emb)(config)

    def turn_plainly(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_embeddings": plain(args[0], kwargs["position_ids"])}

    for kind, layer in zip(config.layer_types, model.model.layers, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(turn_plainly, with_kwargs=True)
    difference, size = logits_apart(model, built, mesh)
    print(
        f"\nolmo3-yarn: logits differ by {difference:.1e} of {size:.1f}; by {scaled:.1e} where all are scaled"
    )
    assert difference <= LIMIT * size
    assert scaled > 0.1


@pytest.mark.usefixtures("highest")
def test_deepseek_v2_logits_match_corrected_transformers(tmp_path: Path) -> None:
    """Compare with transformers 5.12 after two corrections: yarn's factor of the scores, and the choice of
    experts in groups."""
    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    yarn = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
    model = make("deepseek_v2", tmp_path, **TWO, **groups, rope_parameters=yarn)
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    model.model.layers[1].mlp.num_experts = model.config.n_routed_experts
    left_out, size = logits_apart(model, built, mesh)
    for layer in model.model.layers:
        layer.self_attn.scaling *= yarn_get_mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2
    difference, size = logits_apart(model, built, mesh)
    print(f"\ndeepseek_v2: logits differ by {difference:.1e} of {size:.1f}; by {left_out:.1e} without it")
    assert difference <= LIMIT * size
    assert left_out > 0.1


@pytest.mark.usefixtures("highest")
def test_experts_split_over_the_ep_axis_give_transformers_logits(tmp_path: Path) -> None:
    """Split experts over ep, where rows go to the devices that hold their experts, and compare logits with
    transformers."""
    model = make("qwen3_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[], num_experts=6)
    mesh, built = training.build(tmp_path, {"fsdp": 1, "ep": 2, "tp": 2}, remat="none", targets=EVERY)
    split = {p.path: p.spec for p in built.parameters}["layers.0.mlp.experts.gate_up"]
    difference, size = logits_apart(model, built, mesh)
    assert split == ("ep", "fsdp", None, "tp")
    assert difference <= LIMIT * size


def test_llama_4_scaling_beta_of_zero_disables_query_growth() -> None:
    """Devstral 2 123B gives a growth of 0."""
    config = {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}}
    assert family_of(config).architecture(config).query_growth is None


def test_minimax_rotary_dim_sets_the_number_of_rotated_features() -> None:
    """transformers does not read this number, and takes a share of a head, by default all of it."""
    config = {"model_type": "minimax_m2"}
    family = family_of(config)
    told = family.architecture({**config, "rotary_dim": 64})
    assert told == family.architecture({**config, "partial_rotary_factor": 0.5})
    assert told != family.architecture(config)
