"""Check that the folder of a generated script is one build of a recipe."""

from __future__ import annotations

from pathlib import Path

from .errors import UserError

JOURNAL = ".recipe-build/journal.json"
"""What a build that was cut short leaves next to the artifacts, while files still have to be replaced."""


def demand_whole(artifact: Path) -> None:
    """Refuse an artifact that may have files of two builds.

    Raises:
        UserError: a build was killed while it replaced files.
    """
    if (artifact.parent / JOURNAL).is_file():
        raise UserError(
            f"a build in {artifact.parent} was cut short, so {artifact.name} may have files of two builds",
            "complete it where recipec is installed: recipe build RECIPE",
        )
