"""The report of a port: what changes the run, then what became of every key. It is available as rows, plain
data, Markdown and a table."""

from __future__ import annotations

import io
import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.text import Text

from recipec.port.ledger import SEVERITY, Finding, Ledger, Verdict, prefixes
from recipec.port.read import conceal
from recipec.port.source import MISSING, Source, Sources
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import printable
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
    errors = {found.path for found in ledger.diagnostics if found.severity == "error"}
    made = (replace(row, learned=not errors.isdisjoint(prefixes(row.key))) for row in out)
    return [replace(row, changes=_changes(row, ledger)) for row in made]


def _changes(row: Row, ledger: Ledger) -> bool:
    if row.verdict is Verdict.DEFAULTED:
        return row.key.startswith("--") or any(
            ledger.value(path, MISSING) not in (MISSING, _usual(path)) for path in row.recipe
        )
    return row.learned or row.verdict in (Verdict.UNSUPPORTED, Verdict.APPROXIMATED)


def _usual(path: str) -> Any:
    """Return the recipe's own default for a path, or MISSING if there is none."""
    found = field_at(split(path))
    if found is None or found.is_required():
        return MISSING
    return found.get_default(call_default_factory=True, validated_data={})


def headline(made: Sequence[Row]) -> dict[str, list[tuple[list[Row], str]]]:
    """Return what changes the run, by heading, the most severe first, and group keys with the same note."""
    grave = sorted(
        (row for row in made if row.changes),
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
MOST_LINES = 34
"""The most entries that the headline shows. The table has the rest."""
NAMED = 3
"""The most keys that are named for one sentence."""


def _named(together: Sequence[Row]) -> str:
    """Name keys together: "a, b and 2 more (config.yaml:3)"; a default has its value."""
    first = together[0]
    if first.verdict is Verdict.DEFAULTED:
        return f"{first.key}: {shown(first.value, WIDEST_VALUE)}"
    names = [row.key for row in together]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}{f' ({first.place})' if first.place else ''}"


def counts(made: Sequence[Row]) -> dict[str, int]:
    """Count the keys by verdict."""
    return {verdict.value: sum(row.verdict is verdict for row in made) for verdict in Verdict}


def summary(made: Sequence[Row]) -> str:
    """Return "31 keys exact, 4 approximated, 12 defaulted, 6 unsupported", and unused ones if any."""
    unused = Verdict.UNUSED.value
    found = {name: count for name, count in counts(made).items() if count or name != unused}
    first, *rest = (f"{count} {name}" for name, count in found.items())
    number, _, name = first.partition(" ")
    return ", ".join([f"{number} key{'' if number == '1' else 's'} {name}", *rest])


def _rows_of(ledger: Ledger, source: Source) -> Iterator[Row]:
    found: dict[str, Finding] = {}
    for finding in ledger.findings:
        if finding.file == source.file:
            known = found.get(finding.key)
            if known is not None:
                finding = known.joined(finding.verdict, finding.recipe, finding.note)
            found[finding.key] = finding
    spoken: set[str] = set()
    for leaf in source.leaves():
        nearest = [key for key in prefixes(leaf) if key in found]
        if nearest:
            spoken.add(nearest[-1])
            # A finding on a section is shown in addition to the key's own only if it says more than "exact".
            above = [key for key in nearest[:-1] if key not in spoken]
            sections = [k for k in above if found[k].recipe or found[k].verdict is not Verdict.EXACT]
            spoken.update(sections)
            yield from (_row(source, key, source.get(key, None), found[key]) for key in sections)
            yield _row(source, leaf, source.get(leaf, None), found[nearest[-1]])


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


def markdown(title: str, files: Sequence[str], made: Sequence[Row], to: bool = False) -> str:
    """Return the report as a Markdown page."""
    lines = [
        f"# Port {'to' if to else 'from'} {title}",
        "",
        f"{', '.join(f'`{file}`' for file in files)}: {summary(made)}.",
        "",
    ]
    unused = any(row.verdict is Verdict.UNUSED for row in made)
    meant = {verdict: text for verdict, text in MEANINGS.items() if unused or verdict is not Verdict.UNUSED}
    lines += [f"- {verdict.value}: {meaning}" for verdict, meaning in meant.items()]
    for heading, groups in headline(made).items():
        lines += ["", f"## {heading}", ""]
        for together, note in groups:
            places = ", ".join(dict.fromkeys(f"`{row.key}`" for row in together))
            of = (
                f" of `{together[0].place}`"
                if together[0].place
                else f" {_code(shown(together[0].value, 60))}"
            )
            lines.append(f"- {together[0].verdict.value}: {places}{of}{note and f': {note}'}")
    for file in [*files, ""]:
        part = [row for row in made if row.file == file]
        if not part:
            continue
        lines += ["", f"## {file or 'Defaults'}", ""]
        lines += _table(part, located=bool(file))
    return "\n".join(lines) + "\n"


def _table(part: Sequence[Row], located: bool) -> list[str]:
    head = ["line"] * located + ["key", "value", "verdict", "recipe", "note"]
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    for row in part:
        cells = [str(row.line or "")] * located
        cells += [_code(row.key), _code(shown(row.value, 60)), row.verdict.value]
        cells += [", ".join(map(_code, row.recipe)), row.note.replace("|", "\\|").replace("\n", " ")]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _code(text: str) -> str:
    fence = "``" if "`" in text else "`"
    pad = " " if "`" in text else ""
    return f"{fence}{pad}{text.replace('|', chr(92) + '|')}{pad}{fence}" if text else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> str:
    """Return rows of texts in columns, or as a Markdown table. The last column is not padded."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    if markdown:
        cells = [[cell.replace("|", "\\|") for cell in line] for line in lines]
        cells.insert(1, ["---"] * len(head))
        return "".join(f"| {' | '.join(line)} |\n" for line in cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return "".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]) + "\n"
        for line in lines
    )


def to_json(data: Any) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


COLORS = {
    Verdict.EXACT: "green",
    Verdict.APPROXIMATED: "yellow",
    Verdict.DEFAULTED: "cyan",
    Verdict.UNSUPPORTED: "red",
    Verdict.UNUSED: "dim",
}
WIDEST_KEY, WIDEST_VALUE = 48, 36
"""Widths of columns. A longer key shifts the rest of its line, and a longer value is cut."""
INDENT = 9
"""The column at which notes are indented."""


def terminal(
    title: str, files: Sequence[str], made: Sequence[Row], width: int, color: bool, to: bool = False
) -> str:
    """Return what changes the run, and the table, by file."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=color, no_color=not color, legacy_windows=False)
    owner = "The recipe" if to else title
    width = max(width, 60)
    for line in [*_opening(title, made, width), *_lines(owner, files, made, width)]:
        console.print(line, soft_wrap=True, highlight=False)
    return stream.getvalue()


def _opening(title: str, made: Sequence[Row], width: int) -> Iterator[Text]:
    yield Text(f"{title}: {summary(made)}")
    yield Text()
    head = [*_head(made, width)]
    yield from head[:MOST_LINES]
    if len(head) > MOST_LINES:
        yield Text("... and more, in the table")
    if head:
        yield Text()


def _lines(owner: str, files: Sequence[str], made: Sequence[Row], width: int) -> Iterator[Text]:
    for file in [*files, ""]:
        part = [row for row in made if row.file == file]
        if part:
            yield Text(printable(file) or f"{owner}'s defaults, written out", style="bold")
            yield from _columns(part, width)
            yield Text()


def _head(made: Sequence[Row], width: int) -> Iterator[Text]:
    """Yield the lines of what changes the run."""
    wide = max(len(verdict.value) for verdict in Verdict) + 2
    for heading, groups in headline(made).items():
        yield Text(heading, style="bold")
        for together, note in groups:
            first = together[0]
            told = f"{_named(together)}{': ' if note else ''}{note}"
            for number, line in enumerate(textwrap.wrap(printable(told), width - wide - 2)):
                start = "" if number else first.verdict.value
                text = Text("  ").append(f"{start:<{wide}}", style=COLORS[first.verdict])
                yield text.append(line)


def _columns(part: Sequence[Row], width: int) -> Iterator[Text]:
    cells = [(printable(row.key), printable(shown(row.value, WIDEST_VALUE))) for row in part]
    keys = max((len(key) for key, _ in cells if len(key) <= WIDEST_KEY), default=0)
    values = max(len(value) for _, value in cells)
    verdicts = max(len(verdict.value) for verdict in Verdict)
    for row, (key, value) in zip(part, cells, strict=True):
        line = Text(f"{row.line or '':>6} {key:<{keys}}  {value:<{values}}  ")
        line.append(f"{row.verdict.value:<{verdicts}}", style=COLORS[row.verdict])
        line.append(f"  {', '.join(row.recipe)}" if row.recipe else "")
        line.rstrip()
        yield line
        for note in textwrap.wrap(printable(row.note), width - INDENT):
            yield Text(f"{'':{INDENT}}{note}", style="dim")
