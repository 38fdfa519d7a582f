"""Port all files in folders, each on its own, and collect the results for one table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from recipec.port import dialects
from recipec.port.commands import CONFIGS, E1181, E1182, is_command
from recipec.port.port import E1112, Asked, Ported, port
from recipec.port.python_source import CHOOSE, E1175, E1176, NO_TRAINER, SUFFIXES
from recipec.port.read import read
from recipec.port.recognize import E1101, role_of
from recipec.spec.diagnostics import Diagnostic, has_errors
from recipec.spec.load import display
from recipec.spec.yaml_document import E0005

MOST = 2000
"""The most files of the folders that are looked at."""
NO_RUN = (E1101, E1182, E0005)
"""Findings on a file that is not a run of any tool. Such a file is skipped."""
SEVERAL = {E1181: "command", E1176: "trainer"}


@dataclass(frozen=True)
class One:
    """One of several ports."""

    name: str
    target: Path | None
    made: Ported

    @property
    def whole(self) -> bool:
        """Whether there is a recipe, without errors."""
        return self.made.whole and not has_errors(self.made.diagnostics)

    @property
    def result(self) -> str:
        """The recipe's path, or the first error."""
        first = next((each for each in self.made.diagnostics if each.severity == "error"), None)
        if first is None:
            return str(self.target or "a recipe")
        place = f":{first.span.line}" if first.span else ""
        return f"{first.code}{place} {first.message}"

    def to_dict(self) -> dict[str, object]:
        return {"file": self.name, "target": str(self.target) if self.target else None, **self.made.to_dict()}


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files among the paths, and the configs and scripts in folders that are not hidden."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            found.append(path)
            continue
        for each in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in each.relative_to(path).parts)
            known = each.suffix in (*CONFIGS, *SUFFIXES) or (is_command(each) and each.suffix != ".txt")
            if known and not hidden and not each.is_symlink() and each.is_file() and len(found) < MOST:
                found.append(each)
    return found


def port_all(paths: Sequence[Path], asked: Asked, out: Path | None) -> Iterator[One]:
    """Port each file on its own, with the accompanying files of its folder, at most one of each kind.

    Args:
        out: the folder for recipes, with the same subfolders as the sources; with None, none are written.
    """
    files = files_of(paths)
    configs = [path for path in files if not is_command(path) and path.suffix not in SUFFIXES]
    read_ones = {path: read(path)[0] for path in configs}
    roles = {path: role for path, source in read_ones.items() if source and (role := role_of(source))}
    taken: set[Path] = set()
    for path in (each for each in files if each not in roles):
        made = port([path], asked)
        if any(map(_is_no_run, made.diagnostics)) and path not in paths:
            continue
        beside = _companions(path, made.title, roles)
        kind = next((SEVERAL[each.code] for each in made.diagnostics if _lists_runs(each)), "")
        several = bool(kind) and getattr(asked, kind) is None
        for number in count(1) if several else [None]:
            target = _target(path, paths, out, number if several else None, taken) if out else None
            now = replace(asked, place=target or asked.place, writes=out is not None)
            changes: dict[str, Any] = {kind: number} if several else {}
            now = replace(now, **changes)
            one = _ported([path, *beside], replace(now, force=False))
            if target and any(each.code == E1112 for each in one.diagnostics):
                target = target.with_suffix("") / "recipe.yaml"  # another port has its needed files there
                one = _ported([path, *beside], replace(now, place=target))
            if several and any(map(_lists_runs, one.diagnostics)):
                break
            yield One(f"{display(path)}{f' ({number})' if several else ''}", target, one)


def _lists_runs(found: Diagnostic) -> bool:
    """Return whether a finding lists the runs of a file, of which an option chooses one."""
    return found.code in SEVERAL and (found.help or "").startswith(CHOOSE)


def _is_no_run(found: Diagnostic) -> bool:
    """Return whether a finding means that a file is skipped, such as a module without a trainer."""
    return found.code in NO_RUN or (found.code == E1175 and NO_TRAINER in found.message)


def _ported(paths: Sequence[Path], asked: Asked) -> Ported:
    """Port into a folder. Create the folder, and remove it if nothing was written into it."""
    made = [each for each in asked.place.parents if asked.writes and not each.exists()]
    asked.place.parent.mkdir(parents=True, exist_ok=True)
    try:
        return port(paths, asked)
    finally:
        for folder in made:
            folder.rmdir()


def _companions(path: Path, title: str, roles: Mapping[Path, str]) -> list[Path]:
    """Return the accompanying files in a file's folder that its tool reads, where only one is of its kind."""
    known = next((dialects.KNOWN[each.NAME].roles for each in dialects.every() if title == each.TITLE), ())
    beside = {other: role for other, role in roles.items() if other.parent == path.parent and role in known}
    kinds = list(beside.values())
    return [] if is_command(path) else [each for each, role in beside.items() if kinds.count(role) == 1]


def _target(path: Path, paths: Sequence[Path], out: Path, number: int | None, taken: set[Path]) -> Path:
    """Return a path below `out` for a recipe that no other recipe has."""
    home = next((each for each in paths if each.is_dir() and path.is_relative_to(each)), path.parent)
    stem = (out / path.relative_to(home)).with_suffix("")
    names = [f"-{number}" if number else "", *(f"-{path.suffix[1:]}-{again}" for again in range(1, MOST))]
    target = next(each for name in names if (each := stem.with_name(f"{stem.name}{name}.yaml")) not in taken)
    taken.add(target)
    return target
