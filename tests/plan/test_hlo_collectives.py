"""Tests of the collectives of HLO modules, and of the mesh axes that they run over."""

from __future__ import annotations

import pytest

from recipec.compiler.plan.hlo.costs import collectives, costs
from recipec.compiler.plan.hlo.liveness import largest
from recipec.compiler.plan.results import Collective
from tests.plan.hlo_text import module

AXES = {"fsdp": 2, "tp": 4}
TWO_SLICES = {"dcn": 2, "fsdp": 2, "tp": 2}
SUM = """sum
    %x = f32[] parameter(0)
    %y = f32[] parameter(1)
    ROOT %s = f32[] add(%x, %y)"""
REDUCED = "f32[8,130]{1,0:T(8,128)}"
REDUCED_BYTES = 8 * 256 * 4


def over(groups: str, axes: dict[str, int], slices: int = 1) -> tuple[tuple[str, ...], bool]:
    """Return the axes of one all-reduce, and whether it goes over DCN."""
    entry = f"""%p = {REDUCED} parameter(0)
        ROOT %a = {REDUCED} all-reduce(%p), channel_id=1{groups}, use_global_device_ids=true, to_apply=%sum"""
    (found,) = collectives(module(entry, SUM), axes, slices)
    assert (found.kind, found.count, found.bytes) == ("all-reduce", 1, REDUCED_BYTES)
    return found.axes, found.over_dcn


@pytest.mark.parametrize(
    "groups, axes",
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tp",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("fsdp",)),
        ("{{3,7},{4,0},{5,1},{2,6}}", ("fsdp",)),
        ("{{0,1,2,3,4,5,6,7}}", ("fsdp", "tp")),
        ("{}", ("fsdp", "tp")),
        ("{{0,1},{2,3},{4,5},{6,7}}", ()),
        ("[2,4]<=[8]", ("tp",)),
        ("[4,2]<=[2,4]T(1,0)", ("fsdp",)),
        ("[2,4]<=[4,2]T(1,0)", ()),
        ("[1,8]<=[8]", ("fsdp", "tp")),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tp",)),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ("fsdp",)),
        ("mesh['axis_0'=1,'axis_1'=2,'axis_2'=4] {'axis_0','axis_2'}", ("tp",)),
        ("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", ("fsdp", "tp")),
        # Parts of an axis: the size of what precedes a part, and its own size.
        ("mesh['axis_0'=8] {'axis_0':(2)4}", ("tp",)),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("fsdp",)),
        ("mesh['axis_0'=8] {'axis_0':(2)2}", ()),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'a'}", ("tp",)),
        ("mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", ("fsdp",)),
    ],
)
def test_replica_groups_are_named_by_their_mesh_axes(groups: str, axes: tuple[str, ...]) -> None:
    assert over(f", replica_groups={groups}", AXES)[0] == axes


@pytest.mark.parametrize(
    ("groups", "mesh", "slices", "axes"),
    [
        # Axes of size 1 are not named.
        (", replica_groups={{0,1,2,3}}", {"dp": 1, "fsdp": 4, "tp": 1}, 1, ("fsdp",)),
        ("", {"dp": 1, "fsdp": 4, "tp": 1}, 1, ("fsdp",)),
        (", replica_groups={{0,1,4,5},{2,3,6,7}}", {"dp": 2, "fsdp": 2, "tp": 2}, 1, ("dp", "tp")),
        (", replica_groups=[4,2]<=[2,2,2]T(0,2,1)", {"dp": 2, "fsdp": 2, "tp": 2}, 1, ("fsdp",)),
        # Devices are numbered within a slice.
        (", replica_groups={{0,1},{2,3}}", TWO_SLICES, 2, ("tp",)),
        (", replica_groups={{0,2},{1,3}}", TWO_SLICES, 2, ("fsdp",)),
        ("", TWO_SLICES, 2, ("fsdp", "tp")),
        # Without slices, dcn is an axis like any other.
        (", replica_groups={{0,1},{2,3},{4,5},{6,7}}", TWO_SLICES, 1, ("tp",)),
        (", replica_groups={{0,4},{1,5},{2,6},{3,7}}", TWO_SLICES, 1, ("dcn",)),
    ],
)
def test_replica_groups_are_named_in_other_meshes(
    groups: str, mesh: dict[str, int], slices: int, axes: tuple[str, ...]
) -> None:
    assert over(groups, mesh, slices) == (axes, False)


def megascale(transfer: str) -> str:
    """Return the attributes of a transfer between slices."""
    return f"""is_host_transfer=true, frontend_attributes={{\
_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="a.252_0",\
_xla_megascale_target="{{1,2}}x{{0:3}}"{transfer}}}"""


@pytest.mark.parametrize(
    ("transfer", "kind"),
    [
        (',_xla_megascale_transfer_type="ALL_GATHER"', "all-gather"),
        (',_xla_megascale_transfer_type="ONE_TO_ONE"', "collective-permute"),
        (',_xla_megascale_transfer_type="RING.2 OF-LATER"', "ring.2 of-later"),
        (',_xla_megascale_transfer_type=""', "transfer"),
        ("", "transfer"),
    ],
)
def test_dcn_transfer_of_any_kind_counts_once_per_loop_iteration(transfer: str, kind: str) -> None:
    """Count a transfer that is received in one iteration and used in the next; it has two arrays."""
    received = f"(({REDUCED}, {REDUCED}), u32[], token[])"
    carried = f"(s32[], {received})"
    body = f"""body
        %p = {carried} parameter(0)
        %i = s32[] get-tuple-element(%p), index=0
        %before = {received} get-tuple-element(%p), index=1
        %d = (({REDUCED}, {REDUCED}), token[]) recv-done(%before), channel_id=60, is_host_transfer=true
        %t = token[] after-all()
        %r = {received} recv(%t), channel_id=60, {megascale(transfer)}
        ROOT %o = {carried} tuple(%i, %r)"""
    entry = f"""%p = {carried} parameter(0)
        ROOT %w = {carried} while(%p), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"12"}}}}"""
    read = module(entry, body)
    found = collectives(read, TWO_SLICES, slices=2)
    assert found == (Collective(kind, ("dcn",), True, 12, 12 * 2 * REDUCED_BYTES),)
    assert costs(read)[0] == 0 and largest(read)[0] >= 0


PERMUTED = "f32[8,128]{1,0:T(8,128)}"


@pytest.mark.parametrize(
    "pairs, axes",
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tp",)),
        ("{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", ("fsdp",)),
        ("{{0,1},{1,2},{2,3}}", ("tp",)),
        ("{{0,5},{5,0}}", ("fsdp", "tp")),
        ("{{0,7},{1,0},{2,1},{3,2},{4,3},{5,4},{6,5},{7,6}}", ("fsdp", "tp")),
    ],
)
def test_permutations_are_named_by_their_mesh_axes(pairs: str, axes: tuple[str, ...]) -> None:
    entry = f"""%p = {PERMUTED} parameter(0)
        %s = ({PERMUTED}, {PERMUTED}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%p), \
channel_id=2, source_target_pairs={pairs}, metadata={{op_name="jit(f)"}}
        ROOT %d = {PERMUTED} collective-permute-done(%s)"""
    expected = Collective("collective-permute", axes, False, 1, 8 * 128 * 4)
    assert collectives(module(entry), AXES) == (expected,)


def test_collectives_add_up_count_and_bytes_over_loop_iterations() -> None:
    body = f"""body
        %p = (s32[], {PERMUTED}) parameter(0)
        %x = {PERMUTED} get-tuple-element(%p), index=1
        %s = f32[32,128]{{1,0:T(8,128)}} all-gather(%x), channel_id=3, \
replica_groups=[2,4]<=[8], dimensions={{0}}
        ROOT %t = (s32[], {PERMUTED}) tuple(%p, %x)"""
    entry = f"""%p = (s32[], {PERMUTED}) parameter(0)
        %w = (s32[], {PERMUTED}) while(%p), condition=%c, body=%body, \
backend_config={{"known_trip_count":{{"n":"12"}}}}
        %x = {PERMUTED} get-tuple-element(%w), index=1
        %g = (({PERMUTED}, {PERMUTED}), ({PERMUTED}, f32[16,128]{{1,0:T(8,128)}})) all-gather-start(%x, %x), \
channel_id=4, replica_groups=[2,4]<=[8], dimensions={{0}}
        %d = ({PERMUTED}, f32[16,128]{{1,0:T(8,128)}}) all-gather-done(%g)
        %r = ({PERMUTED}, {PERMUTED}) all-reduce-start(%x, %x), channel_id=5, \
replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%sum
        ROOT %e = ({PERMUTED}, {PERMUTED}) all-reduce-done(%r)"""
    one = 8 * 128 * 4
    assert collectives(module(entry, SUM, body), AXES) == (
        Collective("all-gather", ("tp",), False, 13, (12 * 4 + 3) * one),
        Collective("all-reduce", ("fsdp",), False, 1, 2 * one),
    )
