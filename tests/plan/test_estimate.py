"""From the figures of compiles to those of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import calibration
from recipec.compiler.plan.depth import Depth, depths
from recipec.compiler.plan.estimate import extrapolate
from recipec.compiler.plan.results import Collective, Compiled, Costs, Kernel, OutOfMemory, Temporary
from recipec.spec.load import load


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
        seconds=0.01 + 0.02 * layers,
        costs=Costs(0, 0, 0, loop_flops=1.5e13, loop_bytes=6e10, loop_seconds=0.04),
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
    assert one.compiler_seconds == pytest.approx(1.21)
    assert one.loop_seconds == pytest.approx(0.04) and one.kernel_seconds == pytest.approx(0.06)
    assert one.seconds == pytest.approx(1.31)
    assert one.calibrated_seconds == pytest.approx(1.31 * calibration.factor())
    assert one.flops == pytest.approx(1e12 + 3.6e14 + 1.5e13)
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
            seconds=0.0,
            costs=Costs(0, 0, 0, 0, 0, 0),
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


def test_the_calibration_says_what_it_rests_on() -> None:
    assert calibration.factor() == pytest.approx(1.21 / 0.614)
    assert "arXiv 2605.25645: 1.21 s a sample" in calibration.sentence()
