"""`recipe serve bench`: run the recipe's sweep against the running server; write to results/bench/.

vLLM's client runs inside the container that `recipe serve up` started. With a URL, it runs on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.explain.cost import machine_price
from recipec.compiler.serving import published
from recipec.compiler.serving.container import own_address
from recipec.compiler.terminal import note
from recipec.runtime.serving.bench_points import parse_rate

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.serving.artifacts import ServedArtifact
    from recipec.spec.language import Recipe


def bench(
    artifact: Path,
    url: str | None = None,
    results: Path | None = None,
    tokenizer: str | None = None,
    machine: str | None = None,
    usd_per_hour: float | None = None,
    timeout: float | None = None,
) -> int:
    """Measure a server with the recipe's benchmark. The arguments are the command's.

    Returns:
        The exit status.

    Raises:
        ArtifactError: when there is no server to measure.
    """
    from recipec.compiler.serving.artifacts import open_artifact
    from recipec.runtime.serving import bench as benching
    from recipec.runtime.serving.bench_runner import Processes

    opened = open_artifact(artifact)
    for line in opened.notes:
        note(f"note: {line}")
    words = [word for line in bench_flags(opened.recipe, opened.accelerator) for word in line]
    words += ["--results", str(results or opened.folder / "results" / "bench")]
    words += ["--lock", str(opened.folder / "recipe.lock.json")]
    words += ["--tokenizer", tokenizer or _tokenizer(opened, in_container=url is None)]
    for flag, value in (
        ("--url", url),
        ("--machine", machine),
        ("--usd-per-hour", usd_per_hour),
        ("--timeout", timeout),
    ):
        if value is not None:
            words.append(f"{flag}={value}")
    runner = Processes(("docker", "compose", "--project-name", opened.name, "exec", "-T", "vllm"))
    return benching.main(words, runner if url is None else None)


def _tokenizer(artifact: ServedArtifact, in_container: bool) -> str:
    """Return where vLLM's client finds the tokenizer: the folder or id of the served weights.

    Raises:
        ArtifactError: when the recipe names no place on this machine that has them.
    """
    weights = artifact.container.model
    if in_container or weights.kind == "hub":
        return artifact.container.entrypoint[2]
    if weights.kind == "folder" and weights.address:
        folder = artifact.folder / Path(weights.address).expanduser()
        if (folder / "config.json").is_file():
            return str(folder)
    raise ArtifactError(
        "the weights, whose tokenizer makes the prompts, are not on this machine",
        "name a folder with the model's tokenizer: --tokenizer DIR",
    )


def bench_flags(recipe: Recipe, accelerator: Accelerator) -> list[list[str]]:
    """Return the flags of `runtime.serving.bench` for a recipe, one list for each line of the command.

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
    found = published.of_recipe(recipe, accelerator.name)
    if found is None:
        return
    yield ["--published-source", found.source]
    for length in recipe.benchmark.input_lengths:
        figures = found.by_input_length.get(str(length))
        if figures:
            yield ["--published", f"input={length}", *(f"{key}={value}" for key, value in figures.items())]
    point = found.median_ttft_ms
    if point["input_length"] in recipe.benchmark.input_lengths:
        at = [f"input={point['input_length']}", f"rate={point['requests_per_s']}"]
        yield ["--published", *at, f"median_ttft_ms={point['ms']:g}"]
    tpot = [f"{key}_tpot_ms={found.tpot_ms[key]:g}" for key in ("lowest", "highest")]
    yield ["--published", *tpot]
