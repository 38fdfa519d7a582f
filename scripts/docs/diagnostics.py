"""The pages of the diagnostics: every code of docs/diagnostics.md, with what `recipe` prints for it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from recipec.spec.codes import CODES, GROUPS, SEVERITIES, anchor
from scripts.docs.made import Page

TESTS = Path(__file__).resolve().parents[2] / "tests"
PRINTED = ("golden/*/stderr.txt", "port/cases/*/stderr.txt")
"""The expected output of tests, from which each code's example is taken."""

NAMES = {
    "00": "files",
    "01": "keys",
    "02": "mesh",
    "03": "lora",
    "04": "data",
    "05": "train",
    "06": "serve",
    "07": "paths",
    "08": "model",
    "09": "unavailable",
    "10": "plan",
    "11": "port",
    "12": "commands",
}
"""The pages' file names by group."""

_FIRST = re.compile(r"^(?:error|warning|note)\[([EWN]\d{4})\]: ")


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return a page for each group of codes."""
    return tuple(
        Page(_path(group), title.replace("`", ""), _group(group, title))
        for group, title in GROUPS.items()
        if _codes(group)
    )


def completed(path: str, markdown: str) -> str:
    """Return docs/diagnostics.md for the site: every code links to its page."""
    return _index() if path == "diagnostics.md" else markdown


def _index() -> str:
    lines = [
        "# Diagnostics",
        "",
        "Every finding of `recipe` carries a code: E an error, W a warning, N a note. Its first two digits",
        "are its group. A code keeps its meaning for good, and is never used again for another.",
        "",
        "`recipe check --format json` lists findings for other programs. An error ends a command with exit",
        "status 1; warnings and notes do not.",
    ]
    for group, title in GROUPS.items():
        codes = _codes(group)
        if codes:
            lines += ["", f"## {title}", ""]
            lines += [_line(code, group) for code in codes]
    return "\n".join(lines) + "\n"


def _line(code: str, group: str) -> str:
    """Return a code's line, with anchors for its name and for its heading in docs/diagnostics.md."""
    place = f'<span id="{anchor(code)}"></span>'
    return f"- {place}[{code}]({_path(group)}#{code}){{ #{code} }} {CODES[code].title}"


def _group(group: str, title: str) -> str:
    lines = [f"# {title}"]
    for code in _codes(group):
        entry = CODES[code]
        severity = SEVERITIES[code[0]]
        lines += [
            "",
            f"## {code}: {entry.title} {{ #{code} }}",
            "",
            f"*{severity.capitalize()}.* {entry.cause}",
        ]
        lines += ["", f"**Cure.** {entry.cure}"]
        example = examples().get(code)
        if example:
            lines += ["", "````text", example, "````"]
    return "\n".join(lines) + "\n"


def _codes(group: str) -> list[str]:
    return sorted((code for code in CODES if code[1:3] == group), key=lambda code: (code[1:], code[0]))


def _path(group: str) -> str:
    return f"diagnostics/{NAMES.get(group, group)}.md"


@functools.cache
def examples() -> dict[str, str]:
    """Return what `recipe` prints, by code: the shortest of the tests' findings that names a place."""
    found: dict[str, str] = {}
    for file in sorted(file for pattern in PRINTED for file in TESTS.glob(pattern)):
        for code, text in findings(file.read_text(encoding="utf-8")):
            if code not in found or _rank(text) < _rank(found[code]):
                found[code] = text
    return found


def findings(printed: str) -> Iterator[tuple[str, str]]:
    """Yield each finding of a command's output, with its code."""
    for block in re.split(r"\n\n(?=\S)", printed):
        first = _FIRST.match(block)
        if first:
            yield first[1], block.rstrip("\n")


def _rank(text: str) -> tuple[bool, int]:
    return " --> " not in text, len(text)
