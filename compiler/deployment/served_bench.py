"""`recipe serve bench`: run the recipe's sweep against the running server; write to results/bench/.

vLLM's client runs inside the container that `recipe serve up` started. With a URL, it runs on this machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.errors import ArtifactError
from recipec.compiler.terminal import note
from recipec.compiler.vllm.bench_flags import bench_flags
from recipec.runtime.clients import bench as benching
from recipec.runtime.clients.bench_runner import Processes

if TYPE_CHECKING:
    from recipec.compiler.deployment.served_artifact import ServedArtifact


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
