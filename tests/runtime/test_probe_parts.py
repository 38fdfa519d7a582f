"""Tests of the parts of a step's time, from traces of a TPU and of a CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from recipec.runtime.probe import parts

BF16 = "bf16[8,128]{1,0:T(8,128)(2,1)}"
TEXT = f"""HloModule jit_step, is_scheduled=true

%fused.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %c.1 = {BF16} convolution(%p, %p), dim_labels=bf_io->bf
  ROOT %n.1 = {BF16} negate(%c.1)
}}

%start.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.1 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %s.1 = {BF16} custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}}

%step.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.2 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %n.2 = {BF16} negate(%g.2)
}}

%done.1 (p: bf16[8,128]) -> bf16[8,128] {{
  %g.3 = {BF16} all-gather(%p), channel_id=3, dimensions={{0}}
  ROOT %d.1 = {BF16} custom-call(%g.3), custom_call_target="AsyncCollectiveDone"
}}

%scattered (p: bf16[8,128]) -> bf16[8,128] {{
  %r.1 = {BF16} all-reduce(%p), channel_id=4, to_apply=%add
  ROOT %n.3 = {BF16} slice(%r.1)
}}

%body (p: bf16[8,128]) -> bf16[8,128] {{
  ROOT %fusion.9 = {BF16} fusion(%p), kind=kOutput, calls=%fused.1
}}

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {{
  %p = {BF16} parameter(0)
  %copy-start.1 = ({BF16}, {BF16}, u32[]{{:S(2)}}) copy-start(%p)
  %fusion.1 = {BF16} fusion(%p), kind=kOutput, calls=%fused.1
  %copy-done.1 = {BF16} copy-done(%copy-start.1)
  %begin.1 = {BF16} fusion(%p), kind=kCustom, calls=%start.1
  %beside.1 = {BF16} fusion(%p), kind=kCustom, calls=%step.1
  %end.1 = {BF16} fusion(%p), kind=kCustom, calls=%done.1
  %fusion.2 = {BF16} fusion(%p), kind=kCustom, calls=%scattered
  %gather-start.1 = (({BF16}), {BF16}, u32[]) all-gather-start(%p), channel_id=7
  %gather-done.1 = {BF16} all-gather-done(%gather-start.1)
  %wrapped.1 = (({BF16}), {BF16}, u32[]) async-start(%p), calls=%scattered
  %waited.1 = {BF16} async-done(%wrapped.1)
  %splash.1 = {BF16} custom-call(%p), custom_call_target="tpu_custom_call", metadata={{op_name="a/matmul"}}
  %allocated.1 = {BF16} custom-call(), custom_call_target="AllocateBuffer"
  %while.1 = {BF16} while(%p), condition=%condition, body=%body
  ROOT %copy.1 = {BF16} copy(%while.1)
}}
"""


def test_tpu_program_operations_are_classified_by_kind() -> None:
    found = parts.kinds(TEXT)
    told = {part: {name for name, kind in found.items() if kind == part} for part in parts.PARTS}
    assert told["products"] == {"c.1", "fusion.1", "fusion.9"}
    assert told["kernels"] == {"splash.1"}
    assert told["copies"] == {"copy-start.1", "copy-done.1"}
    collectives = {"begin.1", "end.1", "fusion.2", "gather-start.1", "gather-done.1", "wrapped.1", "waited.1"}
    assert told["collectives"] == collectives | {"s.1", "d.1", "r.1"}
    assert {"beside.1", "while.1", "copy.1", "allocated.1"} <= told["other"]


def plane(name: str, **lines: list[tuple[str, float, float]]) -> str:
    """Return a plane of an XSpace.

    Args:
        lines: each line's operations, with their start and duration in microseconds.
    """
    names = sorted({event[0] for events in lines.values() for event in events})
    said = {one: next(line.strip() for line in TEXT.splitlines() if f"%{one} = " in line) for one in names}
    out = f'planes {{ name: "{name}"'
    for number, one in enumerate(names, 1):
        text = said[one].removeprefix("ROOT ").replace('"', '\\"')
        out += f'\nevent_metadata {{ key: {number} value {{ id: {number} name: "{text}" }} }}'
    for line, events in lines.items():
        out += f'\nlines {{ name: "{line.replace("_", " ")}"'
        for one, start, taken in events:
            out += f" events {{ metadata_id: {names.index(one) + 1}"
            out += f" offset_ps: {round(start * 1e6)} duration_ps: {round(taken * 1e6)} }}"
        out += " }"
    return f"{out} }}\n"


def test_tpu_trace_time_is_summed_by_operation_kind() -> None:
    ops = [
        ("fusion.1", 0, 30),
        ("splash.1", 30, 20),
        ("gather-done.1", 55, 10),  # after 5 microseconds of nothing
        ("while.1", 65, 32),
        ("fusion.9", 66, 15),
        ("fusion.9", 81, 15),
        ("copy-done.1", 97, 3),
    ]
    beside = [("gather-start.1", 10, 55), ("copy-start.1", 80, 20)]
    other = [("fusion.1", 0, 60), ("copy.1", 60, 40)]
    text = plane("/device:TPU:0", XLA_Ops=ops, Async_XLA_Ops=beside, Steps=[("copy.1", 0, 100)])
    text += plane("/device:TPU:1", XLA_Ops=other)
    text += plane("/device:TPU:0 SparseCore 0", XLA_Ops=other) + plane("/host:CPU", python=other)
    found = parts.summed(
        ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text)),
        parts.kinds(TEXT),
    )
    both = {"products": 120, "other": 42, "kernels": 20, "collectives": 10, "copies": 3, "idle": 5}
    expected = {name: taken / 2 / parts.TRACED / 1e6 for name, taken in both.items()}
    assert found == pytest.approx(expected)
    assert parts.summed(ProfileData.from_serialized_xspace(b""), {}) == {}


def test_cpu_step_trace_finds_parts_and_leaves_no_files(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mesh = Mesh(np.array(jax.devices()[:4]), ("fsdp",))

    def placed(*spec: str | None) -> jax.Array:
        return jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, PartitionSpec(*spec)))

    inputs = placed("fsdp"), placed(None, "fsdp")
    step = jax.jit(lambda x, w: jnp.sin(x @ w @ w).sum()).lower(*inputs).compile()
    found = parts.parts(lambda: step(*inputs).block_until_ready(), step.as_text())
    assert found["products"] > 0 and found["collectives"] > 0 and found["other"] > 0
    assert found["kernels"] == found["copies"] == 0
    assert list(tmp_path.iterdir()) == []
