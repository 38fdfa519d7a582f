"""The verdict on each key of a ported file, and the values of the recipe.

A dialect goes through its keys and records for each, once, what it became. `unread` finds the keys without
a record, so that no key is missing from the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

from recipec.port.source import MISSING, Source, Sources
from recipec.spec.codes import Code
from recipec.spec.commented_recipe import Line
from recipec.spec.diagnostics import Diagnostic, Span


class Verdict(Enum):
    """How a key was taken over.

    EXACT: the run is the same: the key has a counterpart, or does not affect the run's numbers here.
    APPROXIMATED: there is a counterpart that differs a little; the note says how, and what it changes.
    DEFAULTED: the key is not in the file; its tool's default was written out.
    UNSUPPORTED: there is no counterpart; the note says what that changes.
    UNUSED: the source's run does not read the key, such as a data set that its config does not name.
    """

    EXACT = "exact"
    APPROXIMATED = "approximated"
    DEFAULTED = "defaulted"
    UNSUPPORTED = "unsupported"
    UNUSED = "unused"


SEVERITY = (Verdict.UNUSED, Verdict.EXACT, Verdict.DEFAULTED, Verdict.APPROXIMATED, Verdict.UNSUPPORTED)
"""In ascending severity. Of several findings on one key, the most severe one counts."""


@dataclass(frozen=True)
class Finding:
    """What became of one key.

    Attributes:
        file: the file's name for messages, "" for a default that is in no file.
        key: the path in the file, "datasets[0].path".
        value: the key's value, as plain data.
        verdict: see Verdict.
        recipe: the recipe's paths that the key sets, () for none.
        note: one sentence without a full stop, "" if the verdict says everything.
        span: the place of the value; None for a default.
    """

    file: str
    key: str
    value: Any
    verdict: Verdict
    recipe: tuple[str, ...] = ()
    note: str = ""
    span: Span | None = None

    def joined(self, verdict: Verdict, recipe: Sequence[str], note: str) -> Finding:
        """Add another finding on the same key: keep the more severe verdict, and both notes."""
        return replace(
            self,
            verdict=max(self.verdict, verdict, key=SEVERITY.index),
            recipe=tuple(dict.fromkeys([*self.recipe, *recipe])),
            note="; ".join(dict.fromkeys(filter(None, (self.note, note)))),
        )


@dataclass
class Ledger:
    """The findings of a port, and the recipe's values by path.

    Attributes:
        sources: the files.
        devices: GPUs (processes) of the source's run, from --devices; None counts as 1.
        tpus: devices of the requested accelerator; a TPU tool's run is laid out on them as in the tool.
        findings: in the order of recording.
        lines: the recipe's values by dotted path ("train.optimizer.learning_rate", "data.train"); a complete
            list or mapping is one value.
        diagnostics: with an error, the recipe is written only under --partial; warnings and notes are shown.
        files: further files that the recipe needs, text by name: the file of `data.transform`.
        folder: the tool's key for the folder of results.
        means: rows that a micro-batch's mean is over, if not the rows of one device.
        script: which of the tool's scripts the files are for; None if the files themselves say it.
        home: the recipe's folder, which may have models that were added from the hub.
    """

    sources: Sources
    devices: int | None = None
    findings: list[Finding] = field(default_factory=list)
    lines: dict[str, Line] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    folder: str = "output_dir"
    script: str | None = None
    tpus: int | None = None
    means: int | None = None
    home: Path = Path()

    def exact(self, source: Source, key: str, sets: Mapping[str, Any] | None = None, note: str = "") -> None:
        """Record a key that means the same here. Without `sets` it sets nothing, and the note says why."""
        self._record(source, key, Verdict.EXACT, sets or {}, note)

    def approximated(self, source: Source, key: str, sets: Mapping[str, Any], note: str) -> None:
        """Record a key whose counterpart differs. The note says how, and what the difference changes.

        The note becomes a comment on the recipe's values too.
        """
        self._record(source, key, Verdict.APPROXIMATED, sets, note, comment=True)

    def unsupported(self, source: Source, key: str, note: str) -> None:
        """Record a key without a counterpart. The note says what that changes."""
        self._record(source, key, Verdict.UNSUPPORTED, {}, note)

    def unused(self, source: Source, key: str, note: str) -> None:
        """Record a key that the source's run does not read. The note says why."""
        self._record(source, key, Verdict.UNUSED, {}, note)

    def refused(self, source: Source, key: str, code: Code, message: str, help: str) -> None:
        """Refuse a key that the run cannot do without: add an error at its place, and record the key."""
        reported = any(
            diagnostic.path == key and diagnostic.severity == "error" for diagnostic in self.diagnostics
        )
        if reported and not source.has(key):
            return  # a value that was removed from the file
        self.unsupported(source, key, message)
        self.diagnostics.append(Diagnostic(code, message, key, help, source.place(key)))

    def defaulted(self, key: str, value: Any, sets: Mapping[str, Any], note: str) -> None:
        """Record the tool's default for a key that is in no file, and write it into the recipe."""
        self.findings.append(Finding("", key, value, Verdict.DEFAULTED, tuple(sets), note))
        for path, setting in sets.items():
            self.lines[path] = Line(setting, note)

    def set(self, path: str, value: Any, comment: str = "") -> None:
        """Set a value of the recipe that depends on several keys. Those keys are recorded separately."""
        self.lines[path] = Line(value, comment)

    def amend(self, path: str, verdict: Verdict, note: str) -> None:
        """Add a note to the keys that set a path of the recipe. The more severe verdict holds."""
        for index, finding in enumerate(self.findings):
            if path in finding.recipe:
                self.findings[index] = finding.joined(verdict, (), note)

    def move(self, path: str, to: str) -> None:
        """Take a path out of the recipe; the keys that set it set another path instead."""
        if self.lines.pop(path, None) is not None:
            self.findings = [
                replace(finding, recipe=tuple(to if target == path else target for target in finding.recipe))
                for finding in self.findings
            ]

    def value(self, path: str, default: Any = None) -> Any:
        """Return a value of the recipe that was set before."""
        line = self.lines.get(path)
        return default if line is None else line.value

    def unread(self, source: Source) -> list[str]:
        """Return the paths of a file's values that have no finding.

        A finding on a section ("datasets[0]") counts for everything below it.
        """
        stated = {finding.key for finding in self.findings if finding.file == source.file}
        return [key for key in source.leaves() if not any(prefix in stated for prefix in prefixes(key))]

    def _record(
        self,
        source: Source,
        key: str,
        verdict: Verdict,
        sets: Mapping[str, Any],
        note: str,
        comment: bool = False,
    ) -> None:
        value = source.get(key)
        shown = None if value is MISSING else value
        self.findings.append(Finding(source.file, key, shown, verdict, tuple(sets), note, source.span(key)))
        for path, setting in sets.items():
            self.lines[path] = Line(setting, note if comment else "")


def prefixes(key: str) -> Iterable[str]:
    """Yield the sections that a key is in, and the key: "a[0].b" gives "a", "a[0]", "a[0].b"."""
    for at, character in enumerate(key):
        if character in ".[" and at:
            yield key[:at]
    yield key
