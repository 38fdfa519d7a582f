"""What a benchmark measures, from its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runtime.serving import bench_published
from runtime.serving.bench_points import Point, parse_rate
from runtime.serving.bench_published import Published
from runtime.serving.bench_report import Price

POINT_MINUTES = 30.0


@dataclass(frozen=True)
class Sweep:
    """What is measured, where, and what stands beside the figures.

    Attributes:
        url: of the server.
        model: the name that it serves it by.
        tokenizer: of the model: a folder or an id, as vLLM's client sees it.
        points: in their order.
        output_length: of each answer, in tokens.
        prompts: requests of each point.
        results: folder of the results.
        max_model_len: of the recipe, where the server does not tell; None for no limit.
        lock: the artifact's recipe.lock.json.
        accelerator, chips: that the recipe serves on, "v6e-8" and 8; "" and 0 where nothing is known.
        machine: what the user says that the server runs on; "" for nothing.
        price: of an hour of the accelerator.
        own_price: of an hour of whatever is measured, in US$, as the user says; None for nothing.
        published: figures of others on the same accelerator.
        minutes: that a point may take beyond the time in which its requests are sent.
        seed: of the random prompts; None draws one for each point, since a server with prefix caching knows
            prompts that it has seen.
    """

    url: str
    model: str
    tokenizer: str
    points: tuple[Point, ...]
    output_length: int
    prompts: int
    results: Path
    max_model_len: int | None = None
    lock: Path | None = None
    accelerator: str = ""
    chips: int = 0
    machine: str = ""
    price: Price | None = None
    own_price: float | None = None
    published: Published = field(default_factory=Published)
    minutes: float = POINT_MINUTES
    seed: int | None = None


def parsed(argv: Sequence[str] | None) -> tuple[Sweep, str | None]:
    """The sweep, and compose.yaml of the server's container, None where vLLM is on PATH.

    Args:
        argv: without the program's name; None takes the process's.
    """
    arguments = _parser().parse_args(argv)
    return _sweep(arguments), arguments.compose


def _sweep(arguments: argparse.Namespace) -> Sweep:
    points = [Point(n, rate) for n in arguments.input_lengths for rate in arguments.request_rates]
    price = None
    if arguments.accelerator_usd_per_hour is not None:
        price = Price(arguments.accelerator_usd_per_hour, arguments.price_source)
    return Sweep(
        url=arguments.url,
        model=arguments.model,
        tokenizer=arguments.tokenizer,
        points=tuple(dict.fromkeys(points)),
        output_length=arguments.output_length,
        prompts=arguments.prompts,
        results=arguments.results,
        max_model_len=arguments.max_model_len,
        lock=arguments.lock,
        accelerator=arguments.accelerator,
        chips=arguments.chips,
        machine=arguments.machine,
        price=price,
        own_price=arguments.usd_per_hour,
        published=bench_published.published(arguments.published_source, arguments.published),
        minutes=arguments.timeout,
        seed=arguments.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures a server with `vllm bench serve`. An interrupted run goes on where it stopped. "
        "A key, if the server wants one, is read from VLLM_API_KEY.",
    )
    add = parser.add_argument
    add("--url", required=True, help="of the server: http://HOST:PORT")
    add("--model", required=True, metavar="NAME", help="that the server serves the model by")
    add("--tokenizer", required=True, metavar="DIR", help="of the model, as vLLM's client sees it")
    add("--compose", metavar="FILE", help="compose.yaml whose container vLLM is in; without it, on PATH")
    add("--results", required=True, type=Path, metavar="DIR", help="folder of the results")
    add("--input-lengths", required=True, type=_counts, metavar="N,...", help="tokens of a prompt")
    add("--output-length", required=True, type=_count, metavar="N", help="tokens of an answer")
    add("--request-rates", required=True, type=_rates, metavar="R,...", help="requests/s; inf: all at once")
    add("--prompts", required=True, type=_count, metavar="N", help="requests of each point")
    add("--max-model-len", type=_count, metavar="N", help="tokens, where the server does not tell")
    add("--lock", type=Path, metavar="FILE", help="the artifact's recipe.lock.json")
    add("--accelerator", default="", metavar="NAME", help="that the recipe serves on")
    add("--chips", type=_count, default=0, metavar="N", help="of that accelerator")
    add("--accelerator-usd-per-hour", type=_amount, metavar="X", help="its price")
    add("--price-source", default="", metavar="TEXT", help="where that price is from")
    add("--machine", default="", metavar="NAME", help="what the server runs on, where that cannot be seen")
    add("--usd-per-hour", type=_amount, metavar="X", help="price of what the server runs on")
    add("--published-source", default="", metavar="TEXT", help="where published figures are from")
    add(
        "--published",
        action="append",
        nargs="+",
        default=[],
        type=bench_published.published_word,
        metavar="KEY=NUMBER",
        help="a published figure to stand beside these",
    )
    add("--timeout", type=_amount, default=POINT_MINUTES, metavar="MINUTES", help="of a point (%(default)g)")
    add("--seed", type=int, metavar="N", help="of the prompts; by default new ones at every point")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _amount(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _rates(text: str) -> list[str]:
    try:
        return [parse_rate(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
