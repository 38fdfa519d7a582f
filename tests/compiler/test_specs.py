"""Tests of sharding rules and indivisible dimensions."""

from __future__ import annotations

import pytest

from recipec.compiler.lowering.divided import indivisible, resolve_specs
from recipec.runtime.model.families.family import Parameter

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


@pytest.mark.parametrize(
    ("axes", "gate_up"),
    [
        ({"fsdp": 4, "tp": 2}, ("fsdp", None, None, "tp")),
        ({"fsdp": 2, "cp": 2, "ep": 1}, ("fsdp", None, None, None)),  # fsdp includes cp
        ({"fsdp": 2, "ep": 4}, ("ep", "fsdp", None, None)),
        ({"fsdp": 16, "tp": 2}, (None, "fsdp", None, "tp")),  # 16 devices do not divide 8 experts
    ],
)
def test_fsdp_splits_whole_experts_where_ep_does_not(
    axes: dict[str, int], gate_up: tuple[str | None, ...]
) -> None:
    experts = Parameter("layers.0.mlp.experts.gate_up", (8, 32, 2, 6), ("ep", "fsdp", None, "tp"), ())
    assert resolve_specs([experts], [], axes, "replicate")[0].spec == gate_up
    rule = (".*experts.*", (None, "fsdp", None, None))
    assert resolve_specs([experts], [rule], axes, "replicate")[0].spec == rule[1]
