"""`recipe serve`: a server in a container, and what is asked of it."""

from __future__ import annotations

import json

import typer

from recipec.compiler.cli.arguments.serve import BenchArguments, DownArguments, UpArguments, VerifyArguments
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.deployment.bench_server import bench as measured
from recipec.compiler.deployment.compose import down as stopped
from recipec.compiler.deployment.compose import up as started
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.deployment.verify_server import VerifyOptions, document
from recipec.compiler.deployment.verify_server import verify as verified
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.terminal import note


def up(args: UpArguments) -> None:
    """Run `recipe serve up`."""
    started(open_artifact(args.artifact), note, args.model, args.adapter, args.detach, args.wait)


def down(args: DownArguments) -> None:
    """Run `recipe serve down`."""
    stopped(open_artifact(args.artifact), args.volumes)


def bench(args: BenchArguments) -> None:
    """Run `recipe serve bench`."""
    raise typer.Exit(
        measured(
            args.artifact,
            args.url,
            args.results,
            args.tokenizer,
            args.machine,
            args.usd_per_hour,
            args.timeout,
        )
    )


def verify(args: VerifyArguments) -> None:
    """Run `recipe serve verify`."""
    if args.artifact is None and args.model is None:
        raise typer.BadParameter("give --artifact DIR or --model DIR")
    result = verified(
        VerifyOptions(
            args.url,
            artifact=args.artifact,
            model=args.model,
            name=args.name,
            prompts=args.prompts,
            tokens=args.tokens,
            tolerance=args.tolerance,
            dtype=args.dtype,
            server_dtype=args.server_dtype,
        )
    )
    if args.as_json:
        print(json.dumps(result, indent=2))
    else:
        print_document(document(result))
    if result["problems"]:
        raise typer.Exit(FAILED)
