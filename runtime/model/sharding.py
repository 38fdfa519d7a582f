"""The devices of a run (virtual ones on a CPU) as the recipe's mesh, and arrays that are split over them.

Which axis splits which dimension is decided in partition_rules.py. Virtual devices run the program that TPUs
run: activations are constrained on every platform.
"""

from __future__ import annotations

import bisect
import functools
import glob
import math
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import UserError
from ..settings import MeshSettings
from .partition_rules import TOKENS, axes_of, data_parallel, divisible, row_axes

CHIPS = ("/dev/accel*", "/dev/vfio/[0-9]*")
"""The device files of a TPU's chips: up to v4, and later ones."""
LIBTPU_FLAGS = "LIBTPU_INIT_ARGS"
"""The variable that libtpu reads its flags from."""


def start_mesh(settings: MeshSettings, processes: int = 1) -> Mesh:
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


def tpu_devices() -> int:
    """Return the number of TPU devices of this machine that JAX may use; 0 for none."""
    platforms = jax.config.jax_platforms
    if (platforms and "tpu" not in platforms) or not any(glob.glob(pattern) for pattern in CHIPS):
        return 0
    try:
        return len(jax.devices("tpu"))
    except RuntimeError:
        return 0


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
    exported = os.environ.get(LIBTPU_FLAGS, "").split()
    names = {flag.partition("=")[0] for flag in exported}
    for flag in flags:
        if flag.partition("=")[0] in names:
            print(f"{LIBTPU_FLAGS} replaces the recipe's {flag}", file=sys.stderr)
    kept = [flag for flag in flags if flag.partition("=")[0] not in names]
    if kept:
        os.environ[LIBTPU_FLAGS] = " ".join([*kept, *exported])


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


def mesh_in_scope() -> Mesh | None:
    """Return the mesh in scope while a step is traced; None if there is none, for one device."""
    mesh = pxla.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def on_tpu(mesh: Mesh | None) -> bool:
    """Return whether a program is for TPUs; ahead of time the default backend does not tell."""
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return bool(platform == "tpu")


def constrain(x: jax.Array, spec: Sequence[str | None]) -> jax.Array:
    """Constrain an activation to a sharding over the mesh that is in scope, if one is.

    An axis that does not divide its dimension is left out.

    Args:
        x: any array whose first dimension is the batch's rows, and whose second is their tokens.
        spec: the mesh axis of each dimension. "fsdp" for rows includes slices. Tokens without an axis are
            split over cp.
    """
    mesh = mesh_in_scope()
    if mesh is None:
        return x
    axes = PartitionSpec(*activation_axes(x, spec, mesh))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, axes))


def activation_axes(x: jax.Array, spec: Sequence[str | None], mesh: Mesh) -> list[Any]:
    """Return the axes that split each dimension of an activation; the arguments are those of `constrain`."""
    axes: list[Any] = list(divisible(x.shape, spec, mesh.shape))
    if spec and spec[0] == "fsdp":
        axes[0] = row_axes(x.shape[0], mesh.shape)
        if (
            TOKENS in mesh.shape
            and len(spec) > 2
            and spec[1] is None
            and x.shape[1] % mesh.shape[TOKENS] == 0
        ):
            axes[1] = TOKENS
    return axes


def constrain_weight(x: jax.Array, spec: Sequence[str | None]) -> jax.Array:
    """Constrain a weight, or its gradient, to its sharding over the mesh in scope, if one is."""
    mesh = mesh_in_scope()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, named(mesh, divisible(x.shape, spec, mesh.shape)))


def parts(size: int, axis: str) -> int:
    """Return over how many devices in scope an axis splits a dimension; 1 if it does not divide."""
    axes = pxla.thread_resources.env.physical_mesh.shape
    return axes[axis] if axis in axes and size % axes[axis] == 0 else 1


def row_parts(rows: int) -> int:
    """Return over how many devices of the mesh in scope a batch's rows are split."""
    axes = pxla.thread_resources.env.physical_mesh.shape
    over = row_axes(rows, axes)
    return math.prod(axes[axis] for axis in ((over,) if isinstance(over, str) else over or ()))


def named(mesh: Mesh, spec: Iterable[str | None]) -> NamedSharding:
    """Return a parameter's sharding on a mesh."""
    over = (axes_of(axis, mesh.shape) for axis in spec)
    return NamedSharding(
        mesh, PartitionSpec(*(axes if len(axes) > 1 else next(iter(axes), None) for axes in over))
    )


@dataclass(frozen=True)
class Rows:
    """The rows of a micro-batch, split over the data-parallel devices of a mesh.

    Attributes:
        total: rows of the micro-batch.
        here: the rows that this process's devices hold, ascending; all of them in a run of one process.
    """

    mesh: Mesh
    total: int
    here: tuple[int, ...]

    @classmethod
    def of(cls, mesh: Mesh, total: int) -> Rows:
        """Split the rows of a batch over the devices.

        Raises:
            ValueError: when the devices do not divide the rows, instead of repeating them everywhere.
        """
        if total % data_parallel(mesh.shape):
            raise ValueError(f"{total} rows do not split over {dict(mesh.shape)}")
        indices = row_sharding(mesh, total).addressable_devices_indices_map((total,)).values()
        here = {row for index in indices for row in range(*index[0].indices(total))}
        return cls(mesh, total, tuple(sorted(here)))

    def place(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Put a micro-batch on the devices.

        Args:
            batch: arrays by row hold the rows that `here` names, the others are whole.
        """
        out = {}
        for name, value in batch.items():
            if np.ndim(value) == 0:
                out[name] = _replicated(value, self.mesh)
                continue
            shape = (self.total, *value.shape[1:])
            out[name] = jax.make_array_from_callback(
                shape, row_sharding(self.mesh, self.total), functools.partial(self._part, value)
            )
        return out

    def _part(self, value: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        """Return the rows of one device, from the rows of this process."""
        start, stop, _ = index[0].indices(self.total)
        first = bisect.bisect_left(self.here, start)
        return value[first : first + stop - start]


def row_sharding(mesh: Mesh, rows: int) -> NamedSharding:
    axes = row_axes(rows, mesh.shape) if data_parallel(mesh.shape) > 1 else None
    return NamedSharding(mesh, PartitionSpec(axes))


def _replicated(value: Any, mesh: Mesh) -> jax.Array:
    value = np.asarray(value)
    return jax.make_array_from_callback(
        value.shape, NamedSharding(mesh, PartitionSpec()), lambda index: value[index]
    )


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Put a whole micro-batch on this process's devices, with rows split over the data-parallel ones."""
    total = next(len(value) for value in batch.values() if np.ndim(value))
    return Rows.of(mesh, total).place(batch)
