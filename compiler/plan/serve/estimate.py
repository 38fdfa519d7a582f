"""Estimate the time of the compiled serving step, from the compiler's cycles and from bytes.

The compiler's cycles at the chip's clock give the time of operations. Three costs without cycles are computed
from shapes: the attention kernel's reads of the key/value cache, its matrix products in a prefill, and the
collectives.

The times of the steps give the points of a recipe's benchmark. A replica is assumed to run decode steps and
prefill steps one after the other, without a pause. The time of the host and the scheduler is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipec.compiler.lowering import hardware
from recipec.compiler.plan.serve.hlo import attention_kernel
from recipec.compiler.plan.serve.job import ServeProgram
from recipec.compiler.plan.serve.results import ServingPoint
from recipec.runtime.model.families.base import FULL, SLIDING

KERNEL_EFFICIENCY = 0.5
"""Assumed share of the peak that the attention kernel's matrix products reach."""


@dataclass(frozen=True)
class Machine:
    """The rates of a device.

    Attributes:
        bandwidth: bandwidth of its memory, bytes/s.
        peak: FLOP/s in bfloat16.
    """

    bandwidth: float
    peak: float


def machine(generation: str) -> Machine:
    """Return the rates of a generation's device."""
    data = hardware.generations()[generation]
    per_chip = data["devices_per_chip"]
    return Machine(data["hbm_gb_per_s"] * 1e9 / per_chip, data["bf16_tflops"] * 1e12 / per_chip)


@dataclass(frozen=True)
class Steps:
    """The compiled steps of a whole model, and the machine that they run on.

    Attributes:
        decode, prefill, head: the programs.
        token_bytes: bytes of the cache on one device for a token in one layer, by the layer's type.
        weights: bytes of the weights on one device.
        attention_width: query heads times the mean size of a head's keys and values, summed over the layers,
            on one device.
        windowed_width: the part of `attention_width` in layers with a window.
        window: tokens that layers with a window see; 0 without such layers.
        machine: the rates of the device.
    """

    decode: ServeProgram
    prefill: ServeProgram
    head: ServeProgram
    token_bytes: dict[str, float]
    weights: float
    attention_width: float
    windowed_width: float
    window: int
    machine: Machine

    def decode_seconds(self, sequences: float, context: float) -> float:
        """Return the seconds of a decode step of `sequences` sequences with `context` tokens each."""
        reads = sequences * cache_reads(self.decode, self.token_bytes, context)
        return self._fixed(self.decode) + reads / self.machine.bandwidth

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
        work = max(timeline.products + timeline.memory, self.weights / self.machine.bandwidth)
        return work + timeline.exposed + self.head.timeline.seconds

    def _attention_seconds(self, tokens: float, context: float) -> float:
        """Return the seconds of attention's products, under the causal mask and the layers' windows."""
        seen = context + tokens / 2
        full = self.attention_width - self.windowed_width
        width = full * seen + self.windowed_width * min(seen, self.window or seen)
        return 4 * tokens * width / (KERNEL_EFFICIENCY * self.machine.peak)


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
