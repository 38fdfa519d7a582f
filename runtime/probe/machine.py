"""What a machine is, as JAX and the system tell it: nothing of its name, its paths or its owner."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from ..model.mesh import LIBTPU_FLAGS


def machine(folder: Path) -> dict[str, Any]:
    """The devices that are started, and what is around them.

    Args:
        folder: on the disk whose free space is told.
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
    """The largest of a figure of this process's devices, bytes; None where they do not tell it."""
    told = [(device.memory_stats() or {}).get(figure) for device in jax.local_devices()]
    return max((bytes for bytes in told if bytes is not None), default=None)


def versions(lock: Mapping[str, Any]) -> dict[str, str | None]:
    """The installed versions of the packages that the lock names; None of one that is not there."""
    return {name: _installed(name) for name in lock["packages"]["train"]}


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
