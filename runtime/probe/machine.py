"""Describe a machine from JAX and the system, without its name, its paths or its owner."""

from __future__ import annotations

import os
import shutil
import statistics
import timeit
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from ..model.sharding import LIBTPU_FLAGS


def machine(folder: Path) -> dict[str, Any]:
    """Describe the started devices and their host.

    Args:
        folder: a folder on the disk whose free space is measured.
    """
    devices = jax.devices()
    places = [tuple(device.coords) for device in devices if hasattr(device, "coords")]
    extents = [max(axis) - min(axis) + 1 for axis in zip(*places, strict=True)]
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "topology": "x".join(map(str, extents)) or None,
        "hbm_bytes": memory("bytes_limit"),
        "host_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "cores": os.cpu_count(),
        "disk_free_bytes": shutil.disk_usage(folder).free,
        "flags": sorted(os.environ.get(LIBTPU_FLAGS, "").split()),
    }


def memory(figure: str) -> int | None:
    """Return the largest value of a memory figure over this process's devices, in bytes; None if unknown."""
    told = [(device.memory_stats() or {}).get(figure) for device in jax.local_devices()]
    return max((bytes for bytes in told if bytes is not None), default=None)


SLOW = 1.2
"""A device is slow if it takes more than this many times the median of all devices."""


def product(device: jax.Device) -> float:
    """Time a matrix product on one device alone: the minimum seconds of ten."""
    side = 8192 if device.platform == "tpu" else 512
    square = jax.device_put(jnp.ones((side, side), jnp.bfloat16), device)
    compiled = jax.jit(jnp.matmul).lower(square, square).compile()
    return min(timeit.repeat(lambda: compiled(square, square).block_until_ready(), number=1, repeat=10))


def slow(seconds: Callable[[jax.Device], float] = product) -> dict[str, Any]:
    """Return the median of the run's devices, the slowest device relative to it, and a sentence per slow one.

    Args:
        seconds: the time of each device of this process, while the others are idle.
    """
    taken = np.array([(device.id, seconds(device)) for device in jax.local_devices()])
    every = dict(np.reshape(process_allgather(taken), (-1, 2)).tolist())
    median = statistics.median(every.values())
    late = [
        f"device {device.id}{f' at {device.coords}' if hasattr(device, 'coords') else ''} of process "
        f"{device.process_index} takes {every[device.id] / median:.2f} times as long as the others"
        for device in jax.devices()
        if every[device.id] > SLOW * median
    ]
    return {"median_seconds": median, "slowest": round(max(every.values()) / median, 2), "slow": late}


def versions(lock: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the installed versions of the lock's packages; None for a package that is not installed."""
    return {name: _installed(name) for name in lock["packages"]["train"]}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
