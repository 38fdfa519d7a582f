"""Plan a recipe's server on paper: memory, what fits, and lower bounds of time and cost.

The figures come from the model's shapes, the chip's data, and the sources of tpu-inference. Nothing is
compiled or run, so that planning takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.explain.cost import serving_price
from recipec.compiler.lowering import catalog
from recipec.compiler.plan.roofline.bounds import Server, load, server_of
from recipec.compiler.plan.roofline.cache import DTYPES, sequence_bytes
from recipec.compiler.plan.roofline.notes import notes, promise
from recipec.compiler.plan.roofline.results import SERVING_PLAN, Comparison, ServingPlan, Step
from recipec.compiler.plan.roofline.weights import VISION
from recipec.compiler.serving import published
from recipec.compiler.serving.memory import memory_share

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

__all__ = ["SERVING_PLAN", "ServingPlan", "plan_serving", "promise"]

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
    weight_bytes = sum(one.bytes for one in held)
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
            if limits.cache_bytes >= sequence_bytes(kinds, length + benchmark.output_length, limits.bounded)
        ),
        comparisons=tuple(_comparisons(program, server, weight_bytes)),
        notes=tuple(notes(program, kinds, limits.bounded is not None, share)),
    )


def _decode_steps(server: Server, contexts: Sequence[int]) -> Iterator[Step]:
    """Yield decode steps at each context, with one sequence and with as many as the server takes."""
    limits, most = server.limits, server.program.recipe.server.max_num_seqs
    for context in contexts:
        fit = int(limits.cache_bytes // sequence_bytes(server.caches, context, limits.bounded))
        for sequences in sorted({1, max(1, min(most, fit))}):
            yield server.decode(sequences, context)


def _comparisons(program: Program, server: Server, weight_bytes: float) -> Iterator[Comparison]:
    """Yield comparisons with the published measurements of this server, if there are any."""
    serve = program.recipe.server
    assert program.serve_accelerator is not None
    found = published.of_recipe(program.recipe, program.serve_accelerator.name)
    if found is None:
        return
    text = weight_bytes - sum(one.bytes for one in server.weights if one.name == VISION)
    for what, size in (("with the vision tower", weight_bytes), ("text alone", text)):
        name = f"weights on a chip, {what}"
        yield Comparison(name, "GB", found.weights_gb_per_chip, size / 1e9, None)
    point = found.median_ttft_ms
    prompt = int(point["input_length"])
    named = f"{prompt:,} tokens in, {point['requests_per_s']:g} requests/s"
    # The load of the other figures is not published, so bounds are for a nearly empty and a full server.
    for ms, tokens, name in ((point["ms"], prompt, named), (found.ttft_ms["lowest"], *LOWEST_TTFT)):
        yield _compared(f"TTFT: {name}", ms, server.prefill(tokens, serve.max_num_batched_tokens))
    for key, sequences, context in (("lowest", 1, 512), ("highest", 64, 4096)):
        held_against = f"{sequences} x {context:,} tokens"
        step = server.decode(sequences, context)
        yield _compared(f"TPOT: the {key}, compared with {held_against}", found.tpot_ms[key], step)


def _compared(what: str, measured: float, step: Step) -> Comparison:
    return Comparison(what, "ms", measured, step.bound_seconds * 1e3, step.estimate_seconds * 1e3)
