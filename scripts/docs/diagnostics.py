"""docs/diagnostics.md, and the site's pages of diagnostics, which also show what `recipe` prints.

The texts are those of the modules that declare the codes.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from recipec import ROOT
from recipec.spec.codes import Code
from scripts.docs.made import Page

TESTS = ROOT / "tests"
PRINTED = ("golden/*/stderr.txt", "port/cases/*/stderr.txt")
"""The expected output of tests, from which each code's example is taken."""

GROUPS = {
    "00": ("files", "Files, YAML, `extends` and `--set`"),
    "01": ("keys", "Keys and values"),
    "02": ("mesh", "Mesh and sharding"),
    "03": ("lora", "LoRA"),
    "04": ("data", "Data and chat template"),
    "05": ("train", "Training, checkpoints and merge"),
    "06": ("serve", "Serving"),
    "07": ("paths", "Paths and secrets"),
    "08": ("model", "Model and catalog"),
    "09": ("unavailable", "Not available in this version"),
    "10": ("plan", "Planning and parity"),
    "11": ("port", "Porting"),
    "12": ("commands", "Commands, runs and reports"),
    "13": ("launch", "Launching and several hosts"),
}
"""File names and titles of the pages by group."""

PACKAGES = ("spec", "compiler", "port")
"""The packages whose modules declare codes."""

HEAD = """\
# Diagnostics

Every message of `recipe` has one of these codes: E is an error, W a warning, N a note. The meaning
of a code never changes.

Errors and warnings are printed. Notes are only counted, and `--notes` prints them; editors show them as
hints. A comment that names the code accepts a warning or a note on its line, and says why:
`axes: {fsdp: 4, tp: 1}   # N0227: compared with probe.py`.
"""

_DECLARATION = re.compile(r"^[EWN]\d{4} = Code\(", re.M)
_FIRST = re.compile(r"^(?:error|warning|note)\[([EWN]\d{4})\]: ")


def sources() -> list[Path]:
    """Return the modules of the packages that declare codes, without those of port/scripts."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [file for file in files if file.parent != ROOT / "port" / "scripts"]


@functools.cache
def declared() -> dict[str, Code]:
    """Return every code by its name, in the order of the page, from the modules that declare one.

    Raises:
        ValueError: for a code that two modules declare, or one of no group.
    """
    codes: dict[str, Code] = {}
    for file in sources():
        if _DECLARATION.search(file.read_text(encoding="utf-8")):
            module = ".".join(("recipec", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(
                ".__init__"
            )
            for code in vars(importlib.import_module(module)).values():
                if not isinstance(code, Code):
                    continue
                if codes.setdefault(code, code) is not code or code.group not in GROUPS:
                    raise ValueError(f"{module}: {code} is declared twice, or its group has no page")
    return dict(sorted(codes.items(), key=lambda item: (item[0][1:], item[0][0])))


def markdown() -> str:
    """Return docs/diagnostics.md."""
    lines = [HEAD]
    for group, (_, title) in GROUPS.items():
        lines.append(f"## {title}\n")
        for code in _codes(group):
            lines.append(f"### {code}: {code.heading}\n\n{code.cause}\n\n**Cure.** {code.cure}\n")
    return "\n".join(lines)


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return a page for each group of codes."""
    return tuple(
        Page(_path(group), title.replace("`", ""), _group(group, title))
        for group, (_, title) in GROUPS.items()
    )


def completed(path: str, text: str) -> str:
    """Return docs/diagnostics.md for the site: every code links to its page."""
    return _index() if path == "diagnostics.md" else text


def _index() -> str:
    lines = [HEAD]
    lines += [
        "Its first two digits are its group. `recipe check --format json` lists diagnostics for other",
        "programs. An error ends a command with exit status 1; warnings and notes do not.",
    ]
    for group, (_, title) in GROUPS.items():
        lines += ["", f"## {title}", "", *map(_line, _codes(group))]
    return "\n".join(lines) + "\n"


def _line(code: Code) -> str:
    """Return a code's line, with anchors for its name and for its heading in docs/diagnostics.md."""
    place = f'<span id="{code.anchor}"></span>'
    return f"- {place}[{code}]({_path(code.group)}#{code}){{ #{code} }} {code.heading}"


def _group(group: str, title: str) -> str:
    lines = [f"# {title}"]
    for code in _codes(group):
        lines += [
            "",
            f"## {code}: {code.heading} {{ #{code} }}",
            "",
            f"*{code.severity.capitalize()}.* {code.cause}",
        ]
        lines += ["", f"**Cure.** {code.cure}"]
        example = examples().get(code)
        if example:
            lines += ["", "````text", example, "````"]
    return "\n".join(lines) + "\n"


def _codes(group: str) -> list[Code]:
    return [code for code in declared().values() if code.group == group]


def _path(group: str) -> str:
    return f"diagnostics/{GROUPS[group][0]}.md"


@functools.cache
def examples() -> dict[str, str]:
    """Return what `recipe` prints, by code: the shortest of the tests' findings that names a place."""
    shortest: dict[str, str] = {}
    for file in sorted(file for pattern in PRINTED for file in TESTS.glob(pattern)):
        for code, text in findings(file.read_text(encoding="utf-8")):
            if code not in shortest or _rank(text) < _rank(shortest[code]):
                shortest[code] = text
    return shortest


def findings(printed: str) -> Iterator[tuple[str, str]]:
    """Yield each finding of a command's output, with its code."""
    for block in re.split(r"\n\n(?=\S)", printed):
        first = _FIRST.match(block)
        if first:
            yield first[1], block.rstrip("\n")


def _rank(text: str) -> tuple[bool, int]:
    return " --> " not in text, len(text)
