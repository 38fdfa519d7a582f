"""Compile each job in its own process, as many at a time as the machine has cores and memory for.

Each result is cached as soon as its compile ends, so that an interrupted command continues where it stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from recipec import ROOT
from recipec.compiler import store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.packages import install, require_packages
from recipec.compiler.plan import identity
from recipec.compiler.plan.hlo import assigned
from recipec.compiler.plan.results import COMPILED, JOB, RESULT, Compiled, Failed, Job
from recipec.compiler.wording import listing
from recipec.runtime.process_memory import available_memory

WORKER = ("-P", "-m", "recipec.compiler.plan.worker")
"""-P keeps the working directory out of sys.path, because it may hold another `compiler` package."""
OUTPUT, ERRORS = "stdout", "stderr"
POLL_SECONDS = 0.1
BASE_MEMORY, LAYER_MEMORY = 2.0e9, 0.15e9
"""Estimated bytes that a compile needs, and bytes for each layer. A compile starts only when that much memory
is free. The schedule of all 60 layers of Gemma 4 31B took 5.2 GB; 6 layers compiled to the end, 2.4 GB."""
BASE_SECONDS, LAYER_SECONDS, END_SECONDS = 20.0, 2.0, 15.0
"""A rough estimate of a compile's seconds: in all, for each scheduled layer, and for each layer compiled to
the end. It weighs the compiles of a plan against each other. It foretells no time: on a busy machine, or with
experts, a compile takes several times as long."""

NICE = 10
"""Priority of a compile that is less urgent than others, as `nice` counts."""

STAGES = ((assigned.ASSIGNED, "generating code"), (assigned.BEFORE, "scheduling"))
"""Files that libtpu writes, the latest first, and what it does after it wrote them."""

REFUSED = re.compile(r"Illegal value '([^']*)' specified for flag '([^']+)'")
"""libtpu's message about the value of a flag that it refuses, before it ends the process."""

Progress = Callable[[float, str], None]
"""progress(share of the work that is done, from 0 to 1; a description of the current work). How far a compile
is cannot be seen from outside, so it counts when it ends."""


@dataclass
class _Running:
    """A process that compiles, and the folder of its temporary files and its output."""

    index: int
    job: Job
    process: subprocess.Popen[bytes]
    folder: Path
    started: float = field(default_factory=time.monotonic)


def compile_jobs(
    work: Sequence[tuple[Program, Job]],
    progress: Progress | None = None,
    most: int | None = None,
    on_done: Callable[[int, Compiled | Failed, bool], None] | None = None,
    urgent: int = 0,
) -> list[Compiled | Failed]:
    """Compile each job, or take its result from the cache.

    Args:
        work: each job with its program; jobs start in this order.
        urgent: the first jobs, whose results are waited for: the others leave the processors to them.
        most: processes at a time; the number of cores when None.
        on_done: called with a job's index, its result and whether the result came from the cache.

    Returns:
        The results in the order of the jobs.

    Raises:
        ArtifactError: when something must be compiled and the compiler's packages are not installed.
        KeyboardInterrupt: after the processes were ended; finished results are in the cache.
    """
    names = [identity.name(program, job) for program, job in work]
    results: list[Compiled | Failed | None] = [cached(name) for name in names]
    if on_done:
        for index, result in enumerate(results):
            if result is not None:
                on_done(index, result, True)
    waiting = [index for index, result in enumerate(results) if result is None]
    if waiting:
        require_compiler()
        for backend in {work[index][1].backend for index in waiting}:
            require_backend(backend)
    pool = _Pool([job for _, job in work], most or os.cpu_count() or 1, progress, urgent)

    def done(index: int, result: Compiled | Failed) -> None:
        results[index] = result
        if isinstance(result, Compiled):
            store.put(names[index], COMPILED.dump_json(result).decode())
        if on_done:
            on_done(index, result, False)

    pool.run(waiting, done)
    return [result for result in results if result is not None]


def cached(name: str) -> Compiled | None:
    """Return a result from the cache, or None where it is missing or damaged."""
    text = store.get(name)
    if text is None:
        return None
    try:
        return COMPILED.validate_json(text)
    except ValueError:
        return None


def require_compiler() -> None:
    """Check that the training packages and libtpu are installed, without importing them.

    Raises:
        ArtifactError: names what is missing, and the extra that installs it.
    """
    require_packages("planning", extras=("train", "plan"))
    if find_spec("libtpu") is None:
        raise ArtifactError(
            "planning needs libtpu, whose compiler runs without a TPU, and it is not installed",
            install("train", "plan"),
        )


def require_backend(backend: Backend) -> None:
    """Check that the packages of a backend's step are installed, without importing them.

    Raises:
        ArtifactError: names what is missing, and the extra that installs it.
    """
    wanted = ("torch", "torchax", "peft") if backend is Backend.TORCHAX else ()
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise ArtifactError(
            f"planning the step of {backend.value} needs {listing(missing)}, which cannot be imported",
            install("train", "plan", "torchax"),
        )


class _Pool:
    def __init__(self, jobs: Sequence[Job], most: int, progress: Progress | None, urgent: int) -> None:
        self._jobs = jobs
        self._urgent = urgent
        self._most = most
        self._progress = progress
        self._running: list[_Running] = []
        self._finished = 0.0

    def run(self, waiting: Sequence[int], done: Callable[[int, Compiled | Failed], None]) -> None:
        """Run the jobs with these indices in order, and call `done` with each result."""
        queue = list(waiting)
        total = sum(map(self._work, queue))
        again: list[int] = []
        try:
            while queue or self._running:
                while queue and self._may_start(self._jobs[queue[0]]):
                    self._start(queue.pop(0))
                time.sleep(POLL_SECONDS)
                for item in [item for item in self._running if item.process.poll() is not None]:
                    self._running.remove(item)
                    result = self._result(item)
                    if isinstance(result, Failed) and result.killed and item.index not in again:
                        again.append(item.index)  # retry once, with no other compile running
                        queue.append(item.index)
                        self._most = 1
                        continue
                    self._finished += self._work(item.index)
                    done(item.index, result)
                self._report(total)
        finally:
            self._end()

    def _may_start(self, job: Job) -> bool:
        if not self._running:
            return True
        needed, available = BASE_MEMORY + LAYER_MEMORY * len(job.layers), available_memory()
        return len(self._running) < self._most and (available is None or available > needed)

    def _start(self, index: int) -> None:
        job = self._jobs[index]
        folder = Path(tempfile.mkdtemp(prefix="recipec-"))
        with (folder / OUTPUT).open("wb") as output, (folder / ERRORS).open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, *WORKER, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                env={**environment(), "TMPDIR": str(folder)},
                start_new_session=True,
            )
        assert process.stdin is not None
        if index >= self._urgent > 0:
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICE)
        with suppress(BrokenPipeError):
            process.stdin.write(JOB.dump_json(job))
            process.stdin.close()
        self._running.append(_Running(index, job, process, folder))

    def _result(self, item: _Running) -> Compiled | Failed:
        texts = ((item.folder / name).read_text("utf-8", "replace") for name in (OUTPUT, ERRORS))
        lines, messages = (text.strip().splitlines() for text in texts)
        shutil.rmtree(item.folder, ignore_errors=True)
        return read_result(item.process.returncode, lines[-1] if lines else "", messages)

    def _work(self, index: int) -> float:
        """Return the weight of a job among the others."""
        job = self._jobs[index]
        return BASE_SECONDS + (LAYER_SECONDS if job.scheduled else END_SECONDS) * len(job.layers)

    def _report(self, total: float) -> None:
        if self._progress is None or not total:
            return
        running = listing(
            [f"{len(item.job.layers)} layers ({_stage(item.folder)})" for item in self._running]
        )
        self._progress(self._finished / total, f"compiling {running}" if running else "compiled")

    def _end(self) -> None:
        for item in self._running:
            with suppress(ProcessLookupError):
                os.killpg(item.process.pid, signal.SIGKILL)
            item.process.wait()
            shutil.rmtree(item.folder, ignore_errors=True)
        self._running.clear()


def _stage(folder: Path) -> str:
    """Return what a compile does now, from the files that it wrote."""
    return next((does for name, does in STAGES if next(folder.glob(f"*/{name}"), None)), "tracing")


def read_result(status: int, line: str, messages: Sequence[str]) -> Compiled | Failed:
    """Read the result of a worker that ended.

    Args:
        status: its exit status; below 0, the signal that ended it.
        line: the last line that it printed.
        said: lines of its stderr.
    """
    with suppress(ValueError):
        return RESULT.validate_json(line)
    if status == -signal.SIGKILL:
        return Failed(
            "the compile was killed, most likely because this machine's memory ran out",
            killed=True,
            help="free memory: a compile takes 2 to 10 GB, most of it for the layers; more with --exact",
        )
    if refused := next(filter(None, map(REFUSED.search, messages)), None):
        return Failed(
            f"libtpu does not accept the value {refused[1]} of the flag {refused[2]}",
            help=f"correct xla.flags.{refused[2]}, or LIBTPU_INIT_ARGS if the environment sets it",
            flag=refused[2],
        )
    last = next((text for text in reversed(messages) if text.strip()), f"exit status {status}")
    return Failed(f"the compile ended without a result: {last[:300]}")


def environment() -> dict[str, str]:
    """Return the environment of a process that compiles for a TPU on a machine without one."""
    inherited: Mapping[str, str] = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        # libtpu's lock file keeps processes from sharing a TPU. These processes use none.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
