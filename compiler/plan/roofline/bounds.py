"""Lower bounds of serving times, from the limits of the memory, the matrix units and the links.

A bound leaves out other costs of a server: scheduling, sampling, padding to buckets, waiting, and operations
that reach none of these limits. Measured times are longer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.bound import seen_pairs
from recipec.compiler.plan.roofline.memory import (
    caches,
    pair_flops,
    read_by_blocks,
    read_bytes,
    sequence_bytes,
    weights,
    windows_bound,
)
from recipec.compiler.plan.roofline.results import Cache, Load, StepBounds, Weights
from recipec.compiler.serving.memory import memory_share

ALL_REDUCES = 2
"""All-reduces of each layer: after the output projection of attention, and after that of the MLP."""
ACTIVATION_BYTES = 2
ROUNDS = 200
"""Iterations, at most, to find how many requests are handled at once."""
SETTLED = 1e-6


@dataclass(frozen=True)
class Limits:
    """How many sequences and tokens fit a replica at once.

    Attributes:
        longest: max_model_len.
        cache_bytes: bytes of a device for the cache; 0 when the weights take all.
        bounded: the argument `bounded` of `cache.sequence_bytes`.
        sequence_bytes: bytes of a device that a sequence of max_model_len takes.
    """

    longest: int
    cache_bytes: float
    bounded: int | None
    sequence_bytes: float

    @property
    def sequences_fit(self) -> int:
        """Sequences of max_model_len that the cache holds at once."""
        return int(self.cache_bytes // self.sequence_bytes)

    @property
    def tokens_fit(self) -> int:
        """Tokens of such sequences that the cache holds."""
        return int(self.cache_bytes * self.longest // self.sequence_bytes)


@dataclass(frozen=True)
class Server:
    """The figures of one device of a replica, from which the bounds are computed."""

    program: Program
    weights: Sequence[Weights]
    caches: Sequence[Cache]
    tensor_parallel: int
    peak_flops: float
    bandwidth: float
    link_bandwidth: float

    @functools.cached_property
    def limits(self) -> Limits:
        """How many sequences and tokens fit a replica at once.

        Raises:
            ArtifactError: when a flag's value is invalid.
        """
        serve, accelerator = self.program.recipe.server, self.program.serve_accelerator
        assert accelerator is not None
        usable = accelerator.hbm_bytes_per_device * memory_share(serve.extra_args)
        bounded = serve.max_num_batched_tokens if windows_bound(self.program, self.caches) else None
        return Limits(
            longest=serve.max_model_len,
            cache_bytes=max(0.0, usable - sum(one.bytes for one in self.weights)),
            bounded=bounded,
            sequence_bytes=sequence_bytes(self.caches, serve.max_model_len, bounded),
        )

    def decode(self, sequences: float, context: float) -> StepBounds:
        """Return a decode step, which adds a token to each sequence.

        Args:
            context: tokens that each sequence sees.
        """
        serve = self.program.recipe.server
        seen = self._attention([min(context, window) for window in self._windows()])
        return self._step(
            sequences=sequences,
            tokens=context,
            weight_bytes=self._read_weights(sequences),
            cache_bytes=sequences * read_bytes(self.caches, context),
            whole_cache_bytes=sequences * read_by_blocks(self.caches, serve, context),
            flops=sequences * (2 * self._sum("per_token") + 2 * self._sum("per_sample") + seen),
            handled=sequences,
        )

    def prefill(self, prompt: int, batched: int) -> StepBounds:
        """Return the prefill of one prompt, up to its first token, in steps of at most `batched` tokens.

        Writing the cache is counted. Reading it in later steps is left out.
        """
        written = sequence_bytes(self.caches, prompt, None)
        a = self.program.architecture
        seen = self._attention(
            [seen_pairs(a, i, prompt) if a.scores(i) else 0.0 for i in range(a.num_layers)]
        )
        return self._step(
            sequences=1,
            tokens=prompt,
            weight_bytes=-(-prompt // batched) * self._read_weights(min(prompt, batched)),
            cache_bytes=written,
            whole_cache_bytes=written,
            flops=prompt * 2 * self._sum("per_token") + 2 * self._sum("per_sample") + seen,
            handled=prompt,
        )

    def _step(
        self,
        sequences: float,
        tokens: float,
        weight_bytes: float,
        cache_bytes: float,
        whole_cache_bytes: float,
        flops: float,
        handled: float,
    ) -> StepBounds:
        """Return a step with its times.

        Args:
            handled: tokens whose hidden states the all-reduces sum.
        """
        a, tp = self.program.architecture, self.tensor_parallel
        # A ring does a reduce-scatter and an all-gather. In each, a device sends and receives (tp - 1) / tp
        # of the array.
        array = handled * a.hidden_size * ACTIVATION_BYTES
        reduced = ALL_REDUCES * a.num_layers * 4 * (tp - 1) / tp * array
        memory = (weight_bytes + cache_bytes) / self.bandwidth
        compute = flops / self.peak_flops
        links = reduced / self.link_bandwidth
        return StepBounds(
            sequences=sequences,
            tokens=tokens,
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            whole_cache_bytes=whole_cache_bytes,
            flops=flops,
            all_reduce_bytes=reduced,
            memory_seconds=memory,
            compute_seconds=compute,
            all_reduce_seconds=links,
            bound_seconds=max(memory, compute, links),
            estimate_seconds=max((weight_bytes + whole_cache_bytes) / self.bandwidth, compute) + links,
        )

    def _sum(self, field: str) -> float:
        return sum(float(getattr(one, field)) for one in self.weights)

    def _read_weights(self, tokens: float) -> float:
        """Return the bytes of weights that a step reads, with tokens routed evenly to experts."""
        used = 1.0
        experts, chosen = self.program.architecture.routing
        if experts:
            used = 1 - (1 - chosen / experts) ** tokens
        return sum(one.read_bytes * (used if one.name == "experts" else 1.0) for one in self.weights)

    def _windows(self) -> list[float]:
        """Return the most tokens that each layer sees: infinite without a window, 0 without scores."""
        a = self.program.architecture
        return [float(a.window(i) or "inf") if a.scores(i) else 0.0 for i in range(a.num_layers)]

    def _attention(self, pairs: Sequence[float]) -> float:
        """Return attention's FLOPs, of scores and of values, from the query-key pairs in each layer."""
        a = self.program.architecture
        return sum(pair_flops(a, layer) / self.tensor_parallel * count for layer, count in enumerate(pairs))


def server_of(program: Program) -> Server:
    """Return one replica of the server of a recipe with a `serve` section."""
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    return Server(
        program=program,
        weights=weights(program),
        caches=caches(program),
        tensor_parallel=serve.tensor_parallel_size,
        peak_flops=accelerator.peak_flops_per_device,
        bandwidth=accelerator.bandwidth_per_device,
        link_bandwidth=(accelerator.ici_gb_per_s or 0) * 1e9 / accelerator.devices_per_chip,
    )


def load(
    server: Server,
    prompt: int,
    answer: int,
    rate: float | None,
    prompts: int,
    usd_per_hour: float | None,
) -> Load:
    """Return the bounds of one of the benchmark's points.

    A sequence is assumed to hold half of its answer on average. If the rate is the limit, Little's law gives
    the requests that are handled at once: the rate times the lower bound of a request's duration.

    Args:
        prompt, answer: tokens of a request.
        rate: requests per second over all replicas, None for all at once.
        prompts: requests of the measurement.
        usd_per_hour: price of the whole machine, None without a price.
    """
    context, limits, serve = prompt + answer / 2, server.limits, server.program.recipe.server
    replicas = serve.data_parallel_size
    most, limited_by = min(
        (limits.cache_bytes / sequence_bytes(server.caches, context, limits.bounded), "cache"),
        (float(serve.max_num_seqs), "max_num_seqs"),
        (prompts / replicas, "prompts"),
    )
    first = server.prefill(prompt, serve.max_num_batched_tokens)
    concurrency = most
    if rate is not None:
        arriving = rate / replicas
        under_way = 0.0
        for _ in range(ROUNDS):
            further = (answer - 1) * server.decode(max(under_way, 1.0), context).bound_seconds
            before, under_way = under_way, min(arriving * (first.bound_seconds + further), most)
            if under_way - before < SETTLED:
                break
        if under_way < most:
            concurrency, limited_by = under_way, "rate"
    step = server.decode(max(concurrency, 1.0), context)
    tokens = replicas * _throughput(server, first, most, context, answer)
    if rate is not None:
        tokens = min(tokens, rate * answer)
    return Load(
        input_length=prompt,
        output_length=answer,
        request_rate=rate,
        concurrency=concurrency * replicas,
        limited_by=limited_by,
        ttft_seconds=first.bound_seconds,
        tpot_seconds=step.bound_seconds,
        tokens_per_second=tokens,
        usd_per_million_tokens=None if usd_per_hour is None else usd_per_hour / 3600 / tokens * 1e6,
    )


def _throughput(server: Server, first: StepBounds, sequences: float, context: float, answer: int) -> float:
    """Return the output tokens per second of a replica that is always full.

    Prompts share their steps with decoding. So they add arithmetic and all-reduces, but no reads of weights.
    """
    step = server.decode(sequences, context)
    seconds = max(
        answer * step.memory_seconds,
        answer * step.compute_seconds + sequences * first.compute_seconds,
        answer * step.all_reduce_seconds + sequences * first.all_reduce_seconds,
    )
    return sequences * answer / seconds
