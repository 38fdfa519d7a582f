"""The topology that libtpu compiles for. Imports jax."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from jax.experimental import topologies

from recipec.compiler.lowering.hardware import Accelerator, generations


def name(accelerator: Accelerator) -> str:
    """As libtpu names it: "v5p:2x2x1"."""
    return f"{accelerator.generation}:{accelerator.topology}"


@functools.cache
def devices(accelerator: Accelerator) -> Any:
    """The devices of all slices.

    Raises:
        Exception: of several kinds, when libtpu does not know the topology.
    """
    more: dict[str, Any] = {}
    if config := generations()[accelerator.generation]["compiler"]["chip_config"]:
        more["chip_config_name"] = config
    if accelerator.slices > 1:
        more["num_slices"] = accelerator.slices
    if accelerator.chips == accelerator.slices:
        more["chips_per_host_bounds"] = (1, 1, 1)  # one chip of a host; libtpu takes hosts to have four
    return topologies.get_topology_desc(platform="tpu", topology_name=name(accelerator), **more).devices


def places(devices: Iterable[Any], slices: int = 1) -> list[tuple[int, ...]]:
    """Coordinates of each device's chip, and its number on the chip, of one slice in the order of the mesh,
    whose first axis is that of slices."""
    every = [(*device.coords, device.core_on_chip) for device in devices]
    return every[: len(every) // slices]
