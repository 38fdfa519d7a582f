"""The arguments of `recipe port`, and where its work is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from recipec.compiler.cli.commands import Command
from recipec.port.tools import NAMES, WRITTEN, choice

MACHINE = "v5p-8"
"""The machine of a recipe by default."""
Script = Literal["sft", "dpo", "orpo", "cpo", "kto"]
ReportFormat = Literal["text", "markdown", "json"]


@dataclass(frozen=True)
class PortArguments:
    """Turn another tool's config into a recipe, with a report on every key.

    With --to it turns a recipe into a config. The report goes to stdout, or to stderr if the recipe goes to
    stdout. Exits with 1 if the run cannot be ported.
    """

    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE",
            help="The config of another tool, or its Python script, notebook or command line, followed by "
            "its other files: accelerate's or DeepSpeed's config, dataset_info.json, adapter_config.json. "
            "Or a folder. With --to, a recipe.",
        ),
    ]
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="RECIPE",
            help="The file to write, or with folders the folder for recipes; by default, and with -, stdout.",
        ),
    ] = None
    dialect: Annotated[
        str | None,
        typer.Option(
            "--from",
            parser=choice([*NAMES]),
            metavar=f"<{'|'.join(NAMES)}>",
            help="The tool of the config; by default recognized from its keys.",
        ),
    ] = None
    tool: Annotated[
        str | None,
        typer.Option(
            "--to",
            parser=choice(WRITTEN),
            metavar=f"<{'|'.join(WRITTEN)}>",
            help="Port a recipe to this tool's config.",
        ),
    ] = None
    script: Annotated[
        Script | None,
        typer.Option(
            "--script", help="The TRL script that the config is for; by default recognized from its keys."
        ),
    ] = None
    command: Annotated[
        int | None,
        typer.Option(
            "--command",
            metavar="N",
            min=1,
            help="The training command to use, if a shell script has several.",
        ),
    ] = None
    trainer: Annotated[
        int | None,
        typer.Option(
            "--trainer",
            metavar="N",
            min=1,
            help="The trainer to port, if a Python script or a notebook constructs several.",
        ),
    ] = None
    accelerator: Annotated[
        str,
        typer.Option("--accelerator", metavar="NAME", help="The machine that the recipe is for."),
    ] = MACHINE
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            metavar="N",
            min=1,
            help="Number of GPUs of the source, if its files do not give it; with --to, of the config.",
        ),
    ] = None
    plan: Annotated[
        bool, typer.Option("--plan", help="Choose the mesh by compiling the step for the accelerator.")
    ] = False
    add_model: Annotated[
        bool,
        typer.Option(
            "--add-model",
            help="Add a model that the catalog lacks from the hub, to the folder models next to the recipe.",
        ),
    ] = False
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if any key is approximated or unsupported.")
    ] = False
    partial: Annotated[
        bool,
        typer.Option(
            "--partial", help="Write the recipe even if it is incomplete; its comments name what is missing."
        ),
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE", help="Write the report as .md or .json."),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with both files side by side."),
    ] = None
    format: Annotated[ReportFormat, typer.Option("--format", help="Format of the report.")] = "text"
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the config; may be repeated."),
    ] = None


port = Command("recipec.port.options:PortArguments", "recipec.port.cli:port")
