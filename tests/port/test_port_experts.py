"""Compare adapters on experts and routers with PEFT's, on small models of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers

from recipec.compiler.catalog import Model, entries, find
from recipec.port.meaning import adapters, experts
from recipec.port.tool_names import known
from recipec.runtime.model.adapters import LoraSettings, build_adapters, parse_layers
from recipec.runtime.model.families import FAMILIES

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 32,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
    "shared_intermediate_size": 8,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
RANK = 4


def small(name: str, folder: Path) -> tuple[Model, Any]:
    """Return a small text model of a family in the catalog, here and in transformers."""
    known = deepcopy(entries()[name]["config"])  # transformers writes into nested values
    text = known.get("text_config", known)
    config = {key: SMALL.get(key, EXPERTS.get(key, value)) for key, value in text.items()}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][: SMALL["num_hidden_layers"]]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    return find("./", folder), made


def by_peft(model: Any, spec: Any, parameters: Sequence[str], layers: Any) -> dict[str, int]:
    """Return the ranks of what PEFT adapts, by the names that a recipe's targets match."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, target_modules=spec, target_parameters=parameters, layers_to_transform=layers)
    made = get_peft_model(model, config)
    found = {}
    for name, module in made.named_modules():
        if not hasattr(module, "lora_A") or not module.r:
            continue
        whole = name.replace(".base_layer", "")
        if parameter := getattr(module, "parameter_name", ""):
            whole = f"{whole}.{parameter}".removesuffix(".weight")
        found[whole[whole.index("layers.") :]] = module.r["default"]
    return found


@pytest.mark.parametrize(
    ("spec", "parameters", "layers", "targets"),
    [
        ("all-linear", [], None, ("q_proj", "k_proj", "v_proj", "o_proj", "router", "experts")),
        (["q_proj", "gate_proj", "up_proj", "down_proj"], [], None, ("q_proj", "experts")),
        (["q_proj"], ["mlp.experts.down_proj"], None, ("q_proj", r"layers\.\d+\.mlp\.experts\.down_proj")),
        ([], ["experts.gate_up_proj", "experts.down_proj", "gate.weight"], None, ("router", "experts")),
        (["v_proj", "gate"], [], [1], (r"layers\.(1)\.self_attn\.v_proj", "router")),
        (
            r".*layers\.1\.(self_attn\.q_proj|mlp\.experts\.down_proj)",
            [],
            None,
            ("q_proj", r"layers\.\d+\.mlp\.experts\.down_proj"),
        ),
    ],
)
def test_qwen3_moe_adapted_modules_and_ranks_match_peft(
    spec: Any, parameters: list[str], layers: Any, targets: tuple[str, ...], tmp_path: Path
) -> None:
    model, theirs = small("Qwen/Qwen3-30B-A3B", tmp_path)
    found = adapters.choose(model, spec, layers, None, parameters)
    assert found.targets == targets and not found.unmatched and found.parameters
    patterns = dict.fromkeys(found.doubled, 2 * RANK)
    settings = LoraSettings(
        rank=RANK,
        alpha=8.0,
        targets=found.targets,
        layers=parse_layers(found.layers, model.architecture.num_layers),
        dropout=0.0,
        rank_pattern=patterns,
    )
    lora_adapters = build_adapters(model.family, model.architecture, settings)
    ours = {adapter.name: adapter.rank for adapter in lora_adapters}
    assert ours == by_peft(theirs, spec, parameters, layers)


DENSE = ["q_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("name", "spec", "parameters"),
    [
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "all-linear", []),
        ("Qwen/Qwen3.5-35B-A3B", DENSE, ["gate.weight"]),
        ("mistralai/Mixtral-8x7B-v0.1", ["v_proj", "w1", "w2", "w3", "gate"], []),
        ("mistralai/Mixtral-8x7B-v0.1", ["v_proj"], ["mlp.experts.down_proj"]),
        ("zai-org/GLM-4.5-Air", DENSE, []),
        ("allenai/OLMoE-1B-7B-0125", "all-linear", []),
        ("openai/gpt-oss-20b", ["q_proj"], ["experts.gate_up_proj", "mlp.router.weight"]),
        ("ibm-granite/granite-4.0-h-tiny", "all-linear", ["block_sparse_moe.input_linear.weight"]),
        ("ibm-granite/granite-3.1-1b-a400m-base", ["o_proj"], ["block_sparse_moe.output_linear.weight"]),
    ],
)
def test_moe_adapted_modules_match_peft_for_each_family(
    name: str, spec: Any, parameters: list[str], tmp_path: Path
) -> None:
    model, theirs = small(name, tmp_path)
    found = adapters.choose(model, spec, None, None, parameters)
    wanted = set(by_peft(theirs, spec, parameters, None))
    beyond = {one for one in wanted if one.endswith("shared_expert_gate")}
    assert set(found.sites) == wanted - beyond and not found.unmatched
    assert found.beyond == (("shared_expert_gate",) if beyond else ())


def test_up_proj_without_its_fused_gate_proj_is_refused(tmp_path: Path) -> None:
    model, theirs = small("Qwen/Qwen3-30B-A3B", tmp_path)
    with pytest.raises(ValueError, match="without also targeting"):
        by_peft(theirs, ["q_proj", "up_proj"], [], None)
    with pytest.raises(experts.Halved, match="up_proj of an expert is one parameter with gate_proj"):
        adapters.choose(model, ["q_proj", "up_proj"])


def test_expert_table_matches_peft_and_transformers() -> None:
    from peft.utils import transformers_weight_conversion as peft

    patterns, mappings = peft._MODEL_TO_CONVERSION_PATTERN, peft._MOE_TARGET_MODULE_MAPPING
    for name, family in FAMILIES.items():
        kind = family.model_types[-1]
        assert known("experts", "renamed").get(name) == mappings.get(patterns.get(kind, ""))
        config = transformers.CONFIG_MAPPING[kind]()
        module = __import__(type(config).__module__.replace("configuration", "modeling"), fromlist=["x"])
        usual = (
            getattr(config, "router_aux_loss_coef", None)
            if hasattr(module, "load_balancing_loss_func")
            else None
        )
        assert known("experts", "balanced").get(name) == usual, name
