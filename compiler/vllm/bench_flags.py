"""The flags of the benchmark client, `runtime.clients.bench`, for a recipe."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.prices import machine_price
from recipec.compiler.vllm import published
from recipec.compiler.vllm.container import own_address
from recipec.runtime.clients.bench_points import parse_rate
from recipec.spec.language import Recipe


def bench_flags(recipe: Recipe, accelerator: Accelerator) -> list[list[str]]:
    """Return the flags of `runtime.clients.bench` for a recipe, one list for each line of the command.

    Args:
        accelerator: what the recipe serves on.
    """
    serve, benchmark = recipe.server, recipe.benchmark
    rates = [parse_rate(str(rate)) for rate in benchmark.request_rates]
    return [
        ["--url", f"http://{own_address(serve.host)}:{serve.port}", "--model", recipe.name],
        [
            *("--input-lengths", ",".join(map(str, benchmark.input_lengths))),
            *("--output-length", str(benchmark.output_length)),
        ],
        ["--request-rates", ",".join(rates), "--prompts", str(benchmark.prompts)],
        ["--max-model-len", str(serve.max_model_len)],
        ["--accelerator", accelerator.name, "--chips", str(accelerator.chips)],
        *_price(recipe, accelerator),
        *_published(recipe, accelerator),
    ]


def _price(recipe: Recipe, accelerator: Accelerator) -> Iterator[list[str]]:
    price = machine_price(recipe.cost.serve_usd_per_hour, accelerator)
    if price is not None:
        yield ["--accelerator-usd-per-hour", f"{price.usd_per_hour}", "--price-source", price.source]


def _published(recipe: Recipe, accelerator: Accelerator) -> Iterator[list[str]]:
    """Yield the flags with published figures for the same server, where this recipe measures them too."""
    measurements = published.of_recipe(recipe, accelerator.name)
    if measurements is None:
        return
    yield ["--published-source", measurements.source]
    for length in recipe.benchmark.input_lengths:
        figures = measurements.by_input_length.get(str(length))
        if figures:
            yield ["--published", f"input={length}", *(f"{key}={value}" for key, value in figures.items())]
    point = measurements.median_ttft_ms
    if point["input_length"] in recipe.benchmark.input_lengths:
        at = [f"input={point['input_length']}", f"rate={point['requests_per_s']}"]
        yield ["--published", *at, f"median_ttft_ms={point['ms']:g}"]
    tpot = [f"{key}_tpot_ms={measurements.tpot_ms[key]:g}" for key in ("lowest", "highest")]
    yield ["--published", *tpot]
