"""Show a recipe's card: what has been verified about it, by which method, on which versions and date.

The card comes from data/verified.json, which `python -m scripts.recipes write` makes from the repository's
records. Anything without a record is "not yet". A record applies to the step that it was made for, not to a
recipe's name.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler import store
from recipec.compiler.pages.document import Document, Section, Table
from recipec.compiler.plan import identity

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

DATA = Path(__file__).parent / "data" / "verified.json"
NOT_YET = "not yet"


@dataclass(frozen=True)
class Verification:
    """A way to verify a recipe.

    Attributes:
        title, by: what is verified, and by which method.
        tpu: whether it applies only to TPUs.
        of_family: whether it applies to all models of a family, rather than to a recipe's step.
    """

    title: str
    by: str
    tpu: bool = False
    of_family: bool = False


KINDS = {
    "compiled": Verification("compiled ahead of time", "recipe plan", tpu=True),
    "rehearsed": Verification("rehearsed in miniature on CPU devices", "recipe rehearse"),
    "numerics": Verification(
        "numerics of its family, compared with transformers and PEFT",
        "python -m scripts.families prove",
        of_family=True,
    ),
    "served": Verification("served on a CPU", "tests/e2e/test_vllm.py"),
    "probed": Verification("probed on hardware", "probe.py", tpu=True),
}
"""The kinds by their names in data/verified.json."""


@dataclass(frozen=True)
class Result:
    """The result of a verification.

    Attributes:
        figures: NOT_YET for none.
        versions: versions of packages, as far as they were recorded.
        date: YYYY-MM-DD, if it was recorded.
    """

    figures: str = NOT_YET
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str | None = None

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Result:
        """Return the result of a record of data/verified.json; {} stands for none."""
        return cls(record.get("found", NOT_YET), record.get("versions", {}), record.get("date"))

    def record(self) -> dict[str, Any]:
        """Return the record of data/verified.json."""
        return {"found": self.figures, "versions": self.versions, "date": self.date}

    @property
    def when(self) -> str:
        """Versions and date in words; "" if there are none."""
        versions = [
            *(f"{name} {version}" for name, version in self.versions.items()),
            *filter(None, [self.date]),
        ]
        return ", ".join(versions) or ("" if self.figures == NOT_YET else "not recorded")


def card(program: Program) -> dict[str, Result]:
    """Return the result of each kind of verification that applies to a recipe."""
    names = {True: program.family.name, False: key(program)}
    return {
        kind: Result.read(verified().get(kind, {}).get(names[how.of_family], {}))
        for kind, how in KINDS.items()
        if program.accelerator.platform == "tpu" or not how.tpu
    }


def rows(program: Program) -> list[tuple[str, str, str, str]]:
    """Return the card as a table: what is verified, by which method, the result, versions and date."""
    return [
        (KINDS[kind].title, KINDS[kind].by, entry.figures, entry.when)
        for kind, entry in card(program).items()
    ]


def document(program: Program) -> Document:
    """Return the card as a document: its table, below the recipe's name."""
    return Document("", [Section("card", program.name, (), [table(program)])])


def table(program: Program) -> Table:
    """Return the card's table."""
    return Table(("What", "By", "Found", "Versions and date"), rows(program), words=(1, 2, 3))


def as_json(program: Program) -> dict[str, Any]:
    """Return the card as a JSON value; None for what was not verified yet."""
    rows = card(program)
    return {
        "name": program.name,
        "verified": {
            kind: None if row.figures == NOT_YET else {"by": KINDS[kind].by, **row.record()}
            for kind, row in rows.items()
        },
    }


def key(program: Program) -> str:
    """Return a key for the step that a recipe means: the same on every machine."""
    return store.key(identity.step(program))


@functools.cache
def verified() -> Mapping[str, Mapping[str, Any]]:
    """Return data/verified.json: records by kind, then by a step's key or a family's name."""
    records: dict[str, dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
    return records


def dumped(records: Mapping[str, Mapping[str, Result]]) -> str:
    """Return the text of data/verified.json for these records."""
    kept = {
        kind: {name: entry.record() for name, entry in entries.items()} for kind, entries in records.items()
    }
    return json.dumps(kept, indent=1, sort_keys=True) + "\n"
