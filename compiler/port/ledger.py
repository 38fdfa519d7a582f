"""What became of each key of a ported file, and the recipe that comes of it.

A dialect goes through its keys and says of each, once, what it turned into. What no one spoke of is found
by `unread`, so that no key is missing from the report.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from recipec.compiler.port.source import MISSING, Source, Sources
from recipec.spec.diagnostics import Diagnostic, Span


class Verdict(Enum):
    """How a key was taken over.

    EXACT: the run is the same: the key has a counterpart, or does not bear on the run's numbers here.
    APPROXIMATED: there is a counterpart that is not quite the same; the note says how, and what it changes.
    DEFAULTED: the key does not stand in the file; its tool's default was written out.
    UNSUPPORTED: there is no counterpart; the note says what that changes.
    UNUSED: the run of the source does not read it, such as a data set that its config does not name.
    """

    EXACT = "exact"
    APPROXIMATED = "approximated"
    DEFAULTED = "defaulted"
    UNSUPPORTED = "unsupported"
    UNUSED = "unused"


SEVERITY = (Verdict.UNUSED, Verdict.EXACT, Verdict.DEFAULTED, Verdict.APPROXIMATED, Verdict.UNSUPPORTED)
"""Of several findings on one key, the last of these counts."""


@dataclass(frozen=True)
class Finding:
    """What became of one key.

    Attributes:
        file: as shown, "" for a default that stands in no file.
        key: path in the file, "datasets[0].path".
        value: of the key: plain data.
        verdict: see Verdict.
        recipe: paths of the recipe that it sets, () for none.
        note: one sentence without a full stop, "" where the verdict says all.
        span: of the value; None for a default.
    """

    file: str
    key: str
    value: Any
    verdict: Verdict
    recipe: tuple[str, ...] = ()
    note: str = ""
    span: Span | None = None

    def joined(self, verdict: Verdict, recipe: Sequence[str], note: str) -> Finding:
        """With what else is said of the key: the graver verdict, and both notes."""
        return replace(
            self,
            verdict=max(self.verdict, verdict, key=SEVERITY.index),
            recipe=tuple(dict.fromkeys([*self.recipe, *recipe])),
            note="; ".join(dict.fromkeys(filter(None, (self.note, note)))),
        )


@dataclass(frozen=True)
class Line:
    """A value of the recipe that is made, and the comment beside it, "" for none."""

    value: Any
    comment: str = ""


@dataclass
class Ledger:
    """The findings of a port, and the recipe's values by path.

    Attributes:
        sources: the files.
        devices: GPUs (processes) that the source ran on: given by --devices, or else 1.
        tpus: devices of the accelerator that is asked for, on which a TPU tool's run lies as it did there.
        findings: in the order in which they were made.
        lines: the recipe's values by dotted path ("train.optimizer.learning_rate", "data.train"); a list or a
            mapping that is given whole is one value.
        diagnostics: errors: a recipe is then written with --partial alone; warnings and notes are shown.
        files: what the recipe needs beside it, by name, as text: the file of `data.transform`.
        folder: the tool's key for where results go.
        means: rows that a micro-batch's mean is over, where they are not those of one device.
        script: of the tool's scripts, the one that the files are for; None where they tell it.
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

    def exact(self, source: Source, key: str, sets: Mapping[str, Any] | None = None, note: str = "") -> None:
        """A key that means the same here; without `sets` it has nothing to say here (the note tells why)."""
        self._record(source, key, Verdict.EXACT, sets or {}, note)

    def approximated(self, source: Source, key: str, sets: Mapping[str, Any], note: str) -> None:
        """A key with a counterpart that is not quite the same: how, and what that changes.

        The note stands as a comment beside the recipe's values too.
        """
        self._record(source, key, Verdict.APPROXIMATED, sets, note, comment=True)

    def unsupported(self, source: Source, key: str, note: str) -> None:
        """A key without a counterpart: what that changes."""
        self._record(source, key, Verdict.UNSUPPORTED, {}, note)

    def unused(self, source: Source, key: str, note: str) -> None:
        """A key that the source's run does not read: why."""
        self._record(source, key, Verdict.UNUSED, {}, note)

    def refused(self, source: Source, key: str, code: str, message: str, help: str) -> None:
        """A key without which the run would be another one: an error at its place, and an unsupported key.

        Args:
            code: of spec.codes, E11..
        """
        told = any(each.path == key and each.severity == "error" for each in self.diagnostics)
        if told and not source.has(key):
            return  # a value that was taken out of the file
        self.unsupported(source, key, message)
        self.diagnostics.append(Diagnostic(code, message, key, help, source.place(key)))

    def defaulted(self, key: str, value: Any, sets: Mapping[str, Any], note: str) -> None:
        """A key that does not stand in any file: the tool's default, written out.

        Args:
            note: whose default, "Axolotl's default".
        """
        self.findings.append(Finding("", key, value, Verdict.DEFAULTED, tuple(sets), note))
        for path, made in sets.items():
            self.lines[path] = Line(made, note)

    def set(self, path: str, value: Any, comment: str = "") -> None:
        """A value of the recipe that no single key gives; its keys are recorded for themselves."""
        self.lines[path] = Line(value, comment)

    def value(self, path: str, default: Any = None) -> Any:
        """A value of the recipe that was set before."""
        line = self.lines.get(path)
        return default if line is None else line.value

    def unread(self, source: Source) -> list[str]:
        """Leaves of a file that nothing was said of.

        A finding on a section ("datasets[0]") speaks for all that lies below it.
        """
        said = {finding.key for finding in self.findings if finding.file == source.file}
        return [key for key in source.leaves() if not any(prefix in said for prefix in prefixes(key))]

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
        for path, made in sets.items():
            self.lines[path] = Line(made, note if comment else "")


def prefixes(key: str) -> Iterable[str]:
    """The key itself and the sections that it lies in: "a[0].b" gives "a", "a[0]", "a[0].b"."""
    for at, character in enumerate(key):
        if character in ".[" and at:
            yield key[:at]
    yield key
