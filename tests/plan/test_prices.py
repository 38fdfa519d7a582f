"""Tests of the prices of operations, and of when two operations count as equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.plan.hlo.assigned import assignment, scheduled, sizes, untupled
from recipec.compiler.plan.hlo.schedule import Fingerprints
from recipec.compiler.plan.schedule import (
    Exposed,
    Loop,
    Operation,
    Prices,
    Schedule,
    Work,
    Worked,
    priced,
    prices,
)
from tests.plan.hlo_text import module

PRODUCT = Operation("a", "a-alike", "p", 1.0)
COPY = Operation("c", "c-alike", "", 2.0)
BARE = Operation("b", "b-alike", "", 0.5)
FOUND = prices([(PRODUCT, 3.0), (Operation("a2", "a-alike", "p", 1.0), 5.0), (COPY, 2.5), (BARE, None)])


@pytest.mark.parametrize(
    ("operation", "seconds", "known"),
    [
        (PRODUCT, 3.0, True),
        (BARE, 0.5, False),  # libtpu reported no cycles
        (Operation("a3", "a-alike", "p", 9.0), 4.0, True),  # in another memory: the mean
        (Operation("a4", "other", "p", 9.0), 4.0, True),  # the same products next to another operation
        (Operation("x", "x", "y", 2.0), 8.0, False),  # products took four times the longer of the two
        (Operation("x", "x", "", 2.0), 2.5, False),
    ],
)
def test_operation_takes_the_price_of_its_closest_match(
    operation: Operation, seconds: float, known: bool
) -> None:
    assert FOUND.of(operation) == (pytest.approx(seconds), known)


def test_pricing_adds_each_operation_at_its_step_and_in_its_loop() -> None:
    turn = Loop(4, (Work(kernels=1.0, operations=((0, 2),)), Exposed(0)))
    steps = (Work(operations=((1, 3),)) + Work(memory=1.0, operations=((2, 1), (1, 1))), turn)
    found = priced(Schedule(steps, operations=(PRODUCT, COPY, BARE), names=("up", "up", "norm")), FOUND)
    assert found.steps == (Work(memory=11.5), Loop(4, (Work(6.0, 0.0, 1.0), Exposed(0))))
    assert found.operations == ()
    assert found.costed == pytest.approx((24 + 10) / (24 + 10.5))
    assert set(found.worked) == {
        Worked("up", True, 8, 24.0),
        Worked("up", False, 4, 10.0),
        Worked("norm", False, 1, 0.5),
    }


def test_operations_without_prices_take_their_seconds_at_full_rates() -> None:
    found = priced(Schedule((Work(operations=((0, 2),)),), operations=(COPY,), names=("",)), Prices())
    assert found.steps == (Work(memory=4.0),) and found.costed == 0


def fused(name: str, layer: int, columns: int, space: str, kind: str = "multiply") -> tuple[str, str]:
    """Return a fusion of a product with another operation, and its computation."""
    left = out = f"bf16[8,{columns}]{{1,0:T(8,128)(2,1){space}}}"
    about = f'metadata={{op_name="layers[{layer}]"}}, backend_config={{"estimated_cycles":"{layer}"}}'
    notes = f"channel_id={layer}, {about}"
    body = f"""f{name}
        %p0.{name} = {left} parameter(0)
        %p1.{name} = bf16[{columns},{columns}]{{1,0:T(8,128)(2,1)}} parameter(1)
        %c.{name} = {out} convolution(%p0.{name}, %p1.{name}), dim_labels=bf_io->bf
        ROOT %m.{name} = {out} {kind}(%c.{name}, %c.{name})"""
    call = f"""%x{name} = {left} parameter(0)
        %y{name} = bf16[{columns},{columns}]{{1,0:T(8,128)(2,1)}} parameter(1)
        %z{name} = {out} fusion(%x{name}, %y{name}), kind=kOutput, calls=%f{name}, {notes}"""
    return call, body


def identities(*found: tuple[str, str]) -> list[tuple[str, str, str]]:
    read = module("\n".join(call for call, _ in found), *(body for _, body in found))
    fingerprints = Fingerprints(read)
    return [fingerprints.of(i, read.entry) for i in read.computations[read.entry] if i.opcode == "fusion"]


def test_fingerprints_ignore_layers_but_not_memory_shape_or_operation() -> None:
    one, other, memory, wider, added = identities(
        fused("a", 1, 128, ""),
        fused("b", 2, 128, ""),
        fused("c", 3, 128, "S(1)"),
        fused("d", 4, 256, ""),
        fused("e", 5, 128, "", "add"),
    )
    assert one == other
    assert memory[0] != one[0] and memory[1:] == one[1:]
    assert added[2] == one[2] and added[0] != one[0] and added[1] != one[1]
    assert not set(wider) & set(one)


def test_buffer_assignment_counts_only_hbm_allocations() -> None:
    found = assignment(
        "BufferAssignment:\n"
        "allocation 0: size 512, thread-local:\n"
        " value: <2 reduce_sum.7 @0> (size=512,offset=0): f32[]\n"
        "allocation 1: size 4096, parameter 3, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:\n"
        "allocation 2: size 64, color 2, parameter 4, shape |s32[]| at ShapeIndex {}:\n"
        "allocation 3: size 16, constant:\n"
        "allocation 4: size 8, output shape is |(f32[])|, maybe-live-out:\n"
        "allocation 5: size 65536, preallocated-temp:\n"
        "allocation 6: size 9999, color 1, preallocated-temp:\n"
    )
    assert (found.arguments, found.temporaries, found.rest) == (4096, 65536, 512 + 16 + 8)


def test_tuple_argument_is_split_into_named_parameters(tmp_path: Path) -> None:
    whole = "(f32[8,128]{1,0:T(8,128)}, f32[128,64]{1,0:T(8,128)})"
    read = module(
        f"""%p = {whole} parameter(0)
            %a = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%p), index=0
            %b = f32[128,64]{{1,0:T(8,128)}} get-tuple-element(%p), index=1
            %t = {whole} tuple(%a, %b)
            %c = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%t), index=0"""
    )
    (tmp_path / "module_0000.jit.before_optimizations.txt").write_text(
        "HloModule jit\n\nENTRY %main (a: f32[8,128], b: f32[128,64]) -> f32[8,128] {\n"
        "  %a = f32[8,128] parameter(0), metadata={op_name=\"base['w'].value\"}\n"
        "  %b = f32[128,64] parameter(1), metadata={op_name=\"batch['tokens']\"}\n}\n"
    )
    found = untupled(read, tmp_path).computations[read.entry]
    named = {i.name: (i.opcode, i.literal, i.op_name) for i in found}
    assert named["a"] == ("parameter", "0", "base['w'].value")
    assert named["b"] == ("parameter", "1", "batch['tokens']")
    assert named["c"][0] == "get-tuple-element"


def test_schedule_dump_has_sizes_once_all_three_files_have_text(tmp_path: Path) -> None:
    left = tmp_path / "module_0000.jit.after_optimizations"
    Path(f"{left}.txt").write_text(
        "HloModule jit\n\n%f (p: f32[]) -> f32[] {\n  ROOT %p.1 = f32[] parameter(0)\n}\n\n"
        "ENTRY %main (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  ROOT %b = f32[] fusion(%a), calls=%f\n}\n"
    )
    Path(f"{left}-buffer-assignment.txt").write_text("allocation 0: size 64, preallocated-temp:\n")
    assert sizes(tmp_path) is None
    Path(f"{left}-live-range.txt").touch()
    assert sizes(tmp_path) is None
    Path(f"{left}-live-range.txt").write_text("HloLiveRange\n")
    assert sizes(tmp_path) == (177, 42, 13)
    text, memory = scheduled(tmp_path)
    assert text.startswith("HloModule")
    assert (memory.temporaries, memory.instructions) == (64, 3)
    Path(f"{left}.txt").unlink()
    with pytest.raises(FileNotFoundError, match="install the libtpu that recipec pins"):
        scheduled(tmp_path)
