"""Diagnostics, and how they are displayed: as text in the style of rustc, and as JSON."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.spec.codes import SEVERITIES, Code

WINDOW = 140
"""Columns of a source line that are shown; longer lines are cut around the caret."""

_COLORS = {"error": "31", "warning": "33", "note": "36"}


@dataclass(frozen=True)
class Span:
    """A piece of one source line.

    Attributes:
        file: the file's name as shown; "--set" for a command line argument.
        line, column: 1-based; for an argument, line is its number among the --set arguments.
        text: the whole source line.
        length: of the piece, in characters; 0 for an empty value.
    """

    file: str
    line: int
    column: int
    text: str
    length: int = 1


@dataclass(frozen=True)
class Diagnostic:
    """The report of one problem.

    Attributes:
        code: declared by the module that gives the diagnostic; its letter is the severity.
        message: one sentence without a full stop.
        path: the recipe path it is about, e.g. "data.train[0].path"; "" for the file as a whole.
        help: what to write instead; may have several lines.
        span: position; None until `spec.load.locate` has found it, or if there is none.
        at_key: whether the path's key is wrong and has to be removed or renamed, rather than its value.
    """

    code: Code
    message: str
    path: str = ""
    help: str | None = None
    span: Span | None = None
    at_key: bool = False

    @property
    def severity(self) -> str:
        """error, warning or note."""
        return self.code.severity


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    """Return whether any of them is an error."""
    return any(d.severity == "error" for d in diagnostics)


def in_order(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    """Sort by file, position and code, without repetitions; those without a position come last."""

    def key(d: Diagnostic) -> tuple[Any, ...]:
        if d.span is None:
            return (True, "", 0, 0, d.code)
        return (False, d.span.file, d.span.line, d.span.column, d.code)

    return sorted(dict.fromkeys(diagnostics), key=key)


def accepted(diagnostic: Diagnostic) -> bool:
    """Return whether a comment on the line of a warning or note names its code, which suppresses it."""
    if diagnostic.severity == "error" or diagnostic.span is None:
        return False
    return re.search(rf"\s#.*\b{diagnostic.code}\b", diagnostic.span.text) is not None


def render_text(diagnostics: Sequence[Diagnostic], color: bool = False, notes: bool = True) -> str:
    """Write all of them as text, followed by a line that counts them; "" if there are none.

    Args:
        notes: whether notes are written in full, rather than only counted.
    """
    if not diagnostics:
        return ""
    blocks = [_block(d, color) for d in diagnostics if notes or d.severity != "note"]
    severities = [d.severity for d in diagnostics]
    counts = [(severities.count(name), name) for name in SEVERITIES.values()]
    words = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count]
    if not notes and "note" in severities:
        words[-1] += f" (--notes shows {'them' if severities.count('note') > 1 else 'it'})"
    return "\n".join([*blocks, ", ".join(words)]) + "\n"


def render_json(diagnostics: Sequence[Diagnostic]) -> list[dict[str, Any]]:
    """Convert to plain dicts; file, line and column are None if there is no position."""
    return [
        {
            "code": d.code,
            "severity": d.severity,
            "message": d.message,
            "file": d.span.file if d.span else None,
            "line": d.span.line if d.span else None,
            "column": d.span.column if d.span else None,
            "path": d.path,
            "help": d.help,
        }
        for d in diagnostics
    ]


def json_text(values: Any) -> str:
    """Write values as JSON for printing: escape only characters that could control a terminal."""
    text = json.dumps(values, indent=2, ensure_ascii=False)
    return "".join(
        c if c == "\n" or unicodedata.category(c) not in UNSHOWN else json.dumps(c)[1:-1] for c in text
    )


def _block(d: Diagnostic, color: bool) -> str:
    def paint(text: str, style: str) -> str:
        return f"\x1b[{style}m{text}\x1b[0m" if color else text

    hue = f"1;{_COLORS[d.severity]}"
    lines = [f"{paint(f'{d.severity}[{d.code}]', hue)}{paint(f': {printable(d.message)}', '1')}"]
    margin = " "
    if d.span is not None:
        number = str(d.span.line)
        margin = " " * (len(number) + 1)
        bar = paint("|", "1;34")
        text, before, width = _excerpt(d.span)
        lines.append(f"{margin[1:]}{paint('-->', '1;34')} {printable(d.span.file)}:{number}:{d.span.column}")
        if text.strip():
            caret = paint("^" * width, hue)
            lines += [
                f"{margin}{bar}",
                f"{paint(number, '1;34')} {bar} {text}",
                f"{margin}{bar} {before}{caret}",
            ]
    if d.help:
        first, *rest = printable(d.help).split("\n")
        lines.append(f"{margin}{paint('=', '1;34')} help: {first}")
        lines += [f"{margin}        {line}" if line else "" for line in rest]
    return "\n".join(lines) + "\n"


def _excerpt(span: Span) -> tuple[str, str, int]:
    """Return the source line as shown, the blanks before the caret, and the caret's width in columns."""
    at = min(span.column - 1, len(span.text))
    start = max(0, at - WINDOW // 2) if len(span.text) > WINDOW else 0
    shown = span.text[start : start + WINDOW]
    lead, tail = "..." if start else "", "..." if start + WINDOW < len(span.text) else ""
    before = lead + shown[: at - start]
    blanks = "".join("\t" if c == "\t" else " " * _columns(c) for c in before)
    marked = shown[at - start : at - start + max(1, span.length)]
    return printable(lead + shown + tail), blanks, max(1, sum(map(_columns, marked)))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def printable(text: str) -> str:
    """Replace control characters and lone surrogates in a text, so that it cannot control a terminal."""
    return "".join("\ufffd" if c not in "\n\t" and unicodedata.category(c) in UNSHOWN else c for c in text)


UNSHOWN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Categories of characters that end lines, control terminals or are invisible."""
