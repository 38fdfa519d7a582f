"""The mesh of a tool that runs on TPUs, from the sizes of its axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from recipec.compiler.port.keys import REASONS, Keys
from recipec.compiler.port.meaning import sharding

ROWS = ("data", "fsdp", "fsdp_transpose", "diloco")
"""Axes whose devices have different rows. They map to fsdp."""
WIDTH = ("tensor", "tensor_sequence", "tensor_transpose")
"""Axes that split matrix products. They map to tp."""


@dataclass(frozen=True)
class Axes:
    """The number of all devices, and of those that split each product."""

    devices: int
    tp: int


def of_parallelism(keys: Keys, networks: Sequence[str]) -> Axes:
    """Record the keys `NETWORK_AXIS_parallelism`, and set `mesh.axes` if the files also split products (tp).

    The number of devices comes from --devices or is the product of the sizes. If a size is -1, it is the
    number of the requested accelerator's devices.
    """
    sizes: dict[str, int] = {}
    rest = False
    for key in (each for each in keys.defaults if each.endswith("_parallelism")):
        network, _, name = key.removesuffix("_parallelism").partition("_")
        if network not in networks:
            continue
        size = keys.integer(key) or 1
        rest = rest or (size < 1 and network == networks[0])
        sizes[name] = sizes.get(name, 1) * max(size, 1)
    product = math.prod(sizes.values())
    devices = keys.ledger.devices or (keys.ledger.tpus or product if rest else product)
    tp = math.prod(sizes.get(name, 1) for name in WIDTH)
    carried = product == math.prod(sizes.get(name, 1) for name in (*ROWS, *WIDTH)) and devices % tp == 0
    made = {"mesh.axes": {"fsdp": devices // tp, "tp": tp}} if carried and tp > 1 else None
    for key in (each for each in keys.defaults if each.endswith("_parallelism")):
        network, _, name = key.removesuffix("_parallelism").partition("_")
        if network in networks and name in WIDTH and made and (keys.integer(key) or 1) > 1:
            keys.same(key, made, sharding.sharing(tp))
        elif network in networks:
            keys.same(key, note=REASONS["mesh"])
    return Axes(devices, tp if carried else 1)
