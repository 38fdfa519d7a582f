"""Plan a recipe: compile its step, estimate the step's time and memory, and scale them to the whole run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics, planned_length
from recipec.compiler.plan import identity
from recipec.compiler.plan.at_hand import Unavailable
from recipec.compiler.plan.depth import Part, parts
from recipec.compiler.plan.estimate import estimate
from recipec.compiler.plan.job import Failed, Job
from recipec.compiler.plan.placements import placements
from recipec.compiler.plan.pool import Progress, compile_jobs
from recipec.compiler.plan.results import Compiled, Estimate, Plan
from recipec.spec.core_schema import flow

SEARCHED = (
    "mesh.axes",
    "train.micro_batch_size",
    "train.global_batch_size",
    "remat.policy",
    "model.attention",
    "model.attention_block",
    "xla.profile",
)
"""The keys that a search varies."""
UNMEASURED = "The interval is of runs without TorchAX: no measurement of one by it is published."


class CompileError(ArtifactError):
    """A step could not be compiled.

    Attributes:
        failed: the failed job's result, with the reason.
    """

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, failed.help or None)
        self.failed = failed


def plan(
    program: Program,
    sets: Sequence[str] = (),
    exact: bool = False,
    data: Statistics | Unavailable | None = None,
    progress: Progress | None = None,
    backend: Backend = Backend.TUNIX,
) -> Plan:
    """Plan a program.

    Args:
        sets: the --set arguments of its recipe.
        exact: compile all layers to the end.
        data: statistics of the recipe's data, or why there are none.
        backend: the backend whose step is compiled.

    Raises:
        ArtifactError: when it cannot be compiled.
        KeyboardInterrupt: after Ctrl-C; finished compiles are in the cache.
    """
    start = time.monotonic()
    check_target(program, backend)
    fresh: list[int] = []
    results = compile_jobs(
        [job(program, sets, part, backend) for part in parts(program, exact)],
        progress,
        on_done=lambda index, _, cached: None if cached else fresh.append(index),
    )
    made = estimate(program, compiled_or_raise(results))
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
        estimate=made,
        run=planned_length(program, made, data),
        placements=placements(program, backend),
        settings=settings(program),
        versions=identity.versions(backend),
        notes=() if backend is Backend.TUNIX else (UNMEASURED,),
        cached=not fresh,
        seconds=time.monotonic() - start,
        backend=backend.value,
    )


def check_target(program: Program, backend: Backend = Backend.TUNIX) -> None:
    """Raise ArtifactError if the backend or the accelerator cannot be compiled for a TPU."""
    if backend is Backend.TRL:
        raise ArtifactError(
            "TRL's step runs in torch on GPUs, and is not compiled ahead of time",
            "plan with --backend tunix or --backend torchax",
        )
    if program.accelerator.platform != "tpu":
        raise ArtifactError(
            f"{program.accelerator.name} is not a TPU, and a plan is compiled for a TPU",
            "--set 'mesh={accelerator: v5p-8, axes: {fsdp: 4}}' plans for a v5p-8; recipe rehearse runs here",
        )


def compiled_or_raise(results: Sequence[Compiled | Failed]) -> list[Compiled]:
    """Return the results, or raise CompileError for the first that failed."""
    for result in results:
        if isinstance(result, Failed):
            raise CompileError(result)
    return [result for result in results if isinstance(result, Compiled)]


def estimate_of(
    program: Program,
    sets: Sequence[str],
    progress: Progress | None = None,
    backend: Backend = Backend.TUNIX,
) -> Estimate | None:
    """Return the estimate of a program, or None when it cannot be compiled."""
    results = compile_jobs([job(program, sets, part, backend) for part in parts(program)], progress)
    if any(isinstance(result, Failed) for result in results):
        return None
    return estimate(program, compiled_or_raise(results))


def job(
    program: Program, sets: Sequence[str], part: Part, backend: Backend = Backend.TUNIX
) -> tuple[Program, Job]:
    """Return the job of one compile of a program."""
    return program, Job(Path(program.source).resolve(), tuple(sets), part.layers, backend, part.scheduled)


def settings(program: Program) -> dict[str, str]:
    """Return the recipe's values of the keys that a search varies."""
    values = program.recipe.model_dump(mode="json")
    out = {}
    for path in SEARCHED:
        section, key = path.split(".")
        out[path] = flow(values[section][key])
    return out
