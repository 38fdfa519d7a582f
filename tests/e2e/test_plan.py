"""Tests of `recipe plan` with libtpu's own compiler: topologies, prices, fit and Gemma 4 31B."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from recipec.compiler.lowering.hardware import from_name, generations
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.planner import estimate
from recipec.compiler.plan.planner import job as job_of
from recipec.compiler.plan.results import Compiled, Job
from tests.e2e import planned
from tests.e2e.planned import program_of

pytestmark = pytest.mark.nightly

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

SLICES: dict[str, tuple[str, int, int, int]] = {
    "v5e-1": ("v5e-1", 1, 1, 1),
    "v5p-16": ("v5p-16", 1, 4, 2),
    "v5p-256": ("v5p-256", 1, 64, 2),
    "tpu7x-8": ("tpu7x-8", 1, 4, 2),
    "2 x v6e-16": ("v6e-16", 2, 8, 2),
}
"""Accelerator, dcn, fsdp and tp."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recipe, with a small model's config.json next to it."""
    return planned.small(tmp_path_factory.mktemp("small"), LLAMA)


@pytest.fixture(scope="module", autouse=True)
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with planned.compiler(tmp_path_factory.mktemp("cache")):
        yield


def compiled(small: Path, work: Mapping[str, tuple[tuple[str, ...], int]]) -> dict[str, Compiled]:
    """Compile steps by name, from --set arguments and the number of layers."""
    return planned.compiled(
        {
            name: (program_of(small, *sets), Job(small, sets, tuple(range(layers))))
            for name, (sets, layers) in work.items()
        }
    )


@pytest.fixture(scope="module")
def slices(small: Path) -> dict[str, Compiled]:
    work = {}
    for name, (accelerator, dcn, fsdp, tp) in SLICES.items():
        mesh = f"mesh={{accelerator: {accelerator}, axes: {{dcn: {dcn}, fsdp: {fsdp}, tp: {tp}}}}}"
        work[name] = ((mesh, f"train.global_batch_size={dcn * fsdp}"), 2)
    return compiled(small, work)


@pytest.mark.parametrize("name", SLICES)
def test_step_compiles_for_every_slice_with_expected_collectives(
    slices: dict[str, Compiled], name: str
) -> None:
    _, dcn, fsdp, tp = SLICES[name]
    one = slices[name]
    assert one.out_of_memory is None and one.temporaries > 0
    over = {axis for c in one.collectives for axis in c.axes}
    assert over == {axis for axis, size in (("dcn", dcn), ("fsdp", fsdp), ("tp", tp)) if size > 1}
    assert any(c.over_dcn for c in one.collectives) == (dcn > 1)
    assert all(c.over_dcn == (c.axes == ("dcn",)) for c in one.collectives)
    assert sum(kernel.count for kernel in one.kernels) == 2 * 3


def test_weights_are_sharded_over_all_devices(slices: dict[str, Compiled]) -> None:
    small, large = slices["v5p-16"], slices["v5p-256"]
    # Norms are replicated.
    assert large.weights == pytest.approx(small.weights / 16, rel=0.1)


@pytest.mark.parametrize("profile", ["none", "auto"])
def test_estimate_from_few_layers_matches_compilation_of_all_layers(small: Path, profile: str) -> None:
    """Compare with a full compilation: the same schedule and memory, and nearly the same time."""
    sets = (f"xla.profile={profile}",)
    program = program_of(small, *sets)
    whole, few = parts(program).refined
    (every,) = parts(program, exact=True).refined
    assert (len(whole.layers), len(few.layers), len(every.layers)) == (16, 2, 16)
    found = planned.compiled(
        {str(i): job_of(program, sets, part) for i, part in enumerate((whole, few, every))}
    )
    near, exact = estimate(program, [found["0"], found["1"]]), estimate(program, [found["2"]])
    assert near.memory.temporaries == exact.memory.temporaries
    assert near.memory.used == pytest.approx(exact.memory.used, rel=0.02)
    assert near.seconds == pytest.approx(exact.seconds, rel=0.02)
    assert (near.collectives, near.kernels) == (exact.collectives, exact.kernels)


@pytest.mark.parametrize("name", ["v4-8", "v5e-8", "v5p-8", "v6e-8", "tpu7x-8"])
def test_compiler_cycles_match_the_clock_rate_that_plans_use(root: Path, name: str) -> None:
    """Compile a large product: it takes a little more than at the published peak."""
    script = root / "tests" / "e2e" / "compiler_cycles.py"
    done = subprocess.run([sys.executable, str(script), name], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    accelerator = from_name(name)
    clock = generations()[accelerator.generation]["compiler"]["cycles_ghz"] * 1e9
    peak = found["flops"] / accelerator.peak_flops_per_device
    assert peak <= found["cycles"] / clock <= 1.5 * peak
