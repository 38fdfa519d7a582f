"""The report of a port: what changes the run, then what became of every key. It is available as rows, plain
data and a document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from recipec.compiler.pages.document import Document, Excerpt, Facts, Section, Sides, Table
from recipec.port.ledger import SEVERITY, Finding, Ledger, Verdict, prefixes
from recipec.port.read import conceal
from recipec.port.source import MISSING, Source, Sources
from recipec.spec.core_schema import flow
from recipec.spec.key_paths import split
from recipec.spec.structure import field_at

MEANINGS = {
    Verdict.EXACT: "the run is the same",
    Verdict.APPROXIMATED: "the closest counterpart; the note says how it differs",
    Verdict.DEFAULTED: "not in the files; recipec writes out the tool's default",
    Verdict.UNSUPPORTED: "not taken over; the note says what that changes",
    Verdict.UNUSED: "the source's run does not read it either",
}
SECRETS = re.compile(r"(hub_token|hf_token|api_key|password|secret)$", re.IGNORECASE)
"""Keys whose values are not shown."""


@dataclass(frozen=True)
class Row:
    """What became of a key.

    Attributes:
        file, line, column: the place; "" and None for a default.
        key: the path in the file.
        value: plain data.
        recipe: the recipe's paths that the key sets.
        note: "" if the verdict says everything.
        learned: whether the run learns something else because of the key, which is an error.
        changes: whether the key makes the run a different one, or its default differs from the recipe's.
    """

    file: str
    line: int | None
    column: int | None
    key: str
    value: Any
    verdict: Verdict
    recipe: tuple[str, ...]
    note: str
    learned: bool = False
    changes: bool = False

    @property
    def place(self) -> str:
        """The place as text: "config.yaml:12"."""
        return self.file if self.line is None else f"{self.file}:{self.line}"

    def to_dict(self) -> dict[str, Any]:
        return {
            "file": self.file or None,
            "line": self.line,
            "column": self.column,
            "key": self.key,
            "value": self.value,
            "verdict": self.verdict.value,
            "recipe": list(self.recipe),
            "note": self.note or None,
            "changes": self.changes,
        }


def rows(ledger: Ledger, sources: Sources) -> list[Row]:
    """Return every key of every file in order, then the defaults.

    A finding on a section applies to each of its keys that has no finding of its own.

    Args:
        sources: the files as they were read.
    """
    out = [row for source in sources.all() for row in _rows_of(ledger, source)]
    defaults = [finding for finding in ledger.findings if not finding.file]
    out += [_row(None, finding.key, finding.value, finding) for finding in defaults]
    errors = {problem.path for problem in ledger.diagnostics if problem.severity == "error"}
    judged = (replace(row, learned=not errors.isdisjoint(prefixes(row.key))) for row in out)
    return [replace(row, changes=_changes_the_run(row, ledger)) for row in judged]


def _changes_the_run(row: Row, ledger: Ledger) -> bool:
    if row.verdict is Verdict.DEFAULTED:
        return row.key.startswith("--") or any(
            ledger.value(path, MISSING) not in (MISSING, _usual(path)) for path in row.recipe
        )
    return row.learned or row.verdict in (Verdict.UNSUPPORTED, Verdict.APPROXIMATED)


def _usual(path: str) -> Any:
    """Return the recipe's own default for a path, or MISSING if there is none."""
    field = field_at(split(path))
    if field is None or field.is_required():
        return MISSING
    return field.get_default(call_default_factory=True, validated_data={})


def headline(report: Sequence[Row]) -> dict[str, list[tuple[list[Row], str]]]:
    """Return what changes the run, by heading, the most severe first, and group keys with the same note."""
    grave = sorted(
        (row for row in report if row.changes),
        key=lambda row: (not row.learned, -SEVERITY.index(row.verdict)),
    )
    out: dict[str, list[tuple[list[Row], str]]] = {}
    for row in grave:
        title = OTHER_DEFAULTS if row.verdict is Verdict.DEFAULTED else CHANGES
        groups = out.setdefault(title, [])
        same = next((rows for rows, note in groups if note == row.note and rows[0].file == row.file), None)
        if same is not None and title == CHANGES and same[0].verdict is row.verdict:
            same.append(row)
        else:
            groups.append(([row], row.note))
    return out


CHANGES = "What changes the run"
OTHER_DEFAULTS = "Defaults that differ from a recipe's own"
MOST_CHANGES = 14
"""The most entries of a heading that a terminal shows. The tables have the rest."""
NAMED = 3
"""The most keys that are named for one sentence."""
WIDEST_VALUE = 60
"""Letters of a value. A longer one is cut."""


def counts(report: Sequence[Row]) -> dict[str, int]:
    """Count the keys by verdict."""
    return {verdict.value: sum(row.verdict is verdict for row in report) for verdict in Verdict}


def summary(report: Sequence[Row]) -> str:
    """Return "31 keys exact, 4 approximated, 12 defaulted, 6 unsupported", and unused ones if any."""
    unused = Verdict.UNUSED.value
    present = {name: count for name, count in counts(report).items() if count or name != unused}
    first, *rest = (f"{count} {name}" for name, count in present.items())
    number, _, name = first.partition(" ")
    return ", ".join([f"{number} key{'' if number == '1' else 's'} {name}", *rest])


def _rows_of(ledger: Ledger, source: Source) -> Iterator[Row]:
    by_key: dict[str, Finding] = {}
    for finding in ledger.findings:
        if finding.file == source.file:
            known = by_key.get(finding.key)
            if known is not None:
                finding = known.joined(finding.verdict, finding.recipe, finding.note)
            by_key[finding.key] = finding
    spoken: set[str] = set()
    for leaf in source.leaves():
        nearest = [key for key in prefixes(leaf) if key in by_key]
        if nearest:
            spoken.add(nearest[-1])
            # A finding on a section is shown in addition to the key's own only if it says more than "exact".
            above = [key for key in nearest[:-1] if key not in spoken]
            sections = [k for k in above if by_key[k].recipe or by_key[k].verdict is not Verdict.EXACT]
            spoken.update(sections)
            yield from (_row(source, key, source.get(key, None), by_key[key]) for key in sections)
            yield _row(source, leaf, source.get(leaf, None), by_key[nearest[-1]])


def _row(source: Source | None, key: str, value: Any, finding: Finding) -> Row:
    span = source.span(key) if source else None
    older = source.older.get(key) if source else None
    note = "; ".join(filter(None, (f"the older name of {key}" if older else "", finding.note)))
    shown = "***" if SECRETS.search(key) and value else _concealed(value)
    named = span.file if span and span.file != "--set" else source.file if source else ""
    return Row(
        named if source else "",
        span.line if span else None,
        span.column if span else None,
        older or key,
        shown,
        finding.verdict,
        finding.recipe,
        note,
    )


def _concealed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: "***" if SECRETS.search(str(key)) else _concealed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_concealed(item) for item in value]
    return conceal(value) if isinstance(value, str) else value


def shown(value: Any, widest: int) -> str:
    """Return a value on one line, cut if it is too wide."""
    text = " ".join((value if isinstance(value, str) else flow(value)).split())
    return text if len(text) <= widest else f"{text[: widest - 3]}..."


def document(
    title: str,
    files: Sequence[str],
    report: Sequence[Row],
    to: bool = False,
    sides: Sequence[Sides] = (),
    errors: Sequence[str] = (),
) -> Document:
    """Return the report as a document: what changes the run, then every key by file.

    Args:
        title: the tool's name.
        files: the names of its files.
        to: whether a recipe was ported to the tool.
        sides: the files next to each other, for a page.
        errors: sentences, for a page: elsewhere the diagnostics follow.
    """
    name = f"Port {'to' if to else 'from'} {title}"
    anchors = _anchors(sides)
    sections = list(_changes(report, anchors))
    if sides:
        aside = "A line links to its line on the other side. The numbers next to it link to the others."
        sections.append(Section("sides", "Side by side", (aside,), sides))
    for number, file in enumerate([*files, ""]):
        keys = [row for row in report if row.file == file]
        owner = "The recipe" if to else title
        if keys:
            heading = file or f"{owner}'s defaults, written out"
            sections.append(Section(f"file-{number}", heading, (), [_keys(keys, anchors)]))
    unused = any(row.verdict is Verdict.UNUSED for row in report)
    meanings = [
        (verdict.value, meaning)
        for verdict, meaning in MEANINGS.items()
        if unused or verdict is not Verdict.UNUSED
    ]
    sections.append(Section("verdicts", "Verdicts", (), [Facts(meanings)], detail=True))
    command = ("recipe port", "")
    sentence = f"{', '.join(files)}: {summary(report)}"
    return Document(
        name,
        sections,
        alarms=[("error:", error) for error in errors],
        sentence=sentence,
        title=name,
        generator=command[0],
        command=command,
    )


Anchors = Mapping[tuple[str, int | None], str]
"""Ids of lines, by file and number."""


def _anchors(sides: Sequence[Sides]) -> Anchors:
    return {
        (listing.name, line.number): line.id
        for side in sides
        for listing in side.left
        for line in listing.lines
    }


def _changes(report: Sequence[Row], anchors: Anchors) -> Iterator[Section]:
    """Yield a section for each heading of what changes the run."""
    for number, (heading, groups) in enumerate(headline(report).items()):
        defaults = heading == OTHER_DEFAULTS
        firsts = [together[0] for together, _ in groups]
        table = Table(
            ("verdict", "key", "value") if defaults else ("verdict", "keys", "place"),
            [
                [row.verdict.value, row.key, shown(row.value, WIDEST_VALUE)]
                if defaults
                else [row.verdict.value, _named(together), row.place]
                for row, (together, _) in zip(firsts, groups, strict=True)
            ],
            words=(1, 2),
            code=(1, 2) if defaults else (1,),
            bad=_bad(firsts),
            excerpt=Excerpt(MOST_CHANGES, rest="in the tables"),
            remarks=[note for _, note in groups],
            links=[anchors.get((row.file, row.line), "") for row in firsts],
        )
        yield Section(f"changes-{number}", heading, (), [table])


def _named(together: Sequence[Row]) -> str:
    """Name keys that have one note, the first of them if they are many."""
    names = [row.key for row in together]
    return ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])


def _keys(keys: Sequence[Row], anchors: Anchors) -> Table:
    """Return the table of a file's keys, or of the defaults, which have no lines."""
    located = [[str(row.line or "")] if row.file else [] for row in keys]
    before = len(located[0])
    return Table(
        [*["line"] * before, "key", "value", "verdict", "recipe"],
        [
            [*line, row.key, shown(row.value, WIDEST_VALUE), row.verdict.value, ", ".join(row.recipe)]
            for line, row in zip(located, keys, strict=True)
        ],
        words=range(before + 4),
        code=(before, before + 1, before + 3),
        bad=_bad(keys),
        remarks=[row.note for row in keys],
        links=[anchors.get((row.file, row.line), "") for row in keys],
    )


def _bad(report: Sequence[Row]) -> tuple[int, ...]:
    """Return the indices of the keys that the run does without."""
    return tuple(
        index for index, row in enumerate(report) if row.learned or row.verdict is Verdict.UNSUPPORTED
    )


def to_json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
