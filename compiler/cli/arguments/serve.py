"""The arguments of `recipe serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from recipec.compiler.cli.arguments.shared_arguments import Recipe

Artifact = Annotated[
    Path,
    typer.Argument(metavar="ARTIFACT", help="An artifact's folder: generated/NAME."),
]


@dataclass(frozen=True)
class UpArguments:
    """Build the image and start the server with docker compose.

    It shows the log and runs until Ctrl-C, which stops and removes the container. With --detach it returns
    when the server answers, and the server runs until `recipe serve down`.
    """

    artifact: Artifact
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Folder of the weights on this machine."),
    ] = None
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", metavar="DIR", help="Folder of the PEFT adapter."),
    ] = None
    detach: Annotated[bool, typer.Option("--detach", help="Return once the server is ready.")] = False
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="MINUTES",
            min=0.01,
            help="With --detach: how long the server may load and compile; by default 30.",
        ),
    ] = None


@dataclass(frozen=True)
class PinArguments:
    """Write the digest of the server's image into the recipe.

    The registry is asked for the digest of serve.image through a Docker engine. The name keeps its tag. If
    the tag has moved since, the new digest replaces the old one. Nothing else in the file changes.
    """

    recipe: Recipe
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; exit with 1 if the digest is missing or not current."),
    ] = False


@dataclass(frozen=True)
class DownArguments:
    """Stop the server after its current requests, and remove its container."""

    artifact: Artifact
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Also remove the compiled programs and downloads.")
    ] = False


@dataclass(frozen=True)
class BenchArguments:
    """Run the recipe's benchmark on the server.

    An interrupted benchmark continues where it stopped.
    """

    artifact: Artifact
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="Address of a server other than the one of `recipe serve up`; vllm must then be on PATH.",
        ),
    ] = None
    results: Annotated[
        Path | None,
        typer.Option(
            "--results", metavar="DIR", help="Folder of the results; by default ARTIFACT/results/bench."
        ),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="Folder of the model's tokenizer, as vllm sees it; by default the recipe's weights.",
        ),
    ] = None
    machine: Annotated[
        str | None,
        typer.Option(
            "--machine",
            metavar="NAME",
            help="Machine of the server, such as v6e-8, if it cannot be detected.",
        ),
    ] = None
    usd_per_hour: Annotated[
        float | None,
        typer.Option(
            "--usd-per-hour",
            metavar="X",
            min=1e-6,
            help="Price of the server's machine; by default the accelerator's.",
        ),
    ] = None
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", metavar="MINUTES", min=0.01, help="Limit of one point; by default 30."),
    ] = None


@dataclass(frozen=True)
class VerifyArguments:
    """Compare an endpoint's greedy answers with transformers, token by token.

    transformers runs the merged checkpoint. It needs torch and transformers, and memory for the weights in
    float32. Exits with 1 if the endpoint does not serve that checkpoint.
    """

    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="The endpoint, for example http://127.0.0.1:8000."),
    ]
    artifact: Annotated[
        Path | None,
        typer.Option(
            "--artifact",
            metavar="DIR",
            help="The artifact of the endpoint. It gives the folder of the merged weights, their served "
            "name and their types.",
        ),
    ] = None
    model: Annotated[
        Path | None,
        typer.Option("--model", metavar="DIR", help="Folder of the merged weights."),
    ] = None
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name under which the weights are served."),
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="More prompts, as JSONL in the form of evaluate.prompts."
        ),
    ] = None
    tokens: Annotated[
        int, typer.Option("--tokens", min=1, max=1024, help="Number of tokens of each answer.")
    ] = 16
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            metavar="X",
            min=0,
            help="Allowed difference of log probabilities, instead of the measured one.",
        ),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option("--dtype", help="The type in which transformers computes."),
    ] = "float32"
    server_dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(
            "--server-dtype", help="The type in which the server computes, instead of the artifact's."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
