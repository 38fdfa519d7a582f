"""Tests of config.json cut to some of its layers, compared with how the families read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.miniature.fewer_layers import pattern, with_layers
from recipec.compiler.plan.depth import shortened
from recipec.runtime.model.families import FAMILIES, UnsupportedCheckpoint

LLAMA = catalog.entries()["meta-llama/Llama-3.2-1B"]["config"]
GEMMA = catalog.entries()["google/gemma-3-27b-it"]["config"]


def test_config_with_all_layers_keeps_the_architecture_of_every_model() -> None:
    names = [name for name, entry in catalog.entries().items() if "unsupported" not in entry]
    assert len(names) > 50
    for name in names:
        model = catalog.find(name, Path())
        made = with_layers(model.config, range(model.architecture.num_layers))
        assert "text_config" not in made
        assert model.family.architecture(made) == model.architecture, name


def test_text_config_keeps_the_defaults_of_the_whole_model_type() -> None:
    """Gemma 4 12B has other defaults than the other models of its family."""
    text = {"num_hidden_layers": 12, "attention_k_eq_v": True}
    config = {"model_type": "gemma4_unified", "text_config": text}
    made = with_layers(config, range(12))
    assert FAMILIES["gemma4"].architecture(made) == FAMILIES["gemma4"].architecture(config)


def test_shortened_config_counts_the_kept_kv_shared_layers() -> None:
    model = catalog.find("google/gemma-4-E2B", Path())
    layers = (8, 9, 13, 14, 33, 34)
    made = with_layers(model.config, layers)
    assert made["num_kv_shared_layers"] == 2
    assert FAMILIES["gemma4"].architecture(made) == shortened(model.architecture, layers)


def test_per_layer_config_values_are_cut_to_the_chosen_layers() -> None:
    config = {
        **LLAMA,
        "no_rope_layers": [1, 1, 1, 0] * 4,
        "mlp_only_layers": [0, 5, 15],
        "first_k_dense_replace": 1,
        "eos_token_id": list(range(16)),
        "rope_scaling": None,
    }
    made = with_layers(config, (0, 3, 4, 5))
    assert made["num_hidden_layers"] == 4
    assert made["no_rope_layers"] == [1, 0, 1, 1]
    assert made["mlp_only_layers"] == [0, 3]
    assert made["first_k_dense_replace"] == 1
    kept = ("eos_token_id", "hidden_size", "rms_norm_eps")
    assert {key: made[key] for key in kept} == {key: config[key] for key in kept}
    assert config["num_hidden_layers"] == 16 and len(config["no_rope_layers"]) == 16


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, (0,)),
        (GEMMA, (0, 1, 2, 3, 4, 5)),
        ({**LLAMA, "no_rope_layers": [1, 1, 1, 0] * 4}, (0, 1, 2, 3)),
        ({**LLAMA, "no_rope_layer_interval": 4}, (0, 1, 2, 3)),
        ({**LLAMA, "num_hidden_layers": 61, "first_k_dense_replace": 3}, (0, 3)),
        ({**LLAMA, "num_hidden_layers": 40, "mlp_only_layers": [20]}, (0, 20)),
    ],
    ids=str,
)
def test_layer_pattern_contains_each_kind_of_layer(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert pattern(config) == layers


def test_jamba_layers_must_fit_an_attn_layer_period() -> None:
    model = catalog.find("ai21labs/Jamba-v0.1", Path())
    made = with_layers(model.config, (0, 1, 4, 5))
    architecture = model.family.architecture(made)
    assert architecture.layer_types == tuple(model.architecture.layer_types[i] for i in (0, 1, 4, 5))
    assert [bool(architecture.experts_of(i)) for i in range(4)] == [False, True, False, True]
    with pytest.raises(UnsupportedCheckpoint, match="no attn_layer_period names layers"):
        with_layers(model.config, (4, 12, 13))
