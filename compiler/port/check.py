"""The ported recipe under the checks of every recipe; what they find is shown at the source's own lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from compiler.lower import Lowered, lower
from compiler.port.ledger import Ledger
from spec.diagnostics import Diagnostic, Span
from spec.load import load

FOLDERS = "E1301"
"""Checkpoints that each host would write for itself: the source's own folder for results is their place."""


def check(text: str, place: Path) -> Lowered:
    """Loads and lowers a recipe that is not written yet.

    Args:
        place: where it will lie; what it names is relative to that folder.
    """
    return lower(load(place, text=text))


def hindering(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """The errors for which a recipe is not whole: what is written otherwise passes `recipe check`."""
    return [d for d in diagnostics if d.severity == "error"]


def at_source(diagnostics: Sequence[Diagnostic], ledger: Ledger, name: str) -> list[Diagnostic]:
    """The findings at the keys of the ported files that they come from.

    Args:
        name: of the recipe, for those that come from no key.
    """
    return [_placed(d, ledger, name) for d in diagnostics]


def _placed(found: Diagnostic, ledger: Ledger, name: str) -> Diagnostic:
    span = _key(found.path, ledger)
    if found.code == FOLDERS:
        span = ledger.sources.main.place(ledger.folder)
        found = replace(found, help=f"--set {ledger.folder}=gs://bucket/run, a place that all hosts reach")
    if span is not None:
        return replace(found, span=span)
    return replace(found, span=replace(found.span, file=name) if found.span else None)


def _key(path: str, ledger: Ledger) -> Span | None:
    """The place of the key that sets a path of the recipe, or what lies in it or around it."""
    best: tuple[int, Span] | None = None
    for finding in ledger.findings:
        for made in finding.recipe:
            near = made == path or path.startswith((f"{made}.", f"{made}["))
            if near and finding.span and (best is None or len(made) > best[0]):
                best = (len(made), finding.span)
    return best[1] if best else None


def moved(found: Diagnostic, name: str, lines: int) -> Diagnostic:
    """A finding in the recipe itself, so many lines further down: below the comment at its top."""
    if found.span is None or found.span.file != name:
        return found
    return replace(found, span=replace(found.span, line=found.span.line + lines))
