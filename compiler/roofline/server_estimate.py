"""Plan a recipe's server on paper: memory, what fits, and lower bounds of time and cost.

The figures come from the model's shapes, the chip's data, and the sources of tpu-inference. Nothing is
compiled or run, so that planning takes milliseconds.

The bounds follow from the limits of the memory, the matrix units and the links. A bound leaves out other
costs of a server: scheduling, sampling, padding to buckets, waiting, and operations that reach none of these
limits. Measured times are longer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipec.compiler import catalog
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.prices import serving_price
from recipec.compiler.lowering.program import Program
from recipec.compiler.roofline.server_memory import (
    DTYPES,
    LATENT,
    VISION,
    caches,
    missing,
    pair_flops,
    read_by_blocks,
    read_bytes,
    runs_jax_model,
    sequence_bytes,
    state_pool_bytes,
    weights,
    windows_bound,
)
from recipec.compiler.roofline.server_results import Cache, Comparison, Load, ServingPlan, StepBounds, Weights
from recipec.compiler.roofline.training_step import seen_pairs
from recipec.compiler.vllm import published
from recipec.compiler.vllm.device_memory import memory_share
from recipec.compiler.wording import listing, plural
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

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
        caches: the caches that grow with the sequences: all, or without states that have a pool.
        state_bytes: bytes of a device for the pool of states; 0 without one.
        cache_bytes: bytes of a device for the other caches; 0 when the weights take all.
        bounded: the argument `bounded` of `cache.sequence_bytes`.
    """

    longest: int
    caches: tuple[Cache, ...]
    state_bytes: float
    cache_bytes: float
    bounded: int | None

    def taken(self, tokens: float) -> float:
        """Return the bytes of a device that a sequence takes of `cache_bytes`."""
        return sequence_bytes(self.caches, tokens, self.bounded)

    @property
    def sequences_fit(self) -> int:
        """Sequences of max_model_len that the cache holds at once."""
        return int(self.cache_bytes // self.taken(self.longest))

    @property
    def tokens_fit(self) -> int:
        """Tokens of such sequences that the cache holds."""
        return int(self.cache_bytes * self.longest // self.taken(self.longest))


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
        left = max(0.0, usable - sum(weight.bytes for weight in self.weights))
        states = state_pool_bytes(self.caches, serve, left)
        return Limits(
            longest=serve.max_model_len,
            caches=tuple(cache for cache in self.caches if not states or cache.bytes_per_token),
            state_bytes=states,
            cache_bytes=max(0.0, left - states),
            bounded=serve.max_num_batched_tokens if windows_bound(self.program, self.caches) else None,
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
        return sum(float(getattr(weight, field)) for weight in self.weights)

    def _read_weights(self, tokens: float) -> float:
        """Return the bytes of weights that a step reads, with tokens routed evenly to experts."""
        used = 1.0
        experts, chosen = self.program.architecture.routing
        if experts:
            used = 1 - (1 - chosen / experts) ** tokens
        return sum(weight.read_bytes * (used if weight.name == "experts" else 1.0) for weight in self.weights)

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
        (limits.cache_bytes / limits.taken(context), "cache"),
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


LOWEST_TTFT = (512, "the lowest, compared with 512 tokens in")
"""The prompt length for the bound of the lowest published TTFT, and its label."""


def plan_serving(program: Program) -> ServingPlan:
    """Plan the server of a recipe.

    Raises:
        ArtifactError: when the recipe has no `serve` section, or a flag's value is invalid.
    """
    recipe, serve, accelerator = program.recipe, program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        raise ArtifactError(
            f"{program.name} has no section `serve`, and so no server to plan",
            "add one: `recipe schema` lists the keys of serve",
        )
    server = server_of(program)
    kinds, held, limits = server.caches, server.weights, server.limits
    share = memory_share(serve.extra_args)
    weight_bytes = sum(weight.bytes for weight in held)
    price = serving_price(program)
    usd = None if price is None else float(price.usd_per_hour)
    benchmark = recipe.benchmark
    lengths = [n for n in benchmark.input_lengths if n + benchmark.output_length <= serve.max_model_len]
    rates = [None if rate == "inf" else float(rate) for rate in benchmark.request_rates]
    return ServingPlan(
        recipe=program.name,
        model=catalog.title(recipe.model.id),
        accelerator=accelerator.describe(),
        chips=accelerator.chips,
        tensor_parallel=serve.tensor_parallel_size,
        data_parallel=serve.data_parallel_size,
        devices_per_chip=accelerator.devices_per_chip,
        usd_per_hour=usd,
        price_source="" if price is None else price.source,
        weights=tuple(held),
        weight_bytes=weight_bytes,
        caches=tuple(kinds),
        cache_dtype=DTYPES[serve.kv_cache_dtype][0],
        cache_bytes_per_token=sum(kind.bytes_per_token for kind in kinds),
        windows_bound=limits.bounded is not None,
        hbm_bytes=accelerator.hbm_bytes_per_device,
        memory_share=share,
        state_bytes=limits.state_bytes,
        cache_bytes=limits.cache_bytes,
        max_model_len=serve.max_model_len,
        max_num_seqs=serve.max_num_seqs,
        tokens_fit=limits.tokens_fit,
        sequences_fit=limits.sequences_fit,
        decode=tuple(_decode_steps(server, lengths)),
        prefill=tuple(server.prefill(length, serve.max_num_batched_tokens) for length in lengths),
        loads=tuple(
            load(server, length, benchmark.output_length, rate, benchmark.prompts, usd)
            for length in lengths
            for rate in rates
            if limits.cache_bytes >= limits.taken(length + benchmark.output_length)
        ),
        comparisons=tuple(_comparisons(program, server, weight_bytes)),
        notes=tuple(notes(program, kinds, limits.bounded is not None, share)),
    )


def _decode_steps(server: Server, contexts: Sequence[int]) -> Iterator[StepBounds]:
    """Yield decode steps at each context, with one sequence and with as many as the server takes."""
    limits, most = server.limits, server.program.recipe.server.max_num_seqs
    for context in contexts:
        fit = int(limits.cache_bytes // limits.taken(context))
        for sequences in sorted({1, max(1, min(most, fit))}):
            yield server.decode(sequences, context)


def _comparisons(program: Program, server: Server, weight_bytes: float) -> Iterator[Comparison]:
    """Yield comparisons with the published measurements of this server, if there are any."""
    serve = program.recipe.server
    assert program.serve_accelerator is not None
    measurements = published.of_recipe(program.recipe, program.serve_accelerator.name)
    if measurements is None:
        return
    text = weight_bytes - sum(weight.bytes for weight in server.weights if weight.name == VISION)
    for what, size in (("with the vision tower", weight_bytes), ("text alone", text)):
        name = f"weights on a chip, {what}"
        yield Comparison(name, "GB", measurements.weights_gb_per_chip, size / 1e9, None)
    point = measurements.median_ttft_ms
    prompt = int(point["input_length"])
    named = f"{prompt:,} tokens in, {point['requests_per_s']:g} requests/s"
    # The load of the other figures is not published, so bounds are for a nearly empty and a full server.
    for ms, tokens, name in ((point["ms"], prompt, named), (measurements.ttft_ms["lowest"], *LOWEST_TTFT)):
        yield _compared(f"TTFT: {name}", ms, server.prefill(tokens, serve.max_num_batched_tokens))
    for key, sequences, context in (("lowest", 1, 512), ("highest", 64, 4096)):
        held_against = f"{sequences} x {context:,} tokens"
        step = server.decode(sequences, context)
        yield _compared(f"TPOT: the {key}, compared with {held_against}", measurements.tpot_ms[key], step)


def _compared(what: str, measured: float, step: StepBounds) -> Comparison:
    return Comparison(what, "ms", measured, step.bound_seconds * 1e3, step.estimate_seconds * 1e3)


W1006 = Code(
    "W1006",
    "cache too small for one sequence",
    cause="The memory that the weights leave free cannot hold one sequence of max_model_len, by the "
    "estimate. vLLM does not start. `recipe check` gives E0634.",
    cure="Use a smaller max_model_len, or a larger tensor_parallel_size or accelerator.",
)


def too_small(plan: ServingPlan) -> Diagnostic | None:
    """Return warning W1006 if the cache holds no sequence of max_model_len."""
    if plan.sequences_fit:
        return None
    way = "a smaller max_model_len, a larger tensor_parallel_size, or a larger accelerator"
    return Diagnostic(W1006, none_fits(plan.max_model_len, plan.tokens_fit), "serve.max_num_seqs", way)


def notes(program: Program, kinds: Sequence[Cache], windows_bound: bool, share: float) -> Iterator[str]:
    """Yield the notes that apply to this recipe.

    Args:
        share: share of the memory that vLLM uses.
    """
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    yield from _cache_notes(program, kinds, windows_bound)
    if sentence := missing(program):
        yield sentence
    yield (
        f"vLLM takes {share:.0%} of the memory for weights and cache; the rest is for what else a step needs"
    )
    idle = accelerator.devices - serve.tensor_parallel_size * serve.data_parallel_size
    if idle > 0:
        yield f"{plural(idle, 'device')} are idle, but are paid for"
    if serve.quantization or program.recipe.merge.quantization:
        yield "arithmetic is bounded by the peak in bfloat16; a chip that multiplies fp8 may do more"
    if program.architecture.routing[0]:
        yield "experts are read as often as evenly routed tokens need them"
    if program.recipe.model.id.startswith((".", "/", "~")):
        yield f"sizes are from {program.model_origin}"
    left_out = [
        n
        for n in program.recipe.benchmark.input_lengths
        if n + program.recipe.benchmark.output_length > serve.max_model_len
    ]
    if left_out:
        yield (
            f"left out of the benchmark: {listing(f'{n:,}' for n in left_out)} tokens in and "
            f"{program.recipe.benchmark.output_length:,} out are more than max_model_len "
            f"{serve.max_model_len:,}, and vLLM refuses them"
        )


def _cache_notes(program: Program, kinds: Sequence[Cache], windows_bound: bool) -> Iterator[str]:
    serve = program.recipe.server
    tp, fp8 = serve.tensor_parallel_size, serve.kv_cache_dtype.startswith("fp8")
    windows = sorted({kind.window for kind in kinds if kind.window})
    if windows and windows_bound:
        yield f"local layers keep their window of {windows[0]:,} tokens and what a step adds to it"
    elif windows:
        why = (
            "tpu-inference's JAX models allocate every layer alike"
            if runs_jax_model(program)
            else "heads of several sizes, or a flag, prevent that"
        )
        yield f"local layers keep every token, not only their window of {windows[0]:,}: {why}"
    for kind in kinds:
        name = "" if kind.name == "all" else f"{kind.name} "
        if kind.name == LATENT:
            if tp > 1:
                yield f"each of {tp} devices stores the same compressed keys and values"
        elif kind.heads < tp:
            wasted = ", for which eight bits take as much as sixteen" if fp8 else ""
            yield (
                f"{name}layers have {plural(kind.heads, 'key/value head')} for {tp} devices: a device stores "
                f"one{wasted}, and {tp // kind.heads} devices the same"
            )
        elif fp8 and kind.device_heads % 2 and kind.head_dim != 64:
            yield (
                f"{name}layers have {plural(kind.device_heads, 'key/value head')} on a device: in eight bits "
                "an odd number is padded to the next even one"
            )
        if kind.shared:
            yield f"{kind.shared} {name}layers read the keys and values of earlier layers and store none"
    if getattr(program.architecture, "k_eq_v", False):
        yield (
            "keys serve as values only in the weights of the global layers: the cache holds both, which are "
            "normalized and rotated differently"
        )


def none_fits(length: int, tokens: int) -> str:
    """Return the message that a cache of `tokens` tokens holds no sequence of max_model_len."""
    return (
        f"the key/value cache holds {tokens:,} tokens, less than one sequence of max_model_len {length:,}, "
        "and vLLM does not start"
    )
