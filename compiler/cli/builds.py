"""Complete builds that were killed."""

from __future__ import annotations

from pathlib import Path

from recipec.compiler.artifacts.whole import complete, finish
from recipec.compiler.terminal import note


def end_build(folder: Path) -> None:
    """Complete a build that was killed in a folder of artifacts, and print a note."""
    if finish(folder):
        note(f"note: an interrupted build in {folder} was completed")


def complete_build(folder: Path) -> None:
    """Complete a killed build before its artifacts are read, or end the command if that is impossible."""
    if complete(folder):
        note(f"note: an interrupted build in {folder} was completed")
