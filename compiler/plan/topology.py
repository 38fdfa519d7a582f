"""The topology that libtpu compiles for. Imports jax."""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental import topologies

from compiler.hardware import Accelerator

CHIP_CONFIGS = {"v4": "megacore"}
"""Where libtpu's default is not how Cloud TPU shows a chip: v4's two TensorCores are one device."""


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
    if accelerator.generation in CHIP_CONFIGS:
        more["chip_config_name"] = CHIP_CONFIGS[accelerator.generation]
    if accelerator.slices > 1:
        more["num_slices"] = accelerator.slices
    if accelerator.chips == accelerator.slices:
        more["chips_per_host_bounds"] = (1, 1, 1)  # one chip of a host; libtpu takes hosts to have four
    return topologies.get_topology_desc(platform="tpu", topology_name=name(accelerator), **more).devices
