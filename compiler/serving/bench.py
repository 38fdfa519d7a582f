"""`recipe serve bench`: the recipe's sweep against the running server, into the artifact's results/bench/.

vLLM's client runs within the container that `recipe serve up` started, or on this machine against a URL.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.explain.cost import machine_price
from recipec.compiler.serving import published
from recipec.compiler.serving.container import own_address
from recipec.compiler.terminal import note
from recipec.compiler.wording import as_typed
from recipec.runtime.errors import UserError
from recipec.runtime.serving.bench_points import parse_rate
from recipec.runtime.serving.bench_runner import PREPARE, START, STOP, TimedOut, tenths

if TYPE_CHECKING:
    from recipec.compiler.lowering.hardware import Accelerator
    from recipec.compiler.serving.artifacts import ServedArtifact
    from recipec.compiler.serving.engine import Engine, FoundContainer
    from recipec.runtime.serving.bench_runner import Runner
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
    """Measures a server over the recipe's benchmark; the arguments are the command's.

    Returns:
        The exit status.

    Raises:
        ArtifactError: when there is no server to measure.
    """
    from recipec.compiler.serving.artifacts import open_artifact
    from recipec.runtime.serving import bench as benching

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
    return benching.main(words, _container(opened) if url is None else None)


def _tokenizer(artifact: ServedArtifact, in_container: bool) -> str:
    """Where vLLM's client finds the tokenizer: with the weights that are served.

    Raises:
        ArtifactError: they are nowhere on this machine that the recipe could know.
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


def _container(artifact: ServedArtifact) -> Runner:
    """The running container of an artifact.

    Raises:
        ArtifactError: there is none, or no engine.
    """
    from recipec.compiler.serving.engine import Engine
    from recipec.compiler.serving.logs import Hider

    engine = Engine.connect(Hider(()))
    found = engine.find(artifact.name)
    if found is None or found.status != "running":
        state = "there is no container" if found is None else f"the container is {found.status}:"
        raise ArtifactError(
            f"{state} {artifact.name}",
            f"start it: recipe serve up {as_typed(artifact.folder)}; or measure another server with --url",
        )
    return InContainer(engine, found)


def bench_flags(recipe: Recipe, accelerator: Accelerator) -> list[list[str]]:
    """The flags of `runtime.serving.bench` that a recipe leads to, in lines that belong together.

    Args:
        accelerator: that the recipe serves on.
    """
    serve, benchmark = recipe.serve, recipe.benchmark
    assert serve is not None
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
    """Figures of others on the same server, of what this recipe measures too."""
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


GONE = 137
"""The exit status of a command whose container ended: that of SIGKILL."""

PATIENCE_SECONDS = 0.2
END_SECONDS = 15.0


class InContainer:
    """A `runtime.serving.bench_runner.Runner`.

    Args:
        engine: that has the container.
        found: the container, running.
    """

    def __init__(self, engine: Engine, found: FoundContainer) -> None:
        self._engine = engine
        self._api = engine.api
        self._found = found

    def check(self) -> None:
        status, _ = self._aside("command -v vllm")
        if status != 0:
            raise UserError(
                f"the container {self._found.name} has no vllm to measure with",
                "give --url, with vllm on PATH: the client of this machine measures then",
            )

    def run(self, folder: str, words: Sequence[str], log: Path, seconds: float) -> int:
        self._aside(PREPARE, folder)
        made = self._start(START, folder, *words)
        with log.open("wb") as file:
            reader = threading.Thread(target=self._copy, args=(made, file), daemon=True)
            reader.start()
            try:
                end = time.monotonic() + seconds
                while reader.is_alive():
                    # In short pieces, so that a signal is noticed.
                    reader.join(PATIENCE_SECONDS)
                    if time.monotonic() > end:
                        raise TimedOut
                return self._status(made)
            finally:
                if reader.is_alive():
                    self._aside(STOP, folder, tenths())
                    reader.join(END_SECONDS)

    def read(self, folder: str, name: str) -> bytes | None:
        status, data = self._aside('cat "$1/$2"', folder, name)
        return data if status == 0 else None

    def remove(self, folder: str) -> None:
        self._aside('rm -rf "$1"', folder)

    def _aside(self, script: str, *arguments: str) -> tuple[int, bytes]:
        """A short command: its exit status and what it wrote to stdout; of a container that ended, GONE."""
        try:
            made = self._start(script, *arguments)
            with self._engine.doing(f"run a command in {self._found.name}"):
                output, _ = self._api.exec_start(made, demux=True)
            return self._status(made), output or b""
        except ArtifactError:
            return GONE, b""

    def _start(self, script: str, *arguments: str) -> str:
        with self._engine.doing(f"run a command in {self._found.name}"):
            made = self._api.exec_create(self._found.id, ["sh", "-c", script, "sh", *arguments])
        identity: str = made["Id"]
        return identity

    def _copy(self, made: str, file: IO[bytes]) -> None:
        """Copies a command's output until it ends, or the engine does."""
        try:
            with self._engine.doing(f"run a command in {self._found.name}"):
                for piece in self._api.exec_start(made, stream=True):
                    file.write(piece)
                    file.flush()
        except (ArtifactError, ValueError):
            # A ValueError: the file was closed, since nobody waits any more.
            return

    def _status(self, made: str) -> int:
        try:
            with self._engine.doing(f"tell how a command in {self._found.name} ended"):
                code = self._api.exec_inspect(made)["ExitCode"]
        except ArtifactError:
            return GONE
        return GONE if code is None else int(code)
