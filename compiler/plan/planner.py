"""Plan a recipe: compile its step, estimate the step's time and memory, and scale them to the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.at_hand import Unavailable
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.plan import calibration, identity, rates
from recipec.compiler.plan.depth import Part, parts
from recipec.compiler.plan.pool import Progress, compile_jobs
from recipec.compiler.plan.results import Compiled, Estimate, Failed, Job, Placement, Plan, Timeline
from recipec.compiler.plan.run_hours import planned_length
from recipec.compiler.plan.schedule import priced
from recipec.compiler.plan.step_memory import memory, with_refusal
from recipec.compiler.plan.timeline import timeline
from recipec.compiler.roofline.training_step import model_flops, rows
from recipec.compiler.wording import split_layer
from recipec.runtime.backends.torchax.placement import adapter_specs, tensor_specs
from recipec.runtime.model.families.base import Spec
from recipec.runtime.model.partition_rules import divisible, shards
from recipec.spec.core_schema import flow


def estimate(program: Program, compiled: Sequence[Compiled]) -> Estimate:
    """Return the estimate of a program.

    Args:
        compiled: the results of the compiles in `depth.parts`, in order: the first has all layers, the last
            was compiled to the end.
    """
    whole, few = with_refusal(compiled[0]), compiled[-1]
    accelerator = program.accelerator
    times = Timeline()
    if whole.out_of_memory is None:
        times = timeline(priced(whole.schedule, few.prices), rates.reached(accelerator.generation))
    factor, interval = calibration.known(accelerator.generation, program.lora is not None)
    seconds = times.seconds * factor
    needed = model_flops(program, rows(program) * program.recipe.data.max_length) / accelerator.devices
    peak = accelerator.peak_flops_per_device
    return Estimate(
        layers=program.architecture.num_layers,
        compiled_layers=(few.layers,),
        memory=memory(program, compiled),
        flops=whole.flops,
        bytes=whole.bytes,
        timeline=times,
        seconds=seconds,
        interval=interval,
        peak_flops=peak,
        bandwidth=accelerator.bandwidth_per_device,
        model_flops=needed,
        mfu=needed / (seconds * peak) if seconds else 0.0,
        rows=rows(program),
        row_length=program.recipe.data.max_length,
        collectives=whole.collectives,
        kernels=tuple(sorted(whole.kernels, key=lambda kernel: -kernel.seconds)),
        largest=whole.largest,
        compile_seconds=sum(one.trace_seconds + one.compile_seconds for one in compiled),
    )


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
    estimated = estimate(program, compiled_or_raise(results))
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
        estimate=estimated,
        run=planned_length(program, estimated, data),
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


PlacedArray = tuple[str, tuple[int, ...], Spec, int]
"""Path, shape, sharding, and bytes of each number."""


def placements(program: Program, backend: Backend = Backend.TUNIX) -> tuple[Placement, ...]:
    """Return the model's arrays as a backend shards them, the largest first.

    Base weights are in the model's dtype and adapters in their own. Quantized weights are counted in the
    dtype before quantization.
    """
    arrays = _torchax(program) if backend is Backend.TORCHAX else _tunix(program)
    axes = program.recipe.mesh.axes
    groups: dict[tuple[str, tuple[int, ...], Spec], list[float]] = {}
    for path, shape, spec, size in arrays:
        parts = math.prod(shards(axis, axes) for axis in spec)
        groups.setdefault((split_layer(path)[0], shape, spec), []).append(math.prod(shape) * size / parts)
    placed = [Placement(*key, count=len(each), bytes=sum(each)) for key, each in groups.items()]
    return tuple(sorted(placed, key=lambda placement: -placement.bytes))


def _tunix(program: Program) -> Iterator[PlacedArray]:
    whole = {p.path for p in program.whole}
    for p in program.parameters:
        dtype = program.lora.dtype if program.lora and p.path in whole else program.recipe.model.dtype
        yield p.path, p.shape, p.spec, BYTES[dtype]
    if program.lora is not None:
        yield from ((p.path, p.shape, p.spec, BYTES[program.lora.dtype]) for p in program.token_rows)
        for x in program.adapters:
            yield from ((*array, BYTES[program.lora.dtype]) for array in x.arrays)


def _torchax(program: Program) -> Iterator[PlacedArray]:
    """Yield transformers' tensors, and PEFT's adapters on them."""
    axes = program.recipe.mesh.axes
    specs = tensor_specs(program.family, program.architecture, program.rules, axes)
    for source in (source for parameter in program.parameters for source in parameter.sources):
        yield source.name, source.shape, specs[source.name], BYTES[program.recipe.model.dtype]
    if program.lora is None:
        return
    for adapter in program.adapters:
        pair = adapter_specs(specs[f"{adapter.name}.weight"])
        for letter, shape, spec in zip("AB", adapter.peft_shapes, pair, strict=True):
            placed = divisible(shape, spec, axes)
            yield f"{adapter.name}.lora_{letter}", shape, placed, BYTES[program.lora.dtype]
