"""Port the files of one run to a recipe and a report. The caller writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from recipec.compiler.arrangements import concerns_mesh
from recipec.compiler.catalog import E0801, E0802
from recipec.compiler.checks.launch import E1301
from recipec.compiler.checks.train import E0722
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.references import escapes
from recipec.port import dialects, mesh
from recipec.port.commands import is_command, read_command
from recipec.port.dialects import Module
from recipec.port.keys import words
from recipec.port.ledger import Finding, Ledger, Verdict, prefixes
from recipec.port.meaning.model_names import HUB_ID, way_out
from recipec.port.mesh import E1111
from recipec.port.python_source import SUFFIXES, read_script
from recipec.port.read import read
from recipec.port.recognize import Recognized, recognize, role_of, say_unread
from recipec.port.report import Row, counts, rows, summary
from recipec.port.settle import E1108, Settled, older_beside, overridden, renamed, settle
from recipec.port.source import Source, Sources
from recipec.port.typed import typed
from recipec.spec.codes import Code
from recipec.spec.commented_recipe import recipe_text
from recipec.spec.diagnostics import Diagnostic, Span, has_errors, in_order, render_json
from recipec.spec.language import VERSION
from recipec.spec.language.section import E0110
from recipec.spec.load import display, load
from recipec.spec.validate import E0102
from recipec.spec.yaml_document import Refused

NEUTRAL = words("args config finetune full lora qlora recipe sft train training-args training-config")
"""File names that say nothing about the run. A recipe of such a name is named after the config, and one of
such a config after its folder."""

Free = Mapping[tuple[str, str], str]
"""Unreadable values that affect nothing: the reason why they cannot be read, by file and path."""

MOST_TRIED = 64
"""The most unreadable values that are tried for an effect. Each further one is an error."""


@dataclass(frozen=True)
class Asked:
    """The arguments of the command line.

    Attributes:
        dialect: the dialect of --from, None to recognize it.
        devices: the source's GPUs, None if its files say it.
        partial: whether a recipe with errors is made anyway.
        place: the path of the recipe; paths in the recipe are relative to its folder.
        sets: keys of the source that --set changes, "KEY=VALUE".
        writes: whether the recipe and the files that it needs are written to disk.
        force: whether existing files may be replaced.
        script: the script of --script, None to recognize it from the files.
        command: the number from --command of a script's training command, from 1.
        trainer: the number from --trainer of a Python script's trainer, from 1.
    """

    accelerator: Accelerator
    dialect: str | None = None
    devices: int | None = None
    partial: bool = False
    place: Path = Path("recipe.yaml")
    sets: tuple[str, ...] = ()
    writes: bool = True
    force: bool = False
    script: str | None = None
    command: int | None = None
    trainer: int | None = None


@dataclass
class Ported:
    """The result of a port.

    Attributes:
        title: the tool's name; "" if the tool was not recognized.
        files: the names for messages, the main file first.
        rows: the report's rows.
        diagnostics: the findings, in the order of their places.
        text: the recipe's text; "" if there is none.
        program: the lowered recipe; None if the recipe has errors.
        missing: why the recipe is partial, one sentence each.
        ledger, sources: the ledger and the sources as they were read.
        read: the findings before the ledger was complete.
        batch: the source's batch.
        to: whether a recipe was ported to the tool, so that `text` is the tool's config.
    """

    title: str = ""
    files: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    text: str = ""
    program: Program | None = None
    missing: tuple[str, ...] = ()
    ledger: Ledger | None = None
    sources: Sources | None = None
    read: list[Diagnostic] = field(default_factory=list)
    batch: mesh.Batch | None = None
    to: bool = False

    @property
    def whole(self) -> bool:
        """Whether there is a recipe, and it is complete."""
        return bool(self.text) and not self.missing

    @property
    def inexact(self) -> list[Row]:
        """The keys that --strict does not accept."""
        return [row for row in self.rows if row.verdict in (Verdict.APPROXIMATED, Verdict.UNSUPPORTED)]

    def to_dict(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        return {
            "dialect": self.title or None,
            "files": list(self.files),
            "counts": counts(self.rows),
            "keys": [row.to_dict() for row in self.rows],
            "partial": bool(self.missing),
            "missing": list(self.missing),
            "config" if self.to else "recipe": self.text or None,
            "beside": dict(self.ledger.files) if self.ledger else {},
            "diagnostics": render_json(self.diagnostics),
        }


E1173 = Code(
    "E1173",
    "--script or --trainer for another kind of file",
    cause="`--script` names a script, but the file belongs to a tool that has one only. Or `--trainer` "
    "chooses a trainer of a Python script, but the file is a config.",
    cure="Leave the option out.",
)


def port(paths: Sequence[Path], asked: Asked) -> Ported:
    """Port the files of one run."""
    files, problems_of_files, asked = _read(paths, asked)
    if has_errors(problems_of_files):
        return Ported(diagnostics=in_order(problems_of_files))
    recognized = recognize(files, asked.dialect)
    if not isinstance(recognized, Recognized):
        return Ported(diagnostics=in_order([*problems_of_files, *recognized]))
    dialect, sources = recognized.dialect, recognized.sources
    if asked.script and not dialects.KNOWN[dialect.NAME].scripts:
        message = f"--script is for TRL's files, and {sources.main.file} is a file of {dialect.TITLE}"
        return Ported(diagnostics=[Diagnostic(E1173, message, help="leave --script out")])
    if asked.trainer and not sources.main.script:
        message = f"--trainer is for Python scripts, and {sources.main.file} is a file of {dialect.TITLE}"
        return Ported(diagnostics=[Diagnostic(E1173, message, help="leave --trainer out")])
    sources, problems = overridden(sources, asked.sets)
    if problems:
        return Ported(diagnostics=problems)
    sources = replace(sources, main=renamed(sources.main, dialect.NAME))
    title = sources.main.script.tool if sources.main.script else dialect.TITLE
    ported = Ported(title, _names(sources), sources=sources)
    ported.read = problems_of_files
    try:
        free = _without_bearing(sources, dialect, asked)
        ledger, used = _ledger(sources, dialect, asked, free)
        refused = [*ledger.diagnostics]
        ported.read += older_beside(ledger, dialect.NAME)
        dialects.apply(dialect, ledger)
    except Refused as stop:
        ported.diagnostics = in_order([*problems_of_files, stop.diagnostic])
        return ported
    ported.ledger = ledger
    _explain(ledger, free)
    for key in sorted(used.intersection(ledger.unread(ledger.sources.main))):
        ledger.exact(ledger.sources.main, key, note="what other keys refer to by this name")
    ported.read += say_unread(ledger, dialect, recognized=asked.dialect is None)
    if refused and not asked.partial:
        # Removed values may cause further errors, so those are not shown. Every key still has its row.
        out = {diagnostic.path for diagnostic in refused}
        ledger.findings = [finding for finding in ledger.findings if finding.file or finding.key not in out]
        ported.rows = rows(ledger, sources)
        ported.diagnostics = in_order([*ported.read, *refused])
        return ported
    folder = asked.place.parent
    obstacles = list(in_the_way(ledger.files, folder, asked.writes, asked.force))
    if has_errors(obstacles):
        return Ported(diagnostics=obstacles)
    ported.read += obstacles
    with in_place(ledger.files, folder, asked.force):
        ported.batch = _settle(ledger, sources.main, asked)
    finish(ported, asked)
    return ported


def finish(ported: Ported, asked: Asked) -> None:
    """Write the recipe's text and the report from the ledger, and check the recipe."""
    assert ported.ledger is not None and ported.sources is not None and ported.batch is not None
    # Work on a copy, without the mesh's findings, so that another mesh can still be chosen.
    ledger = replace(
        ported.ledger,
        findings=[*ported.ledger.findings],
        lines={**ported.ledger.lines},
        diagnostics=[*ported.ledger.diagnostics],
    )
    mesh.tell(ledger, ported.batch)
    body = recipe_text(ledger.lines, [])
    with in_place(ledger.files, asked.place.parent, asked.force):
        lowered = checked(body, asked.place)
    errors = hindering(ledger.diagnostics)
    # The error on a refused key already covers what is missing; drop the checks' errors on the same gap.
    kept = [d for d in lowered.diagnostics if not (errors and d.code in (E0102, E0110))]
    if any(d.code == E1111 for d in errors):
        kept = [d for d in kept if not concerns_mesh(d)]
    placed = [_moved_to_source(d, ledger, display(asked.place)) for d in kept]
    if not asked.partial and hindering([*errors, *placed]):
        # The recipe is not written, so findings on its own lines are of no use.
        placed = [d for d in placed if d.severity == "error" or d.span is None or d.span.file in ported.files]
    ported.missing = tuple(dict.fromkeys(map(_sentence, [*errors, *hindering(placed)])))
    ported.rows = rows(ledger, ported.sources)
    ported.program = lowered.program
    ported.text = recipe_text(ledger.lines, _header(ported))
    lower = ported.text.count("\n") - body.count("\n")
    placed = [moved(d, display(asked.place), lower) for d in placed]
    ported.diagnostics = in_order([*ported.read, *ledger.diagnostics, *placed])


E1117 = Code(
    "E1117",
    "file named twice",
    cause="The command names the same file twice.",
    cure="Name it once.",
)


def _read(paths: Sequence[Path], asked: Asked) -> tuple[list[Source], list[Diagnostic], Asked]:
    """Read the files.

    Returns:
        The files, the findings, and `asked` with the options that a script's command sets.
    """
    files: list[Source] = []
    diagnostics: list[Diagnostic] = []
    seen: set[str] = set()
    taken: frozenset[Path] = frozenset()
    for path in sorted(paths, key=lambda path: not is_command(path)):
        real = os.path.realpath(path)  # unlike Path.resolve, it accepts circular links
        if real in seen:
            diagnostics.append(Diagnostic(E1117, f"{display(path)} is given twice", help="give it once"))
            continue
        seen.add(real)
        if path in taken:
            continue
        if is_command(path):
            command, problems = read_command(path, asked.command, asked.dialect, paths)
            if command is not None:
                files += command.sources
                taken |= command.taken
                script, devices = asked.script or command.script, asked.devices or command.devices
                asked = replace(asked, dialect=command.dialect, script=script, devices=devices)
        elif path.suffix.lower() in SUFFIXES:
            config, others = _arguments(paths)
            source, problems = read_script(path, config, asked.trainer)
            files += [source] if source else []
            if config is not None and source is not None and source.script and source.script.taken:
                taken |= {config.path}
                files = [file for file in files if file.path != config.path]
                diagnostics += [problem for problem in others if problem not in diagnostics]
        else:
            source, problems = read(path)
            files += [typed(source)] if source else []
        diagnostics += problems
    return files, diagnostics, asked


def _arguments(paths: Sequence[Path]) -> tuple[Source | None, list[Diagnostic]]:
    """Return the only config among the paths, whose keys may be a script's arguments, with the findings."""
    configs = [path for path in paths if not is_command(path) and path.suffix.lower() not in SUFFIXES]
    sources = [(typed(source), problems) for path in configs for source, problems in [read(path)] if source]
    runs = [
        (source, problems)
        for source, problems in sources
        if role_of(source) is None and isinstance(source.data, dict)
    ]
    return runs[0] if len(runs) == 1 else (None, [])


def _names(sources: Sources) -> tuple[str, ...]:
    """Return the names of the files that contain the sources' keys. A script comes before its config."""
    names: dict[str, None] = {}
    for source in sources.all():
        places = dict.fromkeys(span.file for span in source.keys.values() if span.file != "--set")
        names |= places or {source.file: None}
    return tuple(names)


def _ledger(
    sources: Sources, dialect: Module, asked: Asked, free: Free = MappingProxyType({})
) -> tuple[Ledger, frozenset[str]]:
    """Make a ledger without the values that cannot be read. It has a finding on each of them.

    Args:
        free: unreadable values that stay in the files.

    Returns:
        The ledger, and the keys of the main file that other keys of it refer to.
    """

    def settled_of(source: Source, interpolates: bool) -> Settled:
        return settle(source, interpolates, [key for file, key in free if file == source.file])

    main = settled_of(sources.main, dialects.KNOWN[dialect.NAME].interpolates)
    others = {role: settled_of(source, interpolates=False) for role, source in sources.others.items()}
    files = Sources(main.source, {role: settled.source for role, settled in others.items()})
    folder = dialects.KNOWN[dialect.NAME].folder
    tpus = asked.accelerator.devices
    ledger = Ledger(
        files, asked.devices, folder=folder, script=asked.script, tpus=tpus, home=asked.place.parent
    )
    for settled in (main, *others.values()):
        for refusal in settled.refusals:
            source, key = settled.source, refusal.key
            if (source.file, key) in free:
                continue
            finding = Finding(source.file, key, refusal.value, Verdict.UNSUPPORTED, (), refusal.message)
            ledger.findings.append(replace(finding, span=source.span(key)))
            ledger.diagnostics.append(
                Diagnostic(refusal.code, refusal.message, key, refusal.help, source.span(key))
            )
    return ledger, main.used


def _without_bearing(sources: Sources, dialect: Module, asked: Asked) -> Free:
    """Find the unreadable values without any effect: the recipe is the same without them."""
    bare, _ = _ledger(sources, dialect, asked)
    refused = zip(bare.findings, bare.diagnostics, strict=True)
    notes = {
        (finding.file, finding.key): finding.note
        for finding, diagnostic in refused
        if diagnostic.code != E1108
    }
    if not notes:
        return {}
    dialects.apply(dialect, bare)
    free: dict[tuple[str, str], str] = {}
    for at in list(notes)[:MOST_TRIED]:
        tried, _ = _ledger(sources, dialect, asked, {at: ""})
        dialects.apply(dialect, tried)
        if tried.lines == bare.lines and len(tried.diagnostics) < len(bare.diagnostics):
            free[at] = notes[at]
    return free


def _explain(ledger: Ledger, free: Free) -> None:
    """Add to the findings on unreadable values without effect the reason why they were not read."""
    for (file, key), note in free.items():
        for index, finding in enumerate(ledger.findings):
            if finding.file == file and finding.key in prefixes(key):
                notes = "; ".join(filter(None, (finding.note, note)))
                ledger.findings[index] = replace(finding, note=notes)


def _settle(ledger: Ledger, main: Source, asked: Asked) -> mesh.Batch:
    """Set what no key of the source says: version, name, places and mesh. Return the source's batch."""
    ledger.set("recipe", VERSION)
    if "name" not in ledger.lines:
        named_by_place = asked.writes and _slug(asked.place.stem) not in NEUTRAL
        ledger.set("name", name_of(asked.place if named_by_place else main.path))
    _placed(ledger, asked.place.parent)

    def examine() -> Lowered:
        return checked(recipe_text(ledger.lines, []), asked.place, planning=True)

    return mesh.choose(ledger, asked.accelerator, examine)


def _header(ported: Ported) -> list[str]:
    """Return the comment at the recipe's top."""
    lines = []
    if ported.missing:
        lines += ["PARTIAL: this recipe is not the run of its source. What is missing:"]
        lines += [f"- {sentence}" for sentence in ported.missing]
        lines += [""]
    names = ", ".join(Path(file).name for file in ported.files)
    lines.append(f"Ported by `recipe port` from {names} ({ported.title}): {summary(ported.rows)}.")
    lost = [row for row in ported.rows if row.verdict is Verdict.UNSUPPORTED]
    if lost:
        lines += ["", "Not taken over:"]
        lines += [f"- {row.key}: {row.note}" for row in lost]
    return lines


def _sentence(diagnostic: Diagnostic) -> str:
    place = f" ({Path(diagnostic.span.file).name}:{diagnostic.span.line})" if diagnostic.span else ""
    return f"{diagnostic.message}{place}"


def name_of(path: Path) -> str:
    """Make a recipe's name from its source's path: lower-case letters, digits and hyphens."""
    folder, stem = _slug(path.resolve().parent.name), _slug(path.stem)
    name = (folder or stem) if stem in NEUTRAL else stem
    name = name[:63].rstrip("-")
    if not re.match("[a-z]", name):
        name = f"port-{name}"[:63].rstrip("-")
    return "ported" if name == "runtime" else name


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def checked(text: str, place: Path, planning: bool = False) -> Lowered:
    """Load and lower a recipe that is not written to disk yet.

    Args:
        place: the path that it will have; paths in the recipe are relative to its folder.
        planning: whether errors that a plan does not mind are left out, as of a folder for checkpoints.
    """
    return lower(load(place, text=text), planning)


def hindering(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Return the errors that make a recipe incomplete. A recipe that is written passes `recipe check`."""
    return [d for d in diagnostics if d.severity == "error"]


def _moved_to_source(diagnostic: Diagnostic, ledger: Ledger, name: str) -> Diagnostic:
    span = _key_of(diagnostic.path, ledger)
    if diagnostic.code in (E0801, E0802):
        key = next((finding.key for finding in ledger.findings if "model.id" in finding.recipe), "")
        id = str(ledger.value("model.id"))
        diagnostic = replace(diagnostic, help=way_out(id, key) or diagnostic.help)
        if lacking(diagnostic, id):
            close = re.match(r"did you mean `[^`]+`\? ", diagnostic.help or "")
            way = "--add-model adds it from the hub, as `recipe models add` does; or"
            help = f"{close[0] if close else ''}{way} --set {key}=./checkpoint, a folder with its config.json"
            diagnostic = replace(diagnostic, help=help)
    if diagnostic.code == E0722:
        key = next((finding.key for finding in ledger.findings if mesh.MICRO in finding.recipe), "")
        diagnostic = replace(
            diagnostic, help=f"--set {key}=2; the tool also compares the rows of a micro-batch"
        )
    if diagnostic.code == E1301:
        span = ledger.sources.main.place(ledger.folder)
        diagnostic = replace(
            diagnostic, help=f"--set {ledger.folder}=gs://bucket/run, a place that all hosts can reach"
        )
    if span is not None:
        return replace(diagnostic, span=span)
    return replace(diagnostic, span=replace(diagnostic.span, file=name) if diagnostic.span else None)


def lacking(diagnostic: Diagnostic, id: str) -> bool:
    """Return whether a finding says that the catalog lacks a model of the hub."""
    return (
        diagnostic.code == E0801 and "not in the catalog" in diagnostic.message and bool(HUB_ID.fullmatch(id))
    )


def _key_of(path: str, ledger: Ledger) -> Span | None:
    """Return the place of the key that sets a path of the recipe, or the closest section around it."""
    best: tuple[int, Span] | None = None
    for finding in ledger.findings:
        for target in finding.recipe:
            near = target == path or path.startswith((f"{target}.", f"{target}["))
            if near and finding.span and (best is None or len(target) > best[0]):
                best = (len(target), finding.span)
    return best[1] if best else None


def moved(diagnostic: Diagnostic, name: str, lines: int) -> Diagnostic:
    """Move a finding in the recipe down by `lines`, the length of the comment at the recipe's top."""
    if diagnostic.span is None or diagnostic.span.file != name:
        return diagnostic
    return replace(diagnostic, span=replace(diagnostic.span, line=diagnostic.span.line + lines))


E1112 = Code(
    "E1112",
    "file exists already",
    cause="The file that `-o` or `--report` names exists already, is one of the ported files, or "
    "cannot be written.",
    cure="Name another file, or replace it with `--force`.",
)

W1119 = Code(
    "W1119",
    "additional file is not written",
    cause="The recipe needs a file next to it, such as the Python module of its `data.transform`.",
    cure="Give a file for the recipe with `-o`. The other files are written next to it.",
)


def in_the_way(
    files: Mapping[str, str], folder: Path, writes: bool, force: bool, what: str = "recipe"
) -> Iterator[Diagnostic]:
    """Yield what prevents writing the files: errors, or a warning if the recipe goes to stdout.

    Args:
        files: texts by name.
        folder: the recipe's folder.
        writes: whether the recipe goes to a file at all.
        force: whether existing files may be replaced.
        what: what needs the files: a recipe, or a tool's config.
    """
    for name, content in files.items():
        if not writes:
            message = (
                f"the {what} needs {name} next to it, which recipec does not write if the {what} goes "
                "to stdout"
            )
            yield Diagnostic(W1119, message, help=f"-o {what}.yaml writes both")
        elif not force and _content(folder / name) not in (None, content):
            message = (
                f"{display(folder / name)} already exists, and the {what} needs another file of that name"
            )
            yield Diagnostic(E1112, message, help="--force replaces it; -o can name another folder")


@contextmanager
def in_place(files: Mapping[str, str], folder: Path, force: bool) -> Iterator[None]:
    """Put the files into the folder while the recipe is checked, and restore the folder afterwards.

    Args:
        force: whether existing files may be replaced during the check.
    """
    before: dict[Path, str | None] = {}
    try:
        for name, content in files.items():
            path = folder / name
            present = _content(path)
            if present is None or (force and present != content):
                before[path] = present
                path.write_text(content, encoding="utf-8")
        yield
    finally:
        for path, present in before.items():
            if present is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(present, encoding="utf-8")


def _content(path: Path) -> str | None:
    """Return a file's text, or None if the file does not exist."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


FOLDER = "data"
"""The folder for copies of data sets, next to the recipe."""


def _placed(ledger: Ledger, folder: Path) -> None:
    """Replace the paths of sources that an artifact cannot reach, and say which copies have to be made.

    Args:
        folder: the recipe's folder.
    """
    taken: dict[str, str] = {}
    for path in ("data.train", "data.eval"):
        entries = ledger.value(path)
        if not isinstance(entries, list):
            continue
        notes = []
        reachable = []
        for entry in entries:
            text = entry.get("path") if isinstance(entry, Mapping) else entry
            if isinstance(text, str) and escapes(text):
                below = _below(text, folder) or taken.setdefault(text, _free(text, taken.values()))
                notes += [f"put a copy of {text} next to the recipe, as {below}"] if text in taken else []
                entry = {**entry, "path": below} if isinstance(entry, Mapping) else below
            reachable.append(entry)
        note = "; ".join(dict.fromkeys(notes))
        if reachable != entries:
            ledger.set(path, reachable, "; ".join(filter(None, (ledger.lines[path].comment, note))))
        if note:
            ledger.amend(path, Verdict.EXACT, note)


def _below(text: str, folder: Path) -> str:
    """Return the path relative to the recipe's folder, or "" if it is outside that folder."""
    full, home = Path(folder, Path(text).expanduser()).resolve(), folder.resolve()
    return full.relative_to(home).as_posix() if full != home and full.is_relative_to(home) else ""


def _free(text: str, taken: Collection[str]) -> str:
    """Return a name in FOLDER that no other source has."""
    name = PurePosixPath(text.replace("\\", "/")).name.strip("~. ") or "train"
    stem, dot, ends = name.partition(".")
    for number in count(2):
        if f"{FOLDER}/{name}" not in taken:
            break
        name = f"{stem}-{number}{dot}{ends}"
    return f"{FOLDER}/{name}"
