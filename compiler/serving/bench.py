"""`recipe serve bench`: the recipe's sweep against the running server, into the artifact's results/bench/."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compiler.terminal import note
from compiler.wording import as_typed

if TYPE_CHECKING:
    from compiler.serving.artifacts import ServedArtifact
    from runtime.serving.bench_runner import Runner


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
    from compiler.serving.artifacts import open_artifact
    from compiler.serving.bench_flags import bench_flags
    from runtime.serving import bench as benching

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
    from compiler.errors import ArtifactError

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
    from compiler.errors import ArtifactError
    from compiler.serving.bench_container import InContainer
    from compiler.serving.engine import Engine
    from compiler.serving.logs import Hider

    engine = Engine.connect(Hider(()))
    found = engine.find(artifact.name)
    if found is None or found.status != "running":
        state = "there is no container" if found is None else f"the container is {found.status}:"
        raise ArtifactError(
            f"{state} {artifact.name}",
            f"start it: recipe serve up {as_typed(artifact.folder)}; or measure another server with --url",
        )
    return InContainer(engine, found)
