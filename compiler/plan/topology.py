"""Get the topology that libtpu compiles for. Imports jax."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from jax.experimental import topologies

from recipec.compiler.lowering.hardware import Accelerator, generations


def name(accelerator: Accelerator) -> str:
    """Return libtpu's name of an accelerator's topology: "v5p:2x2x1"."""
    return f"{accelerator.generation}:{accelerator.topology}"


@functools.cache
def devices(accelerator: Accelerator) -> Any:
    """Return the devices of all slices.

    Raises:
        Exception: when libtpu does not know the topology; jax raises several kinds.
    """
    more: dict[str, Any] = {}
    if config := generations()[accelerator.generation]["compiler"]["chip_config"]:
        more["chip_config_name"] = config
    if accelerator.slices > 1:
        more["num_slices"] = accelerator.slices
    if accelerator.chips == accelerator.slices:
        more["chips_per_host_bounds"] = (1, 1, 1)  # one chip on a host; libtpu assumes four chips on a host
    return topologies.get_topology_desc(platform="tpu", topology_name=name(accelerator), **more).devices


def places(devices: Iterable[Any], slices: int = 1) -> list[tuple[int, ...]]:
    """Return where the devices of the first slice are, in the order of the mesh, whose first axis is slices.

    Each place is the coordinates of the device's chip, and the device's number on the chip.
    """
    every = [(*device.coords, device.core_on_chip) for device in devices]
    return every[: len(every) // slices]
