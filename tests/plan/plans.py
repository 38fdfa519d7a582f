"""Programs, and plans and searches with made-up figures, for the tests of what prints and draws them.

The figures resemble the estimates of a Gemma 4 31B step. None was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.plan.results import (
    Collective,
    Estimate,
    Interval,
    Kernel,
    Memory,
    Moved,
    Placement,
    Plan,
    Point,
    RunLength,
    Search,
    Span,
    Temporary,
    Timeline,
)
from recipec.compiler.plan.schedule import Worked
from recipec.spec.load import load

if TYPE_CHECKING:
    from recipec.compiler.plan.abstract import AbstractStep

GIB = 2**30
RECIPES = Path(__file__).parents[2] / "recipes"


def lowered(recipe: Path | str, *sets: str) -> Program:
    """Lower a recipe for planning: a file, or a shipped recipe by its name."""
    path = RECIPES / f"{recipe}.yaml" if isinstance(recipe, str) else recipe
    found = lower(load(path, sets), planning=True)
    assert found.program is not None, [one.message for one in found.diagnostics]
    return found.program


def abstract(
    program: Program, layers: Sequence[int], backend: Backend = Backend.TUNIX, lowering: bool = False
) -> tuple[AbstractStep, str]:
    """Build a program's step on virtual devices, and its lowered text, "" if it is not wanted."""
    import jax

    from recipec.compiler.plan.abstract import abstract_step
    from recipec.runtime.model.sharding import arrange

    settings = run_settings(program)
    mesh = arrange(settings.mesh.axes, jax.devices("cpu")[: settings.mesh.devices])
    with mesh:
        made = abstract_step(program, layers, settings, mesh, backend)
        return made, made.step.jit().lower(*made.arguments).as_text() if lowering else ""


MEMORY = Memory(
    weights=14.62 * GIB,
    adapters=0.46 * GIB,
    optimizer=0.92 * GIB,
    batch=49_152 * 4,
    padding=0.07 * GIB,
    temporaries=56.21 * GIB,
    code=0.22 * GIB,
    available=95.0 * GIB,
)
"""72.5 of 95 GiB."""

LARGEST = (
    Temporary("layers.{}.mlp / gate_proj", "bf16[1,3072,21504]", 60, 7.38 * GIB),
    Temporary("layers.{}.mlp / up_proj", "bf16[1,3072,21504]", 60, 7.38 * GIB),
    Temporary("layers.{}.mlp / mul", "bf16[1,3072,21504]", 60, 7.38 * GIB),
    Temporary("layers.{}.attn / o_proj", "bf16[1,3072,32,256]", 50, 2.34 * GIB),
    Temporary("layers.{}.attn / q_proj", "bf16[1,3072,32,256]", 50, 2.34 * GIB),
    Temporary("layers.{}.pre_feedforward_layernorm / mul", "bf16[1,3072,5376]", 60, 1.85 * GIB),
    Temporary("loss / logits of a chunk", "f32[512,262144]", 1, 0.5 * GIB),
)

KERNELS = (
    Kernel("splash_mha_fwd_segmented_residuals", 60, 7.4e12, 26.1e9, 0.0322),
    Kernel("splash_mha_dq_segmented", 60, 11.1e12, 38.0e9, 0.0484),
    Kernel("splash_mha_dkv_segmented", 60, 14.8e12, 41.5e9, 0.0645),
)

COLLECTIVES = (
    Collective("all-gather", ("fsdp",), False, 854, 118.4e9),
    Collective("reduce-scatter", ("fsdp",), False, 840, 0.49e9),
    Collective("all-reduce", ("fsdp",), False, 123, 2.1e6),
)

PLACEMENTS = (
    Placement("layers.{}.mlp.gate_proj.kernel", (5376, 21504), ("fsdp", "tp"), 60, 3.23 * GIB),
    Placement("layers.{}.mlp.up_proj.kernel", (5376, 21504), ("fsdp", "tp"), 60, 3.23 * GIB),
    Placement("layers.{}.mlp.down_proj.kernel", (21504, 5376), ("tp", "fsdp"), 60, 3.23 * GIB),
    Placement("layers.{}.attn.q_proj.w", (5376, 32, 256), ("fsdp", "tp", None), 50, 1.03 * GIB),
    Placement("layers.{}.attn.k_proj.w", (5376, 16, 256), ("fsdp", "tp", None), 50, 0.51 * GIB),
    Placement("layers.{}.attn.o_proj.w", (32, 256, 5376), ("tp", None, "fsdp"), 50, 1.03 * GIB),
    Placement("embedder.input_embedding", (262144, 5376), ("tp", "fsdp"), 1, 0.66 * GIB),
    Placement("layers.{}.attn.q_proj.w", (5376, 32, 512), ("fsdp", "tp", None), 10, 0.41 * GIB),
    Placement("layers.{}.attn.k_proj.w", (5376, 4, 512), ("fsdp", "tp", None), 10, 0.05 * GIB),
    Placement("layers.{}.mlp.gate_proj.kernel_lora_a", (5376, 64), ("fsdp", None), 60, 0.019 * GIB),
    Placement("layers.{}.mlp.gate_proj.kernel_lora_b", (64, 21504), (None, "tp"), 60, 0.31 * GIB),
    Placement("layers.{}.input_layernorm.w", (5376,), (None,), 60, 0.0006 * GIB),
    Placement("final_norm.w", (5376,), (None,), 1, 10_752),
)

TIMELINE = Timeline(
    products=0.9,
    memory=0.15,
    kernels=0.1451,
    transfers=(
        Moved("all-gather", "layers.{}.mlp.up_proj.kernel", ("fsdp",), False, 120, 27.7e9, 0.104, 0.06),
        Moved("all-gather", "layers.{}.mlp.down_proj.kernel", ("fsdp",), False, 120, 27.7e9, 0.104, 0.03),
        Moved("copy", "reduce_sum", (), False, 77, 1.6e9, 0.011, 0.009),
        Moved("all-reduce", "update", ("fsdp",), False, 12, 1e7, 0.001, 0.0),
    ),
    spans=(
        Span("core", "", 0.0, 0.2),
        Span("links", "all-gather layers.{}.mlp.up_proj.kernel", 0.1, 0.15),
        Span("wait", "all-gather layers.{}.mlp.up_proj.kernel", 0.2, 0.05),
        Span("kernel", "", 0.25, 0.02),
    ),
    operations=(
        Worked("layers.{}.mlp.down_proj.kernel / dot_general (backward)", True, 60, 0.132),
        Worked("layers.{}.mlp / mul", False, 120, 0.0075),
    ),
)
INTERVAL = Interval(
    0.9, 1.2, "Of nine published runs the measured step took 0.90 to 1.20 times its estimate."
)

ESTIMATE = Estimate(
    layers=60,
    compiled_layers=(6,),
    memory=MEMORY,
    flops=372.4e12,
    bytes=1.61e12,
    timeline=TIMELINE,
    seconds=1.2941,
    interval=INTERVAL,
    peak_flops=459e12,
    bandwidth=2765e9,
    model_flops=381.2e12,
    mfu=0.6418,
    rows=4,
    row_length=3072,
    collectives=COLLECTIVES,
    kernels=KERNELS,
    largest=LARGEST,
    compile_seconds=81.4,
)

RUN = RunLength(
    source="data",
    tokens_per_row=2979.7,
    steps=774,
    micro_batches=1,
    hours=0.2782,
    usd=4.67,
    interval=INTERVAL,
    usd_per_hour=16.80,
    tokens_per_second=9210.1,
    usd_per_million_tokens=0.5067,
    note="10,000 samples of data/train.jsonl packed into 3,096 rows that are 97 % full.",
)


def flagship() -> Plan:
    """Make a plan of Gemma 4 31B on four devices of one host."""
    return Plan(
        recipe="gemma4-31b-v5p8",
        model="google/gemma-4-31B-it",
        accelerator="v5p-8: 4 chips (the number in its name counts TensorCores), topology 2x2x1, 95 GiB each",
        topology="v5p:2x2x1",
        slices=1,
        devices=4,
        hosts=1,
        axes={"fsdp": 4, "tp": 1},
        estimate=ESTIMATE,
        run=RUN,
        placements=PLACEMENTS,
        settings={
            "mesh.axes": "{fsdp: 4, tp: 1}",
            "train.micro_batch_size": "1",
            "remat.policy": "none",
            "model.attention": "splash",
            "model.attention_block": "null",
            "train.global_batch_size": "4",
            "xla.profile": "auto",
        },
        versions={"recipec": "0.1.0", "jax": "0.10.2", "libtpu": "0.0.43", "google-tunix": "0.1.7"},
        notes=("Every layer's keys and values of the ten global layers are one array.",),
        seconds=96.2,
    )


def too_large() -> Plan:
    """Make a plan with two rows on each device, which needs 128.7 of 95 GiB."""
    memory = replace(MEMORY, temporaries=112.4 * GIB)
    estimate = replace(
        ESTIMATE,
        memory=memory,
        rows=8,
        timeline=replace(TIMELINE, products=1.85, memory=0.3492, kernels=0.2902),
        seconds=2.5882,
        model_flops=762.4e12,
    )
    return replace(flagship(), estimate=estimate)


def refused() -> Plan:
    """Make a plan that the compiler refused: its only figure is the memory that it would need."""
    estimate = replace(
        too_large().estimate,
        flops=0.0,
        bytes=0.0,
        timeline=Timeline(),
        seconds=0.0,
        mfu=0.0,
        collectives=(),
        kernels=(),
    )
    run = replace(
        RUN,
        hours=None,
        usd=None,
        tokens_per_second=0.0,
        usd_per_million_tokens=None,
    )
    return replace(flagship(), estimate=estimate, run=run)


def unpriced() -> Plan:
    """Make the first plan again, on a machine without a price."""
    run = replace(RUN, usd=None, usd_per_hour=None, usd_per_million_tokens=None)
    return replace(flagship(), run=run)


def unknown_length() -> Plan:
    """Make a plan without the data and without train.steps."""
    run = replace(
        RUN,
        source="unknown",
        tokens_per_row=3072.0,
        steps=None,
        hours=None,
        usd=None,
        note="data/train.jsonl is not at hand, and the recipe has no train.steps.",
    )
    return replace(flagship(), run=run)


def sliced() -> Plan:
    """Make a plan of 256 devices: two slices of 128, connected by the data center's network."""
    collectives = (
        Collective("all-gather", ("fsdp",), False, 854, 29.6e9),
        Collective("all-reduce", ("dcn",), True, 61, 4.4e9),
        Collective("all-reduce", ("tp",), False, 480, 61.2e9),
        Collective("all-reduce", ("fsdp", "tp"), False, 123, 2.1e6),
        Collective("collective-permute", (), False, 12, 0.2e9),
    )
    return replace(
        flagship(),
        recipe="gemma4-31b-two-slices",
        accelerator="2 slices of v5p-256: 128 chips each, topology 4x4x8, 95 GiB each",
        topology="v5p:4x4x8",
        slices=2,
        devices=256,
        hosts=64,
        axes={"dcn": 2, "fsdp": 32, "tp": 4},
        estimate=replace(ESTIMATE, collectives=collectives, rows=64),
    )


def one_axis(devices: int = 256) -> Plan:
    """Make a plan of a slice whose devices are all on fsdp."""
    return replace(
        flagship(), topology="v6e:16x16", devices=devices, hosts=devices // 4, axes={"fsdp": devices, "tp": 1}
    )


def search() -> Search:
    """Make a search of fourteen configurations: ten compiled, and seven of them on the front."""
    points = (
        _compiled((), 1.2941, 72.5, 11_919),
        _compiled(("remat.policy=block",), 1.58, 34.8, 11_919),
        _compiled(("remat.policy=decoder",), 1.73, 25.4, 11_919),
        _compiled(("remat.policy=block", "train.micro_batch_size=2"), 2.83, 55.1, 23_838),
        _compiled(("remat.policy=decoder", "train.micro_batch_size=2"), 3.31, 34.0, 23_838),
        _compiled(("remat.policy=decoder", "train.micro_batch_size=4"), 6.41, 51.9, 47_676),
        _compiled(("remat.policy=block", "train.micro_batch_size=3"), 3.62, 75.3, 35_757),
        _compiled(("mesh.axes={fsdp: 2, tp: 2}",), 0.911, 49.8, 5_959),
        _compiled(("mesh.axes={fsdp: 2, tp: 2}", "train.micro_batch_size=2"), 1.52, 82.7, 11_919),
        _compiled(("mesh.axes={fsdp: 1, tp: 4}", "remat.policy=decoder"), 0.497, 17.2, 2_980),
        replace(
            _compiled(("train.micro_batch_size=2",), 2.6, 128.7, 23_838),
            status="too large",
            reason="it needs 128.7 GiB of 95.0 GiB",
            seconds_per_token=None,
            step_seconds=None,
            usd_per_million_tokens=None,
            mfu=None,
            exposed_seconds=None,
        ),
        Point(
            ("model.attention=dot", "remat.policy=decoder"),
            "pruned",
            "cannot be faster than 0.1402 ms a token",
            11_919,
            1.402e-4,
        ),
        Point(
            ("mesh.axes={fsdp: 1, tp: 4}", "model.attention=dot"),
            "pruned",
            "cannot be faster than 0.2114 ms a token",
            2_980,
            2.114e-4,
        ),
        Point(
            ("mesh.axes={fsdp: 4, tp: 1}", "train.micro_batch_size=3"),
            "refused",
            "E0501: global_batch_size 4 is not a multiple of 12",
            0.0,
            0.0,
        ),
    )
    return Search(
        points=points, front=(6, 0, 3, 1, 4, 2, 9), baseline=0, seconds=412.0, notes=("Two at a time.",)
    )


def _compiled(sets: tuple[str, ...], seconds: float, gib: float, tokens: float) -> Point:
    others = MEMORY.used - MEMORY.temporaries
    per_token = seconds / tokens
    return Point(
        sets=sets,
        status="compiled",
        reason="",
        tokens=tokens,
        bound_seconds_per_token=0.7e-4,
        seconds_per_token=per_token,
        step_seconds=seconds,
        memory=replace(MEMORY, temporaries=gib * GIB - others),
        usd_per_million_tokens=per_token * 16.80 / 3600 * 1e6,
        mfu=381.2e12 / 11_919 / per_token / 459e12,
        exposed_seconds=0.148,
    )


def estimate(temporaries: float, seconds: float = 1.0) -> Estimate:
    """Estimate a step with 20 GiB of arguments on devices of 95 GiB.

    Args:
        temporaries: GiB.
    """
    memory = Memory(14.5 * GIB, 1.5 * GIB, 3 * GIB, 0, 0, temporaries * GIB, 1 * GIB, 95 * GIB)
    largest = (
        Temporary("layers.{}.mlp.gate_proj.kernel / dot_general", "bf16[3072,21504]", 60, 7.38 * GIB),
        Temporary("embedder.input_embedding / all-gather", "bf16[262144,5376]", 1, 2.625 * GIB),
    )
    return replace(ESTIMATE, memory=memory, largest=largest, seconds=seconds, rows=4, row_length=3072)
