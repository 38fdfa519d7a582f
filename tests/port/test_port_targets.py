"""Compare target modules with PEFT's own matching, on the module names of transformers' models."""

from __future__ import annotations

import functools
import re
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from recipec.compiler.catalog import Model, entries, find
from recipec.port.meaning import adapters
from recipec.runtime.model.adapters import LoraSettings, build_adapters, parse_layers


@functools.cache
def module_names(name: str) -> dict[str, bool]:
    """Return the modules of transformers' model, without weights, and whether each is a Linear."""
    config = {**entries()[name]["config"], **find(name, Path()).multimodal}
    config = deepcopy(config)  # transformers writes into nested values
    if "vision_config" in config:
        config["vision_config"]["vision_use_head"] = False  # as Gemma 3's config.json has it
    with torch.device("meta"):
        model = getattr(transformers, config["architectures"][0])(transformers.AutoConfig.for_model(**config))
    return {path: isinstance(module, torch.nn.Linear) for path, module in model.named_modules() if path}


def by_peft(
    name: str, spec: Any, layers: list[int] | None = None, exclude: Any = None, tower: bool = False
) -> set[str]:
    """Return the projections of the language model that PEFT adapts, without the model's prefix; or those of
    the vision tower and its projector."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

    given = [key for key, linear in module_names(name).items() if linear and key != "lm_head"]
    config = LoraConfig(
        target_modules=given if spec == "all-linear" else spec,
        layers_to_transform=layers,
        exclude_modules=exclude,
    )
    found = {
        key
        for key in module_names(name)
        if (hit := check_target_module_exists(config, key)) and not isinstance(hit, _ExcludedModule)
    }
    if tower:
        return {
            key.removeprefix("model.")
            for key in found
            if "language_model" not in key and module_names(name)[key] and key != "lm_head"
        }
    text = [key for key in found if not any(part in key for part in ("vision_tower", "visual."))]
    return {
        key[key.index("layers.") :] for key in text if re.search(r"_proj$", key) and "per_layer" not in key
    }


def model_of(name: str) -> Model:
    return find(name, Path())


GEMMA4, GEMMA3 = "google/gemma-4-31B", "google/gemma-3-4b-it"
QWEN3, E2B, UNIFIED = "Qwen/Qwen3-4B-Base", "google/gemma-4-E2B", "google/gemma-4-12B"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BACKBONE = (
    r"model\.language_model\.layers\.\d+\.(_checkpoint_wrapped_module\.)?(mlp|self_attn)\.(up|k|v)_proj"
)


@pytest.mark.parametrize(
    ("name", "spec", "layers", "exclude"),
    [
        (GEMMA4, BACKBONE, None, None),
        (GEMMA4, "all-linear", None, None),
        (GEMMA4, ["v_proj", "mlp.down_proj"], [3, 4, 5, 11], None),
        (GEMMA4, r".*\.[0-5]\.self_attn\.q_proj|.*\.6\.mlp\.up_proj", None, None),
        (GEMMA4, r".*(?<!vision_tower).*\.1[02]\.mlp\..*_proj", None, None),
        (GEMMA3, ATTENTION, None, r".*vision_tower.*"),
        (GEMMA3, r"^(?!.*vision).*(q|v)_proj$", None, None),
        (UNIFIED, BACKBONE, None, None),
        (E2B, "all-linear", None, None),
        (E2B, ["k_proj", "v_proj"], None, ["layers.3.self_attn.k_proj"]),
        (QWEN3, ["self_attn.q_proj", "model.layers.7.mlp.up_proj"], None, None),
    ],
)
def test_adapted_projections_match_peft(name: str, spec: Any, layers: Any, exclude: Any) -> None:
    model = model_of(name)
    found = adapters.choose(model, spec, layers, exclude)
    wanted = by_peft(name, spec, layers, exclude)
    assert set(found.sites) == wanted and wanted
    assert adapted(model, found) == wanted


MISTRAL3, QWEN_VL = "mistralai/Mistral-Small-3.2-24B-Instruct-2506", "Qwen/Qwen3-VL-8B-Instruct"
QWEN_VL_2 = "Qwen/Qwen2.5-VL-7B-Instruct"


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        (GEMMA3, ["q_proj", "fc2"]),
        (GEMMA3, r".*vision_tower.*\.[0-3]\.self_attn\..*_proj|.*language_model.*q_proj"),
        (MISTRAL3, "all-linear"),
        (MISTRAL3, ["q_proj", "linear_1"]),
        (QWEN_VL, ["qkv", "q_proj"]),
        (QWEN_VL, r".*(visual.*linear_fc1|language_model.*down_proj)"),
        (QWEN_VL, ()),
        (QWEN_VL, ("finetune_language_layers",)),
        (QWEN_VL, ("finetune_vision_layers", "finetune_mlp_modules")),
        (QWEN_VL_2, ()),
        (QWEN_VL_2, ("finetune_attention_modules",)),
    ],
)
def test_adapted_projections_of_a_tower_match_peft(name: str, spec: Any) -> None:
    """Compare what a recipe with lora.vision adapts; a tuple names Unsloth's switches that are off."""
    model = model_of(name)
    if isinstance(spec, tuple):
        spec = adapters.unsloth_targets(model, spec)
    found = adapters.choose(model, spec)
    text, tower = by_peft(name, spec), by_peft(name, spec, tower=True)
    assert (set(found.sites), set(found.tower)) == (text, tower)
    targets = adapters.with_tower(model, found.targets, found.tower) if tower else found.targets
    settings = LoraSettings(rank=4, alpha=8.0, targets=tuple(targets), dropout=0.0, vision=True)
    architecture = replace(model.architecture, vision=model.tower)
    assert {adapter.name for adapter in build_adapters(model.family, architecture, settings)} == text | tower


def adapted(model: Model, found: adapters.Chosen) -> set[str]:
    """Return the projections that the recipe adapts."""
    layers = parse_layers(found.layers, model.architecture.num_layers)
    settings = LoraSettings(rank=4, alpha=8.0, targets=found.targets, layers=layers, dropout=0.0)
    return {adapter.name for adapter in build_adapters(model.family, model.architecture, settings)}


@pytest.mark.parametrize("name", [GEMMA3, E2B, UNIFIED, QWEN3, "google/gemma-4-26B-A4B"])
def test_module_names_match_transformers(name: str) -> None:
    ours = {module.name: module for module in adapters.modules(model_of(name))}
    theirs = module_names(name)
    text = {key for key, linear in theirs.items() if linear and "vision" not in key}
    assert text == {key for key, module in ours.items() if module.linear and module.what != adapters.VISION}
    assert {key for key, module in ours.items() if module.site is None and not module.linear} <= set(theirs)


def test_targets_that_recipes_cannot_adapt_are_listed() -> None:
    found = adapters.choose(
        model_of(E2B), ["q_proj", "lm_head", "embed_tokens", "per_layer_input_gate", "qkv_proj"]
    )
    assert found.targets == ("q_proj",) and found.layers == "all"
    assert found.beyond == ("embed_tokens", "per_layer_input_gate", "lm_head")
    assert found.unmatched == ("qkv_proj",) and found.vision
    dense = adapters.choose(model_of(UNIFIED), ["q_proj", "patch_dense", "embedding_projection"])
    assert dense.vision and not dense.unmatched
    assert not adapters.choose(model_of(UNIFIED), ["q_proj"]).vision
    assert adapters.default_targets(model_of(UNIFIED)) is None and adapters.default_targets(model_of(E2B))
    assert not adapters.choose(model_of(QWEN3), ["q_proj"]).vision


def test_targets_and_layers_are_written_compactly() -> None:
    model = model_of(QWEN3)
    assert adapters.choose(model, ["q_proj"], range(8, 12)).layers == "8-11"
    assert adapters.choose(model, ["q_proj"], [0, 5]).layers == [0, 5]
    mixed = adapters.choose(model, r".*\.[01]\.self_attn\.q_proj|.*up_proj")
    assert mixed.targets == (r"layers\.(0|1)\.self_attn\.q_proj", "up_proj") and mixed.layers == "all"


def test_invalid_regular_expression_target_is_refused() -> None:
    with pytest.raises(re.error):
        adapters.choose(model_of(QWEN3), "*.q_proj")
