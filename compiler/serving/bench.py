"""`recipe serve bench`: the recipe's sweep against the running server, into the artifact's results/bench/."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiler import completion

if TYPE_CHECKING:
    from compiler.serving.artifacts import ServedArtifact
    from runtime.serving.bench_runner import Runner


def command(
    artifact: Annotated[
        Path,
        typer.Argument(
            metavar="ARTIFACT",
            help="An artifact's folder: generated/NAME.",
            show_default=False,
            autocompletion=completion.artifact_folders,
        ),
    ],
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Of another server than the one of `recipe serve up`; then vllm has to be on PATH.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            "--results", metavar="DIR", help="Of the results; ARTIFACT/results/bench.", show_default=False
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="Folder of the model's tokenizer as vllm sees it; the recipe's weights.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="What the server runs on, such as v6e-8, where that cannot be seen.",
            show_default=False,
        ),
    ] = None,
    usd_per_hour: Annotated[
        float | None,
        typer.Option(
            "--usd-per-hour",
            metavar="X",
            min=1e-6,
            help="Price of what the server runs on; the accelerator's.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="MINUTES", min=0.01, help="Of a point; 30.", show_default=False),
    ] = None,
) -> None:
    """Measure the server over the recipe's benchmark; an interrupted run goes on where it stopped."""
    from compiler.cli_base import note
    from compiler.emitters.bench import bench_flags
    from compiler.serving.artifacts import open_artifact
    from runtime.serving import bench

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
    raise typer.Exit(bench.main(words, _container(opened) if url is None else None))


def _tokenizer(artifact: ServedArtifact, in_container: bool) -> str:
    """Where vLLM's client finds the tokenizer: with the weights that are served.

    Raises:
        ArtifactError: they are nowhere on this machine that the recipe could know.
    """
    from compiler.artifact import ArtifactError

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
    from compiler.artifact import ArtifactError
    from compiler.serving.bench_container import InContainer
    from compiler.serving.engine import Engine
    from compiler.serving.logs import Hider

    engine = Engine.connect(Hider(()))
    found = engine.find(artifact.name)
    if found is None or found.status != "running":
        state = "there is no container" if found is None else f"the container is {found.status}:"
        raise ArtifactError(
            f"{state} {artifact.name}",
            f"start it: recipe serve up {artifact.folder}; or measure another server with --url",
        )
    return InContainer(engine, found)
