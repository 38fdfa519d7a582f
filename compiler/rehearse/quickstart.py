"""`make quickstart`: the whole path on this machine, with a small model that is made on the spot.

It writes a checkpoint in Gemma 4's form, builds recipes/quickstart.yaml, and runs the artifact's
scripts: train, kill, resume, merge, verify. Every command is printed, so that it can be repeated.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from recipec import ROOT
from recipec.compiler import catalog
from recipec.compiler.artifacts.artifact import write
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.compiler.packages import require_packages
from recipec.compiler.rehearse.artifact_run import ArtifactRun, claim
from recipec.compiler.rehearse.pipeline import (
    Pipeline,
    StepFailed,
    carry_out,
    new_console,
    readable,
    say,
)
from recipec.compiler.rehearse.rehearse import EXPECTED
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

RECIPE = ROOT / "recipes" / "quickstart.yaml"
OUTPUT = ROOT / "build" / "quickstart"

EMBEDDING_SCALE = 0.2
"""Chosen so that the loss starts only slightly above that of a uniform guess, ln 512 = 6.2."""

LOSS_RATIO = 0.8
"""Highest ratio of the final to the first loss. For training, it compares the means of the first and the last
tenth of the steps; for evaluation, the losses before the first and after the last step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the quickstart; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipec.compiler.rehearse.quickstart", description=__doc__
    )
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="folder to write to (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        require_packages("the quickstart")
        output = claim(options.output)
    except ArtifactError as error:
        print(f"error: {error}\n  = help: {error.help}", file=sys.stderr)
        return 1
    console = new_console()
    pipeline = Pipeline(console, output / "logs", show_commands=True, expected=EXPECTED)
    try:
        carry_out(pipeline, output, lambda: _run(output, pipeline))
    except KeyboardInterrupt:
        return 130
    pipeline.print_table("quickstart")
    if not pipeline.ok:
        return 1
    say(console, f"everything is in {readable([str(output)])}: the merged model in resumed/merged")
    return 0


def _run(output: Path, pipeline: Pipeline) -> None:
    generated = output / "generated"
    program = compiled()
    pipeline.step("model", lambda: write_model(output / "model", program))
    pipeline.step("build", lambda: _build(generated, program, pipeline))
    run = ArtifactRun(
        pipeline,
        artifact=generated / program.name,
        model=output / "model",
        data=RECIPE.parent,
        work=output,
        checkpoints=program.recipe.checkpoint.directory,
        merged=program.recipe.merge.output,
        cache=program.recipe.cache.directory,
    )
    pipeline.step("train", run.train)
    pipeline.step("learn", lambda: check_losses(run.losses(run.whole), run.losses(run.whole, "eval_loss")))
    pipeline.step("kill", run.kill)
    pipeline.step("resume", run.resume)
    pipeline.step("compare", run.compare)
    pipeline.step("merge", run.merge)
    pipeline.step("verify", run.verify)


def compiled() -> Program:
    lowered = lower(load(RECIPE))
    if lowered.program is None:
        raise StepFailed(f"{RECIPE.name} does not compile", render_text(lowered.diagnostics))
    return lowered.program


def write_model(directory: Path, program: Program) -> str:
    """Write the checkpoint that the recipe names; its tokenizer is trained on the recipe's own data."""
    config = complete(catalog.entries()[program.recipe.model.id]["config"])
    files = [RECIPE.parent / source.path for source in program.recipe.data.train]
    write_checkpoint(
        directory,
        config,
        list(_texts(files)),
        dtype=program.recipe.model.dtype,
        embedding_scale=EMBEDDING_SCALE,
    )
    return f"{program.base_parameters:,} random parameters in {readable([str(directory)])}"


def _texts(files: Iterable[Path]) -> Iterable[str]:
    for file in files:
        for line in file.read_text(encoding="utf-8").splitlines():
            for message in json.loads(line)["messages"]:
                yield message["content"]


def _build(generated: Path, program: Program, pipeline: Pipeline) -> str:
    pipeline.say_command(["recipe", "build", str(RECIPE), "-o", str(generated)])
    try:
        write(generated, {program.name: emit(program)})
    except (ArtifactError, OSError) as error:
        raise StepFailed(str(error)) from error
    return readable([str(generated / program.name)])


def check_losses(training: Sequence[float], evaluation: Sequence[float]) -> str:
    """Check that both loss curves decrease enough from start to end."""
    tenth = max(1, len(training) // 10)
    first, last = (sum(part) / tenth for part in (training[:tenth], training[-tenth:]))
    figure = (
        f"loss {first:.2f} to {last:.2f} ({last / first:.0%}), on held-out data {evaluation[0]:.2f} to "
        f"{evaluation[-1]:.2f} ({evaluation[-1] / evaluation[0]:.0%})"
    )
    if not (last <= LOSS_RATIO * first and evaluation[-1] <= LOSS_RATIO * evaluation[0]):
        raise StepFailed(f"{figure}; both must fall to {LOSS_RATIO:.0%}")
    return f"{figure}; at most {LOSS_RATIO:.0%} is allowed"


if __name__ == "__main__":
    sys.exit(main())
