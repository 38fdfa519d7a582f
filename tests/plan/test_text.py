"""Tests of what `recipe plan`, its search and `recipe diff --plan` print, word for word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import duration, flop_count, milliseconds, traffic
from recipec.compiler.pages.text import write
from recipec.compiler.plan.plan_text import WIDTH, comparison, document, search_document
from recipec.compiler.plan.results import (
    Collective,
    Kernel,
    Memory,
    Moved,
    Point,
    Search,
    Temporary,
    Timeline,
)
from tests.plan import plans
from tests.plan.plans import ESTIMATE, GIB, MEMORY, RUN


def text(plan: plans.Plan) -> str:
    return write(document(plan), WIDTH)


def compare(before: plans.Plan, after: plans.Plan) -> str:
    return write(comparison(before, after), WIDTH)


def search_text(program: Program, found: Search) -> str:
    return write(search_document(program, found), WIDTH)


FLAGSHIP = """\
gemma4-31b-v5p8: google/gemma-4-31B-it
v5p-8: 4 chips (the number in its name counts TensorCores), topology 2x2x1, 95 GiB each
mesh fsdp 4 x tp 1 = 4 devices on 1 host; a micro-batch is 4 rows of 3,072 tokens
mesh.axes {fsdp: 4, tp: 1}, train.micro_batch_size 1, remat.policy none, model.attention splash
All 60 layers were scheduled for v5p:2x2x1, 6 were compiled to the end for the times of their
operations; nothing was measured on a TPU.

HBM of each device, as the compiler lays it out (an estimate, in GiB)
  base weights                 14.62  15.4 %
  adapters                      0.46   0.5 %
  optimizer                     0.92   1.0 %
  padding of their layouts      0.07   0.1 %
  activations and temporaries  56.21  59.2 %
  code                          0.22   0.2 %
  in all                       72.50  76.3 %
  headroom                     22.50  23.7 %  of the 95.00 that it has

One micro-batch, forward, backward and update (estimates)
  matrix products                      900.0 ms
  other operations                     150.0 ms
  custom kernels                       145.1 ms
  exposed collectives                   90.0 ms
  exposed copies                           9 ms
  = the step                         1,294.1 ms            9,210 tokens/s  MFU 64.2 %
  within               1,164.7 ms to 1,552.9 ms  7,675 to 10,233 tokens/s
  Of nine published runs the measured step took 0.90 to 1.20 times its estimate.
  FLOPs   372.4 TFLOP  811.3 ms at 459 TFLOP/s, without the custom kernels'
  needed  381.2 TFLOP  by the model for full rows, without recomputation; MFU counts these
  bytes      1,610 GB  582.3 ms at 2,765 GB/s

The longest waits of the device, of all layers together
  all-gather  layers.*.mlp.up_proj.kernel    60.0 ms  of 104.0 ms
  all-gather  layers.*.mlp.down_proj.kernel  30.0 ms  of 104.0 ms
  copy        reduce_sum                        9 ms   of 11.0 ms

The longest operations, of all layers together
  layers.*.mlp.down_proj.kernel / dot_general (backward)   60 x  132.0 ms
  layers.*.mlp / mul                                      120 x    7.5 ms

Collectives of a micro-batch on one device, from the compiled program
  all-gather      fsdp  854 x  118.4 GB
  reduce-scatter  fsdp  840 x  490.0 MB
  all-reduce      fsdp  123 x    2.1 MB

Custom kernels (estimates from their shapes, by kernels that were measured)
  splash_mha_dkv_segmented            60 x  14.8 TFLOP  41.5 GB  64.5 ms
  splash_mha_dq_segmented             60 x  11.1 TFLOP  38.0 GB  48.4 ms
  splash_mha_fwd_segmented_residuals  60 x   7.4 TFLOP  26.1 GB  32.2 ms

Largest temporaries, at the peak of memory (GiB)
  7.38  60 x  bf16[1,3072,21504]  layers.*.mlp / gate_proj
  7.38  60 x  bf16[1,3072,21504]  layers.*.mlp / up_proj

The whole run              estimate          within
steps of 1 micro-batch          774
hours                          0.28    0.25 to 0.33
US$, at 16.80 an hour          4.67    4.20 to 5.60
US$ a million real tokens     0.507  0.456 to 0.608
10,000 samples of data/train.jsonl packed into 3,096 rows that are 97 % full.

Planned in 96 s; compiling took 81 s.
recipec 0.1.0, jax 0.10.2, libtpu 0.0.43, google-tunix 0.1.7
note: Every layer's keys and values of the ten global layers are one array.
"""


def test_flagship_plan_text_matches_the_expected_text() -> None:
    assert text(plans.flagship()) == FLAGSHIP


ALL = [
    *(plans.flagship(), plans.too_large(), plans.refused(), plans.unpriced(), plans.unknown_length()),
    *(plans.sliced(), plans.one_axis()),
]


@pytest.mark.parametrize("plan", ALL, ids=range(len(ALL)))
def test_plan_text_fits_66_lines_of_100_columns(plan: plans.Plan) -> None:
    lines = text(plan).splitlines()
    assert len(lines) <= 66 and max(map(len, lines)) <= 100
    assert lines == [line.rstrip() for line in lines]


def test_text_of_a_too_large_step_shows_the_missing_memory() -> None:
    shown = text(plans.too_large())
    assert "  in all                       128.69  135.5 %\n" in shown
    assert "  MISSING                       33.69   35.5 %  of the 95.00 that it has\n" in shown
    assert "headroom" not in shown


def test_a_refused_step_is_printed_without_a_time() -> None:
    shown = text(plans.refused())
    assert "MISSING" in shown and "Largest temporaries" in shown
    assert "The compiler refused the step, so its time is not known.\n" in shown
    for absent in ("tokens/s", "MFU", "The whole run", "Collectives", "Custom kernels"):
        assert absent not in shown


def test_text_of_a_run_with_bounded_length_says_at_most() -> None:
    flagship = plans.flagship()
    shown = text(replace(flagship, run=replace(flagship.run, source="bound")))
    assert "The whole run, at most" in shown
    assert "The whole run, at most" not in text(flagship)


def test_text_of_a_run_of_unknown_length_gives_only_step_figures() -> None:
    shown = text(plans.unknown_length())
    assert "  = the step                         1,294.1 ms    at most 9,210 tokens/s  MFU" in shown
    assert "steps of 1 micro-batch           unknown\n" in shown
    assert "hours                            unknown\n" in shown
    assert "US$ a million tokens, at least     0.507  0.456 to 0.608\n" in shown


def test_a_machine_without_a_price_is_printed_without_a_cost() -> None:
    shown = text(plans.unpriced())
    assert "US$                     no price\n" in shown
    assert "a million" not in shown


def test_text_of_two_slices_shows_hosts_and_dcn_collectives() -> None:
    shown = text(plans.sliced())
    assert (
        "mesh dcn 2 x fsdp 32 x tp 4 = 256 devices on 64 hosts of 2 slices; a micro-batch is 64 rows" in shown
    )
    assert "  all-reduce          dcn over DCN   61 x    4.4 GB\n" in shown
    assert "  collective-permute  other groups   12 x  200.0 MB\n" in shown


def test_text_says_if_all_layers_were_compiled_and_if_cached() -> None:
    exact = replace(ESTIMATE, compiled_layers=(60,), timeline=Timeline(products=1.2941), kernels=())
    shown = text(replace(plans.flagship(), estimate=exact, cached=True, seconds=1.26))
    assert "All 60 layers were compiled for v5p:2x2x1; nothing was measured on a TPU.\n" in shown
    assert "Planned in 1.3 s, from the cache; compiling took 81 s when it was filled.\n" in shown
    for absent in ("  custom kernels", "Custom kernels", "exposed", "waits"):
        assert absent not in shown


def test_text_shows_the_micro_batches_of_an_optimizer_step() -> None:
    plan = replace(plans.flagship(), run=replace(plans.RUN, steps=1244, micro_batches=8))
    assert "steps of 8 micro-batches      1,244\n" in text(plan)


def test_text_truncates_long_tables_and_wraps_long_names() -> None:
    waits = (Moved("all-gather", f"weight{i}", ("fsdp",), False, 1, 1e9, 0.05, 0.02) for i in range(8))
    estimate = replace(
        ESTIMATE,
        timeline=replace(ESTIMATE.timeline, transfers=tuple(waits)),
        collectives=tuple(Collective("all-gather", (f"axis{i}",), False, 1, 1e9) for i in range(9)),
        kernels=tuple(Kernel(f"kernel{i}", 1, 1e12, 1e9, 0.01) for i in range(7)),
        largest=(Temporary("layers.{}." + "deep." * 30, "f32[8]", 1, 2**30),),
    )
    shown = text(replace(plans.flagship(), estimate=estimate))
    assert "  and 5 more, 5.0 GB together\n" in shown and "  and 3 more, 30.0 ms together\n" in shown
    assert "weight3" in shown and "weight4" not in shown and "  and 4 more, 80.0 ms together\n" in shown
    name = [line for line in shown.splitlines() if "deep." in line]
    assert max(map(len, name)) <= 100 and "".join(name).count("deep") == 30


def test_figures_are_printed_in_readable_units() -> None:
    assert [flop_count(n) for n in (372.4e12, 1.2e15, 4.1e9, 12)] == [
        *("372.4 TFLOP", "1,200 TFLOP", "4.1 GFLOP", "12 FLOP")
    ]
    assert [traffic(n) for n in (1.61e12, 2.1e6, 0)] == ["1,610 GB", "2.1 MB", "0 B"]
    assert [milliseconds(n) for n in (1.2941, 0.0104, 0.000214)] == ["1,294.1 ms", "10.4 ms", "0.214 ms"]
    assert [duration(n) for n in (81.4, 0.73)] == ["81 s", "0.7 s"]


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


def a_point(*sets: str, token: float = 1e-4, gib: float = 70.0, usd: float | None = 0.467) -> Point:
    return Point(
        sets=sets,
        status="compiled",
        reason="",
        tokens=11_919,
        bound_seconds_per_token=0.8e-4,
        seconds_per_token=token,
        step_seconds=token * 11_919,
        memory=Memory(gib * GIB, 0, 0, 0, 0, 0, 0, 95.0 * GIB),
        usd_per_million_tokens=usd,
        mfu=0.62,
        exposed_seconds=0.178,
    )


def test_search_text_shows_the_front_and_the_fastest_recipe_lines(program: Program) -> None:
    points = (
        a_point(token=1.115e-4, gib=72.5),
        a_point("mesh.axes={fsdp: 2, tp: 2}", "train.micro_batch_size=2", token=1.083e-4, gib=58.1),
        a_point("remat.policy=decoder", token=1.432e-4, gib=24.8),
        Point(("model.attention=dot",), "too large", "it needs 131.0 GiB of 95.0 GiB", 11_919, 1.0e-4),
        Point(("remat.policy=block",), "pruned", "even its bound is behind a", 11_919, 1.2e-4),
        Point(("mesh.axes={fsdp: 1, tp: 4}",), "failed", "the compile was killed", 2_980, 1.2e-4),
        Point(("train.micro_batch_size=3",), "refused", "E0501: not a multiple", 0, 0),
        Point(("train.micro_batch_size=5",), "refused", "E0501: not a multiple", 0, 0),
    )
    found = Search(points, (1, 2), 0, 412.0, ("2 configurations could still be better: because.",))
    assert search_text(program, found) == EXPECTED


EXPECTED = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  mesh   micro  remat    attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
  2 x 2      2  none     splash  auto     0.1083  1.291  58.1  61 %  62 %  0.467  0.178
  4 x 1      1  decoder  splash  auto     0.1432  1.707  24.8  26 %  62 %  0.467  0.178
  mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
  micro-batch. GiB, HBM: of each device, and the share of its memory. US$/M: of a million real
  tokens. waits: seconds of a step that the device waits for collectives and copies, a part of
  `step`.

The recipe as it stands is not one of them. The fastest takes 0.971 times its time a token.
  mesh   micro  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
  4 x 1      1  none   splash  auto     0.1115  1.329  72.5  76 %  62 %  0.467  0.178

The fastest, as lines of the recipe:
  mesh:
    axes: {fsdp: 2, tp: 2}
  train:
    micro_batch_size: 2

8 configurations in 412 s: 3 compiled, 1 too large, 1 pruned, 2 refused, 1 failed.
2 configurations could still be better: because.
- refused, 2 x: E0501: not a multiple
- failed, 1 x: the compile was killed
"""


def test_search_text_without_a_price_shows_raised_batch_and_device_seconds(program: Program) -> None:
    tight = a_point(
        "train.global_batch_size=8", "train.micro_batch_size=2", token=1.05e-4, gib=93.0, usd=None
    )
    found = Search((a_point(token=1.1e-4, usd=None), tight), (1, 0), 0, 4.0)
    assert search_text(program, found) == RAISED


RAISED = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  mesh   micro  rows  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  dev-s/M  waits
  4 x 1      2     8  none   splash  auto     0.1050  1.251  93.0  98 %  62 %      420  0.178
  4 x 1      1     4  none   splash  auto     0.1100  1.311  70.0  74 %  62 %      440  0.178
  mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
  micro-batch. GiB, HBM: of each device, and the share of its memory. dev-s/M: seconds of all
  devices together for a million real tokens; there is no price. waits: seconds of a step that the
  device waits for collectives and copies, a part of `step`.

The recipe as it stands is number 2 of them. The fastest takes 0.955 times its time a token.

The fastest, as lines of the recipe:
  train:
    global_batch_size: 8
    micro_batch_size: 2
  It raises train.global_batch_size from 4 to 8: another optimization, with fewer steps over the
  same data.

2 configurations in 4.0 s: 2 compiled.
"""


def test_search_text_offers_no_lines_if_the_recipe_is_the_fastest(program: Program) -> None:
    said = search_text(program, Search((a_point(),), (0,), 0, 1.0))
    assert (
        "The recipe as it stands is the fastest of them.\n\n1 configuration in 1.0 s: 1 compiled.\n" in said
    )
    assert "as lines of the recipe" not in said


def test_search_text_says_when_no_configuration_fits(program: Program) -> None:
    large = Point((), "too large", "it needs 131.0 GiB of 95.0 GiB", 11_919, 1.0e-4)
    assert search_text(program, Search((large,), (), None, 3.0)) == NOTHING


NOTHING = """\
Configurations that no other beats in time, memory and cost: estimates of the compiler; nothing was
measured on a TPU
  none: nothing that was compiled fits

The recipe as it stands has no estimate: it needs 131.0 GiB of 95.0 GiB.

1 configuration in 3.0 s: 1 too large.
"""
