"""What a generation's devices do in a second: as published, and as runs that were published have reached.

The second is in data/rates.json, which `python -m scripts.step_times fit` writes from the runs'
schedules; docs/planning.md has the table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.hardware import Accelerator, generations
from recipec.compiler.plan.hlo.parse import Array
from recipec.compiler.plan.hlo.schedule import Rates
from recipec.compiler.plan.results import Interval
from recipec.compiler.plan.timeline import Reached

DATA = Path(__file__).parents[1] / "data" / "rates.json"
HOST_BYTES = 32e9
"""Bytes a second between a chip and its host, in one direction: taken as 16 lanes of PCI Express 4.0."""


Kernel = Callable[[str, Sequence[Array], Sequence[Array]], float]
"""Seconds of a custom kernel, from its name, operands and results."""


def published(accelerator: Accelerator, kernel: Kernel) -> Rates:
    """Of one device."""
    data = generations()[accelerator.generation]
    return Rates(
        clock=data["compiler"]["cycles_ghz"] * 1e9,
        flops=accelerator.peak_flops_per_device,
        hbm=accelerator.bandwidth_per_device,
        host=HOST_BYTES / accelerator.devices_per_chip,
        kernel=kernel,
    )


def reached(generation: str) -> Reached:
    """Shares of full speed; all of it, of a generation of which no run is known."""
    return Reached(**_data()["reached"].get(generation, {}))


def interval(generation: str, lora: bool) -> Interval:
    """Of an estimate for a generation.

    Args:
        lora: whether adapters are trained; otherwise all weights are.
    """
    found = _data()["intervals"]
    one = found["lora"] if lora else found.get(generation) or found["all"]
    return Interval(one["low"], one["high"], one["basis"])


def _data() -> Any:
    return json.loads(DATA.read_text(encoding="utf-8"))
