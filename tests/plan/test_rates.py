"""Tests of what the file of reached rates must hold, for any figures."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from recipec.compiler.lowering.hardware import from_name, generations
from recipec.compiler.plan import kernels, rates
from recipec.compiler.plan.kernels import KernelSeconds, attention

MACHINES = {"v4": "v4-8", "v5e": "v5e-8", "v5p": "v5p-8", "v6e": "v6e-8", "tpu7x": "tpu7x-8"}


def test_machines_cover_every_generation() -> None:
    assert set(MACHINES) == set(generations())


@pytest.mark.parametrize("generation", MACHINES)
def test_reached_shares_are_above_0_and_at_most_2(generation: str) -> None:
    """Allow a little more than 1: a device may exceed its links' rate and libtpu's cycles."""
    assert all(0 < share <= 2 for share in asdict(rates.reached(generation)).values())


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("generation", MACHINES)
def test_interval_is_positive_and_ordered_and_has_a_basis(generation: str, lora: bool) -> None:
    found = rates.interval(generation, lora)
    low, high = found.of(2.0)
    assert 0 < low <= high and (low, high) == (2 * found.low, 2 * found.high)
    assert found.basis
    assert rates.interval(generation, True) == rates.interval("v5p", True)


def test_rate_files_have_only_known_keys() -> None:
    found, known = json.loads(rates.DATA.read_text(encoding="utf-8")), {*generations()}
    assert set(found) == {"reached", "intervals"} and set(found["reached"]) <= known
    assert {"all", "lora"} <= set(found["intervals"]) <= {*known, "all", "lora"}
    laws = json.loads(kernels.DATA.read_text(encoding="utf-8"))
    assert set(laws) == {"attention", "backward"} and set(laws["attention"]) <= known


@pytest.mark.parametrize("generation", MACHINES)
def test_published_rates_are_per_device(generation: str) -> None:
    accelerator = from_name(MACHINES[generation])
    found = rates.published(accelerator, KernelSeconds(accelerator))
    data, devices = generations()[generation], accelerator.devices_per_chip
    assert found.flops == data["bf16_tflops"] * 1e12 / devices
    assert found.hbm == data["hbm_gb_per_s"] * 1e9 / devices
    assert found.host == rates.HOST_BYTES / devices
    assert found.clock == data["compiler"]["cycles_ghz"] * 1e9
    law = attention(generation)
    assert min(*law.row, law.block, law.pair) > 0
