"""Tests of the FLOPs and bytes of HLO modules."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from recipec.compiler.plan.hlo.costs import costs, product_flops
from tests.plan.hlo_text import OVERLAPPED, OVERLAPPED_ENTRY, module


def once(entry: str, *computations: str) -> tuple[float, float]:
    """Return the FLOPs and bytes of a program."""
    return costs(module(entry, *computations))


@pytest.mark.parametrize(
    "attributes, left, right, result",
    [
        ("dim_labels=bf_io->bf", (6, 10), (10, 4), (6, 4)),
        ("dim_labels=bf_oi->fb", (6, 10), (4, 10), (4, 6)),
        ("dim_labels=fb_io->bf", (10, 6), (10, 4), (6, 4)),
        # A convolution sums over two dimensions, one of them as a window over its full size.
        ("window={size=5}, dim_labels=b0f_o0i->bf0", (6, 5, 8), (3, 5, 8), (6, 3, 1)),
        # Only the kernel has one of the result's dimensions: most of the window is over padding.
        ("window={size=5 pad=4_4 rhs_reversal=1}, dim_labels=bf0_i0o->b0f", (6, 8, 1), (8, 5, 3), (6, 5, 3)),
        (
            "window={size=5x2 pad=4_4x0_0 rhs_reversal=1x0}, dim_labels=b1f0_1i0o->b0f1",
            (6, 2, 8, 1),
            (2, 8, 5, 3),
            (6, 5, 3, 1),
        ),
        # A batch dimension: each position of the input meets one position of the kernel.
        (
            "window={size=4x2 stride=3x1 pad=0_0x1_1 lhs_dilate=4x1 rhs_reversal=0x1}, "
            "dim_labels=b0f1_o01i->0bf1",
            (6, 4, 8, 1),
            (3, 4, 2, 8),
            (4, 6, 3, 2),
        ),
        ("window={size=3 pad=2_1 rhs_dilate=2}, dim_labels=b0f_0io->b0f", (2, 9, 4), (3, 4, 5), (2, 8, 5)),
        ("window={size=3}, dim_labels=b0f_0io->b0f, feature_group_count=2", (2, 9, 4), (3, 2, 6), (2, 7, 6)),
    ],
)
def test_product_flops_match_a_convolution_of_ones(
    attributes: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]
) -> None:
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert labels is not None
    axes = sum(label.isdigit() for label in labels[3])

    def each(name: str, default: str) -> list[str]:
        match = re.search(rf"[{{ ]{name}=([\dx_]+)", attributes)
        return match[1].split("x") if match else [default] * axes

    def places(part: str, first: str) -> tuple[int, ...]:
        return tuple(part.index(label) for label in first + "01"[:axes])

    groups = re.search(r"feature_group_count=(\d)", attributes)
    ones = lax.conv_general_dilated(
        jnp.ones(left),
        jnp.ones(right),
        window_strides=[int(n) for n in each("stride", "1")],
        padding=[tuple(int(n) for n in pad.split("_")) for pad in each("pad", "0_0")],
        lhs_dilation=[int(n) for n in each("lhs_dilate", "1")],
        rhs_dilation=[int(n) for n in each("rhs_dilate", "1")],
        dimension_numbers=lax.ConvDimensionNumbers(
            places(labels[1], "bf"), places(labels[2], "oi"), places(labels[3], "bf")
        ),
        feature_group_count=int(groups[1]) if groups else 1,
    )
    assert ones.shape == result
    shape = ",".join(map(str, result))
    (convolution,) = (
        i
        for i in module(
            f"""%a = f32[] parameter(0)
            ROOT %c = f32[{shape}] convolution(%a, %a), {attributes}"""
        ).computations["main.1_spmd"]
        if i.opcode == "convolution"
    )
    assert product_flops(convolution, left, right) == 2 * float(np.asarray(ones).sum())


def test_dot_flops_and_bytes_follow_its_shapes() -> None:
    flops, moved = once(
        """%a = bf16[3,16,10] parameter(0)
        %b = bf16[3,10,20] parameter(1)
        ROOT %d = f32[3,16,20] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, \
rhs_batch_dims={0}, rhs_contracting_dims={1}"""
    )
    assert flops == 2 * np.einsum("bij,bjk->", np.ones((3, 16, 10)), np.ones((3, 10, 20)))
    assert moved == 3 * (16 * 10 * 2 + 10 * 20 * 2 + 16 * 20 * 4)


PRODUCT = """products
    %a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
    %b = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(1)
    %inner = bf16[64,128]{1,0:T(8,128)(2,1)} fusion(%a), kind=kLoop, calls=%view
    ROOT %c = bf16[64,256]{1,0:T(8,128)(2,1)} convolution(%inner, %b), dim_labels=bf_io->bf"""
VIEW = """view
    %v = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
    ROOT %w = bf16[64,128]{1,0:T(8,128)(2,1)} bitcast(%v)"""
PRODUCT_FLOPS = 2 * 64 * 128 * 256
PRODUCT_BYTES = 2 * (64 * 128 + 128 * 256 + 64 * 256)


def test_fusion_counts_product_flops_and_operand_and_result_bytes() -> None:
    entry = """%a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
        %b = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(1)
        %f = bf16[64,256]{1,0:T(8,128)(2,1)} fusion(%a, %b), kind=kOutput, calls=%products
        ROOT %n = bf16[64,256]{1,0:T(8,128)(2,1)} negate(%f)"""
    flops, moved = once(entry, VIEW, PRODUCT)
    assert flops == PRODUCT_FLOPS
    assert moved == PRODUCT_BYTES + 2 * 64 * 256 * 2


def test_bytes_count_padded_hbm_arrays_and_no_vmem() -> None:
    _, moved = once(
        """%a = f32[5,130]{1,0:T(8,128)} parameter(0)
        %b = f32[5,130]{1,0:T(8,128)S(1)} negate(%a)
        %start = (f32[5,130]{1,0:T(8,128)}, f32[5,130]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%b)
        ROOT %done = f32[5,130]{1,0:T(8,128)} copy-done(%start)"""
    )
    assert moved == 2 * 8 * 256 * 4


def test_loop_body_counts_once_per_iteration() -> None:
    state = "(s32[], bf16[64,128]{1,0:T(8,128)(2,1)}, bf16[128,256]{1,0:T(8,128)(2,1)})"
    body = f"""body
        %p = {state} parameter(0)
        %i = s32[] get-tuple-element(%p), index=0
        %one = s32[] constant(1)
        %next = s32[] add(%i, %one)
        %a = bf16[64,128]{{1,0:T(8,128)(2,1)}} get-tuple-element(%p), index=1
        %b = bf16[128,256]{{1,0:T(8,128)(2,1)}} get-tuple-element(%p), index=2
        %f = bf16[64,256]{{1,0:T(8,128)(2,1)}} fusion(%a, %b), kind=kOutput, calls=%products
        ROOT %t = {state} tuple(%next, %a, %b)"""
    condition = f"""condition
        %p = {state} parameter(0)
        %i = s32[] get-tuple-element(%p), index=0
        %twelve = s32[] constant(12)
        ROOT %lt = pred[] compare(%i, %twelve), direction=LT"""
    inner = f"""inner
        %p = {state} parameter(0)
        ROOT %w = {state} while(%p), condition=%condition, body=%body"""
    entry = f"""%p = {state} parameter(0)
        %w = {state} while(%p), condition=%condition, body=%body
        %x = {state} while(%w), condition=%other, body=%inner, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
        ROOT %y = {state} call(%x), to_apply=%body"""
    # The bodies run 12 times, 3 x 12 times, and once.
    flops, moved = once(entry, VIEW, PRODUCT, body, condition, inner)
    assert flops == 49 * PRODUCT_FLOPS
    scalars = 12  # of the addition
    assert moved == pytest.approx(49 * (PRODUCT_BYTES + scalars), rel=1e-3)


def test_a_conditional_takes_its_longest_branch() -> None:
    short = """short
        ROOT %a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)"""
    entry = """%a = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
        %which = s32[]{:T(128)} parameter(1)
        ROOT %c = bf16[64,256]{1,0:T(8,128)(2,1)} conditional(%which, %a, %a, %a), \
branch_computations={%short, %products, %short}"""
    assert once(entry, VIEW, PRODUCT, short)[0] == PRODUCT_FLOPS


WHOLE, ROW = 1024 * 256 * 4, 8 * 256 * 4


def test_slice_counts_only_the_bytes_of_the_slice() -> None:
    sliced = """sliced
        %whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %at = s32[]{:T(128)} parameter(1)
        %zero = s32[]{:T(128)} constant(0)
        %view = f32[1024,256]{1,0:T(8,128)} bitcast(%whole)
        %row = f32[8,256]{1,0:T(8,128)} dynamic-slice(%view, %at, %zero), dynamic_slice_sizes={8,256}
        ROOT %n = f32[8,256]{1,0:T(8,128)} negate(%row)"""
    fused = """%whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %at = s32[]{:T(128)S(6)} parameter(1)
        ROOT %f = f32[8,256]{1,0:T(8,128)} fusion(%whole, %at), kind=kLoop, calls=%sliced"""
    assert once(fused, sliced)[1] == 2 * ROW
    alone = """%whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %at = s32[]{:T(128)S(6)} parameter(1)
        ROOT %s = f32[8,256]{1,0:T(8,128)} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={8,256}"""
    assert once(alone)[1] == 2 * ROW
    # With one use of the whole array, the slice saves no bytes.
    both = sliced.replace(
        "ROOT %n = f32[8,256]{1,0:T(8,128)} negate(%row)", "%n = f32[] reduce(%whole, %zero)"
    )
    assert once(fused, both)[1] == WHOLE + ROW


def test_update_slice_counts_only_the_bytes_of_the_update() -> None:
    updated = """updated
        %whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %new = f32[8,256]{1,0:T(8,128)} parameter(1)
        %at = s32[]{:T(128)} parameter(2)
        %twice = f32[8,256]{1,0:T(8,128)} add(%new, %new)
        %u = f32[1024,256]{1,0:T(8,128)} dynamic-update-slice(%whole, %twice, %at, %at)
        ROOT %t = (f32[1024,256]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) tuple(%u, %twice)"""
    given = """%whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %new = f32[8,256]{1,0:T(8,128)} parameter(1)
        %at = s32[]{:T(128)S(6)} parameter(2)
        """
    fused = """ROOT %f = (f32[1024,256]{1,0:T(8,128)}, f32[8,256]{1,0:T(8,128)}) fusion(%whole, %new, %at), \
kind=kLoop, calls=%updated"""
    assert once(given + fused, updated)[1] == 3 * ROW
    alone = "ROOT %u = f32[1024,256]{1,0:T(8,128)} dynamic-update-slice(%whole, %new, %at, %at)"
    assert once(given + alone)[1] == 2 * ROW


def test_asynchronous_slice_counts_once() -> None:
    _, moved = once(
        """%whole = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %s = ((f32[1024,256]{1,0:T(8,128)}), f32[8,256]{1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(\
%whole), slice={[0:8], [0:256]}
        %d = f32[8,256]{1,0:T(8,128)S(1)} slice-done(%s)
        ROOT %c = f32[8,256]{1,0:T(8,128)S(1)} custom-call(%d), custom_call_target="ConcatBitcast\""""
    )
    assert moved == ROW


def test_custom_calls_cost_no_flops_and_no_bytes() -> None:
    flops, moved = once(
        """%q = f32[1024,256]{1,0:T(8,128)} parameter(0)
        %memory = f32[1024,256]{1,0:T(8,128)} custom-call(), custom_call_target="AllocateBuffer"
        %kernel = f32[1024,256]{1,0:T(8,128)} custom-call(%q), custom_call_target="tpu_custom_call"
        ROOT %t = (f32[1024,256]{1,0:T(8,128)}) tuple(%kernel)"""
    )
    assert (flops, moved) == (0, 0)


def test_collectives_count_the_bytes_they_read_and_write() -> None:
    _, moved = once(
        """%a = f32[64,256]{1,0:T(8,128)} parameter(0)
        %g = f32[256,256]{1,0:T(8,128)} all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}
        %s = (f32[64,256]{1,0:T(8,128)}, f32[64,256]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
        %d = f32[64,256]{1,0:T(8,128)} collective-permute-done(%s)
        ROOT %t = (f32[256,256]{1,0:T(8,128)}) tuple(%g)"""
    )
    part = 64 * 256 * 4
    assert moved == (part + 4 * part) + 2 * part


def test_collective_split_over_fusions_counts_once() -> None:
    part = 64 * 256 * 4
    gathering, negating = part + 4 * part, 2 * part
    assert once(OVERLAPPED_ENTRY, *OVERLAPPED)[1] == gathering + negating
