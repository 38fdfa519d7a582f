"""The devices of a run, virtual ones on a CPU, laid out as the recipe's mesh."""

from __future__ import annotations

import math
import os

import jax
from jax.sharding import AxisType, Mesh

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
    return jax.make_mesh(
        tuple(settings.axes.values()),
        tuple(settings.axes),
        axis_types=(AxisType.Auto,) * len(settings.axes),
        devices=devices,
    )


def _virtual_devices(count: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # The backend is running already; the count of its devices is checked by the caller.
        return
