"""Compile the serving step of a recipe: make jobs, run workers, and extrapolate to the whole model."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import store
from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.serve import environment
from recipec.compiler.plan.serve.hlo import FIGURES, read
from recipec.compiler.plan.serve.job import ANSWER, JOB, ServeAnswer, ServeJob, ServeProgram
from recipec.compiler.plan.serve.program import depths, job
from recipec.compiler.plan.timeline import combined

WORKER = Path(__file__).with_name("worker.py")
SOURCES = tuple(WORKER.with_name(f"{name}.py") for name in ("worker", "model", "hlo"))
"""Files that an answer depends on, besides the job."""

TIMEOUT = 3600.0
"""Seconds that a worker may take at most."""

Say = Callable[[str], None]
Run = Callable[[ServeJob, Say], ServeAnswer]


class WorkerKilled(Exception):
    """The system killed a worker, most likely because memory ran out."""


def compile_program(
    program: Program, exact: bool, say: Say, run: Run | None = None, **changes: Any
) -> tuple[ServeJob, ServeAnswer, list[str]]:
    """Compile a program's server at the best depths that this machine has memory for.

    Returns:
        The job that was compiled, its answer, and notes.

    Raises:
        ArtifactError: the server cannot be compiled.
    """
    notes: list[str] = []
    for layers in depths(program, exact):
        made = job(program, layers, **changes)
        try:
            return made, (run or answer)(made, say), notes
        except WorkerKilled:
            notes.append(
                f"compiling {' and '.join(map(str, layers))} layers was killed by the system, most likely "
                "because this machine's memory ran out"
            )
            say(notes[-1])
    raise ArtifactError(notes[-1], "close other programs, or plan on a machine with more memory")


def answer(made: ServeJob, say: Say) -> ServeAnswer:
    """Return a job's answer from the cache or from a worker.

    Raises:
        ArtifactError: the environment cannot be installed, or the worker failed.
        WorkerKilled: the system killed the worker.
    """
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES))
    name = store.key("serve", pins.sets()["serve"], sources.hexdigest(), JOB.dump_python(made, mode="json"))
    with suppress(ValueError):
        if kept := store.get(name):
            return ANSWER.validate_json(kept)
    python = environment.make(say)
    with tempfile.TemporaryDirectory(prefix="recipe-serve-") as folder:
        done = parse(run_worker(python, made, Path(folder), say), Path(folder), made)
    store.put(name, ANSWER.dump_json(done).decode())
    return done


def run_worker(python: Path, made: ServeJob, folder: Path, say: Say, timeout: float = TIMEOUT) -> str:
    """Run a worker, and return what it prints. The worker is always killed before this call ends.

    Raises:
        ArtifactError: the worker failed or took too long.
        WorkerKilled: the system killed the worker.
    """
    say(
        f"compiling tpu-inference's step for {made.topology}: {' and '.join(map(str, made.layers))} of "
        f"{made.model_layers} layers, {', '.join(f'{b.kind} of {b.tokens} tokens' for b in made.buckets)}"
    )
    started = time.monotonic()
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            [str(python), "-P", str(WORKER), str(folder)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=worker_environment(made),
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(JOB.dump_json(made).decode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ArtifactError(
                f"compiling the serving step took longer than {timeout / 60:.0f} minutes",
                "plan without --exact, or on a faster machine",
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode == -signal.SIGKILL:
            raise WorkerKilled
        if process.returncode != 0:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if line and line[0] not in " -^"]
            reason = said[-1] if said else f"exit {process.returncode}"
            raise ArtifactError(f"the serving step could not be compiled: {reason}", "plan without --serve")
    say(f"compiled in {time.monotonic() - started:.0f} s")
    return output


def worker_environment(made: ServeJob) -> dict[str, str]:
    """Return the environment variables of a worker."""
    dropped = ("VLLM_", "PYTHON", "XLA_", "LIBTPU_", "JAX_", "TPU_", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **inherited,
        **dict(made.environment),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Without these, tpu-inference asks Google Cloud's metadata server, which does not exist here.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{made.generation}-{made.tensor_parallel}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_NAME": "none",
    }


def parse(output: str, folder: Path, made: ServeJob) -> ServeAnswer:
    """Parse a worker's answer, and add the figures from the texts of its programs.

    Raises:
        ArtifactError: the output is not a valid answer.
    """
    try:
        plain = json.loads(output.strip().rpartition("\n")[2])
        for program in (plain["head"], *(p for depth in plain["depths"] for p in depth["programs"])):
            if name := program.pop("text", None):
                text = (folder / name).read_text(encoding="utf-8")
                program |= FIGURES.dump_python(read(text, made.topology, made.tensor_parallel))
        return ANSWER.validate_python(plain)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ArtifactError(
            f"the worker's answer cannot be read: {error}", "make the serving environment again"
        ) from None


def extrapolated(done: ServeAnswer, layers: int) -> tuple[float, float, tuple[ServeProgram, ...]]:
    """Return weights, bytes of a page, and programs of the whole model; figures are linear in the depth."""
    first, last = done.depths[0], done.depths[-1]
    share = (layers - first.layers) / (last.layers - first.layers) if last is not first else 0.0

    def line(low: float, high: float) -> float:
        return low + share * (high - low)

    programs = tuple(
        low if low.refusal else high if high.refusal else _between(low, high, line)
        for low, high in zip(first.programs, last.programs, strict=True)
    )
    return line(first.weights, last.weights), line(first.page, last.page), programs


def _between(low: ServeProgram, high: ServeProgram, line: Callable[[float, float], float]) -> ServeProgram:
    kernels, more = dict(low.kernels), dict(high.kernels)
    kinds = {c.kind: c for c in high.collectives}
    before = {c.kind: c for c in low.collectives}
    none = Collective("", (), False, 0, 0.0)
    return replace(
        low,
        arguments=line(low.arguments, high.arguments),
        temporaries=line(low.temporaries, high.temporaries),
        code=line(low.code, high.code),
        outputs=line(low.outputs, high.outputs),
        timeline=combined((low.timeline, high.timeline), lambda pair: line(*pair)),
        collectives=tuple(
            replace(
                kinds[kind],
                count=round(line(before.get(kind, none).count, kinds[kind].count)),
                bytes=line(before.get(kind, none).bytes, kinds[kind].bytes),
            )
            for kind in sorted(kinds)
        ),
        kernels=tuple((name, line(kernels.get(name, 0.0), more[name])) for name in sorted(more)),
        seconds=low.seconds + (high.seconds if high is not low else 0.0),
    )
