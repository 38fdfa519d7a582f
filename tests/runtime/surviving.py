"""Helpers for interrupted runs and their error messages."""

from __future__ import annotations

from pathlib import Path

from tests.runtime.artifacts import script
from tests.runtime.lives import Life, Lives

SLOW = """
import sys
import time

from runtime.training import trainer

quick = trainer.Trainer._step


def slow(self, *arguments):
    time.sleep({seconds} if self._train_steps and "--resume" not in sys.argv else 0)
    return quick(self, *arguments)


trainer.Trainer._step = slow
"""
"""Code of an artifact with slow steps, except for the first one and those of a resumed run."""


def error_of(life: Life, place: Path, output: str) -> list[str]:
    """Return the lines of a process's only error, with DIRECTORY in place of its checkpoints' folder."""
    assert "Traceback" not in life.stderr, life.stderr
    (start,) = [i for i, line in enumerate(life.stderr.splitlines()) if line.startswith("error: ")]
    text = "\n".join(life.stderr.splitlines()[start:])
    return text.replace(str(place / output / "checkpoints"), "DIRECTORY").splitlines()


def begin(lives: Lives, place: Path, output: str, *options: str, artifact: str = "artifact") -> Life:
    return lives.begin(*script(place, output, *options, artifact=artifact))
