"""How long the compiled serving step takes: an estimate, from the compiler's cycles and from bytes.

Operations are those cycles at the chip's clock. What has no cycles is added on paper: what the attention
kernel reads of the key/value cache, its matrix products in a prefill, and the collectives.

The points of a recipe's benchmark follow. A replica is taken to do nothing but decode and take in prompts,
one after the other, without a pause; what the host and the scheduler add is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipec.compiler.lowering import hardware
from recipec.compiler.plan.serve.hlo import attention_kernel
from recipec.compiler.plan.serve.job import ServeProgram
from recipec.compiler.plan.serve.results import ServingPoint
from recipec.runtime.model.families.base import FULL, SLIDING

KERNEL_EFFICIENCY = 0.5
"""Of the peak, that the attention kernel's matrix products are taken to reach."""


@dataclass(frozen=True)
class Machine:
    """A device.

    Attributes:
        bandwidth: of its memory, bytes/s.
        peak: FLOP/s in bfloat16.
    """

    bandwidth: float
    peak: float


def machine(generation: str) -> Machine:
    """A device of a generation."""
    data = hardware.generations()[generation]
    per_chip = data["devices_per_chip"]
    return Machine(data["hbm_gb_per_s"] * 1e9 / per_chip, data["bf16_tflops"] * 1e12 / per_chip)


@dataclass(frozen=True)
class Steps:
    """The compiled steps of a whole model, and the machine that they run on.

    Attributes:
        decode, prefill, head: the programs.
        token_bytes: of the cache on one device, for a token in one layer, by the layer's type.
        weights: bytes of a device.
        attention_width: query heads times head size, summed over the layers, on one device.
        windowed_width: of it, what belongs to layers with a window.
        window: tokens that those see, 0 where there are none.
        machine: what it runs on.
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
        """A step that gives each of so many sequences of this many tokens their next one."""
        reads = sequences * cache_reads(self.decode, self.token_bytes, context)
        return self._fixed(self.decode) + reads / self.machine.bandwidth

    def prefill_seconds(self, tokens: float, context: float = 0.0) -> float:
        """A step that takes in so many tokens of a prompt, after `context` earlier ones.

        It takes as long as the compiled one in proportion to the tokens, and no less than a decode step: the
        weights have to be read.
        """
        low, high = self._fixed(self.decode), self._fixed(self.prefill)
        fixed = max(low, high * tokens / self.prefill.tokens)
        return fixed + self._attention_seconds(tokens, context)

    def prompt_seconds(self, tokens: int, step_tokens: int) -> float:
        """A whole prompt, in as many steps as the server's limit makes of it."""
        seconds, done = 0.0, 0
        while done < tokens:
            size = min(step_tokens, tokens - done)
            seconds += self.prefill_seconds(size, done)
            done += size
        return seconds

    def _fixed(self, program: ServeProgram) -> float:
        """What does not hang on the context. Weights are read once in any case."""
        timeline = program.timeline
        work = max(timeline.products + timeline.memory, self.weights / self.machine.bandwidth)
        return work + timeline.exposed + self.head.timeline.seconds

    def _attention_seconds(self, tokens: float, context: float) -> float:
        """Scores and their product with the values, of the causal half; windows cut what is further back."""
        seen = context + tokens / 2
        full = self.attention_width - self.windowed_width
        width = full * seen + self.windowed_width * min(seen, self.window or seen)
        return 4 * tokens * width / (KERNEL_EFFICIENCY * self.machine.peak)


def cache_reads(program: ServeProgram, token_bytes: dict[str, float], context: float) -> float:
    """Bytes of the cache that a device reads for one sequence's next token.

    The kernel fetches blocks; those wholly before a layer's window are skipped, and no part of a block.
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
"""Of the search for how many requests are under way at a rate."""


def point(
    steps: Steps,
    prompt: int,
    answer: int,
    rate: float | None,
    replicas: int,
    most: float,
    step_tokens: int,
) -> ServingPoint:
    """One point.

    Args:
        prompt, answer: tokens of each request.
        rate: of requests a second over all replicas, None for all at once.
        most: requests that a replica can have under way.
        step_tokens: max_num_batched_tokens.
    """
    context = prompt + answer / 2
    first = steps.prompt_seconds(prompt, step_tokens)
    most = max(1.0, most)

    def capacity(sequences: float) -> float:
        """Requests a second of a replica that has so many under way all the time."""
        return 1 / (first + answer * steps.decode_seconds(sequences, context) / sequences)

    def between_tokens(sequences: float, arriving: float) -> float:
        """Seconds between tokens, when prompts take their share of the time."""
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
