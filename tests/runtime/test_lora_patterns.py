"""Tests of rsLoRA, rank_pattern and alpha_pattern against PEFT, without a run.

test_methods.py trains with them, and test_merge_parity.py merges and exports."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.compiler.lowering.program import trained_size
from recipec.runtime.model.adapters import LoraSettings, build_adapters, by_pattern, lora_settings
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.initial import initial_pair
from recipec.runtime.peft.exporting import adapter_config, peft_pattern
from recipec.runtime.settings import ModelSettings
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.runtime import training
from tests.runtime.runs import lora_section

SIZES = {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
OPTIONS: dict[str, Any] = {
    "rank": 4,
    "alpha": 8.0,
    "rslora": True,
    "rank_pattern": {"k_proj": 2, "down_proj": 6},
    "alpha_pattern": {r"layers\.0\.self_attn\.[kv]_proj": 3.0},
    "layers": (0, 2),
}


def gemma4_adapters(**options: Any) -> dict[str, Any]:
    family = FAMILIES["gemma4"]
    architecture = family.architecture({**tiny.gemma4_text(**SIZES), "model_type": "gemma4_text"})
    lora = LoraSettings(**{"dropout": 0.0, "rank": 4, "alpha": 8.0, "targets": training.TARGETS, **options})
    return {a.target.weight: a for a in build_adapters(family, architecture, lora)}


@pytest.mark.parametrize(
    ("patterns", "module"),
    [
        ({"k_proj": 2, "down_proj": 6}, "layers.3.self_attn.k_proj"),
        ({"k_proj": 2, "down_proj": 6}, "layers.3.mlp.down_proj"),
        ({"proj": 2}, "layers.3.self_attn.k_proj"),
        ({".*k_proj": 2, r"self_attn\.k_proj": 3}, "layers.3.self_attn.k_proj"),
        ({r"self_attn\.k_proj": 3, ".*k_proj": 2}, "layers.3.self_attn.k_proj"),
        ({r"layers\.[0-2]\..*": 2}, "layers.3.self_attn.k_proj"),
        ({r"layers\.(1|3)\.self_attn\.[qk]_proj": 2}, "layers.13.self_attn.k_proj"),
        ({r"model\.layers\.3\.mlp\.up_proj": 9}, "layers.3.mlp.up_proj"),
        ({r"^model\.layers\.3\.mlp\.up_proj": 9}, "layers.3.mlp.up_proj"),
        ({"q_proj|k_proj": 5}, "layers.3.self_attn.k_proj"),
        ({"self_attn": 5}, "layers.3.self_attn.k_proj"),
    ],
)
def test_pattern_lookup_matches_peft(patterns: dict[str, int], module: str) -> None:
    from peft.utils.other import get_pattern_key

    name = f"model.{module}"
    expected = patterns.get(get_pattern_key(list(patterns), name), 4)
    assert by_pattern(patterns, module, 4) == expected


def test_keys_and_values_keep_separate_ranks_and_scales() -> None:
    adapters = gemma4_adapters(**OPTIONS)
    key, value = (adapters[f"layers.0.attn.{name}_proj.w"] for name in "kv")
    assert (key.a_shape, key.b_shape) == ((64, 2), (2, 4, 16))
    assert (value.a_shape, value.b_shape) == ((64, 4), (4, 4, 16))
    scales = [adapter.scale for adapter in (key, value)]
    assert scales == [3.0 / math.sqrt(2), 3.0 / math.sqrt(4)]
    assert trained_size(value) == 64 * 4 + 4 * 4 * 16
    lora = LoraSettings(**OPTIONS, dropout=0.0, targets=())
    alone = gemma4_adapters(**OPTIONS | {"targets": ("v_proj",)})["layers.0.attn.v_proj.w"]
    assert np.array_equal(initial_pair(value, lora, 7)[0], initial_pair(alone, lora, 7)[0])


def test_shared_kv_adapter_refuses_different_ranks_or_alphas() -> None:
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj and layers.0.self_attn.v_proj share"):
        gemma4_adapters(kv="shared", rank_pattern={"k_proj": 2})
    with pytest.raises(ValueError, match="share one A"):
        gemma4_adapters(kv="shared", alpha_pattern={"v_proj": 2.0})
    adapters = gemma4_adapters(kv="shared", rank_pattern={"[kv]_proj": 2})
    key, value = (adapters[f"layers.0.attn.{name}_proj.w"] for name in "kv")
    assert key.a_shape == value.a_shape == (64, 2)
    assert value.a_path == key.a_path == "layers.0.attn.k_proj.w_lora_a"
    assert value.b_path == "layers.0.attn.v_proj.w_lora_b"
    assert trained_size(value) == 2 * 4 * 16, "A counts once, with the keys"
    lora = LoraSettings(**OPTIONS, dropout=0.0, targets=())
    assert np.array_equal(*(initial_pair(adapter, lora, 7)[0] for adapter in (key, value)))


def test_old_record_without_patterns_or_rslora_is_read() -> None:
    section = lora_section()
    for key in ("rslora", "rank_pattern", "alpha_pattern"):
        section.pop(key, None)
    settings = lora_settings(section, 6)
    assert (settings.rslora, settings.rank_pattern) == (False, {})
    recorded = lora_settings({**section, "rank_pattern": [["v_proj", 2], [".*", 3]]}, 6)
    assert list(recorded.rank_pattern) == ["v_proj", ".*"], "the order of the record's pairs counts"


def test_exported_adapter_config_records_rslora_and_patterns(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path, multimodal=False, **SIZES)
    base = HFCheckpoint.open(tmp_path)
    settings = LoraSettings(**OPTIONS, dropout=0.0, targets=training.TARGETS)
    adapters = build_adapters(base.family, base.architecture, settings)
    names = [adapter.name for adapter in adapters]
    config = adapter_config(base, ModelSettings(id="base", family="gemma4"), settings, names)
    assert config["use_rslora"] is True
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert list(config["rank_pattern"].items()) == [("k_proj", 2), ("down_proj", 6)]
    assert config["alpha_pattern"] == {r"layers\.0\.self_attn\.[kv]_proj": 3}


def test_export_writes_full_names_for_patterns_peft_reads_differently() -> None:
    wanted = {"model.language_model.layers.0.mlp.up_proj": 2, "model.language_model.layers.1.mlp.up_proj": 4}
    assert peft_pattern({r"^model\.layers\.0\..*": 2}, wanted, 4) == {
        r"model\.language_model\.layers\.0\.mlp\.up_proj": 2
    }
    assert peft_pattern({r"layers\.0\..*": 2}, wanted, 4) == {r"layers\.0\..*": 2}
    assert peft_pattern({"(": 9, r"layers\.0\..*": 2}, wanted, 4) == {
        r"model\.language_model\.layers\.0\.mlp\.up_proj": 2
    }
    assert peft_pattern({"up_proj": 2}, {"model.layers.0.mlp.up_proj.weight": 2}, 4) == {
        r"model\.layers\.0\.mlp\.up_proj(\.weight)?": 2
    }, "of a weight, which PEFT knows by its own name, and an import by its module's"
