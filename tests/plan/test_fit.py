"""Tests of the suggestions for a step that does not fit, with a scripted compiler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.fit import (
    FitResult,
    MemoryReduction,
    diagnostic,
    find,
    hopeless,
    ladders,
    yaml_lines,
)
from recipec.compiler.plan.results import Estimate
from recipec.spec.diagnostics import render_text
from tests.plan.plans import RECIPES, estimate, lowered

FLAGSHIP = RECIPES / "gemma4-31b-v5p8.yaml"
STATED = (
    "model.attention=splash",
    "mesh.axes={fsdp: 4, tp: 1}",
    "remat.policy=none",
    "train.micro_batch_size=1",
    "train.global_batch_size=4",
    "xla.profile=none",
)
"""Settings that these tests depend on, so that they do not depend on the recipe's."""


@functools.cache
def program(*sets: str, recipe: Path = FLAGSHIP) -> Program:
    return lowered(recipe, *(STATED if recipe == FLAGSHIP else ()), *sets)


class Compiler:
    """A compiler with a scripted estimate for each known argument, and else a step that is too large."""

    def __init__(self, **known: Estimate | None) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._known = known

    def __call__(self, sets: tuple[str, ...]) -> Estimate | None:
        self.asked.append(sets)
        for key, found in self._known.items():
            if any(key in argument.replace(".", "_").replace("=", "_") for argument in sets):
                return found
        return estimate(200)


def search(compiler: Compiler, given: tuple[str, ...] = (), most: int = 8) -> FitResult:
    return find(program(), compiler, most, overrides=(*STATED, *given))


def reductions_of(program: Program) -> Iterator[MemoryReduction]:
    return chain.from_iterable(ladders(program))


def sets_of(program: Program) -> list[tuple[str, ...]]:
    return [way.sets for way in reductions_of(program)]


def test_flagship_reductions_go_from_smallest_to_largest_change() -> None:
    assert sets_of(program()) == [
        ("remat.policy=save_dots",),
        ("remat.policy=save_attention",),
        ("remat.policy=block",),
        ("remat.policy=decoder",),
        ("mesh.axes={fsdp: 2, tp: 2}",),
        ("mesh.axes={fsdp: 1, tp: 4}",),
        ("remat.policy=decoder", "mesh.axes={fsdp: 1, tp: 4}"),
        ("model.quantization=int8",),
        ("model.quantization=nf4",),
        ("mesh.accelerator=v5p-16", "mesh.axes={fsdp: 4, tp: 2}"),
        ("mesh.accelerator=v5p-32", "mesh.axes={fsdp: 4, tp: 4}"),
    ]


def test_default_compiler_flags_come_first_if_the_profile_has_flags() -> None:
    found = sets_of(program("xla.profile=auto"))
    assert found[0] == ("xla.profile=none",)
    assert ("xla.profile=none", "remat.policy=decoder") in found
    assert not any("xla.profile=none" in sets for sets in sets_of(program()))


def test_micro_batch_shrinks_at_the_same_global_batch() -> None:
    larger = program("train.micro_batch_size=6", "train.global_batch_size=48")
    found = {way.sets: way for way in reductions_of(larger)}
    assert list(found)[:2] == [("train.micro_batch_size=3",), ("train.micro_batch_size=1",)]
    assert found[("train.micro_batch_size=3",)].cost == "an optimizer step takes 4 micro-batches instead of 2"
    assert [found[sets].kept for sets in list(found)[:2]] == [1 / 2, 1 / 6]
    assert ("train.micro_batch_size=1", "remat.policy=decoder") in found


def test_splash_attention_comes_first_unless_in_use_or_on_cpu() -> None:
    assert sets_of(program("model.attention=dot"))[0] == ("model.attention=splash",)
    assert not any("model.attention" in argument for sets in sets_of(program()) for argument in sets)
    on_cpu = sets_of(program(recipe=RECIPES / "gemma3-270m-cpu.yaml"))
    assert on_cpu and not any(
        "splash" in argument or "accelerator" in argument for s in on_cpu for argument in s
    )


def test_tensor_parallel_sizes_divide_every_layers_heads() -> None:
    """Exclude tp 8: ten layers of Gemma 4 31B have only four key/value heads."""
    wide = sets_of(program("mesh.accelerator=v5p-16", "mesh.axes={fsdp: 4, tp: 2}"))
    assert ("mesh.axes={fsdp: 2, tp: 4}",) in wide
    assert not any("tp: 8" in argument for sets in wide for argument in sets)


def test_smaller_tp_is_suggested_only_if_rows_divide_over_fsdp() -> None:
    split = program("mesh.axes={fsdp: 1, tp: 4}", "train.global_batch_size=2")
    assert ("mesh.axes={fsdp: 2, tp: 2}",) in sets_of(split)
    assert ("mesh.axes={fsdp: 4, tp: 1}",) not in sets_of(split)


def test_larger_slice_is_set_by_topology_or_accelerator_as_in_the_recipe() -> None:
    by_topology = program("mesh.accelerator=null", "mesh.topology=v5p:2x2x1")
    assert ("mesh.topology=v5p:2x2x2", "mesh.axes={fsdp: 4, tp: 2}") in sets_of(by_topology)
    sliced = program("mesh.axes={dcn: 2, fsdp: 4, tp: 1}", "train.global_batch_size=16")
    assert ("mesh.accelerator=v5p-16", "mesh.axes={dcn: 2, fsdp: 8, tp: 1}") in sets_of(sliced)


@pytest.mark.parametrize("recipe", ["llama31-8b-v6e8", "qwen3-8b-dpo-v5e8"])
def test_every_suggested_reduction_passes_the_checks(recipe: str) -> None:
    path = RECIPES / f"{recipe}.yaml"
    ways_out = sets_of(program(recipe=path))
    assert ways_out
    for sets in ways_out:
        assert lowered(path, *sets)


def test_find_tries_the_last_rung_then_bisects_to_the_first_fitting_rung() -> None:
    compiler = Compiler(
        remat_policy_save_dots=estimate(80),
        remat_policy_save_attention=estimate(60),
        remat_policy_decoder=estimate(20),
    )
    found = search(compiler)
    assert found.way is not None and found.way.sets == ("remat.policy=save_attention",)
    assert found.estimate == estimate(60)
    assert [sets[0] for sets in compiler.asked] == [
        "remat.policy=decoder",
        "remat.policy=save_attention",
        "remat.policy=save_dots",
    ]


def test_find_leaves_a_ladder_whose_last_rung_does_not_fit() -> None:
    compiler = Compiler(model_quantization=estimate(60))
    found = search(compiler)
    assert found.way is not None and found.way.sets == ("model.quantization=int8",)
    assert compiler.asked == [
        ("remat.policy=decoder",),
        ("mesh.axes={fsdp: 1, tp: 4}",),
        ("remat.policy=decoder", "mesh.axes={fsdp: 1, tp: 4}"),
        ("model.quantization=nf4",),
        ("model.quantization=int8",),
    ]


@pytest.mark.parametrize(("temporaries", "fits"), [(73.0, True), (73.2, False)])
def test_find_keeps_two_percent_of_memory_free(temporaries: float, fits: bool) -> None:
    found = search(Compiler(remat=estimate(temporaries)))
    assert (found.way is not None) is fits


def test_find_skips_candidates_that_fail_to_compile() -> None:
    found = search(Compiler(remat_policy_decoder=None, remat_policy_block=estimate(50)))
    assert [(way.sets[0], result is None) for way, result in found.tried[:2]] == [
        ("remat.policy=decoder", True),
        ("remat.policy=block", False),
    ]
    assert found.way is not None and found.way.sets == ("remat.policy=block",)


def test_find_compiles_at_most_the_allowed_number() -> None:
    compiler = Compiler(remat_policy_decoder=estimate(20))
    assert search(compiler, most=2).way is not None
    assert len(compiler.asked) == 2
    assert search(Compiler(), most=3).way is None


def test_find_does_not_compile_meshes_that_the_checks_refuse() -> None:
    """Skip meshes that the checks refuse: one of the recipe's rules shards a scalar over tp."""
    compiler = Compiler()
    search(compiler, ("sharding.rules=[{match: 'layers.*.layer_scalar', spec: [tp]}]",))
    assert ("remat.policy=decoder",) in compiler.asked
    assert not any("mesh" in argument for sets in compiler.asked for argument in sets)


def test_find_does_not_compile_candidates_that_cannot_fit() -> None:
    given = ("train.micro_batch_size=4", "train.global_batch_size=16")
    full = program(*given)
    compiler = Compiler()
    find(full, compiler, overrides=(*STATED, *given), estimate=estimate(400))
    # A quarter of the temporaries is 100 GiB: with a micro-batch of one row, and with a quarter of each row.
    assert ("train.micro_batch_size=1",) not in compiler.asked
    assert ("mesh.axes={fsdp: 1, tp: 4}",) not in compiler.asked
    assert ("remat.policy=decoder",) in compiler.asked


@pytest.mark.parametrize(
    ("way", "before", "expected"),
    [
        (MemoryReduction((), "", kept=0.5), estimate(160), True),  # 20 + 80 of 95 GiB
        (MemoryReduction((), "", kept=0.5), estimate(140), False),
        (MemoryReduction((), "", kept=0.5, arguments=True), estimate(160), False),
        (
            MemoryReduction((), "", kept=0.5),
            estimate(160, seconds=0.0),
            False,
        ),  # refused: the figures do not describe a step
    ],
)
def test_hopeless_compares_the_scaled_temporaries_with_the_memory(
    way: MemoryReduction, before: Estimate, expected: bool
) -> None:
    assert hopeless(way, before) is expected


def test_yaml_lines_write_each_section_once() -> None:
    assert yaml_lines(("mesh.accelerator=v5p-16", "remat.policy=decoder", "mesh.axes={fsdp: 8, tp: 1}")) == [
        "mesh:",
        "  accelerator: v5p-16",
        "  axes: {fsdp: 8, tp: 1}",
        "remat:",
        "  policy: decoder",
    ]


def shown(found: Callable[[], FitResult | None]) -> str:
    return render_text([diagnostic(program(), estimate(101.25), found())])


MESSAGE = (
    "error[E1001]: the step needs 121.25 GiB of each device's memory, and a device of v5p-8 has 95.00 GiB: "
    "101.25 GiB of temporaries, 14.50 GiB of base weights and 3.00 GiB of optimizer state; the largest "
    "temporaries are `layers.{}.mlp.gate_proj.kernel / dot_general` (60 x bf16[3072,21504], 7.38 GiB) and "
    "`embedder.input_embedding / all-gather` (bf16[262144,5376], 2.62 GiB)\n"
)


def test_too_large_step_diagnostic_shows_recipe_lines_that_fit() -> None:
    compiler = Compiler(remat=estimate(50, seconds=1.2), mesh=estimate(30))
    found = search(compiler)
    assert shown(lambda: found) == (
        MESSAGE
        + " = help: remat:\n"
        + "           policy: save_dots\n"
        + "         estimated: 70.00 of 95.00 GiB, 26.3 % free; 1.20 times the time a token\n"
        + "         with this, the backward pass computes norms, rotations and activation functions again\n"
        + "\n1 error\n"
    )
    assert diagnostic(program(), estimate(101.25), found).path == "remat.policy"


def test_too_large_step_diagnostic_lists_failed_attempts() -> None:
    found = search(Compiler(quantization=None), most=5)
    assert shown(lambda: found) == (
        MESSAGE
        + " = help: nothing that was tried fits:\n"
        + "           remat.policy=decoder: 220.00 GiB\n"
        + "           mesh.axes={fsdp: 1, tp: 4}: 220.00 GiB\n"
        + "           remat.policy=decoder, mesh.axes={fsdp: 1, tp: 4}: 220.00 GiB\n"
        + "           model.quantization=nf4: does not compile\n"
        + "           model.quantization=int8: does not compile\n"
        + "         `recipe plan --search` tries more\n"
        + "\n1 error\n"
    )


def test_too_large_step_diagnostic_has_help_even_without_attempts() -> None:
    assert shown(lambda: None).endswith(
        " = help: `recipe plan --search` searches for a configuration that fits\n\n1 error\n"
    )
    assert shown(lambda: FitResult(())).endswith("mesh or larger slice is left to try\n\n1 error\n")


def test_refused_step_diagnostic_compares_no_times() -> None:
    refused = replace(estimate(101.25, seconds=0.0), largest=())
    found = FitResult(
        (),
        MemoryReduction(("remat.policy=decoder",), "the backward pass computes each layer again"),
        estimate(50),
    )
    help = diagnostic(program(), refused, found).help
    assert help is not None and "the time a token" not in help
    assert diagnostic(program(), refused, found).message.endswith("3.00 GiB of optimizer state")
