"""Sharding constraints on activations.

Tunix's models annotate their activations through a helper that does nothing when the first device
is a CPU, and that fails when a mesh axis does not divide a dimension. runtime.forward puts `constrain`
in its place, which constrains on every platform, so that virtual devices run the program that TPUs run,
and which leaves an axis out where it does not divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.interpreters import pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runtime.specs import divisible


def constrain(x: jax.Array, spec: Sequence[str | None], eager: bool = False) -> jax.Array:
    """Constrains an activation to a sharding over the mesh that is in scope, if one is.

    Args:
        x: any array.
        spec: the mesh axis of each dimension.
        eager: place a concrete array now instead of constraining a traced one.
    """
    mesh = pxla.thread_resources.env.physical_mesh
    if mesh.empty:
        return x
    sharding = NamedSharding(mesh, PartitionSpec(*divisible(x.shape, spec, mesh.shape)))
    return jax.device_put(x, sharding) if eager else jax.lax.with_sharding_constraint(x, sharding)


def parts(size: int, axis: str) -> int:
    """Over how many devices of the mesh in scope an axis splits a dimension; 1 where it does not divide."""
    axes = pxla.thread_resources.env.physical_mesh.shape
    return axes[axis] if axis in axes and size % axes[axis] == 0 else 1


def named(mesh: Mesh, spec: Iterable[str | None]) -> NamedSharding:
    """A parameter's sharding on a mesh."""
    return NamedSharding(mesh, PartitionSpec(*spec))


def shard_rows(batch: dict[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Puts a micro-batch on the devices, its rows split over the data-parallel axis.

    Raises:
        ValueError: when that axis does not divide the rows, instead of repeating them everywhere.
    """
    rows = mesh.shape.get("fsdp", 1)
    out = {}
    for name, value in batch.items():
        split = getattr(value, "ndim", 0) > 0 and rows > 1
        if split and value.shape[0] % rows:
            raise ValueError(f"{name} has {value.shape[0]} rows, which do not split over fsdp={rows}")
        spec = PartitionSpec("fsdp") if split else PartitionSpec()
        out[name] = jax.device_put(value, NamedSharding(mesh, spec))
    return out
