"""Tests of sharding rules and indivisible dimensions."""

from __future__ import annotations

import pytest

from recipec.compiler.lowering.divided import indivisible, resolve_specs
from recipec.runtime.model.families.base import Parameter

PARAMETERS = [
    Parameter("layers.0.mlp.up_proj.kernel", (6, 16), ("fsdp", "tp"), ()),
    Parameter("layers.0.mlp.down_proj.kernel", (16, 6), ("tp", "fsdp"), ()),
    Parameter("final_norm.w", (6,), ("tp",), ()),
]


def specs(*arguments: object) -> dict[str, object]:
    return {p.path: p.spec for p in resolve_specs(PARAMETERS, *arguments)}  # type: ignore[arg-type]


def test_without_rules_parameters_keep_their_default_specs() -> None:
    assert resolve_specs(PARAMETERS, [], {"fsdp": 2, "tp": 2}) == tuple(PARAMETERS)


def test_first_sharding_rule_that_matches_the_whole_path_wins() -> None:
    rules = [
        ("layers", (None, None)),  # the beginning of a path is not the path
        (".*down_proj.*", (None, "tp")),
        ("layers.*", ("tp", None)),
    ]
    assert specs(rules, {"fsdp": 1, "tp": 1}) == {
        "layers.0.mlp.down_proj.kernel": (None, "tp"),
        "layers.0.mlp.up_proj.kernel": ("tp", None),
        "final_norm.w": ("tp",),
    }


def test_indivisible_dimension_is_an_error_or_is_replicated() -> None:
    axes = {"fsdp": 4, "tp": 2}
    with pytest.raises(
        ValueError, match=r"dimension 0 of layers\.0\.mlp\.up_proj\.kernel has length 6.*fsdp=4"
    ):
        resolve_specs(PARAMETERS, [], axes)
    found = specs([], axes, "replicate")
    assert found["layers.0.mlp.up_proj.kernel"] == (None, "tp")
    assert found["final_norm.w"] == ("tp",)


def test_an_axis_that_the_mesh_lacks_splits_nothing() -> None:
    assert indivisible("x", (5,), ("tp",), {"fsdp": 2}) == []
