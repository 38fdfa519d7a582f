"""Tests of `recipe diff --plan`: the effect of a change, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipec.compiler.plan.plan_text import compare
from tests.plan import plans
from tests.plan.plans import ESTIMATE, GIB, MEMORY, RUN


def block() -> plans.Plan:
    """Plan Gemma 4 31B with recomputation by block: less memory, a longer step, another collective."""
    gather, *rest = ESTIMATE.collectives
    estimate = replace(
        ESTIMATE,
        memory=replace(MEMORY, temporaries=18.51 * GIB),
        seconds=1.5,
        timeline=replace(ESTIMATE.timeline, products=1.1059),
        mfu=0.5537,
        collectives=(replace(gather, bytes=177.6e9), rest[0]),
    )
    run = replace(
        RUN,
        hours=0.3225,
        usd=5.418,
        tokens_per_second=7946.0,
        usd_per_million_tokens=0.5873,
    )
    return replace(plans.flagship(), recipe="with-block", estimate=estimate, run=run)


def test_comparison_shows_only_changed_figures() -> None:
    assert compare(plans.flagship(), block()) == (
        "before: gemma4-31b-v5p8 on v5p-8, mesh fsdp 4 x tp 1\n"
        "after:  with-block on v5p-8, mesh fsdp 4 x tp 1\n"
        "\n"
        "                                   before       after   change\n"
        "HBM of a device                 72.50 GiB   34.80 GiB  -52.0 %\n"
        "  activations and temporaries   56.21 GiB   18.51 GiB  -67.1 %\n"
        "share of it                        76.3 %      36.6 %  -52.0 %\n"
        "its step                       1,294.1 ms  1,500.0 ms  +15.9 %\n"
        "  matrix products                900.0 ms  1,105.9 ms  +22.9 %\n"
        "a real token                     0.109 ms    0.126 ms  +15.9 %\n"
        "tokens/s                            9,210       7,946  -13.7 %\n"
        "MFU                                64.2 %      55.4 %  -13.7 %\n"
        "all-gather, fsdp                 118.4 GB    177.6 GB  +50.0 %\n"
        "all-reduce, fsdp                   2.1 MB         0 B     gone\n"
        "hours                                0.28        0.32  +15.9 %\n"
        "US$                                  4.67        5.42  +16.0 %\n"
        "US$ a million tokens                 0.51        0.59  +15.9 %\n"
        "\n"
        "Times, tokens/s, MFU, hours and US$ are estimates; HBM and collectives are the compiler's own.\n"
        "Nothing was measured on a TPU.\n"
    )


def test_comparison_ignores_a_change_below_rounding() -> None:
    slightly = replace(plans.flagship(), estimate=replace(ESTIMATE, seconds=ESTIMATE.seconds + 1e-6))
    assert compare(plans.flagship(), slightly) == (
        "before: gemma4-31b-v5p8 on v5p-8, mesh fsdp 4 x tp 1\n"
        "after:  gemma4-31b-v5p8 on v5p-8, mesh fsdp 4 x tp 1\n"
        "\n"
        "Nothing changes in memory, time or cost.\n"
    )


def test_collectives_over_different_axes_have_separate_rows() -> None:
    shown = compare(plans.flagship(), plans.sliced())
    assert "\nall-gather, fsdp                  118.4 GB   29.6 GB     -75.0 %\n" in shown
    assert "\nall-reduce, dcn over DCN               0 B    4.4 GB         new\n" in shown
    assert "\ncollective-permute, other groups       0 B  200.0 MB         new\n" in shown
    assert "\ndevices                                  4       256  +6,300.0 %\n" in shown


@pytest.mark.parametrize("other", [plans.refused(), plans.unknown_length(), plans.unpriced()])
def test_comparison_shows_unknown_figures_as_unknown(other: plans.Plan) -> None:
    lines = [line for line in compare(plans.flagship(), other).splitlines() if "unknown" in line]
    assert any(line.startswith("US$ ") for line in lines)
    assert all(line.endswith("unknown") for line in lines)


def test_comparison_with_a_refused_step_knows_only_memory() -> None:
    shown = compare(plans.flagship(), plans.refused())
    assert "\nHBM of a device                 72.50 GiB  128.69 GiB   +77.5 %\n" in shown
    for name in ("its step", "a real token", "tokens/s", "MFU", "all-gather, fsdp", "hours", "US$"):
        (line,) = [line for line in shown.splitlines() if line.startswith(f"{name}  ")]
        assert line.endswith("unknown"), line
