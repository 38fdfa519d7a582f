"""Tests of what `recipe plan`, its search and `recipe diff --plan` print, word for word."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import duration, milliseconds, traffic
from recipec.compiler.pages.text import WIDTH, write
from recipec.compiler.plan import search_document
from recipec.compiler.plan.comparison import comparison
from recipec.compiler.plan.plan_document import document
from recipec.compiler.plan.planner import settings
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
    axes, devices = program.recipe.mesh.axes, program.accelerator.devices
    return write(search_document.document(found, settings(program), axes, devices), WIDTH)


FLAGSHIP = """\
gemma4-31b-v5p8
  Model: google/gemma-4-31B-it
  Machine: v5p-8: 4 chips (the number in its name counts TensorCores), topology 2x2x1, 95 GiB each
  Mesh: fsdp 4 x tp 1 = 4 devices on 1 host; a micro-batch is 4 rows of 3,072 tokens
  Step of a micro-batch: 1,294 ms; 1,165 ms to 1,553 ms
  Real tokens a second: 9,210; 7,675 to 10,233
  Model FLOPs utilization (MFU): 64.2 %; 53.5 % to 71.3 %
  HBM of a device: 76.3 %; 72.5 GiB of 95.0 GiB; 22.5 GiB free
  Run: 0.28 h; 0.25 h to 0.33 h
  Cost of the run: US$4.67; US$4.20 to US$5.60; US$16.80 an hour
Estimates: libtpu compiled the training step without a TPU, and nothing was measured on one. Of nine
published runs the measured step took 0.90 to 1.20 times its estimate.

Memory
  part                              HBM  of the device
  base weights                 14.6 GiB         15.4 %
  adapters                      0.5 GiB          0.5 %
  optimizer                     0.9 GiB          1.0 %
  batch                         0.2 MiB          0.0 %
  padding                       0.1 GiB          0.1 %
  activations and temporaries  56.2 GiB         59.2 %
  code                          0.2 GiB          0.2 %
  The largest temporaries
    where it comes from       shape               arrays      HBM
    layers.*.mlp / gate_proj  bf16[1,3072,21504]      60  7.4 GiB
    layers.*.mlp / up_proj    bf16[1,3072,21504]      60  7.4 GiB

Time
  part                    time  of the step
  matrix products       900 ms       69.5 %
  other operations      150 ms       11.6 %
  custom kernels        145 ms       11.2 %
  exposed collectives  90.0 ms        7.0 %
  exposed copies       9.00 ms        0.7 %
  What the device waits for
    kind        weight or operation              takes  exposed
    all-gather  layers.*.mlp.up_proj.kernel     104 ms  60.0 ms
    all-gather  layers.*.mlp.down_proj.kernel   104 ms  30.0 ms
    copy        reduce_sum                     11.0 ms  9.00 ms
  What the device works on
    weight and operation                                    times    takes
    layers.*.mlp.down_proj.kernel / dot_general (backward)     60   132 ms
    splash_mha_dkv_segmented                                   60  64.5 ms
    splash_mha_dq_segmented                                    60  48.4 ms
    splash_mha_fwd_segmented_residuals                         60  32.2 ms

Collectives
  kind            axes  network  times  arrives at a device
  all-gather      fsdp  ICI        854             118.4 GB
  reduce-scatter  fsdp  ICI        840             490.0 MB
  all-reduce      fsdp  ICI        123               2.1 MB

The run
10,000 samples of data/train.jsonl packed into 3,096 rows that are 97 % full.
                         estimate                within
  Optimizer steps             774
  A million real tokens  US$0.507  US$0.456 to US$0.608

What this rests on
  - All 60 layers of the step of train.py were scheduled for v5p:2x2x1, and 6 compiled to the end
    for the times of their operations.
  - Every layer's keys and values of the ten global layers are one array.
  Settings: mesh.axes {fsdp: 4, tp: 1}, train.micro_batch_size 1, remat.policy none, model.attention
  splash, model.attention_block null, train.global_batch_size 4, xla.profile auto
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
    needs = "A device would need 128.7 GiB of HBM and has 95.0 GiB: 33.7 GiB too much."
    assert f"It does not fit. {needs}\n" in shown
    assert "  HBM of a device: 135.5 %; 128.7 GiB of 95.0 GiB; 33.7 GiB too much\n" in shown
    assert "headroom" not in shown


def test_a_refused_step_is_printed_without_a_time() -> None:
    shown = text(plans.refused())
    assert "GiB too much" in shown and "The largest temporaries" in shown
    assert "The compiler refused the step, and gives no time for what does not fit.\n" in shown
    assert "Step of a micro-batch: not known; the compiler refused it\n" in shown
    for absent in ("The run", "Collectives"):
        assert f"\n{absent}\n" in text(plans.flagship()) and f"\n{absent}\n" not in shown


def test_text_of_a_run_with_bounded_length_says_at_most() -> None:
    flagship = plans.flagship()
    shown = text(replace(flagship, run=replace(flagship.run, source="bound")))
    assert "Cost of the run, at most: US$4.67" in shown and "Optimizer steps, at most" in shown
    assert "at most" not in text(flagship)


def test_text_of_a_run_of_unknown_length_gives_only_step_figures() -> None:
    shown = text(plans.unknown_length())
    assert "  Tokens a second, at most: 9,210; 7,675 to 10,233\n" in shown
    assert "  Run: not known\n" in shown and "  Cost of the run: not known\n" in shown
    assert re.search(r"\n  Optimizer steps +not known\n", shown)
    assert re.search(r"\n  A million tokens, at least +US\$0.507 +US\$0.456 to US\$0.608\n", shown)


def test_a_machine_without_a_price_is_printed_without_a_cost() -> None:
    shown = text(plans.unpriced())
    assert "Cost of the run: no price\n" in shown
    assert "US$" not in shown


def test_text_of_two_slices_shows_hosts_and_dcn_collectives() -> None:
    shown = text(plans.sliced())
    mesh = "dcn 2 x fsdp 32 x tp 4 = 256 devices on 64 hosts; a micro-batch is 64 rows of 3,072 tokens"
    assert f"  Mesh: {mesh}\n" in shown
    assert " scheduled for 2 slices of v5p:4x4x8, " in shown
    assert "  all-reduce          dcn           DCN         61               4.4 GB\n" in shown
    assert "  collective-permute  other groups  ICI         12             200.0 MB\n" in shown


def test_text_says_if_all_layers_were_compiled_and_if_cached() -> None:
    exact = replace(ESTIMATE, compiled_layers=(60,), timeline=Timeline(products=1.2941), kernels=())
    shown = text(replace(plans.flagship(), estimate=exact, cached=True, seconds=1.26))
    assert "- All 60 layers of the step of train.py were compiled to the end for v5p:2x2x1.\n" in shown
    assert "  Compiling took 81 s, and this plan came from the cache.\n" in shown
    for absent in ("custom kernels", "exposed", "waits"):
        assert absent not in shown


def test_text_shows_the_time_that_probes_of_such_machines_add() -> None:
    slower = replace(ESTIMATE, seconds=ESTIMATE.timeline.seconds + 0.1)
    assert "by probes of such machines" in text(replace(plans.flagship(), estimate=slower))
    assert "probes" not in text(plans.flagship())


def test_text_shows_the_micro_batches_of_an_optimizer_step() -> None:
    shown = text(replace(plans.flagship(), run=replace(plans.RUN, steps=1244, micro_batches=8)))
    assert re.search(r"\n  Optimizer steps +1,244 of 8 micro-batches\n", shown)


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
    assert "  and 5 more, 5.0 GB together\n" in shown and "kernel2" in shown and "kernel3" not in shown
    assert "weight3" in shown and "weight4" not in shown and "  and 4 more, 80.0 ms together\n" in shown
    name = [line for line in shown.splitlines() if "deep." in line]
    folded = "".join(line[4:].split("  ")[0] for line in name)
    assert max(map(len, name)) <= 100 and folded.count("deep") == 30


def test_figures_are_printed_in_readable_units() -> None:
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
Estimates: libtpu compiled the training step without a TPU, and nothing was measured on one.

Search
8 configurations in 412 s: 3 compiled, 1 too large, 1 pruned, 2 refused, 1 failed.
The recipe as it stands is not on the front. The fastest has 1.03 times its tokens a second.
  Configurations that no other beats in time, memory and cost
    mesh   micro  remat    attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
    2 x 2      2  none     splash  auto     0.1083  1.291  58.1  61 %  62 %  0.467  0.178
    4 x 1      1  decoder  splash  auto     0.1432  1.707  24.8  26 %  62 %  0.467  0.178
    mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
    micro-batch. GiB, HBM: of each device, and the share of its memory. US$/M: of a million real
    tokens. waits: seconds of a step that the device waits for collectives and copies, a part of
    `step`.
  The recipe as it stands
    mesh   micro  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  US$/M  waits
    4 x 1      1  none   splash  auto     0.1115  1.329  72.5  76 %  62 %  0.467  0.178
  The fastest, as lines of the recipe
    mesh:
      axes: {fsdp: 2, tp: 2}
    train:
      micro_batch_size: 2
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
Estimates: libtpu compiled the training step without a TPU, and nothing was measured on one.

Search
2 configurations in 4.0 s: 2 compiled.
The recipe as it stands is number 2 on the front. The fastest has 1.05 times its tokens a second.
  Configurations that no other beats in time, memory and cost
    mesh   micro  rows  remat  attn.   flags  ms/token   step   GiB   HBM   MFU  dev-s/M  waits
    4 x 1      2     8  none   splash  auto     0.1050  1.251  93.0  98 %  62 %      420  0.178
    4 x 1      1     4  none   splash  auto     0.1100  1.311  70.0  74 %  62 %      440  0.178
    mesh: fsdp x tp. ms/token: milliseconds a real token, over all devices. step: seconds of a
    micro-batch. GiB, HBM: of each device, and the share of its memory. dev-s/M: seconds of all
    devices together for a million real tokens; there is no price. waits: seconds of a step that the
    device waits for collectives and copies, a part of `step`.
  The fastest, as lines of the recipe
    train:
      global_batch_size: 8
      micro_batch_size: 2
    It raises train.global_batch_size from 4 to 8: another optimization, with fewer steps over the
    same data.
"""


def test_search_text_offers_no_lines_if_the_recipe_is_the_fastest(program: Program) -> None:
    said = search_text(program, Search((a_point(),), (0,), 0, 1.0))
    assert "1 configuration in 1.0 s: 1 compiled.\nThe recipe as it stands is the fastest.\n" in said
    assert "as lines of the recipe" not in said


def test_search_text_says_when_no_configuration_fits(program: Program) -> None:
    large = Point((), "too large", "it needs 131.0 GiB of 95.0 GiB", 11_919, 1.0e-4)
    assert search_text(program, Search((large,), (), None, 3.0)) == NOTHING


NOTHING = """\
Estimates: libtpu compiled the training step without a TPU, and nothing was measured on one.

Search
1 configuration in 3.0 s: 1 too large.
No configuration fits. The recipe as it stands has no estimate: it needs 131.0 GiB of 95.0 GiB.
"""
