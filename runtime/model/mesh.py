"""The devices of a run (virtual ones on a CPU), arranged as the recipe's mesh."""

from __future__ import annotations

import glob
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import Mesh

from ..errors import UserError
from ..settings import MeshSettings

CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""The device files of a TPU's chips: up to v4, and later ones."""
LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"
"""The variable that libtpu reads its flags from."""


def start(settings: MeshSettings, processes: int = 1) -> Mesh:
    """Start JAX on the recipe's platform, and return its mesh.

    Call this before anything else asks JAX for devices: the number of virtual CPU devices is fixed
    when the backend starts.

    Args:
        processes: of the run, including this one; JAX has connected them.

    Raises:
        UserError: when the machines do not have the devices that the recipe names.
    """
    wanted = math.prod(settings.axes.values())
    if wanted != settings.devices:
        raise UserError(
            f"mesh axes {dict(settings.axes)} need {wanted} devices, the mesh has {settings.devices}",
            "the script was edited: build the recipe again",
        )
    if settings.platform == "cpu":
        if settings.devices % processes:
            raise UserError(
                f"{settings.devices} virtual CPU devices cannot be shared by {processes} processes",
                "start as many processes as divide them",
            )
        _virtual_devices(settings.devices // processes)
    else:
        compile_with(settings.flags)
    try:
        with _without_complaint():
            devices = jax.devices(settings.platform)
    except RuntimeError as error:
        raise UserError(
            f"no {settings.platform.upper()} on this machine: {str(error).splitlines()[0]}",
            "run it on the machine that the recipe's mesh.accelerator names",
        ) from None
    if settings.platform == "cpu" and processes == 1:
        devices = devices[: settings.devices]
    if len(devices) != settings.devices:
        here = f"these {processes} machines" if processes > 1 else "this machine"
        raise UserError(
            f"the recipe's mesh has {settings.devices} {settings.platform.upper()} devices, "
            f"{here} {len(devices)}",
            "set mesh.accelerator and mesh.axes to what is here and build the recipe again",
        )
    return arrange(settings.axes, devices)


@contextmanager
def _without_complaint() -> Iterator[None]:
    """Drop what libtpu writes to stderr on a machine without a TPU. The error that follows says so in one
    sentence.

    libtpu writes to the file descriptor, before any setting of its logs has an effect. Where the devices of a
    TPU are present, nothing is held back: its messages must not be lost if it hangs or crashes.
    """
    if any(glob.glob(pattern) for pattern in CHIPS):
        yield
        return
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except RuntimeError:
            written.truncate(0)
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            os.write(2, written.read())


def compile_with(flags: Sequence[str]) -> None:
    """Pass flags to libtpu, which reads them when it is loaded. The environment's flags take precedence."""
    own = os.environ.get(LIBTPU_FLAGS, "").split()
    names = {flag.partition("=")[0] for flag in own}
    for flag in flags:
        if flag.partition("=")[0] in names:
            print(f"{LIBTPU_FLAGS} replaces the recipe's {flag}", file=sys.stderr)
    kept = [flag for flag in flags if flag.partition("=")[0] not in names]
    if kept:
        os.environ[LIBTPU_FLAGS] = " ".join([*kept, *own])


def arrange(axes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """Arrange devices as a mesh in which neighbors are neighbors in hardware.

    The axis dcn counts slices, so that fsdp and tp never cross the network between slices. Virtual CPU
    devices have no slices: for them dcn is an axis like the others.
    """
    sizes = tuple(axes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    across = tuple(size if axis == "dcn" else 1 for axis, size in axes.items())
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
