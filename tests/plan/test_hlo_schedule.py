"""Tests of how scheduled modules are reduced to work, transfers, waits and loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from recipec.compiler.plan.hlo.costs import collectives
from recipec.compiler.plan.hlo.parse import Array
from recipec.compiler.plan.hlo.read_schedule import Rates, schedule
from recipec.compiler.plan.results import COPIES
from recipec.compiler.plan.schedule import (
    Exposed,
    Loop,
    Schedule,
    Start,
    Transfer,
    Wait,
    Work,
    priced,
    with_turns,
)
from recipec.compiler.plan.timeline import Reached, timeline
from recipec.compiler.plan.torus import Torus
from tests.plan.hlo_text import OVERLAPPED, OVERLAPPED_ENTRY, module

CLOCK, FLOPS, HBM, HOST = 1e6, 1e9, 1e9, 1e8
ROW = Torus((8,), (False,), tuple((n, 0) for n in range(8)), 1e9, 1e7)
AXES = {"fsdp": 2, "tp": 4}
PART, ALL = "f32[64,256]{1,0:T(8,128)}", "f32[256,256]{1,0:T(8,128)}"
PART_BYTES, ALL_BYTES = 64 * 256 * 4, 256 * 256 * 4
WEIGHT = "base[\\'layers\\'][3][\\'mlp\\'][\\'up_proj\\'][\\'kernel\\'].value"
NAME = "layers.{}.mlp.up_proj.kernel"
PARAMETER = f'%w = {PART} parameter(0), metadata={{op_name="{WEIGHT}"}}'
OVER_TP = "replica_groups=[2,4]<=[8], dimensions={0}"


Kernel = Callable[[str, Sequence[Array], Sequence[Array]], float]


def cycles(count: int) -> str:
    return f'backend_config={{"window_config":{{}},"estimated_cycles":"{count}","other":[]}}'


def unknown(name: str, operands: Sequence[Array], results: Sequence[Array]) -> float:
    return 0.0


def read(
    entry: str,
    *computations: str,
    axes: Mapping[str, int] = AXES,
    slices: int = 1,
    kernel: Kernel = unknown,
    even: bool = False,
) -> Schedule:
    """Read a schedule, and check that its collectives are those of the module."""
    rates, read = Rates(CLOCK, FLOPS, HBM, HOST, kernel), module(entry, *computations)
    found = priced(*schedule(read, rates, axes, ROW, slices, even))
    moved: Counter[tuple[object, ...]] = Counter()
    for one in timeline(found, Reached()).transfers:
        if one.kind not in COPIES:
            moved[one.kind, one.axes, one.over_dcn, "count"] += round(one.count)
            moved[one.kind, one.axes, one.over_dcn, "bytes"] += round(one.bytes)
    for every in collectives(read, axes, slices):
        key = every.kind, every.axes, every.over_dcn
        assert (moved.pop((*key, "count")), moved.pop((*key, "bytes"))) == (every.count, every.bytes)
    assert not moved
    return found


def total(found: Schedule) -> Work:
    """Return the core's work, with loops counted in full."""
    done = timeline(found, Reached())
    return Work(done.products, done.memory, done.kernels)


def gathered(name: str = NAME, size: float = ALL_BYTES) -> Transfer:
    """Return an all-gather over the four devices of a tp row; the first device has one neighbor."""
    seconds = ROW.seconds("all-gather", size, range(4))[0]
    return Transfer("all-gather", name, ("tp",), False, size, seconds, ("0",))


BEGUN = f"""%s = ({PART}, {ALL}) all-gather-start(%w), channel_id=4, {OVER_TP}
    %x = {PART} negate(%w), {cycles(500)}
    %d = {ALL} all-gather-done(%s)"""


def test_async_all_gather_becomes_start_work_and_wait() -> None:
    found = read(f"{PARAMETER}\n{BEGUN}")
    assert found.steps == (Start(0, 1), Work(memory=500 / CLOCK), Wait(1))
    assert found.transfers == (gathered(),) and found.uncounted_loops == 0 and found.costed == 1.0


def test_synchronous_all_gather_is_exposed() -> None:
    """Count the links' time, which includes reading and writing HBM, and in addition libtpu's cycles."""
    plain = f"""{PARAMETER}
        %x = {PART} negate(%w), {cycles(500)}
        %g = {ALL} all-gather(%w), channel_id=4, {OVER_TP}"""
    found = read(plain)
    assert found.steps == (Work(memory=500 / CLOCK), Exposed(0)) and found.transfers == (gathered(),)
    costed = read(f"{plain}, {cycles(70)}")
    assert costed.steps == (Work(memory=500 / CLOCK), Exposed(0), Work(memory=70 / CLOCK))


def test_transfer_without_a_weight_is_named_by_its_part_of_the_layer() -> None:
    how = 'channel_id=3, replica_groups=[2,4]<=[8], to_apply=%sum, metadata={op_name="jit(f)/jvp(layer_7)/'
    found = read(
        f"""%x = {PART} parameter(0)
        %r = {PART} all-reduce(%x), {how}feed_forward/abi,io->abo/dot_general"}}
        %s = {PART} all-reduce(%x), {how}attention/dot_general"}}"""
    )
    assert [one.name for one in found.transfers] == ["layers.{} / feed_forward", "layers.{} / attention"]


def test_collective_split_over_fusions_overlaps_their_work() -> None:
    found = read(OVERLAPPED_ENTRY, *OVERLAPPED, axes={"fsdp": 4, "tp": 2})
    start, work, wait = found.steps
    assert (start, wait) == (Start(0, 1), Wait(1)) and isinstance(work, Work)
    assert work == Work(memory=2 * PART_BYTES / HBM)
    (moved,) = found.transfers
    # Every second device of the row of eight. The other group uses the same links.
    seconds = ROW.seconds("all-gather", ALL_BYTES, (0, 2, 4, 6))[0]
    assert (moved.kind, moved.axes, moved.bytes, moved.seconds) == (
        "all-gather",
        ("fsdp",),
        ALL_BYTES,
        seconds,
    )


def test_wrapped_async_collective_waits_at_async_done() -> None:
    wrapped = f"""wrapped
        %p = {PART} parameter(0)
        ROOT %r = f32[16,256]{{1,0:T(8,128)}} reduce-scatter(%p), channel_id=6, {OVER_TP}, to_apply=%sum"""
    context = f"(({PART}), f32[16,256]{{1,0:T(8,128)}}, u32[])"
    entry = f"""%p = {PART} parameter(0)
        %s = {context} async-start(%p), calls=%wrapped
        %x = {PART} negate(%p), {cycles(9)}
        %u = {context} async-update(%s), calls=%wrapped
        ROOT %d = f32[16,256]{{1,0:T(8,128)}} async-done(%u), calls=%wrapped"""
    found = read(entry, wrapped)
    assert found.steps == (Start(0, 1), Work(memory=9 / CLOCK), Wait(1))
    assert found.transfers[0].kind == "reduce-scatter" and found.transfers[0].bytes == 16 * 256 * 4


PRODUCT = f"""%w = {PART} parameter(0)
    %v = {ALL} parameter(1)
    %c = {PART} convolution(%w, %v), dim_labels=bf_io->bf"""
PRODUCT_FLOPS = 2 * 64 * 256 * 256


def test_work_uses_libtpus_estimated_cycles() -> None:
    found = read(f"{PRODUCT}, {cycles(1234)}\n%n = {PART} negate(%c)")
    assert total(found) == Work(1234 / CLOCK, 2 * PART_BYTES / HBM)
    core = 1234 / CLOCK + 2 * PART_BYTES / HBM
    assert found.costed == pytest.approx(1234 / CLOCK / core)


def test_operation_without_cycles_takes_longer_of_flops_and_bytes_time() -> None:
    assert PRODUCT_FLOPS / FLOPS > (2 * PART_BYTES + ALL_BYTES) / HBM
    for product in (PRODUCT, f"{PRODUCT}, {cycles(2**63 - 1)}"):
        assert total(read(product)) == Work(products=pytest.approx(PRODUCT_FLOPS / FLOPS))
    few = f"""%w = f32[8,256]{{1,0:T(8,128)}} parameter(0)
        %v = {ALL} parameter(1)
        %c = f32[8,256]{{1,0:T(8,128)}} convolution(%w, %v), dim_labels=bf_io->bf"""
    flops, moved = 2 * 8 * 256 * 256 / FLOPS, (2 * 8 * 256 * 4 + ALL_BYTES) / HBM
    assert total(read(few)) == Work(products=pytest.approx(max(flops, moved)))


@pytest.mark.parametrize(
    "left, right, precision, passes",
    [
        ("f32", "f32", "", 1),
        ("f32", "f32", ", operand_precision={highest,highest}", 6),
        ("f32", "f32", ", operand_precision={high,high}", 3),
        ("f32", "bf16", ", operand_precision={highest,highest}", 3),
        ("bf16", "bf16", ", operand_precision={highest,highest}", 1),
    ],
)
def test_float32_product_passes_depend_on_precision(
    left: str, right: str, precision: str, passes: int
) -> None:
    found = read(
        f"""%a = {left}[512,512] parameter(0)
        %b = {right}[512,512] parameter(1)
        ROOT %c = f32[512,512] convolution(%a, %b), dim_labels=bf_io->bf{precision}"""
    )
    assert total(found).products == pytest.approx(passes * 2 * 512**3 / FLOPS)


CARRIED = f"(s32[], {PART})"
TURN = f"""%p = {CARRIED} parameter(0)
    %w = {PART} get-tuple-element(%p), index=1
    {BEGUN}
    %m = {PART} multiply(%x, %x), {cycles(100)}
    ROOT %t = {CARRIED} tuple(%p, %m)"""


def loop(name: str, given: str, body: str, turns: str) -> str:
    count = f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}' if turns else ""
    return f"%{name} = {CARRIED} while(%{given}), condition=%c, body=%{body}{count}"


def test_loop_trip_count_multiplies_its_work_and_waits() -> None:
    found = read(f"%p = {CARRIED} parameter(0)\n{loop('l', 'p', 'body', '12')}", f"body\n{TURN}")
    turn = (Start(0, 1), Work(memory=500 / CLOCK), Wait(1), Work(memory=100 / CLOCK))
    assert found.steps == (Loop(12, turn),)
    assert total(found).memory == pytest.approx(12 * 600 / CLOCK)


def test_nested_loops_multiply_and_unknown_trip_count_counts_once() -> None:
    outer = f"outer\n%p = {CARRIED} parameter(0)\n{loop('i', 'p', 'body', '5')}\nROOT %t = {CARRIED} copy(%i)"
    entry = f"%p = {CARRIED} parameter(0)\n{loop('l', 'p', 'outer', '3')}\n{loop('u', 'l', 'alone', '')}"
    found = read(entry, outer, f"body\n{TURN}", f"alone\n{TURN}")
    nested, once = (step for step in found.steps if isinstance(step, Loop))
    assert (nested.times, once.times, found.uncounted_loops) == (3, 1, 1)
    (inner,) = (step for step in nested.body if isinstance(step, Loop))
    assert inner.times == 5
    copied = 3 * 2 * PART_BYTES / HBM
    assert total(found).memory == pytest.approx((15 + 1) * 600 / CLOCK + copied, rel=1e-3)
    assert timeline(found, Reached()).transfers[0].count == pytest.approx(16)


def test_costed_share_counts_every_loop_iteration() -> None:
    body = f"""body
        %p = {CARRIED} parameter(0)
        %w = {PART} get-tuple-element(%p), index=1
        %m = {PART} negate(%w), {cycles(100)}
        ROOT %t = {CARRIED} tuple(%p, %m)"""
    entry = f"""%p = {CARRIED} parameter(0)
        {loop("l", "p", "body", "9")}
        %w = {PART} get-tuple-element(%l), index=1
        %n = {PART} abs(%w)"""
    found = read(entry, body)
    costed, other = 9 * 100 / CLOCK, 2 * PART_BYTES / HBM
    assert found.costed == pytest.approx(costed / (costed + other))


def test_conditional_takes_longest_branch_and_call_takes_all_its_work() -> None:
    long = f"""long
        %a = {PART} parameter(0)
        %b = {PART} negate(%a), {cycles(5)}
        ROOT %c = {PART} abs(%b), {cycles(6)}"""
    short = f"short\nROOT %a = {PART} parameter(0)"
    entry = f"""%a = {PART} parameter(0)
        %i = s32[] parameter(1)
        %c = {PART} conditional(%i, %a, %a), branch_computations={{%short, %long}}
        ROOT %d = {PART} call(%c), to_apply=%long"""
    assert read(entry, long, short).steps == (Work(memory=22 / CLOCK),)
    # If both branches run equally often, the conditional takes half of the long one's time.
    (mean,) = read(entry, long, short, even=True).steps
    assert isinstance(mean, Work) and mean.memory == pytest.approx((5.5 + 11) / CLOCK)


def test_loop_of_unknown_turns_gets_turns_later() -> None:
    body = f"""body
        %p = {CARRIED} parameter(0)
        %w = {PART} get-tuple-element(%p), index=1
        %m = {PART} negate(%w), {cycles(100)}
        ROOT %t = {CARRIED} tuple(%p, %m)"""
    entry = f"""%p = {CARRIED} parameter(0)
        %l = {CARRIED} while(%p), condition=%c, body=%body
        %w = {PART} get-tuple-element(%l), index=1"""
    once = read(entry, body)
    assert once.uncounted_loops == 1
    for turns in (1, 2, 7):
        assert timeline(with_turns(once, turns), Reached()).seconds == pytest.approx(turns * 100 / CLOCK)


IN_VMEM = "f32[64,256]{1,0:T(8,128)S(1)}"
ON_HOST = "f32[64,256]{1,0:T(8,128)S(5)}"


@pytest.mark.parametrize(
    ("source", "target", "kind", "rate", "along"),
    [
        (PART, IN_VMEM, "copy", HBM, "hbm"),
        (ON_HOST, PART, "host", HOST, "host"),
        (PART, ON_HOST, "host", HOST, "host"),
    ],
)
def test_async_copies_run_on_the_hbm_or_host_lane(
    source: str, target: str, kind: str, rate: float, along: str
) -> None:
    found = read(
        f"""%w = {source} parameter(0), metadata={{op_name="{WEIGHT}"}}
        %s = ({target}, {source}, u32[]{{:S(2)}}) copy-start(%w)
        %x = {PART} negate(%w), {cycles(3)}
        ROOT %d = {target} copy-done(%s)"""
    )
    assert found.steps == (Start(0, 1), Work(memory=3 / CLOCK), Wait(1))
    assert found.transfers == (Transfer(kind, NAME, (), False, PART_BYTES, PART_BYTES / rate, (along,)),)


def test_async_slice_moves_only_the_bytes_of_the_slice() -> None:
    found = read(
        f"""%w = {ALL} parameter(0)
        %s = (({ALL}), {IN_VMEM}, s32[]{{:S(2)}}) slice-start(%w), slice={{[0:64], [0:256]}}
        ROOT %d = {IN_VMEM} slice-done(%s)"""
    )
    assert [(one.kind, one.bytes) for one in found.transfers] == [("copy", PART_BYTES)]


def test_each_async_copy_waits_at_its_matching_copy_done() -> None:
    found = read(
        f"""%w = {PART} parameter(0)
        %a = ({IN_VMEM}, {PART}, u32[]{{:S(2)}}) copy-start(%w)
        %b = ({ON_HOST}, {PART}, u32[]{{:S(2)}}) copy-start(%w)
        %c = {ON_HOST} copy-done(%b)
        %d = {IN_VMEM} copy-done(%a)"""
    )
    assert found.steps == (Start(0, 1), Start(1, 2), Wait(2), Wait(1))
    assert [one.kind for one in found.transfers] == ["copy", "host"]


CUSTOM = 'custom_call_target="tpu_custom_call"'


def test_kernel_time_from_its_model_counts_once_per_loop_iteration() -> None:
    asked: list[object] = []

    def kernel(name: str, operands: Sequence[Array], results: Sequence[Array]) -> float:
        asked.append((name, [a.dimensions for a in operands], [a.dimensions for a in results]))
        return 4.0

    body = f"""body
        %p = {CARRIED} parameter(0)
        %w = {PART} get-tuple-element(%p), index=1
        %splash.3 = {PART} custom-call(%w), {CUSTOM}
        ROOT %t = {CARRIED} tuple(%p, %splash.3)"""
    found = read(f"%p = {CARRIED} parameter(0)\n{loop('l', 'p', 'body', '3')}", body, kernel=kernel)
    assert found.steps == (Loop(3, (Work(kernels=4.0),)),)
    assert total(found) == Work(kernels=12.0)
    assert asked == [("splash.3", [(64, 256)], [(64, 256)])]


def over_dcn(opcode: str) -> str:
    return f"""{opcode}, channel_id=60, is_host_transfer=true, frontend_attributes={{\
_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}}"""


def test_dcn_transfer_is_awaited_one_loop_iteration_later() -> None:
    received = f"({PART}, u32[], token[])"
    carried = f"(s32[], {received})"
    body = f"""body
        %p = {carried} parameter(0)
        %before = {received} get-tuple-element(%p), index=1
        %d = ({PART}, token[]) recv-done(%before), channel_id=60, is_host_transfer=true
        %g = {PART} get-tuple-element(%d), index=0
        %n = {PART} negate(%g), {cycles(7)}
        %t = token[] after-all()
        %s = {received} {over_dcn("send(%n, %t)")}
        %r = {received} {over_dcn("recv(%t)")}
        ROOT %o = {carried} tuple(%p, %r)"""
    entry = f"""%p = {carried} parameter(0)
        ROOT %w = {carried} while(%p), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"12"}}}}"""
    found = read(entry, body, axes={"dcn": 2, "fsdp": 8}, slices=2)
    assert found.steps == (Loop(12, (Wait(1), Work(memory=7 / CLOCK), Start(0, 1))),)
    (moved,) = found.transfers
    assert (moved.kind, moved.axes, moved.over_dcn, moved.along) == ("all-reduce", ("dcn",), True, ("dcn",))
    assert moved.seconds == pytest.approx(PART_BYTES / ROW.dcn)
    assert timeline(found, Reached()).exposed == pytest.approx(11 * moved.seconds)


def test_collective_permute_is_exposed_at_link_speed_with_its_axis() -> None:
    pairs = "source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    found = read(f"%w = {PART} parameter(0)\n%g = {PART} collective-permute(%w), channel_id=2, {pairs}")
    assert found.steps == (Exposed(0),)
    (moved,) = found.transfers
    # The last device of each row sends back over the links in the other direction.
    assert moved.seconds == pytest.approx(PART_BYTES / ROW.link, rel=0.1) and moved.axes == ("tp",)


def test_fused_reduce_scatter_is_exposed_in_addition_to_its_cycles() -> None:
    fused = f"""fused
        %p = {ALL} parameter(0)
        %r = {ALL} all-reduce(%p), channel_id=6, {OVER_TP}, to_apply=%sum
        %i = u32[] partition-id()
        ROOT %s = {PART} dynamic-slice(%r, %i, %i), dynamic_slice_sizes={{64,256}}"""
    found = read(
        f"%p = {ALL} parameter(0)\nROOT %f = {PART} fusion(%p), kind=kCustom, calls=%fused, {cycles(40)}",
        fused,
    )
    assert found.steps == (Exposed(0), Work(memory=40 / CLOCK))
    assert (found.transfers[0].kind, found.transfers[0].bytes) == ("reduce-scatter", PART_BYTES)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        (f"%x = {PART} copy(%w), {cycles(1_000_000)}", 2 * 2 * PART_BYTES / HBM),
        (f"%x = {PART} copy(%w), {cycles(200)}", 200 / CLOCK),
        (f"%x = {PART} exponential(%w), {cycles(1_000_000)}", 1_000_000 / CLOCK),
    ],
)
def test_only_data_movement_is_capped_at_twice_its_bytes_time(line: str, seconds: float) -> None:
    (work,) = read(f"{PARAMETER}\n{line}").steps
    assert isinstance(work, Work) and work.memory == pytest.approx(seconds)
