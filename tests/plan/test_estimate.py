"""From the figures of compiles to those of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.depth import Depth, depths
from recipec.compiler.plan.estimate import extrapolate
from recipec.compiler.plan.rates import interval
from recipec.compiler.plan.results import Collective, Compiled, Kernel, Moved, OutOfMemory, Temporary
from recipec.compiler.plan.schedule import Exposed, Schedule, Start, Transfer, Wait, Work
from recipec.compiler.plan.timeline import Reached, timeline
from recipec.spec.load import load

pytestmark = pytest.mark.usefixtures("full_speed")


@pytest.fixture(scope="module")
def program(root: Path) -> Program:
    found = lower(load(root / "recipes" / "gemma4-31b-v5p8.yaml")).program
    assert found is not None
    return found


def compiled(layers: int) -> Compiled:
    """Figures in a line: a part outside of the layers, and one in each."""
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
                Work(0.01 + 0.015 * layers, 0.005 * layers, 1e-3 * layers),
                Wait(1),
                Exposed(2),
            ),
            transfers=(
                Transfer("all-gather", "head", ("fsdp",), False, 1e9, 0.04, ("0",)),
                Transfer("all-gather", "mlp", ("fsdp",), False, 2e9 * layers, 0.01 * layers, ("0",)),
                Transfer("copy", "mlp", (), False, 1e6 * layers, 1e-3 * layers, ("hbm",)),
            ),
        ),
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


def test_temporaries_are_not_less_than_those_of_fewer_layers(program: Program) -> None:
    deep = replace(compiled(12), temporaries=8e9)
    assert extrapolate(program, depths(program), [compiled(6), deep]).memory.temporaries == 1.1e10


def test_every_figure_is_extrapolated_in_a_line(program: Program) -> None:
    one = extrapolate(program, depths(program), [compiled(6), compiled(12)])
    memory = one.memory
    assert memory.weights == pytest.approx(1e9 + 2e8 * 60)
    assert (memory.adapters, memory.optimizer, memory.batch) == pytest.approx((6e8, 1.2e9, 100))
    assert memory.padding == pytest.approx(1.1e9 + 2.4e8 * 60 - memory.weights - 1.8e9 - 100)
    assert memory.temporaries == pytest.approx(6.5e10) and memory.code == pytest.approx(6e7)
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
    assert found.spans == timeline(compiled(12).schedule, Reached()).spans
    assert one.flops == pytest.approx(1e12 + 3.6e14)
    assert [(c.kind, c.count, c.bytes) for c in one.collectives] == [
        ("all-gather", 1203, pytest.approx(1.21e11)),
        ("all-to-all", 1, pytest.approx(3e7)),
    ]
    assert one.kernels[0].count == 60 and one.kernels[0].flops == pytest.approx(6e12)
    assert [(t.name, t.count, t.bytes) for t in one.largest] == [
        ("layers.{}.mlp / gelu", 60, pytest.approx(6e9)),
        ("head / all-gather", 1, pytest.approx(2.8e9)),
    ]
    assert one.compile_seconds == 24


def test_model_flops_are_those_of_the_model(program: Program) -> None:
    """4 N a token for the frozen weights and 6 for the adapters; attention's are some per cent."""
    one = extrapolate(program, depths(program), [compiled(6), compiled(12)])
    expected = (4 * program.base_parameters + 6 * program.trainable_parameters) * 4 * 3072 / 4
    assert expected < one.model_flops < 1.1 * expected
    assert one.mfu == pytest.approx(one.model_flops / (one.seconds * 459e12))


def test_a_refused_step_has_memory_and_no_time(program: Program) -> None:
    refused = [
        replace(
            compiled(layers),
            schedule=Schedule(),
            kernels=(),
            out_of_memory=OutOfMemory(
                2e11 + 1e9 * layers, 1.02e11, (Temporary("scores", "f32[9]", 1, 9e10),)
            ),
        )
        for layers in (6, 12)
    ]
    one = extrapolate(program, depths(program), refused)
    assert one.memory.used == pytest.approx(2e11 + 6e10 + 6e7)
    assert one.memory.headroom < 0 and one.seconds == 0 and one.mfu == 0
    assert one.largest[0].name == "scores"


def test_code_that_layers_would_share_is_not_extrapolated(program: Program) -> None:
    large = [replace(compiled(layers), code=1e7 * layers) for layers in (6, 12)]
    assert extrapolate(program, depths(program), large).memory.code == 1.2e8
    whole = replace(compiled(60), code=6e8)
    exact = extrapolate(program, [Depth(tuple(range(60)), 1.0)], [whole])
    assert exact.memory.code == 6e8


def test_what_only_a_part_of_the_compiles_shows_is_taken_as_it_is(program: Program) -> None:
    longer = replace(compiled(12), largest=(*compiled(12).largest, Temporary("late", "f32[3]", 12, 1e9)))
    one = extrapolate(program, depths(program), [compiled(6), longer])
    assert Temporary("late", "f32[3]", 12, 1e9) in one.largest


def test_what_only_the_longer_compile_waits_for_is_extrapolated_too(program: Program) -> None:
    """And what the shorter one waits for alone is not counted below nothing."""
    late = Transfer("all-reduce", "late", ("fsdp",), False, 8.0, 0.1, ("0",))
    early = replace(late, name="early")
    short, long = (
        replace(compiled(layers), schedule=Schedule((Exposed(0),), (one,)))
        for layers, one in ((6, early), (12, late))
    )
    found = {m.name: m for m in extrapolate(program, depths(program), [short, long]).timeline.transfers}
    assert found["late"].exposed == pytest.approx(9 * 0.1) and found["late"].count == 9
    assert found["early"].exposed == found["early"].seconds == 0.0


def test_the_interval_is_that_of_the_generation_and_the_method(program: Program) -> None:
    one = extrapolate(program, depths(program), [compiled(6), compiled(12)])
    assert one.interval == interval("v5p", lora=True)
    low, high = one.interval.of(one.seconds)
    assert 0 < low <= high
    assert one.interval.of(3.0) == pytest.approx((3 * one.interval.low, 3 * one.interval.high))
