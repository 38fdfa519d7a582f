"""Rates of a TPU generation's devices: the published rates, and the shares of them that real runs reached.

The shares are in data/rates.json. `python -m scripts.step_times fit` writes them from the schedules of
published runs; docs/planning.md has the table. The file also has what operations usually take, relative to
their FLOPs and bytes at full rates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.hardware import Accelerator, generations
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.hlo.parse import Array
from recipec.compiler.plan.hlo.read_schedule import Rates
from recipec.compiler.plan.results import Interval
from recipec.compiler.plan.schedule import Prices
from recipec.compiler.plan.timeline import Reached

DATA = Path(__file__).parents[1] / "data" / "rates.json"
HOST_BYTES = 32e9
"""Bytes/s between a chip and its host in one direction, assumed to be 16 lanes of PCI Express 4.0."""


Kernel = Callable[[str, Sequence[Array], Sequence[Array]], float]
"""Seconds of a custom kernel, from its name, operands and results."""


def published(accelerator: Accelerator, kernel: Kernel) -> Rates:
    """Return the published rates of one device."""
    data = generations()[accelerator.generation]
    return Rates(
        clock=data["compiler"]["cycles_ghz"] * 1e9,
        flops=accelerator.peak_flops_per_device,
        hbm=accelerator.bandwidth_per_device,
        host=HOST_BYTES / accelerator.devices_per_chip,
        kernel=kernel,
    )


def reached(generation: str) -> Reached:
    """Return the shares of full speed that a generation reached; 1 for a generation without known runs."""
    return Reached(**_data()["reached"].get(generation, {}))


def usual_prices(program: Program) -> Prices | None:
    """Return what a step's operations usually take, for a schedule without libtpu's cycles.

    The ratios are those at which the steps of recipes/ came nearest to plans with libtpu's cycles (libtpu
    0.0.42.1). They hold for products in bfloat16. None for other steps: libtpu tiles products of quantized
    weights, and the loops of layers with a state, too differently.
    """
    ratios = _data()["operations"].get(program.accelerator.generation)
    model = program.recipe.model
    unusual = model.dtype != "bfloat16" or model.quantization is not None or program.architecture.stateful
    return None if ratios is None or unusual else Prices(ratio=(ratios["products"], ratios["others"]))


def interval(generation: str, lora: bool) -> Interval:
    """Return the error interval of an estimate for a generation.

    Args:
        lora: whether adapters are trained; otherwise all weights are.
    """
    intervals = _data()["intervals"]
    errors = intervals["lora"] if lora else intervals.get(generation) or intervals["all"]
    return Interval(errors["low"], errors["high"], errors["basis"])


def _data() -> Any:
    return json.loads(DATA.read_text(encoding="utf-8"))
