"""Read the timeline, collectives and attention kernels of a compiled serving step from its HLO text."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from recipec.compiler.lowering.hardware import from_topology
from recipec.compiler.plan import rates
from recipec.compiler.plan.hlo.costs import collectives
from recipec.compiler.plan.hlo.parse import executed, parse
from recipec.compiler.plan.hlo.read_schedule import schedule
from recipec.compiler.plan.kernels import NUMBERS, TARGET
from recipec.compiler.plan.schedule import priced
from recipec.compiler.plan.timeline import timeline
from recipec.compiler.plan.torus import Torus

_KERNEL = re.compile(r"RPA(?P<case>[dpm])-p_\d+-bq_\d+_\d+-bkv_(?P<block>\d+)_\d+(?:-sw_(?P<window>\d+))?")

AXIS = "model"
"""The only axis of a replica's mesh that has more than one device."""


@dataclass(frozen=True)
class AttentionKernel:
    """A ragged paged attention kernel, by its name.

    Attributes:
        decode: whether it is the kernel for sequences with a single new token.
        block: tokens of the cache that it reads at a time.
        window: tokens that it attends to, None for all.
    """

    decode: bool
    block: int
    window: int | None


def attention_kernel(name: str) -> AttentionKernel | None:
    """Read an attention kernel's settings from its name; return None for another kernel."""
    match = _KERNEL.match(name)
    if match is None:
        return None
    window = int(match["window"]) if match["window"] else None
    return AttentionKernel(match["case"] == "d", int(match["block"]), window)


def read(text: str, topology: str, devices: int) -> dict[str, Any]:
    """Return the timeline, collectives and kernels of a `ServeProgram`.

    Args:
        text: the program's HLO, as `jax.stages.Compiled.as_text()` gives it for a TPU.
        topology: the topology that it was compiled for: "v6e:2x4".
        devices: number of the replica's devices, which are the topology's first.

    Raises:
        ValueError: the text is no HLO module.
    """
    module, accelerator, axes = parse(text), from_topology(topology), {AXIS: devices}
    sizes = [int(size) for size in topology.partition(":")[2].split("x")]
    chips = (tuple(reversed(place)) for place in itertools.product(*map(range, reversed(sizes))))
    places = [(*chip, core) for chip in chips for core in range(accelerator.devices_per_chip)]
    torus = Torus.of(accelerator, places[:devices])
    published = rates.published(accelerator, lambda name, operands, results: 0.0)
    kernels: defaultdict[str, float] = defaultdict(float)
    for instruction, _, times in executed(module):
        if instruction.opcode == "custom-call" and TARGET in instruction.attributes:
            kernels[NUMBERS.sub("", instruction.name)] += times
    steps = priced(*schedule(module, published, axes, torus))
    return {
        "timeline": timeline(steps, rates.reached(accelerator.generation)),
        "collectives": collectives(module, axes),
        "kernels": tuple((name, kernels[name]) for name in sorted(kernels)),
    }
