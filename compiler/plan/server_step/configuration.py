"""Plan one configuration of a server by compiling it: its memory, its speed, and published figures.

The compiler's cycles at the chip's clock give the time of operations. Three costs without cycles are computed
from shapes: the attention kernel's reads of the key/value cache, its matrix products in a prefill, and the
collectives.

The times of the steps give the points of a recipe's benchmark. A replica is assumed to run decode steps and
prefill steps one after the other, without a pause. The time of the host and the scheduler is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import pins
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import gb_number
from recipec.compiler.plan.server_step.compile import Run, Say, compile_program, extrapolated, padded
from recipec.compiler.plan.server_step.hlo import attention_kernel
from recipec.compiler.plan.server_step.server_plan import (
    Bucket,
    CompiledServing,
    ServeAnswer,
    ServeJob,
    ServeProgram,
    ServingPoint,
)
from recipec.compiler.roofline.server_memory import pair_flops
from recipec.compiler.vllm import blocks
from recipec.compiler.vllm import published as figures
from recipec.runtime.model.families.family import FULL, SLIDING

KERNEL_EFFICIENCY = 0.5
"""Assumed share of the peak that the attention kernel's matrix products reach."""


@dataclass(frozen=True)
class Steps:
    """The compiled steps of a whole model, and the rates of the devices that they run on.

    Attributes:
        decode, prefill, head: the programs.
        token_bytes: bytes of the cache on one device for a token in one layer, by the layer's type.
        weights: bytes of the weights on one device.
        attention_width: query heads times the mean size of a head's keys and values, summed over the layers,
            on one device.
        windowed_width: the part of `attention_width` in layers with a window.
        window: tokens that layers with a window see; 0 without such layers.
        bandwidth, peak: of a device, bytes/s of its memory and FLOP/s in bfloat16.
    """

    decode: ServeProgram
    prefill: ServeProgram
    head: ServeProgram
    token_bytes: dict[str, float]
    weights: float
    attention_width: float
    windowed_width: float
    window: int
    bandwidth: float
    peak: float

    def decode_seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of a decode step of `sequences` sequences with `context` tokens each."""
        reads = sequences * cache_reads(self.decode, self.token_bytes, context)
        return self._fixed(self.decode) + reads / self.bandwidth

    def prefill_seconds(self, tokens: float, context: float = 0.0) -> float:
        """Return the seconds of a prefill step of `tokens` prompt tokens, after `context` earlier tokens.

        The compiled step's time is scaled by the tokens. The result is at least the time of a decode step,
        because the weights must be read.
        """
        low, high = self._fixed(self.decode), self._fixed(self.prefill)
        fixed = max(low, high * tokens / self.prefill.tokens)
        return fixed + self._attention_seconds(tokens, context)

    def prompt_seconds(self, tokens: int, step_tokens: int) -> float:
        """Return the seconds of a whole prompt, in steps of at most `step_tokens` tokens."""
        seconds, done = 0.0, 0
        while done < tokens:
            size = min(step_tokens, tokens - done)
            seconds += self.prefill_seconds(size, done)
            done += size
        return seconds

    def _fixed(self, program: ServeProgram) -> float:
        """Return the part of a step's seconds that does not depend on the context.

        It is at least the time to read the weights once.
        """
        timeline = program.timeline
        work = max(timeline.products + timeline.memory, self.weights / self.bandwidth)
        return work + timeline.exposed + self.head.timeline.seconds

    def _attention_seconds(self, tokens: float, context: float) -> float:
        """Return the seconds of attention's products, under the causal mask and the layers' windows."""
        seen = context + tokens / 2
        full = self.attention_width - self.windowed_width
        width = full * seen + self.windowed_width * min(seen, self.window or seen)
        return 4 * tokens * width / (KERNEL_EFFICIENCY * self.peak)


def cache_reads(program: ServeProgram, token_bytes: dict[str, float], context: float) -> float:
    """Return the bytes of the cache that a device reads for one sequence's next token.

    The kernel reads whole blocks. It skips only blocks that are entirely before a layer's window.
    """
    total = 0.0
    for name, count in program.kernels:
        kernel = attention_kernel(name)
        if kernel is None or not kernel.decode:
            continue
        skipped = 0.0
        if kernel.window is not None:
            skipped = max(0.0, context - kernel.window) // kernel.block * kernel.block
        kind = FULL if kernel.window is None else SLIDING
        size = token_bytes.get(kind, max(token_bytes.values()))
        total += count * size * (context - skipped)
    return total


ROUNDS = 60
"""Iterations to find how many requests are handled at once at a rate."""


def point(
    steps: Steps,
    prompt: int,
    answer: int,
    rate: float | None,
    replicas: int,
    most: float,
    step_tokens: int,
) -> ServingPoint:
    """Estimate one point of the benchmark.

    Args:
        prompt, answer: tokens of each request.
        rate: requests a second over all replicas, None for all at once.
        replicas: number of replicas.
        most: requests that a replica can handle at once.
        step_tokens: max_num_batched_tokens.
    """
    context = prompt + answer / 2
    first = steps.prompt_seconds(prompt, step_tokens)
    most = max(1.0, most)

    def capacity(sequences: float) -> float:
        """Return the requests a second of a replica that always handles `sequences` requests."""
        return 1 / (first + answer * steps.decode_seconds(sequences, context) / sequences)

    def between_tokens(sequences: float, arriving: float) -> float:
        """Return the seconds between tokens, when prompts take their share of the time."""
        return steps.decode_seconds(sequences, context) / (1 - arriving * first)

    saturated = rate is None or rate / replicas >= capacity(most)
    if saturated:
        sequences, arriving = most, capacity(most)
    else:
        assert rate is not None
        arriving, sequences = rate / replicas, 1.0
        for _ in range(ROUNDS):
            latency = first + (answer - 1) * between_tokens(max(sequences, 1.0), arriving)
            sequences = min(most, arriving * latency)
    return ServingPoint(
        input_length=prompt,
        output_length=answer,
        request_rate=rate,
        concurrency=sequences * replicas,
        ttft=first,
        tpot=between_tokens(max(sequences, 1.0), arriving),
        tokens_per_second=arriving * answer * replicas,
        saturated=saturated,
    )


BLOCKS = blocks.VARIABLE


def serving(
    program: Program,
    exact: bool = False,
    say: Say = print,
    run: Run | None = None,
    data_parallel: int | None = None,
    prefill: ServeProgram | None = None,
    **changes: Any,
) -> CompiledServing:
    """Plan the recipe's configuration with changes.

    Args:
        exact: compile every layer, instead of extrapolating from two depths.
        say: called with progress messages.
        run: answers a job in place of a worker.
        data_parallel: replicas; the recipe's when None.
        prefill: a prefill step with the same parallelism that is already compiled. If given, only the decode
            step is compiled.
        changes: fields of the job that differ from the recipe.

    Raises:
        ArtifactError: the configuration cannot be compiled.
    """
    if prefill is not None:
        changes["buckets"] = (Bucket("decode", padded(program.recipe.server.max_num_seqs)),)
    job, done, notes = compile_program(program, exact, say, run, **changes)
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    replicas = data_parallel or serve.data_parallel_size
    layers = program.architecture.num_layers
    weights, page, programs = extrapolated(done, layers)
    refusal = next((p.refusal for p in (*programs, done.head) if p.refusal), None)
    arguments = max(p.arguments for p in programs)
    if prefill is not None:
        programs = (*programs, prefill)
    used = arguments + max(p.temporaries + p.code + p.outputs for p in programs)
    planned = CompiledServing(
        recipe=program.name,
        model=program.recipe.model.id,
        accelerator=accelerator.name,
        topology=job.topology,
        tensor_parallel=job.tensor_parallel,
        data_parallel=replicas,
        kv_cache_dtype=job.kv_cache_dtype,
        decode_blocks=dict(job.environment).get(BLOCKS),
        layers=layers,
        compiled_layers=tuple(depth.layers for depth in done.depths),
        weights=weights,
        cache=page * done.pages,
        cache_tokens=done.pages * done.page_tokens,
        page_tokens=done.page_tokens,
        programs=(*programs, done.head),
        used=used,
        available=job.hbm_bytes,
        refusal=refusal,
        points=(),
        decode_alone=0.0,
        decode_full=0.0,
        published=(),
        versions=dict(pins.sets()["serve"]),
        notes=tuple([*notes, *_notes(job, done, blocks.batched_kernel(serve))]),
        compile_seconds=done.seconds,
        peak_rss=done.peak_rss,
    )
    return _timed(planned, program, job, done, programs) if planned.fits else planned


def _notes(job: ServeJob, done: ServeAnswer, batched: bool) -> list[str]:
    notes = []
    vision = job.config["architectures"][0].endswith("ForConditionalGeneration")
    if not vision and "text_config" in job.config:
        notes.append("only the text model: the weights of the vision tower are not counted")
    if len(done.depths) > 1:
        depths = " and ".join(str(depth.layers) for depth in done.depths)
        notes.append(f"extrapolated from {depths} layers; --exact compiles all {job.model_layers}")
    if BLOCKS in dict(job.environment):
        notes.append(f"{BLOCKS} was compiled, and is untested on hardware")
    if batched:
        notes.append("the batched attention kernel's reads of the cache are not counted")
    return notes


def _timed(
    planned: CompiledServing,
    program: Program,
    job: ServeJob,
    done: ServeAnswer,
    programs: Sequence[ServeProgram],
) -> CompiledServing:
    """Return the plan with estimates of its times."""
    benchmark = program.recipe.benchmark
    steps = steps_of(program, job, done, programs, planned.weights)
    points: list[ServingPoint] = []
    answer = benchmark.output_length
    for prompt in benchmark.input_lengths:
        if prompt + answer > job.max_model_len:
            continue
        most = min(
            planned.cache_tokens / (prompt + answer),
            float(job.max_num_seqs),
            max(1.0, benchmark.prompts / planned.data_parallel),
        )
        for rate in benchmark.request_rates:
            number = None if isinstance(rate, str) else float(rate)
            load = (number, planned.data_parallel, most, job.max_num_batched_tokens)
            points.append(point(steps, prompt, answer, *load))
    longest = min(max(benchmark.input_lengths) + answer, job.max_model_len)
    full = min(float(job.max_num_seqs), planned.cache_tokens / longest)
    timed = replace(
        planned,
        points=tuple(points),
        decode_alone=steps.decode_seconds(1, min(benchmark.input_lengths)),
        decode_full=steps.decode_seconds(max(1.0, full), longest),
    )
    return replace(timed, published=published(timed, steps, job.max_num_batched_tokens))


def steps_of(
    program: Program, job: ServeJob, done: ServeAnswer, programs: Sequence[ServeProgram], weights: float
) -> Steps:
    """Return the steps of the whole model, for estimates.

    Raises:
        ArtifactError: a step is missing from the answer.
    """
    kinds = {p.kind: p for p in programs}
    if "decode" not in kinds:
        raise ArtifactError("the worker answered without a decode step", "make the serving environment again")
    architecture, accelerator = program.architecture, program.serve_accelerator
    assert accelerator is not None
    windows = [architecture.window(layer) for layer in range(architecture.num_layers)]
    layers = range(architecture.num_layers)
    widths = [pair_flops(architecture, layer) / 4 / job.tensor_parallel for layer in layers]
    return Steps(
        decode=kinds["decode"],
        prefill=kinds.get("prefill", kinds["decode"]),
        head=done.head,
        token_bytes=done.token_bytes,
        weights=weights,
        attention_width=sum(widths),
        windowed_width=sum(w for w, window in zip(widths, windows, strict=True) if window),
        window=max(window or 0 for window in windows),
        bandwidth=accelerator.bandwidth_per_device,
        peak=accelerator.peak_flops_per_device,
    )


def published(planned: CompiledServing, steps: Steps, step_tokens: int) -> tuple[str, ...]:
    """Compare the estimates with the published run's measurements; () if this is another configuration."""
    figures_of_runs = figures.serving()
    parallel = (planned.tensor_parallel, planned.data_parallel)
    if not figures_of_runs.is_of(planned.model, planned.accelerator, *parallel, planned.kv_cache_dtype):
        return ()
    prompt, measured = (
        int(figures_of_runs.median_ttft_ms["input_length"]),
        figures_of_runs.median_ttft_ms["ms"] / 1e3,
    )
    first = steps.prompt_seconds(prompt, step_tokens)
    weights = figures_of_runs.weights_gb_per_chip
    share = planned.weights / (1e9 * weights) - 1
    shortest = min((p.ttft for p in planned.points), default=first)
    longest = max((p.ttft for p in planned.points), default=first)
    return (
        f"weights: {gb_number(planned.weights)} GB a chip, published {weights:.2f} GB ({share:+.1%})",
        "TPOT: a decode step is estimated at "
        + _against(planned.decode_alone, planned.decode_full, figures_of_runs.tpot_ms)
        + "; the load behind each published figure is not known",
        "TTFT: the benchmark's prompts are estimated at "
        + _against(shortest, longest, figures_of_runs.ttft_ms),
        f"TTFT of {prompt:,} tokens: {1e3 * first:.0f} ms estimated, {1e3 * measured:.0f} ms published "
        f"({first / measured - 1:+.0%})",
    )


def _against(low: float, high: float, measured: Mapping[str, float]) -> str:
    lowest, highest = measured["lowest"], measured["highest"]
    return (
        f"{1e3 * low:.1f} to {1e3 * high:.1f} ms, published {lowest:g} to {highest:g} ms "
        f"({1e3 * low / lowest - 1:+.0%} and {1e3 * high / highest - 1:+.0%})"
    )
