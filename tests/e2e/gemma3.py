"""The real Gemma 3 270M, fine-tuned by its recipe's artifact, for several tests."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

RECIPE = "gemma3-270m-cpu"


@dataclass(frozen=True)
class Tuned:
    """A trained and merged run.

    Attributes:
        base: the Hugging Face folder of the base model.
        run: its output folder, with checkpoints/, merged/ and merged-adapter/.
        trained, merged: the last lines that train.py and merge.py printed.
        seconds: the time of building and training.
    """

    base: Path
    run: Path
    trained: str
    merged: str
    seconds: float


def tune(root: Path, base: Path, folder: Path) -> Tuned:
    """Build the recipe into an empty folder, train, and merge with --verify."""
    started = time.monotonic()
    generated = folder / "generated"
    run(root, "-m", "recipec.compiler.cli.main", "build", f"recipes/{RECIPE}.yaml", "-o", generated)
    artifact = generated / RECIPE
    places = ("--model", base, "--output", folder / "run")
    trained = run(root, artifact / "train.py", *places, "--data-dir", root / "recipes")
    seconds = time.monotonic() - started
    merged = run(
        root, artifact / "merge.py", *places, "--checkpoint", folder / "run" / "checkpoints", "--verify"
    )
    return Tuned(base, folder / "run", trained, merged, seconds)


def run(root: Path, script: str | Path, *arguments: str | Path) -> str:
    """Run a Python script of the repository, which must succeed, and return its last line of output."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # not 8 devices
    # Lower priority than the other worker's servers, whose answers are timed.
    command = ["nice", "-n", "10", sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip().rpartition("\n")[2]
