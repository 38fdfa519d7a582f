"""Which layers stand for a model, and that figures linear in them come out exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.depth import depths, renumbered, shortened, weighted, whole
from recipec.runtime.model.adapters import build_adapters
from recipec.spec.load import load

E2B = "model.id=google/gemma-4-E2B-it"
SETS: dict[str, tuple[str, ...]] = {
    "31b": (),
    "12b": ("model.id=google/gemma-3-12b-it",),
    "4b": ("model.id=google/gemma-3-4b-it",),
    "llama": ("model.id=meta-llama/Llama-3.1-8B-Instruct",),
    "e2b": (E2B,),
    "some": ("lora.layers=20-59",),
    "few": ("model.id=google/gemma-3-270m-it",),
    "moe": ("model.id=google/gemma-4-26B-A4B-it",),
    "numbered": ("lora.targets=['layers\\.(7|9)\\.self_attn\\.q_proj']",),
}


@pytest.fixture(scope="module")
def programs(root: Path) -> dict[str, Program]:
    out = {}
    for name, sets in SETS.items():
        found = lower(load(root / "recipes" / "gemma4-31b-v5p8.yaml", ("serve=null", *sets)), True)
        assert found.program is not None, [d.message for d in found.diagnostics if d.severity == "error"]
        out[name] = found.program
    return out


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("31b", [6, 12]),
        ("12b", [6, 12]),
        ("4b", [10, 16]),  # 34 layers: five repeats of six, and four more
        ("llama", [7, 12]),  # 32 layers: six repeats of five, and two more
        ("e2b", [10, 15, 15]),  # 15 layers with keys and values of their own, 20 that share them
        ("some", [18, 24, 24]),  # 20 layers without adapters, 40 with them
        ("few", [6, 12]),
        ("moe", [6, 12]),
        ("numbered", [60]),
    ],
)
def test_depths_are_whole_repeats_of_the_pattern(
    programs: dict[str, Program], name: str, counts: list[int]
) -> None:
    chosen = depths(programs[name])
    assert [len(depth.layers) for depth in chosen] == counts
    assert sum(depth.weight for depth in chosen) == pytest.approx(1)


@pytest.mark.parametrize("name", [name for name in SETS if name != "numbered"])
def test_every_kind_of_layer_is_counted_as_often_as_the_model_has_it(
    programs: dict[str, Program], name: str
) -> None:
    """Parameters, trained numbers and layers of each type: sums over layers come out exactly."""
    program = programs[name]
    chosen = depths(program)

    def numbers(layers: tuple[int, ...]) -> list[float]:
        a, lora = shortened(program.architecture, layers), renumbered(program.lora, layers)
        parameters = program.family.parameters(a)
        assert lora is not None
        adapters = build_adapters(program.family, a, lora, {p.path: p.spec for p in parameters})
        return [
            a.num_layers,
            a.layer_types.count("full_attention"),
            sum(size(p.shape) for p in parameters),
            sum(size(p.shape) for p in parameters if p.sources),
            sum(size(x.a_shape) + size(x.b_shape) for x in adapters),
        ]

    each = [numbers(depth.layers) for depth in chosen]
    expected = numbers(whole(program).layers)
    for figure, values in zip(expected, zip(*each, strict=True), strict=True):
        assert weighted(chosen, values) == pytest.approx(figure, rel=1e-12)


def size(shape: tuple[int, ...]) -> int:
    out = 1
    for length in shape:
        out *= length
    return out


def test_the_small_depths_are_smaller_where_the_pattern_allows(programs: dict[str, Program]) -> None:
    assert [len(depth.layers) for depth in depths(programs["llama"], small=True)] == [1, 2]
    assert [len(depth.layers) for depth in depths(programs["31b"], small=True)] == [6, 12]
