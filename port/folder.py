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
class FolderRun:
    """The port of one file of a folder."""

    name: str
    target: Path | None
    ported: Ported

    @property
    def whole(self) -> bool:
        """Whether there is a recipe, without errors."""
        return self.ported.whole and not has_errors(self.ported.diagnostics)

    @property
    def result(self) -> str:
        """The recipe's path, or the first error."""
        first = next((problem for problem in self.ported.diagnostics if problem.severity == "error"), None)
        if first is None:
            return str(self.target or "a recipe")
        place = f":{first.span.line}" if first.span else ""
        return f"{first.code}{place} {first.message}"

    def to_dict(self) -> dict[str, object]:
        return {
            "file": self.name,
            "target": str(self.target) if self.target else None,
            **self.ported.to_dict(),
        }


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files among the paths, and the configs and scripts in folders that are not hidden."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        for file in sorted(path.rglob("*")):
            hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            known = file.suffix in (*CONFIGS, *SUFFIXES) or (is_command(file) and file.suffix != ".txt")
            if known and not hidden and not file.is_symlink() and file.is_file() and len(files) < MOST:
                files.append(file)
    return files


def port_all(paths: Sequence[Path], asked: Asked, out: Path | None) -> Iterator[FolderRun]:
    """Port each file on its own, with the accompanying files of its folder, at most one of each kind.

    Args:
        out: the folder for recipes, with the same subfolders as the sources; with None, none are written.
    """
    files = files_of(paths)
    configs = [path for path in files if not is_command(path) and path.suffix not in SUFFIXES]
    read_ones = {path: read(path)[0] for path in configs}
    roles = {path: role for path, source in read_ones.items() if source and (role := role_of(source))}
    taken: set[Path] = set()
    for path in (file for file in files if file not in roles):
        ported = port([path], asked)
        if any(map(_is_no_run, ported.diagnostics)) and path not in paths:
            continue
        beside = _companions(path, ported.title, roles)
        kind = next((SEVERAL[problem.code] for problem in ported.diagnostics if _lists_runs(problem)), "")
        several = bool(kind) and getattr(asked, kind) is None
        for number in count(1) if several else [None]:
            target = _target(path, paths, out, number if several else None, taken) if out else None
            now = replace(asked, place=target or asked.place, writes=out is not None)
            changes: dict[str, Any] = {kind: number} if several else {}
            now = replace(now, **changes)
            port_of_run = _ported([path, *beside], replace(now, force=False))
            if target and any(problem.code == E1112 for problem in port_of_run.diagnostics):
                target = target.with_suffix("") / "recipe.yaml"  # another port has its needed files there
                port_of_run = _ported([path, *beside], replace(now, place=target))
            if several and any(map(_lists_runs, port_of_run.diagnostics)):
                break
            yield FolderRun(f"{display(path)}{f' ({number})' if several else ''}", target, port_of_run)


def _lists_runs(diagnostic: Diagnostic) -> bool:
    """Return whether a finding lists the runs of a file, of which an option chooses one."""
    return diagnostic.code in SEVERAL and (diagnostic.help or "").startswith(CHOOSE)


def _is_no_run(diagnostic: Diagnostic) -> bool:
    """Return whether a finding means that a file is skipped, such as a module without a trainer."""
    return diagnostic.code in NO_RUN or (diagnostic.code == E1175 and NO_TRAINER in diagnostic.message)


def _ported(paths: Sequence[Path], asked: Asked) -> Ported:
    """Port into a folder. Create the folder, and remove it if nothing was written into it."""
    new_folders = [parent for parent in asked.place.parents if asked.writes and not parent.exists()]
    asked.place.parent.mkdir(parents=True, exist_ok=True)
    try:
        return port(paths, asked)
    finally:
        for folder in new_folders:
            folder.rmdir()


def _companions(path: Path, title: str, roles: Mapping[Path, str]) -> list[Path]:
    """Return the accompanying files in a file's folder that its tool reads, where only one is of its kind."""
    known = next(
        (dialects.KNOWN[dialect.NAME].roles for dialect in dialects.every() if title == dialect.TITLE), ()
    )
    beside = {other: role for other, role in roles.items() if other.parent == path.parent and role in known}
    kinds = list(beside.values())
    return [] if is_command(path) else [file for file, role in beside.items() if kinds.count(role) == 1]


def _target(path: Path, paths: Sequence[Path], out: Path, number: int | None, taken: set[Path]) -> Path:
    """Return a path below `out` for a recipe that no other recipe has."""
    home = next((folder for folder in paths if folder.is_dir() and path.is_relative_to(folder)), path.parent)
    stem = (out / path.relative_to(home)).with_suffix("")
    names = [f"-{number}" if number else "", *(f"-{path.suffix[1:]}-{again}" for again in range(1, MOST))]
    target = next(free for name in names if (free := stem.with_name(f"{stem.name}{name}.yaml")) not in taken)
    taken.add(target)
    return target
