"""Time on the chips' links, which the compiler's estimate leaves out: it counts memory traffic alone."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compiler.hardware import Accelerator
from compiler.plan.results import Collective, Estimate


def link_seconds(estimate: Estimate, accelerator: Accelerator, axes: Mapping[str, int]) -> float | None:
    """Seconds that a step's collectives within a slice take if all of a chip's links are busy and nothing is
    computed meanwhile; None where the links' speed is not known.

    Half of a chip's bandwidth is inwards. A small slice does not use all links of a chip, and takes longer.
    """
    if accelerator.ici_gb_per_s is None:
        return None
    inwards = accelerator.ici_gb_per_s * 1e9 / 2 / accelerator.devices_per_chip
    return sum(received(c, axes) for c in estimate.collectives if not c.over_dcn) / inwards


def received(collective: Collective, axes: Mapping[str, int]) -> float:
    """Bytes that a device gets from others in a collective over rings."""
    size = math.prod(axes[axis] for axis in collective.axes) if collective.axes else math.prod(axes.values())
    share = (size - 1) / size
    if collective.kind == "all-reduce":
        return 2 * share * collective.bytes
    if collective.kind == "reduce-scatter":
        return (size - 1) * collective.bytes
    if collective.kind == "collective-permute":
        return collective.bytes
    return share * collective.bytes
