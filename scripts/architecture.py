"""Count what docs/architecture.md says about the code's shape.

python -m scripts.architecture          print the tables
python -m scripts.architecture write    write them into docs/architecture.md

The counts at the start are those of version 0.2, before the rooms were put in one order.
"""

from __future__ import annotations

import ast
import functools
import re
import statistics
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
SMALL = 1200
"""The fewest lines of a room with a row of its own."""

PACKAGES = ("spec", "compiler", "runtime", "port")
NAME = "recipec."

KEYS = ROOT / "spec" / "language" / "train.py"
START = {"files": 666, "later": 535, "pairs": 10, "mocked": 4, "median": 16, "most": 47}
"""The counts of version 0.2."""

_PART = re.compile(r"(?<=<!-- python -m scripts.architecture write -->\n).*?(?=<!-- end -->)", re.S)


@dataclass(frozen=True)
class Counts:
    """The shape of the product: spec/, compiler/, runtime/, port/ and templates/.

    Attributes:
        files: modules and templates.
        later: own modules that functions import, by statement.
        pairs: pairs of rooms of compiler/ that import each other, also for types.
        mocked: modules that use unittest.mock.
        median, most: files that name a key of `train`, `checkpoint` or `merge`, over the keys.
        rooms: modules and lines of each room.
    """

    files: int
    later: int
    pairs: int
    mocked: int
    median: int
    most: int
    rooms: Mapping[str, tuple[int, int]]


@functools.cache
def modules() -> dict[str, Path]:
    """Return the product's modules by name, without the scripts of port/."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.relative_to(ROOT).parts[:2] != ("port", "scripts")
    }


@functools.cache
def tree(path: Path) -> ast.Module:
    """Return a module's syntax tree, which nobody changes."""
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(module: str) -> Iterator[tuple[str, bool]]:
    """Yield the own modules of each import statement, and whether it is in a function."""
    yield from _imported(tree(modules()[module]), module, False)


def _imported(node: ast.AST, module: str, later: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            source = _source(child, module)
            names = [f"{source}.{alias.name}".removeprefix(NAME) for alias in child.names]
            known = {name if name in modules() else source.removeprefix(NAME) for name in names}
            yield from ((name, later) for name in sorted(known & modules().keys()))
        else:
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from _imported(child, module, later or inner)


def _source(node: ast.ImportFrom, module: str) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.split(".")
    package = package if modules()[module].name == "__init__.py" else package[:-1]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def room_of(module: str) -> str:
    """Return the folder of a module that the table has a row for: "compiler/plan/"."""
    package, *parts = module.split(".")
    folder = ROOT / package / (parts[0] if parts else "")
    return f"{package}/{parts[0]}/" if parts and package != "spec" and folder.is_dir() else f"{package}/"


def _entered(module: str) -> str:
    """Return the room of a module of compiler/: its folder, or itself if it is in none."""
    return module if room_of(module) == "compiler/" else room_of(module)


def keys() -> list[str]:
    """Return the keys of `train`, `checkpoint` and `merge` with an underscore; others are ordinary words."""
    sections = (node for node in tree(KEYS).body if isinstance(node, ast.ClassDef))
    return [
        field.target.id
        for section in sections
        for field in section.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and "_" in field.target.id
    ]


def files_by_key() -> dict[str, int]:
    """Count the modules and templates that name each key: as an attribute, an argument, a field or in a text.

    runtime/sections.py does not count, which is generated.
    """
    named = [_names(tree(path)) for path in modules().values() if path.name != "sections.py"]
    for template in (ROOT / "templates").rglob("*.j2"):
        named.append(set(re.findall(r"\w+", template.read_text(encoding="utf-8"))))
    return {key: sum(key in names for names in named) for key in keys()}


def _names(module: ast.Module) -> set[str]:
    """Return the words of a module that may be keys, without those of its comments."""
    names: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.keyword) and node.arg:
            names.add(node.arg)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.update(re.findall(r"\w+", node.value))
    return names


@functools.cache
def counts() -> Counts:
    """Count the product's modules and imports."""
    later, mocked = 0, 0
    entered: set[tuple[str, str]] = set()
    rooms: dict[str, tuple[int, int]] = {}
    for module, path in modules().items():
        text = path.read_text(encoding="utf-8")
        mocked += "unittest.mock" in text or "from unittest import mock" in text
        room = room_of(module)
        number, lines = rooms.get(room, (0, 0))
        rooms[room] = number + 1, lines + len(text.splitlines())
        for name, in_function in imported(module):
            later += in_function
            if module.startswith("compiler.") and name.startswith("compiler."):
                entered.add((_entered(module), _entered(name)))
    pairs = sum(first < second and (second, first) in entered for first, second in entered)
    templates = len([*(ROOT / "templates").rglob("*.j2")])
    named = files_by_key().values()
    return Counts(
        len(modules()) + templates, later, pairs, mocked, statistics.median_high(named), max(named), rooms
    )


def text() -> str:
    """Return the two tables; rooms of less than 1,200 lines are in their package's sum alone."""
    counted = counts()
    out = ["| | Version 0.2 | Now |", "|---|---:|---:|"]
    for name, title in (
        ("files", "modules and templates"),
        ("later", "own modules imported inside functions"),
        ("pairs", "pairs of rooms of `compiler/` that import each other"),
        ("mocked", "modules of the product that use `unittest.mock`"),
        ("median", "files that name a key of `train`, `checkpoint` or `merge`, median over the keys"),
        ("most", "the same for the key that most files name"),
    ):
        out.append(f"| {title} | {START[name]} | {getattr(counted, name)} |")
    out += ["", "| Room | Modules | Lines |", "|---|---:|---:|"]
    for package in PACKAGES:
        inside = {room: size for room, size in counted.rooms.items() if room.startswith(f"{package}/")}
        files, lines = (sum(size[part] for size in inside.values()) for part in (0, 1))
        out.append(f"| **`{package}/`** | {files} | {rounded(lines)} |")
        for room, size in sorted(inside.items(), key=lambda item: -item[1][1]):
            if len(inside) > 1 and room != f"{package}/" and size[1] >= SMALL:
                out.append(f"| `{room}` | {size[0]} | {rounded(size[1])} |")
    return "\n".join(out) + "\n"


def rounded(lines: int) -> str:
    """Return a number of lines, to the nearest hundred."""
    return f"{max(100, round(lines, -2)):,}"


def completed(page: str) -> str:
    """Return the text of the page with the tables of now."""
    return _PART.sub(lambda _: f"\n{text()}\n", page)


if __name__ == "__main__":
    if sys.argv[1:] == ["write"]:
        PAGE.write_text(completed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(text(), end="")
