"""The outcomes of checks: run one after another, each a line with its seconds, and all of them as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..errors import UserError
from .client import REFUSED, SILENT, ServerError

OK, FAILED, NOT_MADE = "ok", "FAILED", "-"
"""A check's state; the last is of one that was not made, and says why."""

NAME_WIDTH = 18


class CheckFailed(UserError):
    """A check's outcome: the server answers, and not as it should."""


class Stopped(Exception):
    """What failed leaves nothing for the checks after it: the server is gone, hangs, or lets nobody in."""


@dataclass(frozen=True)
class Finding:
    """What a check that did not fail has to say.

    Attributes:
        text: goes into its line.
        notes, warnings: sentences that follow the line.
        figures: for the JSON.
        made: False where the check was not made, as `text` says.
    """

    text: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    made: bool = True


class Findings:
    """Runs checks and keeps what they found.

    Args:
        stream: where the lines go.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.checks: list[dict[str, Any]] = []

    @property
    def failed(self) -> int:
        """How many checks failed."""
        return sum(check["state"] == FAILED for check in self.checks)

    def check(self, name: str, work: Callable[[], Finding], essential: bool = False) -> None:
        """Runs one check, and writes its line.

        Args:
            work: raises UserError where it fails.
            essential: whether nothing else can be checked where it fails.

        Raises:
            Stopped: it failed and was essential, or the server is gone or does not answer.
        """
        started = time.monotonic()
        try:
            finding = work()
        except UserError as error:
            self._add(name, FAILED, started, error.message, help=error.help)
            if essential or (isinstance(error, ServerError) and error.kind in (REFUSED, SILENT)):
                raise Stopped from None
            return
        state = OK if finding.made else NOT_MADE
        told = {"notes": finding.notes, "warnings": finding.warnings, "figures": finding.figures}
        self._add(name, state, started, finding.text, **told)

    def _add(self, name: str, state: str, started: float, text: str, **told: Any) -> None:
        seconds = time.monotonic() - started
        line = f"{state:<8}{name:<{NAME_WIDTH}}{seconds:7.1f} s  {text}".rstrip()
        lines = [line, *(f"          = warning: {warning}" for warning in told.get("warnings", ()))]
        lines += [f"          = note: {note}" for note in told.get("notes", ())]
        if told.get("help"):
            lines.append(f"          = help: {told['help']}")
        self.stream.write("\n".join(lines) + "\n")
        self.stream.flush()
        told = {key: list(value) if isinstance(value, tuple) else value for key, value in told.items()}
        self.checks.append(
            {"name": name, "state": state, "seconds": round(seconds, 3), "text": text}
            | {key: value for key, value in told.items() if value}
        )


def quoted(text: str, limit: int = 60) -> str:
    """The start of a text, on one line and in quotes."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return f'"{words if len(words) <= limit else words[: limit - 3] + "..."}"'
