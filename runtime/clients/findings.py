"""The outcomes of checks: a printed line with its seconds for each check, and all outcomes as JSON."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from ..errors import UserError
from .client import REFUSED, SILENT, ServerError, plain

OK, FAILED, NOT_MADE = "ok", "FAILED", "-"
"""The states of a check. The last means that the check was skipped; its text says why."""

NAME_WIDTH = 18


class CheckFailed(UserError):
    """The server answers, but the answer is wrong."""


class Stopped(Exception):
    """The remaining checks are pointless: the server is gone, does not respond, or refuses access."""


@dataclass(frozen=True)
class Finding:
    """The result of a check that did not fail.

    Attributes:
        text: the text of its line.
        notes, warnings: sentences that follow the line.
        figures: for the JSON.
        checked: False if the check was skipped, for the reason in `text`.
    """

    text: str = ""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict)
    checked: bool = True


class Findings:
    """Runs checks and records their outcomes.

    Args:
        stream: where the lines are written.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.checks: list[dict[str, Any]] = []

    @property
    def failed(self) -> int:
        """Return the number of failed checks."""
        return sum(check["state"] == FAILED for check in self.checks)

    def check(self, name: str, work: Callable[[], Finding], essential: bool = False) -> None:
        """Run one check, and write its line.

        Args:
            work: the check; it raises UserError to fail.
            essential: whether a failure makes all further checks pointless.

        Raises:
            Stopped: an essential check failed, or the server is gone or does not answer.
        """
        started = time.monotonic()
        try:
            finding = work()
        except UserError as error:
            self._add(name, FAILED, started, error.message, help=error.help)
            if essential or (isinstance(error, ServerError) and error.kind in (REFUSED, SILENT)):
                raise Stopped from None
            return
        state = OK if finding.checked else NOT_MADE
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


def quoted(text: str) -> str:
    """Return the start of a text, on one line and in quotes."""
    return f'"{plain(text, 60)}"'
