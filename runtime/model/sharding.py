"""Sharding constraints on activations.

Tunix's models annotate their activations through a helper. It does nothing if the first device is a CPU, and
fails if a mesh axis does not divide a dimension. runtime.model.forward replaces it with `constrain`. That
constrains on every platform, so that virtual devices run the program that TPUs run, and it leaves out an axis
that does not divide its dimension.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .partition_rules import TOKENS, axes_of, data_parallel, divisible, row_axes


def constrain(x: jax.Array, spec: Sequence[str | None], eager: bool = False) -> jax.Array:
    """Constrain an activation to a sharding over the mesh that is in scope, if one is.

    Args:
        x: any array whose first dimension is the batch's rows, and whose second is their tokens.
        spec: the mesh axis of each dimension. "fsdp" for rows includes slices. Tokens without an axis are
            split over cp.
        eager: place a concrete array now instead of constraining a traced one.
    """
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(*activation_axes(x, spec, mesh)))
    return jax.device_put(x, sharding) if eager else jax.lax.with_sharding_constraint(x, sharding)


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
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
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
        """
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
