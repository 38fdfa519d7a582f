"""Tests of the variants of a recipe that a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.search import variants
from recipec.spec.load import load

RECIPES = Path(__file__).resolve().parent.parent.parent / "recipes"


def program(name: str, *sets: str) -> Program:
    settled = lower(load(RECIPES / f"{name}.yaml", sets), planning=True)
    assert settled.program is not None, [d.message for d in settled.diagnostics]
    return settled.program


def shapes_of(found: Sequence[object]) -> list[tuple[dict[str, int], int, int]]:
    """Return the meshes and batches in order, each once."""
    every = [(dict(v.axes), v.micro_batch, v.global_batch) for v in found]  # type: ignore[attr-defined]
    return [one for i, one in enumerate(every) if one not in every[:i]]


def test_flagship_variants_cover_every_allowed_combination() -> None:
    """Limit tp to 4, as ten layers have 4 key/value heads, and keep the recipe's 4 rows."""
    found = variants(program("gemma4-31b-v5p8"))
    assert found[0].sets == ()
    assert shapes_of(found) == [
        ({"fsdp": 4, "tp": 1}, 1, 4),
        ({"fsdp": 2, "tp": 2}, 1, 4),
        ({"fsdp": 2, "tp": 2}, 2, 4),
        ({"fsdp": 1, "tp": 4}, 1, 4),
        ({"fsdp": 1, "tp": 4}, 2, 4),
        ({"fsdp": 1, "tp": 4}, 4, 4),
    ]
    policies = {"none", "block", "decoder", "save_attention", "save_dots", "offload_dots"}
    assert policies <= {v.remat for v in found}
    assert {v.attention for v in found} == {"dot", "splash"}
    assert {v.profile for v in found} == {"none", "auto"}
    assert [v.block for v in found if v.block] == [1024]  # of the recipe as written
    assert len(found) == 6 * len({v.remat for v in found}) * 2 * 2 + 1
    assert len({v.sets for v in found}) == len(found)


def test_set_arguments_of_a_variant_reproduce_the_variant() -> None:
    """Check that each variant's --set arguments give exactly that configuration."""
    base = program("llama31-8b-v6e8")
    for variant in variants(base)[::17]:
        changed = program("llama31-8b-v6e8", *variant.sets)
        recipe = changed.recipe
        assert tuple(recipe.mesh.axes.items()) == variant.axes
        assert recipe.train.micro_batch_size == variant.micro_batch
        assert (recipe.remat.policy, recipe.model.attention) == (variant.remat, variant.attention)
        assert changed.micro_batch_rows * changed.accumulation_steps == recipe.train.global_batch_size
        assert recipe.train.global_batch_size == base.recipe.train.global_batch_size
        same = {"name", "data", "lora", "merge", "checkpoint", "serve"}
        assert recipe.model_dump(include=same) == base.recipe.model_dump(include=same)


def test_variants_include_indivisible_meshes_that_the_checks_refuse() -> None:
    base = program("gemma4-31b-v5p8", "mesh.axes={fsdp: 2, tp: 2}", "train.global_batch_size=2")
    refused = next(v for v in variants(base) if dict(v.axes) == {"fsdp": 4, "tp": 1})
    settled = lower(load(RECIPES / "gemma4-31b-v5p8.yaml", ["train.global_batch_size=2", *refused.sets]))
    assert settled.program is None
    assert [d.code for d in settled.diagnostics if d.severity == "error"] == ["E0501"]


def test_free_batch_variants_raise_rows_up_to_four_times() -> None:
    """Use multiples of a micro-batch over all devices, up to four times the recipe's rows."""
    found = variants(program("gemma4-31b-v5p8"), free_batch=True)
    assert shapes_of(found)[:4] == [
        ({"fsdp": 4, "tp": 1}, 1, 4),
        ({"fsdp": 4, "tp": 1}, 2, 8),
        ({"fsdp": 4, "tp": 1}, 4, 16),
        ({"fsdp": 2, "tp": 2}, 1, 4),
    ]
    assert all(v.global_batch % (v.micro_batch * dict(v.axes)["fsdp"]) == 0 for v in found)
    assert {v.global_batch for v in found} == {4, 8, 16}
    raised = next(v for v in found if v.global_batch == 8)
    assert "train.global_batch_size=8" in raised.sets


@pytest.mark.parametrize("rows, fsdp, expected", [(6, 4, 8), (1, 4, 4)])
def test_smallest_free_batch_is_a_multiple_of_the_fsdp_size(rows: int, fsdp: int, expected: int) -> None:
    base = program("gemma4-31b-v5p8", "mesh.axes={tp: 4}", f"train.global_batch_size={rows}")
    found = [v for v in variants(base, free_batch=True) if dict(v.axes)["fsdp"] == fsdp]
    assert min(v.global_batch for v in found) == expected


def test_single_key_value_head_allows_tensor_parallelism() -> None:
    """Replicate Gemma 3 270M's one key/value head, and split its 4 query heads."""
    base = program("gemma4-31b-v5p8", "model.id=google/gemma-3-270m-it", "serve=null")
    assert {dict(v.axes)["tp"] for v in variants(base)} == {1, 2, 4}


def test_cpu_variants_have_no_splash_kernel_and_no_offload() -> None:
    found = variants(program("quickstart"))
    assert {v.attention for v in found} == {"dot"}
    assert "offload_dots" not in {v.remat for v in found}


def test_variants_include_the_recipe_mesh() -> None:
    """Include tp 8, which does not divide all heads, because the recipe replicates these weights."""
    sets = ["mesh.accelerator=v5p-16", "mesh.axes={tp: 8}", "sharding.on_indivisible=replicate"]
    found = variants(program("gemma4-31b-v5p8", *sets))
    assert dict(found[0].axes) == {"fsdp": 1, "tp": 8}
    assert {dict(v.axes)["tp"] for v in found} == {1, 2, 4, 8}
    assert len({v.remat for v in found if dict(v.axes)["tp"] == 8}) > 1
