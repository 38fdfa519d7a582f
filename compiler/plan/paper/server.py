"""A recipe's server on paper: memory, what fits, and lower bounds of time and cost, in milliseconds.

Everything comes from the model's shapes, the chip's figures and what tpu-inference's sources do with them;
nothing is compiled or run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compiler import catalog
from compiler.artifact import ArtifactError
from compiler.checks.serve import MEMORY_SHARE
from compiler.cost import serving_price
from compiler.plan.paper.cache import DTYPES, caches, sequence_bytes, windows_bound
from compiler.plan.paper.notes import notes, promise
from compiler.plan.paper.results import SERVING_PLAN, Comparison, ServingPlan, Step
from compiler.plan.paper.roofline import Limits, Server, load
from compiler.plan.paper.weights import VISION, weights

if TYPE_CHECKING:
    from compiler.program import Program

__all__ = ["SERVING_PLAN", "ServingPlan", "plan_serving", "promise"]

PUBLISHED_MODEL = "Gemma 4 31B"
PUBLISHED_WEIGHTS_GB = 7.75
PUBLISHED_TTFT = (
    (61.0, 4096, "4,096 tokens in, 4 requests/s"),
    (45.0, 512, "the lowest, beside 512 tokens in"),
)
"""ms, and the prompt that a bound is given for."""
PUBLISHED_TPOT = ((13.5, 1, 512, "the lowest"), (24.0, 64, 4096, "the highest"))
"""ms, and the sequences and context that a bound is given for: a server nearly empty, and full."""


def plan_serving(program: Program) -> ServingPlan:
    """Plans the server of a recipe.

    Raises:
        ArtifactError: when the recipe serves nothing, or a flag's value has no meaning.
    """
    recipe, serve, accelerator = program.recipe, program.recipe.serve, program.serve_accelerator
    if serve is None or accelerator is None:
        raise ArtifactError(
            f"{program.name} has no section `serve`, and so no server to plan",
            "add one: `recipe schema` lists the keys of serve",
        )
    held, kinds = weights(program), caches(program)
    share = memory_share(serve.extra_args)
    weight_bytes = sum(one.bytes for one in held)
    room = max(0.0, accelerator.hbm_bytes_per_device * share - weight_bytes)
    bounded = serve.max_num_batched_tokens if windows_bound(program, kinds) else None
    server = Server(
        program=program,
        weights=held,
        caches=kinds,
        tensor_parallel=serve.tensor_parallel_size,
        peak_flops=accelerator.peak_flops_per_device,
        bandwidth=accelerator.bandwidth_per_device,
        link_bandwidth=(accelerator.ici_gb_per_s or 0) * 1e9 / accelerator.devices_per_chip,
    )
    limits = Limits(serve.data_parallel_size, serve.max_num_seqs, serve.max_num_batched_tokens, room, bounded)
    price = serving_price(program)
    usd = None if price is None else float(price.usd_per_hour)
    longest = sequence_bytes(kinds, serve.max_model_len, bounded)
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
        windows_bound=bounded is not None,
        hbm_bytes=accelerator.hbm_bytes_per_device,
        memory_share=share,
        cache_bytes=room,
        max_model_len=serve.max_model_len,
        max_num_seqs=serve.max_num_seqs,
        tokens_fit=int(room * serve.max_model_len // longest),
        sequences_fit=int(room // longest),
        decode=tuple(_decode_steps(server, limits, lengths)),
        prefill=tuple(server.prefill(length, limits.batched) for length in lengths),
        loads=tuple(
            load(server, limits, length, benchmark.output_length, rate, benchmark.prompts, usd)
            for length in lengths
            for rate in rates
            if room >= sequence_bytes(kinds, length + benchmark.output_length, bounded)
        ),
        comparisons=tuple(_comparisons(program, server, weight_bytes)),
        notes=tuple(notes(program, kinds, bounded is not None, share)),
    )


def memory_share(extra_args: dict[str, Any]) -> float:
    """The share of a device's memory that vLLM uses: of the recipe's flags, or vLLM's default.

    Raises:
        ArtifactError: when the flag's value is no share.
    """
    given = {str(name).replace("_", "-"): value for name, value in extra_args.items()}
    value = given.get("gpu-memory-utilization", MEMORY_SHARE)
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise ArtifactError(
            f"serve.extra_args: gpu-memory-utilization is {value!r}, which is no share of the memory",
            f"write a number above 0 and at most 1, for example {MEMORY_SHARE}",
        )
    return share


def _decode_steps(server: Server, limits: Limits, contexts: Sequence[int]) -> Iterator[Step]:
    """At each context: one sequence, and as many as the server takes."""
    for context in contexts:
        fit = int(limits.cache_bytes // sequence_bytes(server.caches, context, limits.bounded))
        for sequences in sorted({1, max(1, min(limits.sequences, fit))}):
            yield server.decode(sequences, context)


def _comparisons(program: Program, server: Server, weight_bytes: float) -> Iterator[Comparison]:
    """To the published measurements, where this is the server that they are of."""
    recipe, serve = program.recipe, program.recipe.serve
    assert serve is not None and program.serve_accelerator is not None
    measured = (
        catalog.title(recipe.model.id) == PUBLISHED_MODEL
        and program.serve_accelerator.name == "v6e-8"
        and (serve.tensor_parallel_size, serve.data_parallel_size) == (8, 1)
        and serve.quantization is None
        and recipe.merge.quantization is None
        and DTYPES[serve.kv_cache_dtype][1] == 1
    )
    if not measured:
        return
    text = weight_bytes - sum(one.bytes for one in server.weights if one.name == VISION)
    for what, size in (("with the vision tower", weight_bytes), ("text alone", text)):
        yield Comparison(f"weights on a chip, {what}", "GB", PUBLISHED_WEIGHTS_GB, size / 1e9, None)
    for ms, prompt, name in PUBLISHED_TTFT:
        step = server.prefill(prompt, serve.max_num_batched_tokens)
        yield _compared(f"TTFT: {name}", ms, step)
    for ms, sequences, context, name in PUBLISHED_TPOT:
        held_against = f"{sequences} x {context:,} tokens"
        yield _compared(f"TPOT: {name}, beside {held_against}", ms, server.decode(sequences, context))


def _compared(what: str, published: float, step: Step) -> Comparison:
    return Comparison(what, "ms", published, step.bound_seconds * 1e3, step.estimate_seconds * 1e3)
