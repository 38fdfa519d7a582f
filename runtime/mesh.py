"""The devices of a run, virtual ones on a CPU, laid out as the recipe's mesh."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import Mesh

from runtime.errors import UserError
from runtime.settings import MeshSettings


def start(settings: MeshSettings) -> Mesh:
    """Starts JAX on the recipe's platform and returns its mesh.

    Call it before anything else asks JAX for devices: the number of virtual CPU devices is fixed
    when the backend starts.

    Raises:
        UserError: when the machine does not have the devices that the recipe names.
    """
    wanted = math.prod(settings.axes.values())
    if wanted != settings.devices:
        raise UserError(
            f"mesh axes {dict(settings.axes)} need {wanted} devices, the mesh has {settings.devices}"
        )
    if settings.platform == "cpu":
        _virtual_devices(settings.devices)
    try:
        devices = jax.devices(settings.platform)
    except RuntimeError as error:
        raise UserError(
            f"no {settings.platform.upper()} on this machine: {str(error).splitlines()[0]}",
            "run it on the machine that the recipe's mesh.accelerator names",
        ) from None
    if settings.platform == "cpu":
        devices = devices[: settings.devices]
    if len(devices) != settings.devices:
        raise UserError(
            f"the recipe's mesh has {settings.devices} {settings.platform.upper()} devices, "
            f"this machine {len(devices)}",
            "set mesh.accelerator and mesh.axes to this machine and build the recipe again",
        )
    return arrange(settings.axes, devices)


def arrange(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Devices as a mesh whose neighbours are neighbours in hardware.

    Where they are of several slices, each slice takes an equal part of the axis fsdp, so that tp never
    crosses the network between slices.
    """
    sizes = tuple(axes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = tuple(slices if axis == "fsdp" else 1 for axis in axes)
    within = tuple(size // count for size, count in zip(sizes, across, strict=True))
    # jax.make_mesh would refuse an axis that takes a part of a dimension of the torus, such as tp 2 on 4x4x4.
    if slices == 1:
        placed = create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    else:
        placed = create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(placed, tuple(axes))


def _virtual_devices(count: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # The backend is running already; the count of its devices is checked by the caller.
        return
