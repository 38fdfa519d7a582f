"""Compile one job for its TPU from shapes alone: the training step of a recipe's train.py, or of another
backend's script, or the program that generates completions.

    python -m recipec.compiler.plan.worker PARENT < JOB.json

PARENT is the process id of the process that started the worker. The worker ends when that process ends.

Each job has its own process for three reasons. libtpu must be told of the machine before jax is imported. A
compile that is killed because memory ran out must not end the command. And memory that a compile leaves
behind is freed. The worker prints one line of JSON: a Compiled, or a Failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lower import lower
from recipec.compiler.lowering.libtpu import flags
from recipec.compiler.lowering.runtime_settings import run_settings
from recipec.compiler.plan import rates
from recipec.compiler.plan.hlo import assigned
from recipec.compiler.plan.hlo.assigned import dump_options, parse_refusal, parse_vmem, untupled
from recipec.compiler.plan.hlo.costs import collectives, costs
from recipec.compiler.plan.hlo.liveness import largest
from recipec.compiler.plan.hlo.parse import parse
from recipec.compiler.plan.hlo.read_schedule import schedule
from recipec.compiler.plan.kernels import KernelSeconds, kernels
from recipec.compiler.plan.results import JOB, RESULT, Compiled, Failed, Job
from recipec.compiler.plan.torus import Torus
from recipec.runtime.errors import UserError, first_line
from recipec.spec.load import load

POLL_SECONDS, STILL_SECONDS = 0.1, 1.0
"""How often a worker looks for libtpu's files, and how long complete files keep their sizes."""

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.plan.hlo.assigned import Assigned


def main() -> None:
    threading.Thread(target=end_without, args=(int(sys.argv[1]),), daemon=True).start()
    job = JOB.validate_json(sys.stdin.read())
    try:
        result = compile_step(job)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    print(RESULT.dump_json(result).decode(), flush=True)
    os._exit(0)  # a compile that is needed only up to its schedule still generates code in its thread


def end_without(parent: int) -> None:
    """End this process when its parent process has ended for any reason."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def compile_step(job: Job) -> Compiled | Failed:
    """Build and compile a job's step."""
    from recipec.runtime.model.sharding import compile_with

    program = lower(load(job.recipe, job.sets), planning=True).program
    if program is None:
        return Failed("the recipe does not pass its checks", help="recipe check shows the errors")
    import jax

    compile_with(flags(program))  # libtpu is loaded with the topology
    if program.recipe.model.dtype == "float32":
        jax.config.update("jax_default_matmul_precision", "highest")  # as runtime.training.train does
    from recipec.compiler.plan import abstract

    accelerator = program.accelerator
    try:
        devices = abstract.devices(accelerator)
    except Exception as error:  # jax raises exceptions of several kinds, with libtpu's own message
        return Failed(
            f"libtpu does not know the topology {accelerator.generation}:{accelerator.topology}: "
            f"{first_line(error)[:600]}",
            help="choose another mesh.accelerator or mesh.topology",
        )
    try:
        return _compile(job, program, devices)
    except UserError as error:
        return Failed(error.message, help=error.help or "")


def _compile(job: Job, program: Program, devices: Any) -> Compiled | Failed:
    import jax

    from recipec.compiler.plan.abstract import abstract_generation, abstract_step, places
    from recipec.runtime.model import sharding

    settings = run_settings(program)
    mesh = sharding.arrange(settings.mesh.axes, devices)
    start = time.monotonic()
    if job.generates:
        run, arguments, mesh, sizes = abstract_generation(program, job.layers, settings, mesh)
        with mesh:
            lowered = run.lower(*arguments)
    else:
        with mesh:
            abstract = abstract_step(program, job.layers, settings, mesh, job.backend)
            lowered, sizes = abstract.step.jit().lower(*abstract.arguments), abstract.sizes
    traced = time.monotonic()
    measured = replace(sizes, trace_seconds=traced - start)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            text, assigned, code = _compiled(lowered, Path(folder), job.scheduled)
            module = untupled(parse(text), Path(folder))
        except jax.errors.JaxRuntimeError as error:
            refused = parse_refusal(str(error), Path(folder))
            if refused is None:
                return _refused(error)
            return replace(measured, compile_seconds=time.monotonic() - traced, out_of_memory=refused)
    accelerator, axes = program.accelerator, dict(mesh.shape)
    torus = Torus.of(accelerator, places(mesh.devices.flat, accelerator.slices))
    times = KernelSeconds(accelerator)
    # With ep, an expert's room is twice as large as the rows that usually arrive, and each half is a branch.
    even = job.generates or axes.get("ep", 1) > 1
    flops, moved = costs(module, even)
    published = rates.published(accelerator, times.seconds)
    steps, prices = schedule(module, published, axes, torus, accelerator.slices, even)
    return replace(
        measured,
        arguments=assigned.arguments,
        temporaries=assigned.temporaries,
        code=code + assigned.rest,
        instructions=assigned.instructions,
        flops=flops,
        bytes=moved,
        schedule=steps,
        prices=prices,
        collectives=collectives(module, axes, accelerator.slices),
        kernels=kernels(module, times, even),
        largest=largest(module)[1],
        compile_seconds=time.monotonic() - traced,
    )


def _refused(error: BaseException) -> Failed:
    if vmem := parse_vmem(str(error)):
        return Failed(
            "the kernel {} needs {} of a core's VMEM, and the step's flags leave it {}".format(*vmem),
            help="another xla.scoped_vmem_kib: XLA chooses a kernel's tiles by it, and exceeds it a little",
        )
    return Failed(f"libtpu refused the step: {first_line(error)[:600]}")


def _compiled(lowered: Any, folder: Path, scheduled: bool) -> tuple[str, Assigned, float]:
    """Return the module's text, its memory, and the bytes of its code.

    With `scheduled`, return as soon as the schedule is written, with 0 bytes of code.
    """
    compiling = ThreadPoolExecutor(1).submit(lowered.compile, compiler_options=dump_options(folder))
    before, since = None, time.monotonic()
    while scheduled and not compiling.done():
        if (written := assigned.sizes(folder)) != before:
            before, since = written, time.monotonic()
        elif written and time.monotonic() - since > STILL_SECONDS:
            return *assigned.scheduled(folder), 0.0
        time.sleep(POLL_SECONDS)
    compiled = compiling.result()
    _, memory = assigned.scheduled(folder)
    return compiled.as_text(), memory, compiled.memory_analysis().generated_code_size_in_bytes


if __name__ == "__main__":
    main()
