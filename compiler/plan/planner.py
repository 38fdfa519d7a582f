"""A plan: the recipe's step compiled, extrapolated to the whole model, and multiplied to the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path

from compiler.artifact import ArtifactError
from compiler.plan import calibration, identity
from compiler.plan.depth import Depth, depths, whole
from compiler.plan.estimate import extrapolate
from compiler.plan.job import Failed, Job
from compiler.plan.pool import Progress, compile_jobs
from compiler.plan.results import Compiled, Estimate, Placement, Plan
from compiler.plan.run import Statistics, Unavailable, run_length
from compiler.program import Program
from compiler.wording import flow, listing, split_layer

SEARCHED = (
    "mesh.axes",
    "train.micro_batch_size",
    "train.global_batch_size",
    "remat.policy",
    "model.attention",
)
"""What a search varies."""


def plan(
    program: Program,
    sets: Sequence[str] = (),
    exact: bool = False,
    effort: float = -1.0,
    data: Statistics | Unavailable | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Plans a program.

    Args:
        sets: what --set changed in its recipe.
        exact: compile all layers instead of extrapolating.
        effort: of XLA's optimisation, from -1 to 1.
        data: what is known of the recipe's data.

    Raises:
        ArtifactError: when it cannot be compiled.
        KeyboardInterrupt: what was compiled is in the cache.
    """
    start = time.monotonic()
    check_target(program)
    chosen = (whole(program),) if exact else depths(program)
    notes: list[str] = []
    fresh: list[int] = []
    results = _compile(program, sets, chosen, effort, progress, fresh)
    killed = next((result for result in results if isinstance(result, Failed) and result.killed), None)
    smaller = depths(program, small=not exact)
    if killed and smaller != chosen:
        notes.append(
            f"{killed.message[0].upper()}{killed.message[1:]}: "
            f"{listing(len(depth.layers) for depth in smaller)} layers were compiled instead of "
            f"{listing(len(depth.layers) for depth in chosen)}."
        )
        chosen = smaller
        results = _compile(program, sets, chosen, effort, progress, fresh)
    estimate = extrapolate(program, chosen, compiled_or_raise(results))
    a, recipe = program.accelerator, program.recipe
    return Plan(
        recipe=program.name,
        model=recipe.model.id,
        accelerator=a.describe(),
        topology=f"{a.generation}:{a.topology}",
        slices=a.slices,
        devices=a.devices,
        hosts=a.hosts,
        axes=dict(recipe.mesh.axes),
        estimate=estimate,
        run=run_length(program, estimate, data),
        placements=placements(program),
        settings=settings(program),
        versions=identity.versions(),
        notes=(*notes, calibration.sentence()),
        cached=not fresh,
        seconds=time.monotonic() - start,
    )


def check_target(program: Program) -> None:
    """Raises ArtifactError for a recipe that has no TPU to be compiled for."""
    if program.accelerator.platform != "tpu":
        raise ArtifactError(
            f"{program.accelerator.name} is no TPU, and a plan is compiled for one",
            "--set 'mesh={accelerator: v5p-8, axes: {fsdp: 4}}' plans for a v5p-8; recipe rehearse runs here",
        )


def compiled_or_raise(results: Sequence[Compiled | Failed]) -> list[Compiled]:
    """The results, when all of them are there."""
    for result in results:
        if isinstance(result, Failed):
            raise ArtifactError(result.message, result.help or None)
    return [result for result in results if isinstance(result, Compiled)]


def estimate_of(
    program: Program, sets: Sequence[str], effort: float = -1.0, progress: Progress | None = None
) -> Estimate | None:
    """The estimate of a program, extrapolated; None when it cannot be compiled."""
    chosen = depths(program)
    results = _compile(program, sets, chosen, effort, progress, [])
    if any(isinstance(result, Failed) for result in results):
        return None
    return extrapolate(program, chosen, compiled_or_raise(results))


def job(program: Program, sets: Sequence[str], depth: Depth, effort: float) -> tuple[Program, Job]:
    """What is compiled for one depth of a program."""
    return program, Job(Path(program.source).resolve(), tuple(sets), depth.layers, effort)


def settings(program: Program) -> dict[str, str]:
    """What a search varies, as the recipe has it."""
    values = program.recipe.model_dump(mode="json")
    out = {}
    for path in SEARCHED:
        section, key = path.split(".")
        out[path] = flow(values[section][key])
    return out


def placements(program: Program) -> tuple[Placement, ...]:
    """The model's arrays by name, shape and sharding, the largest first. Base weights in the model's dtype,
    adapters in theirs; quantised weights are counted as they are before."""
    sizes = {"bfloat16": 2, "float32": 4}
    axes, recipe = program.recipe.mesh.axes, program.recipe
    arrays = [(p.path, p.shape, p.spec, sizes[recipe.model.dtype]) for p in program.parameters]
    if program.lora is not None:
        size = sizes[program.lora.dtype]
        arrays += [(x.a_path, x.a_shape, x.a_spec, size) for x in program.adapters]
        arrays += [(x.b_path, x.b_shape, x.b_spec, size) for x in program.adapters]
    groups: dict[tuple[str, tuple[int, ...], tuple[str | None, ...]], list[float]] = {}
    for path, shape, spec, size in arrays:
        parts = math.prod(axes[axis] for axis in spec if axis is not None)
        groups.setdefault((split_layer(path)[0], shape, spec), []).append(math.prod(shape) * size / parts)
    found = [Placement(*key, count=len(each), bytes=sum(each)) for key, each in groups.items()]
    return tuple(sorted(found, key=lambda placement: -placement.bytes))


def _compile(
    program: Program,
    sets: Sequence[str],
    chosen: Sequence[Depth],
    effort: float,
    progress: Progress | None,
    fresh: list[int],
) -> list[Compiled | Failed]:
    """Compiles a program's depths; `fresh` gets the number of each that was not in the cache."""
    return compile_jobs(
        [job(program, sets, depth, effort) for depth in chosen],
        progress,
        on_done=lambda index, _, cached: None if cached else fresh.append(index),
    )
