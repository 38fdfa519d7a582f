"""Tests of the estimate of a step from its compiled parts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.depth import Part, Parts, parts, probed
from recipec.compiler.plan.first_estimate import TIME_ERROR, USUAL_ERROR, first_parts
from recipec.compiler.plan.planner import estimate
from recipec.compiler.plan.rates import interval
from recipec.compiler.plan.results import Collective, Compiled, Kernel, Moved, OutOfMemory, Temporary
from recipec.compiler.plan.schedule import Exposed, Operation, Prices, Schedule, Start, Transfer, Wait, Work
from recipec.compiler.wording import split_layer
from tests.plan.plans import lowered

pytestmark = pytest.mark.usefixtures("full_speed")


def compiled(layers: int) -> Compiled:
    """Make a compiled part: a constant and a share for each layer. Its products have no prices yet."""
    return Compiled(
        layers=layers,
        weights=1e9 + 2e8 * layers,
        adapters=1e7 * layers,
        optimizer=2e7 * layers,
        batch=100.0,
        arguments=1.1e9 + 2.4e8 * layers,
        temporaries=5e9 + 1e9 * layers,
        code=1e6 * layers,
        flops=1e12 + 6e12 * layers,
        bytes=1e10 * layers,
        schedule=Schedule(
            steps=(
                Exposed(0),
                Start(1, 1),
                Work(0.0, 0.005 * layers, 1e-3 * layers, ((0, layers), (1, 1))),
                Wait(1),
                Exposed(2),
            ),
            transfers=(
                Transfer("all-gather", "head", ("fsdp",), False, 1e9, 0.04, ("0",)),
                Transfer("all-gather", "mlp", ("fsdp",), False, 2e9 * layers, 0.01 * layers, ("0",)),
                Transfer("copy", "mlp", (), False, 1e6 * layers, 1e-3 * layers, ("hbm",)),
            ),
            operations=(Operation("mlp", "mlp", "mlp", 0.01), Operation("head", "head", "head", 0.01)),
            names=("mlp", "head"),
        ),
        prices=Prices({"mlp": 0.015, "head": None}),
        instructions=100 + 100 * layers,
        collectives=(
            Collective("all-gather", ("fsdp",), False, 3 + 20 * layers, 1e9 + 2e9 * layers),
            Collective("all-to-all", ("fsdp",), False, 1, 3e7),
        ),
        kernels=(Kernel("fwd", layers, 1e11 * layers, 1e9 * layers, 1e-3 * layers),),
        largest=(
            Temporary("layers.{}.mlp / gelu", "bf16[4,4]", layers, 1e8 * layers),
            Temporary("head / all-gather", "bf16[9,9]", 1, 2.8e9),
        ),
        compile_seconds=10.0,
        trace_seconds=2.0,
    )


def scheduled(layers: int) -> Compiled:
    """Make the same part without code and prices."""
    return replace(compiled(layers), code=5e3, prices=Prices())


def test_estimate_prices_all_layers_by_the_few_compiled_layers(program: Program) -> None:
    one = estimate(program, [scheduled(60), compiled(6)])
    memory = one.memory
    assert (memory.weights, memory.adapters, memory.optimizer) == pytest.approx((1.3e10, 6e8, 1.2e9))
    assert memory.padding == pytest.approx(1.1e9 + 2.4e8 * 60 - memory.weights - 1.8e9 - 100)
    assert memory.temporaries == pytest.approx(6.5e10)
    assert memory.code == pytest.approx(6e6 * 6100 / 700 + 5e3)
    assert memory.available == 95 * 2**30
    found = one.timeline
    assert (found.products, found.memory, found.kernels) == pytest.approx((0.91, 0.3, 0.06))
    assert found.transfers == (
        Moved("copy", "mlp", (), False, 1, 6e7, pytest.approx(0.06), pytest.approx(0.06)),
        Moved("all-gather", "head", ("fsdp",), False, 1, 1e9, pytest.approx(0.04), pytest.approx(0.04)),
        Moved("all-gather", "mlp", ("fsdp",), False, 1, 1.2e11, pytest.approx(0.6), 0.0),
    )
    assert found.exposed_in(True) == pytest.approx(0.04)
    assert found.exposed_in(False) == pytest.approx(0.06)
    assert one.seconds == pytest.approx(0.91 + 0.3 + 0.06 + 0.04 + 0.06)
    assert one.flops == pytest.approx(1e12 + 3.6e14)
    assert [(c.kind, c.count) for c in one.collectives] == [("all-gather", 1203), ("all-to-all", 1)]
    assert one.kernels[0].count == 60 and one.largest == compiled(60).largest
    assert one.compile_seconds == 24 and one.compiled_layers == (6,)


def test_full_compile_gives_the_prices_and_code_size_of_the_estimate(program: Program) -> None:
    one = estimate(program, [compiled(60)])
    assert one.timeline.products == pytest.approx(0.91) and one.memory.code == 6e7
    assert one.compiled_layers == (60,)


def test_model_flops_and_mfu_follow_the_parameter_counts(program: Program) -> None:
    """Count 4 N FLOPs a token for frozen weights and 6 N for adapters; attention adds a few percent."""
    one = estimate(program, [scheduled(60), compiled(6)])
    expected = (4 * program.base_parameters + 6 * program.trainable_parameters) * 4 * 3072 / 4
    assert expected < one.model_flops < 1.1 * expected
    assert one.mfu == pytest.approx(one.model_flops / (one.seconds * 459e12))


def test_out_of_memory_step_has_memory_but_no_time(program: Program) -> None:
    refused = [
        replace(
            compiled(layers),
            schedule=Schedule(),
            kernels=(),
            out_of_memory=OutOfMemory(
                2e11 + 1e9 * layers, 1.02e11, (Temporary("scores", "f32[9]", 1, 9e10),)
            ),
        )
        for layers in (60, 6)
    ]
    one = estimate(program, refused)
    assert one.memory.used == pytest.approx(2e11 + 6e10 + 6e6 * 6100 / 700 + 6e7)
    assert one.memory.headroom < 0 and one.seconds == 0 and one.mfu == 0
    assert one.largest[0].name == "scores"


def test_estimate_takes_the_v5p_lora_interval(program: Program) -> None:
    one = estimate(program, [scheduled(60), compiled(6)])
    assert one.interval == interval("v5p", lora=True)


E2B = "model.id=google/gemma-4-E2B-it"
SETS: dict[str, tuple[str, ...]] = {
    "31b": (),
    "4b": ("model.id=google/gemma-3-4b-it",),
    "llama": ("model.id=meta-llama/Llama-3.1-8B-Instruct",),
    "e2b": (E2B,),
    "some": ("lora.layers=20-59",),
    "few": ("model.id=google/gemma-3-270m-it",),
    "moe": ("model.id=google/gemma-4-26B-A4B-it",),
    "jamba": ("model.id=ai21labs/AI21-Jamba-1.5-Mini",),
    "jamba-some": (
        *("model.id=ai21labs/AI21-Jamba-1.5-Mini", "lora.layers=20-31"),
        "mesh={accelerator: v5p-64, hosts: 8, axes: {fsdp: 4, tp: 8}}",
    ),
    "numbered": ("lora.targets=['layers\\.(7|9)\\.self_attn\\.q_proj']",),
}


@pytest.fixture(scope="module")
def programs() -> dict[str, Program]:
    return {name: lowered("gemma4-31b-v5p8", "serve=null", *sets) for name, sets in SETS.items()}


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("31b", 2),
        ("4b", 2),
        ("llama", 2),
        ("e2b", 4),  # 15 layers with their own keys and values, 20 that share them: one of each type
        ("some", 4),  # 20 layers without adapters, 40 with them
        ("few", 2),
        ("moe", 2),
        ("jamba", 3),
    ],
)
def test_plan_schedules_all_layers_and_compiles_each_layer_type(
    programs: dict[str, Program], name: str, few: int
) -> None:
    program = programs[name]
    whole, end = parts(program).refined
    every = tuple(range(program.architecture.num_layers))
    assert whole == Part(every, scheduled=True) and not end.scheduled
    assert len(end.layers) == few and set(end.layers) <= set(every)
    types = program.architecture.layer_types
    assert {types[layer] for layer in end.layers} == set(types)
    assert parts(program, exact=True) == Parts(Part(every))


@pytest.mark.parametrize(("name", "depths"), [("31b", (6, 12)), ("llama", (4, 8)), ("some", (18, 24, 24))])
def test_shallow_schedules_add_up_to_all_layers_of_each_kind(
    programs: dict[str, Program], name: str, depths: tuple[int, ...]
) -> None:
    program = programs[name]
    compiles = parts(program)
    assert tuple(len(part.layers) for part in compiles.shallow) == depths
    assert compiles.few == (compiles.end, *compiles.shallow)
    adapted = {split_layer(adapter.a_path)[1] for adapter in program.adapters}
    kinds = [*zip(program.architecture.layer_types, (i in adapted for i in range(60)), strict=False)]
    for kind in set(kinds):
        foretold = sum(
            share * sum(kinds[layer] == kind for layer in part.layers)
            for share, part in zip(compiles.shares, compiles.shallow, strict=True)
        )
        assert foretold == pytest.approx(kinds.count(kind)), kind


def test_first_estimate_needs_code_only_for_operations_without_a_usual_time(
    programs: dict[str, Program],
) -> None:
    program = programs["31b"]
    every = parts(program)
    quick = first_parts(program, every, Backend.TUNIX)
    assert quick is not None and quick.quick and quick.every == every.shallow
    assert quick.error == USUAL_ERROR > TIME_ERROR
    for unusual in (programs["jamba"], lowered("gemma4-31b-v5p8", "serve=null", "model.quantization=int8")):
        slow = first_parts(unusual, every, Backend.TUNIX)
        assert slow is not None and slow.every == every.few and slow.error == TIME_ERROR
    other = first_parts(program, every, Backend.TORCHAX)
    assert other is not None and not other.quick
    exact = parts(program, exact=True)
    assert first_parts(program, exact, Backend.TUNIX) is None
    all_layers = first_parts(program, replace(every, shallow=(), shares=()), Backend.TUNIX)
    assert all_layers is not None and all_layers.scheduled == (every.whole,) and all_layers.shares == (1.0,)


def test_shallow_schedules_include_the_layers_of_a_pattern_that_is_not_whole() -> None:
    """Gemma 3 27B has ten patterns of six layers, and two layers more."""
    compiles = parts(lowered("gemma3-27b-tpu7x8"))
    assert [len(part.layers) for part in compiles.shallow] == [8, 14] and compiles.shares == (-8.0, 9.0)


def test_plan_compiles_all_layers_if_no_config_can_shorten_the_model(programs: dict[str, Program]) -> None:
    assert parts(programs["jamba-some"]) == Parts(Part(tuple(range(32))))
    assert probed(programs["jamba-some"]) == (tuple(range(32)),)


def test_lora_targets_with_layer_numbers_compile_all_layers(programs: dict[str, Program]) -> None:
    assert parts(programs["numbered"]) == Parts(Part(tuple(range(60))))
