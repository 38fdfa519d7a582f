"""Compile the serving step of a recipe: make jobs, run workers, and extrapolate to the whole model."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipec.compiler import store
from recipec.compiler.catalog import architecture_class
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import hardware, pins
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.fewer_layers import period
from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.server_step import environment
from recipec.compiler.plan.server_step.hlo import read
from recipec.compiler.plan.server_step.server_plan import (
    ANSWER,
    JOB,
    Bucket,
    ServeAnswer,
    ServeJob,
    ServeProgram,
)
from recipec.compiler.plan.timeline import combined
from recipec.compiler.vllm import blocks
from recipec.compiler.vllm.device_memory import memory_share
from recipec.compiler.vllm.features import runs_jax_model
from recipec.compiler.vllm.flags import by_flag

PREFILL_TOKENS = 1024
"""The largest prefill step that is compiled, because larger steps take minutes longer. Gemma 4 31B's step of
4,096 tokens has 3.6 % more cycles than four steps of this size."""

HOST_CHIPS = 4
"""Chips of the smallest topology that libtpu describes."""

LEAST_TOKENS = 16
"""Tokens of the server's smallest bucket. Each further bucket is twice as large."""


def job(program: Program, layers: Sequence[int], **changes: Any) -> ServeJob:
    """Return the job to compile for a recipe's `serve` section.

    Args:
        program: the program of a recipe with a `serve` section.
        layers: depths to compile.
        changes: fields of the job that differ from the recipe.

    Raises:
        ArtifactError: the recipe has no `serve` section, or its server cannot be compiled here.
    """
    serve, accelerator = program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        raise ArtifactError("the recipe has no `serve` section", "add one, or plan without --serve")
    _refuse(program)
    size = changes.pop("tensor_parallel", serve.tensor_parallel_size)
    sequences = changes.pop("max_num_seqs", serve.max_num_seqs)
    flags = by_flag(serve.extra_args)
    prefill = min(serve.max_num_batched_tokens, PREFILL_TOKENS)
    vllm = hardware.generations()[accelerator.generation]["vllm"]
    job_of_recipe = ServeJob(
        config=config_of(program),
        model_layers=program.architecture.num_layers,
        layers=tuple(layers),
        generation=accelerator.generation,
        chip=vllm["name"],
        kernel_version=vllm["kernel_version"],
        topology=replica_topology(accelerator.generation, size),
        tensor_parallel=size,
        kv_cache_dtype=serve.kv_cache_dtype,
        max_model_len=serve.max_model_len,
        max_num_seqs=sequences,
        max_num_batched_tokens=serve.max_num_batched_tokens,
        buckets=(Bucket("decode", padded(sequences)), Bucket("prefill", padded(prefill))),
        hbm_bytes=(accelerator.hbm_gib or 0) * 2**30 / accelerator.devices_per_chip,
        memory_share=memory_share(serve.extra_args),
        pages=flags.get("num-gpu-blocks-override"),
        page_tokens=flags.get("block-size"),
        environment=tuple(sorted(blocks.environment(serve).items())),
    )
    return replace(job_of_recipe, **changes)


def _refuse(program: Program) -> None:
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    without = "plan its serving on paper, without --serve"
    config = config_of(program)
    compiled = hardware.supported_by_vllm("advised", "tested")
    if accelerator.generation not in compiled:
        raise ArtifactError(
            f"the serving step is compiled for {', '.join(compiled)}, and not for {accelerator.generation}",
            without,
        )
    if not runs_jax_model(config, serve):
        raise ArtifactError(
            f"tpu-inference serves {architecture_class(config)} by vLLM's PyTorch model, "
            "which is not compiled here",
            without,
        )
    if serve.quantization or (serve.weights == "merged" and program.recipe.merge.quantization):
        raise ArtifactError("the serving step is compiled only with bfloat16 weights", without)


def config_of(program: Program) -> dict[str, Any]:
    """Return the model's config.json, with the fields that transformers needs and the catalog leaves out.

    A configuration from the catalog has no vision tower. Then only the text model is compiled.
    """
    config = copy.deepcopy(dict(program.config))
    text = config.get("text_config", config)
    if len(set(program.architecture.layer_types)) > 1:
        text.update(program.family.kinds(program.config, range(program.architecture.num_layers)))
    serve = program.recipe.serve
    least = serve.max_model_len if serve else 0
    text["max_position_embeddings"] = max(text.get("max_position_embeddings") or 0, least)
    config.setdefault("dtype", "bfloat16")
    if config.get("architectures") == ["Gemma4ForConditionalGeneration"]:
        config.setdefault("tie_word_embeddings", True)
        if not config.get("vision_config"):
            config["architectures"] = ["Gemma4ForCausalLM"]
    return config


def replica_topology(generation: str, devices: int) -> str:
    """Return the smallest topology with at least `devices` devices: "v6e:2x2" for 4.

    A replica may use only some of the topology's devices.
    """
    data = hardware.generations()[generation]
    for shape in data["topologies"]:
        chips = math.prod(map(int, shape.split("x")))
        if chips >= HOST_CHIPS and chips * data["devices_per_chip"] >= devices:
            return f"{generation}:{shape}"
    raise ArtifactError(
        f"{generation} has no topology of {devices} devices", "choose a smaller tensor_parallel_size"
    )


def padded(tokens: int) -> int:
    """Return the size of the server's bucket for `tokens` tokens."""
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def depths(program: Program, exact: bool) -> list[tuple[int, ...]]:
    """Return the depths to compile, best first. The next entry is used if this machine's memory runs out.

    An entry of two depths has whole repeats of the layer pattern. A model whose last layers reuse the keys
    and values of others has no such repeats, and is compiled whole.
    """
    count = program.architecture.num_layers
    unit = period(program.architecture.layer_types)
    unit *= -(-2 // unit)
    short = (unit, 2 * unit)
    if getattr(program.architecture, "kv_shared_layers", 0) or 2 * unit >= count or count % unit:
        return [(count,)]
    return [(count,), short] if exact else [short]


WORKER = Path(__file__).with_name("server_worker.py")
SOURCES = WORKER, WORKER.with_name("hlo.py")
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
        job_of_program = job(program, layers, **changes)
        try:
            return job_of_program, (run or answer)(job_of_program, say), notes
        except WorkerKilled:
            notes.append(
                f"compiling {' and '.join(map(str, layers))} layers was killed by the system, most likely "
                "because this machine's memory ran out"
            )
            say(notes[-1])
    raise ArtifactError(notes[-1], "close other programs, or plan on a machine with more memory")


def answer(job: ServeJob, say: Say) -> ServeAnswer:
    """Return a job's answer from the cache or from a worker.

    Raises:
        ArtifactError: the environment cannot be installed, or the worker failed.
        WorkerKilled: the system killed the worker.
    """
    sources = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES))
    name = store.key("serve", pins.sets()["serve"], sources.hexdigest(), JOB.dump_python(job, mode="json"))
    with suppress(ValueError):
        if kept := store.get(name):
            return ANSWER.validate_json(kept)
    python = environment.make(say)
    with tempfile.TemporaryDirectory(prefix="recipe-serve-") as folder:
        done = parse(run_worker(python, job, Path(folder), say), Path(folder), job)
    store.put(name, ANSWER.dump_json(done).decode())
    return done


def run_worker(python: Path, job: ServeJob, folder: Path, say: Say, timeout: float = TIMEOUT) -> str:
    """Run a worker, and return what it prints. The worker is always killed before this call ends.

    Raises:
        ArtifactError: the worker failed or took too long.
        WorkerKilled: the system killed the worker.
    """
    say(
        f"compiling tpu-inference's step for {job.topology}: {' and '.join(map(str, job.layers))} of "
        f"{job.model_layers} layers, {', '.join(f'{b.kind} of {b.tokens} tokens' for b in job.buckets)}"
    )
    started = time.monotonic()
    with (folder / "stderr").open("w+", encoding="utf-8", errors="replace") as errors:
        command = [str(python), "-P", str(WORKER), str(folder)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        with environment.process_group(command, env=worker_environment(job), **pipes) as process:
            try:
                output, _ = process.communicate(JOB.dump_json(job).decode(), timeout=timeout)
            except subprocess.TimeoutExpired:
                raise ArtifactError(
                    f"compiling the serving step took longer than {timeout / 60:.0f} minutes",
                    "plan without --exact, or on a faster machine",
                ) from None
        if process.returncode == -signal.SIGKILL:
            raise WorkerKilled
        if process.returncode != 0:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line and line[0] not in " -^"]
            reason = lines[-1] if lines else f"exit {process.returncode}"
            raise ArtifactError(f"the serving step could not be compiled: {reason}", "plan without --serve")
    say(f"compiled in {time.monotonic() - started:.0f} s")
    return output


def worker_environment(job: ServeJob) -> dict[str, str]:
    """Return the environment variables of a worker."""
    dropped = ("VLLM_", "PYTHON", "XLA_", "LIBTPU_", "JAX_", "TPU_", "VIRTUAL_ENV")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    return {
        **inherited,
        **dict(job.environment),
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Without these, tpu-inference asks Google Cloud's metadata server, which does not exist here.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": f"{job.generation}-{job.tensor_parallel}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "TPU_NAME": "none",
    }


def parse(output: str, folder: Path, job: ServeJob) -> ServeAnswer:
    """Parse a worker's answer, and add the figures from the texts of its programs.

    Raises:
        ArtifactError: the output is not a valid answer.
    """
    try:
        plain = json.loads(output.strip().rpartition("\n")[2])
        for program in (plain["head"], *(p for depth in plain["depths"] for p in depth["programs"])):
            if name := program.pop("text", None):
                text = (folder / name).read_text(encoding="utf-8")
                program |= read(text, job.topology, job.tensor_parallel)
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
