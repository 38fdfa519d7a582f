"""`recipe serve`: a server in a container, and what is asked of it."""

from __future__ import annotations

import json

import typer

from recipec.compiler.cli.arguments.serve import (
    BenchArguments,
    DownArguments,
    PinArguments,
    UpArguments,
    VerifyArguments,
)
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.cli.printing import fail
from recipec.compiler.deployment import pin as pinning
from recipec.compiler.deployment.compose import down as stopped
from recipec.compiler.deployment.compose import up as started
from recipec.compiler.deployment.docker_engine import connected
from recipec.compiler.deployment.served_artifact import open_artifact
from recipec.compiler.deployment.served_bench import bench as measured
from recipec.compiler.deployment.verify_server import VerifyOptions, document
from recipec.compiler.deployment.verify_server import verify as verified
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.terminal import note, say, tell
from recipec.spec.load import display


def up(args: UpArguments) -> None:
    """Run `recipe serve up`."""
    started(open_artifact(args.artifact), note, args.model, args.adapter, args.detach, args.wait)


def down(args: DownArguments) -> None:
    """Run `recipe serve down`."""
    stopped(open_artifact(args.artifact), args.volumes)


def pin(args: PinArguments) -> None:
    """Run `recipe serve pin`."""
    try:
        image = pinning.find_image(args.recipe)
    except pinning.CannotPin as refusal:
        fail(refusal.diagnostics)
    with connected("recipe serve pin", pinning.by_hand(image.image)) as engine:
        pinned = pinning.pin(image, engine)
    name = display(args.recipe)
    if pinned == image.image and image.value is not None:
        tell(f"{name} has image: {pinned}, as the registry has it now")
    elif args.check:
        say(f"error: {name} has image: {image.image}, and the registry now has {pinned.digest}")
        say(f"  = help: recipe serve pin {name}")
        raise typer.Exit(FAILED)
    else:
        pinning.write(image, pinned)
        tell(f"{name}: image: {pinned} (was {image.image})")


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
