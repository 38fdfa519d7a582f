"""Tests of how transformers' tensors are sharded: like Tunix's arrays of the same weights, with rules too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from recipec.compiler.lowering.catalog import find
from recipec.runtime.backends.torchax.placement import adapter_specs, tensor_specs
from recipec.runtime.model.families.base import Spec
from recipec.runtime.model.partition_rules import Rule


def specs(model: str, tp: int = 2, rules: Sequence[Rule] = ()) -> dict[str, Spec]:
    known = find(model, Path())
    return tensor_specs(known.family, known.architecture, rules, {"fsdp": 2, "tp": tp})


@pytest.mark.parametrize("model", ["google/gemma-4-31B-it", "google/gemma-3-4b-it", "Qwen/Qwen3-8B"])
def test_weight_matrices_are_sharded_over_tp_and_fsdp(model: str) -> None:
    """Shard torch's weights [out, in]: heads and features over tp, the model's width over fsdp."""
    found = specs(model)
    layer = "layers.0.self_attn"
    assert found["embed_tokens.weight"] == ("tp", "fsdp")
    for name in ("q", "k", "v"):
        assert found[f"{layer}.{name}_proj.weight"] == ("tp", "fsdp")
    assert found[f"{layer}.o_proj.weight"] == ("fsdp", "tp")
    assert found["layers.0.mlp.up_proj.weight"] == ("tp", "fsdp")
    assert found["layers.0.mlp.down_proj.weight"] == ("fsdp", "tp")
    assert found[f"{layer}.q_norm.weight"] == (None,)


def test_untied_output_head_is_sharded_like_the_embedding() -> None:
    assert specs("Qwen/Qwen3-8B")["lm_head.weight"] == ("tp", "fsdp")


def test_key_heads_not_divisible_by_tp_are_replicated() -> None:
    """Replicate 8 key/value heads of 128 over 16 devices: 1,024 rows divide by 16, but heads do not."""
    assert specs("Qwen/Qwen3-8B", tp=16)["layers.0.self_attn.k_proj.weight"] == (None, "fsdp")


def test_sharding_rules_use_tunix_array_names() -> None:
    """Apply rules to Tunix's [heads, width, head size]; the tensor's rows include the head size."""
    name = "layers.0.self_attn.q_proj.weight"
    for spec, expected in (((None, "tp", None), (None, "tp")), ((None, "fsdp", "tp"), ("tp", "fsdp"))):
        rules = [(r"layers\.0\.attn\.q_einsum\.w", spec)]
        assert specs("google/gemma-4-31B-it", rules=rules)[name] == expected
        assert specs("google/gemma-4-31B-it", rules=rules)[name.replace("0", "1")] == ("tp", "fsdp")


def test_adapters_are_sharded_like_their_weight() -> None:
    assert adapter_specs(("tp", "fsdp")) == ((None, "fsdp"), ("tp", None))
    assert adapter_specs(("fsdp", "tp")) == ((None, "tp"), ("fsdp", None))
