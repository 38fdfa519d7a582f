"""Plan a recipe: compile its step, estimate the step's time and memory, and scale them to the whole run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.at_hand import Unavailable
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics
from recipec.compiler.lowering.sizes import BYTES
from recipec.compiler.pages.numbers import gib, ms
from recipec.compiler.plan import calibration, identity, rates
from recipec.compiler.plan.depth import Part, parts
from recipec.compiler.plan.first_estimate import FirstParts, first_parts, foretold, foretold_time, widened
from recipec.compiler.plan.pool import Progress, cached, compile_jobs
from recipec.compiler.plan.results import (
    Compiled,
    Estimate,
    Failed,
    Generation,
    Job,
    Placement,
    Plan,
    Timeline,
)
from recipec.compiler.plan.rollout_compiled import compiled_generation, rollout_parts
from recipec.compiler.plan.rollout_estimate import generation
from recipec.compiler.plan.run_hours import planned_length
from recipec.compiler.plan.schedule import Prices, priced
from recipec.compiler.plan.step_memory import memory, with_refusal
from recipec.compiler.plan.timeline import timeline
from recipec.compiler.roofline.step_estimate import code, mask_of_pictures
from recipec.compiler.roofline.training_step import model_flops, rows
from recipec.compiler.wording import listing, split_layer
from recipec.runtime.backends.torchax.placement import adapter_specs, tensor_specs
from recipec.runtime.model.families.family import Spec
from recipec.runtime.model.partition_rules import divisible, shards
from recipec.spec.core_schema import flow


def estimate(program: Program, compiled: Sequence[Compiled]) -> Estimate:
    """Return the estimate of a program.

    Args:
        compiled: the results of `depth.Parts.refined`, in order: the first has all layers, the last was
            compiled to the end.
    """
    whole = with_refusal(compiled[0])
    end = compiled[1] if len(compiled) > 1 else whole
    times = Timeline()
    if whole.out_of_memory is None:
        times = _timeline(program, whole, end.prices)
    return _estimate(program, whole, end, times)


def first_estimate(program: Program, parts: FirstParts, compiled: Mapping[Part, Compiled]) -> Estimate:
    """Return the first estimate of a program: from schedules of few layers.

    If the compiler refused one of them, return an estimate without a time: fewer layers already do not fit.

    Args:
        compiled: the results of `parts.every`.
    """
    end = None if parts.end is None else compiled[parts.end]
    shallow = [compiled[part] for part in parts.scheduled]
    scheduled = tuple(compiled.layers for compiled in shallow)
    refused = next((compiled for compiled in shallow if compiled.out_of_memory is not None), None)
    if refused is not None:
        return _estimate(program, with_refusal(refused), end, Timeline(), scheduled)
    prices = parts.usual if end is None else end.prices
    assert prices is not None
    times = foretold_time([_timeline(program, compiled, prices) for compiled in shallow], parts.shares)
    estimated = _estimate(program, foretold(shallow, parts.shares), end, times, scheduled)
    return replace(estimated, interval=widened(estimated.interval, parts.error))


def _timeline(program: Program, scheduled: Compiled, prices: Prices) -> Timeline:
    """Return the time of a schedule whose operations take these times."""
    return timeline(priced(scheduled.schedule, prices), rates.reached(program.accelerator.generation))


def _estimate(
    program: Program, whole: Compiled, end: Compiled | None, times: Timeline, scheduled: tuple[int, ...] = ()
) -> Estimate:
    """Return an estimate.

    Args:
        whole: the compile of all layers, compiled or foretold.
        end: the layers that were compiled to the end; None if there were none.
        times: the timeline of all layers; empty where the compiler refused them.
        scheduled: the layers of the schedules that `whole` was foretold from; () where it was compiled.
    """
    accelerator = program.accelerator
    compiles = (whole,) if end is None or end is whole else (whole, end)
    used = memory(program, compiles)
    if end is None:
        used = replace(used, code=code(program))
    factor, interval = calibration.known(accelerator.generation, program.lora is not None)
    seconds = times.seconds * factor
    needed = model_flops(program, rows(program) * program.recipe.data.max_length) / accelerator.devices
    peak = accelerator.peak_flops_per_device
    return Estimate(
        layers=program.architecture.num_layers,
        compiled_layers=() if end is None else (end.layers,),
        scheduled_layers=scheduled,
        memory=used,
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
        compile_seconds=sum(compiled.trace_seconds + compiled.compile_seconds for compiled in compiles),
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
OF_ROLLOUTS = ("rollout.axes", "rollout.rows")
"""The same of a recipe that generates completions."""
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
    on_first: Callable[[Plan], None] | None = None,
) -> Plan:
    """Plan a program.

    Args:
        sets: the --set arguments of its recipe.
        exact: compile all layers to the end.
        data: statistics of the recipe's data, or why there are none.
        backend: the backend whose step is compiled.
        on_first: called with a plan of the first estimate as soon as there is one, while all layers are
            scheduled. Not called if the plan's own compiles are in the cache, or if all layers are compiled
            to the end.

    Raises:
        ArtifactError: when it cannot be compiled.
        KeyboardInterrupt: after Ctrl-C; finished compiles are in the cache.
    """
    start = time.monotonic()
    check_target(program, backend)
    compiles, rolled = parts(program, exact), rollout_parts(program, backend)
    first = None
    if on_first is not None and not _kept(program, sets, compiles.whole, backend):
        first = first_parts(program, compiles, backend)
    early = () if first is None else first.every
    every = list(dict.fromkeys((*early, *compiles.refined)))
    results: dict[Part, Compiled] = {}
    rollouts: dict[Part, Compiled] = {}
    fresh: list[Part] = []
    estimates: list[Estimate] = []

    def planned(estimated: Estimate) -> Plan:
        seconds = time.monotonic() - start
        generates = generation(program)
        if generates is not None and rolled and len(rollouts) == len(rolled):
            generates = compiled_generation(program, generates, rollouts, estimated.memory)
        return _plan(program, estimated, data, backend, generates, cached=not fresh, seconds=seconds)

    def on_done(index: int, result: Compiled | Failed, from_cache: bool) -> None:
        if isinstance(result, Failed):
            return
        part = (*every, *rolled)[index]
        (results if index < len(every) else rollouts)[part] = result
        if not from_cache:
            fresh.append(part)
        if on_first and first and not estimates and all(part in results for part in early):
            estimates.append(first_estimate(program, first, results))
            on_first(planned(estimates[0]))

    jobs = [job(program, sets, part, backend) for part in every]
    jobs += [job(program, sets, part, backend, generates=True) for part in rolled]
    compiled_or_raise(compile_jobs(jobs, progress, on_done=on_done, urgent=len(early)))
    final = planned(estimate(program, [results[part] for part in compiles.refined]))
    return replace(
        final, notes=(*final.notes, *(difference(estimate, final.estimate) for estimate in estimates))
    )


def _plan(
    program: Program,
    estimated: Estimate,
    data: Statistics | Unavailable | None,
    backend: Backend,
    rolled: Generation | None,
    **of_compiles: Any,
) -> Plan:
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
        run=planned_length(program, estimated, data, rolled),
        placements=placements(program, backend),
        settings=settings(program),
        versions=identity.versions(backend),
        notes=tuple(_notes(program, backend)),
        backend=backend.value,
        generation=rolled,
        **of_compiles,
    )


def _notes(program: Program, backend: Backend) -> Iterator[str]:
    if backend is not Backend.TUNIX:
        yield UNMEASURED
    if (mask := mask_of_pictures(program)) is not None:
        sentence = str(mask)
        yield f"{sentence[0].upper()}{sentence[1:]}."


def _kept(program: Program, sets: Sequence[str], part: Part, backend: Backend) -> bool:
    """Return whether the result of a compile is in the cache."""
    return cached(identity.name(*job(program, sets, part, backend))) is not None


def difference(first: Estimate, final: Estimate) -> str:
    """Say how a first estimate differs from the plan's own figures."""
    layers = listing([str(count) for count in first.scheduled_layers])
    figures = [f"{gib(first.memory.used)} of HBM ({_signed(first.memory.used / final.memory.used)})"]
    if first.seconds and final.seconds:
        figures.append(f"{ms(first.seconds)} a micro-batch ({_signed(first.seconds / final.seconds)})")
    return f"The first estimate, from schedules of {layers} layers, was {listing(figures)}."


def _signed(ratio: float) -> str:
    """Write a ratio as the difference from 1: "+0.4 %"."""
    return f"{100 * (ratio - 1):+.1f} %"


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
    jobs = [job(program, sets, part, backend) for part in parts(program).refined]
    results = compile_jobs(jobs, progress)
    if any(isinstance(result, Failed) for result in results):
        return None
    return estimate(program, compiled_or_raise(results))


def job(
    program: Program,
    sets: Sequence[str],
    part: Part,
    backend: Backend = Backend.TUNIX,
    generates: bool = False,
) -> tuple[Program, Job]:
    """Return the job of one compile: of a program's step, or of its program that generates completions."""
    source = Path(program.source).resolve()
    return program, Job(source, tuple(sets), part.layers, backend, part.scheduled, generates)


def settings(program: Program) -> dict[str, str]:
    """Return the recipe's values of the keys that a search varies."""
    values = program.recipe.model_dump(mode="json")
    out = {}
    for path in (*SEARCHED, *(OF_ROLLOUTS if program.generated is not None else ())):
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
    placed = [Placement(*key, count=len(sizes), bytes=sum(sizes)) for key, sizes in groups.items()]
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
