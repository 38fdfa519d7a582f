"""The flagship on more and more chips: compiled, recorded in recipes/scale.json, and shown in docs/scale.md.

    python -m scripts.scale plan [NAME...]       compile what changed: minutes each
    python -m scripts.scale write                the tables of docs/scale.md

Planning needs the extras train and plan. The record holds the compiler's figures. tests/recipes/ compares the
page with the record, and the record with the current recipe.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import arranged, from_name
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.planner import plan
from recipec.compiler.plan.search import received
from recipec.compiler.wording import mesh_axes
from recipec.spec.core_schema import flow
from scripts.recipe_pages import Planned, span, table, thousands
from scripts.recipes import FOLDER, ROOT, guarded, key, planned, program, replace

RECIPE = FOLDER / "gemma4-31b-v5p8.yaml"
RECORD = FOLDER / "scale.json"
PAGE = ROOT / "docs" / "scale.md"

SAMPLES, SAMPLE_TOKENS = 1244 * 8, 922
"""Samples of an epoch of the published run (arXiv 2605.25645), and the mean tokens of a sample."""


@dataclass(frozen=True)
class Case:
    """The flagship on one machine.

    Attributes:
        table: on the page.
        accelerator: of one slice.
        rows: of an optimizer step; by default as many as chips.
    """

    table: str
    accelerator: str
    tp: int = 1
    slices: int = 1
    rows: int = 0

    @property
    def name(self) -> str:
        """Return the case's name: "v5p-32", "v5p-32 tp 4, 4 rows", "2 x v5p-64"."""
        several = f"{self.slices} x " if self.slices > 1 else ""
        split = f" tp {self.tp}" if self.tp > 1 else ""
        return f"{several}{self.accelerator}{split}" + (f", {self.rows} rows" if self.rows else "")

    @property
    def sets(self) -> tuple[str, ...]:
        """Return the changes to the recipe, as values of --set."""
        chips = from_name(self.accelerator).chips
        axes = arranged(self.slices, chips // self.tp, self.tp)
        return (
            f"mesh={flow({'accelerator': self.accelerator, 'axes': axes})}",
            f"train.global_batch_size={self.rows or chips * self.slices}",
        )


CASES = {
    case.name: case
    for case in (
        *(Case("growing", f"v5p-{cores}") for cores in (8, 32, 64, 128)),
        Case("split", "v5p-16", tp=2, rows=4),
        Case("split", "v5p-32", tp=4, rows=4),
        Case("slices", "v5p-64", slices=2),
    )
}

EARLIER = frozenset(CASES)
"""Cases whose record is of the step by Tunix's model classes: they were not planned again since Gemma runs on
the project's decoder."""


@dataclass(frozen=True)
class Scaled:
    """The results of `recipe plan` for the flagship on one machine.

    Attributes:
        chips, hosts: total over all slices.
        rows: of an optimizer step.
        ici, dcn: bytes that a chip receives in an optimizer step from its slice and from other slices.
        exposed: seconds of an optimizer step that the chip waits for collectives.
    """

    chips: int
    hosts: int
    axes: Mapping[str, int]
    rows: int
    ici: float
    dcn: float
    exposed: float
    planned: Planned

    @property
    def per_chip(self) -> float | None:
        """Return a chip's estimated tokens/s; None if the step does not fit."""
        if self.planned.memory.headroom < 0 or not self.planned.seconds:
            return None
        return self.planned.tokens / self.planned.seconds / self.planned.micro_batches / self.chips


Record = dict[str, Scaled]
RECORDS: TypeAdapter[Record] = TypeAdapter(Record)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.scale", description="The flagship at scale.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="compile the steps that changed")
    planning.add_argument("names", nargs="*", metavar="NAME", help="such as v5p-32; all when none is given")
    commands.add_parser("write", help="write the tables of docs/scale.md from the record")
    asked = parser.parse_args(argv)
    return guarded({"plan": lambda: _plan(asked.names), "write": write}[asked.command])


def lowered(case: Case) -> Program:
    """Lower the recipe for a case's machine.

    Raises:
        ArtifactError: the recipe has errors.
    """
    return program(RECIPE, case.sets)


def scaled(case: Case) -> Scaled:
    """Compile a case for its machine.

    Raises:
        ArtifactError: it cannot be compiled.
    """
    of = lowered(case)
    estimated = plan(of, case.sets)
    axes, steps = dict(of.recipe.mesh.axes), of.accumulation_steps
    ici, dcn = (
        sum(
            received(collective, axes)
            for collective in estimated.estimate.collectives
            if collective.over_dcn == over_dcn
        )
        * steps
        for over_dcn in (False, True)
    )
    return Scaled(
        chips=of.accelerator.chips,
        hosts=of.accelerator.hosts,
        axes=axes,
        rows=of.recipe.train.global_batch_size,
        ici=ici,
        dcn=dcn,
        exposed=estimated.estimate.timeline.exposed_in(collectives=True) * steps,
        planned=planned(of, estimated),
    )


def read() -> Record:
    """Read the record; return an empty one if there is none."""
    return RECORDS.validate_json(RECORD.read_bytes()) if RECORD.exists() else {}


def write() -> None:
    """Write the page's tables."""
    before = PAGE.read_text(encoding="utf-8")
    if (after := page(before, read())) != before:
        PAGE.write_text(after, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: written")


def page(text: str, record: Record) -> str:
    """Return docs/scale.md with new tables, each between `<!-- NAME -->` and `<!-- end -->`.

    Raises:
        ArtifactError: the page lacks the place of a table.
    """
    for name, lines in tables(record).items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, marker, rest = text.partition(start)
        if not marker or end not in rest:
            raise ArtifactError(f"docs/scale.md has no place for the table {name}", f"{start}{end}")
        text = f"{before}{start}\n{lines}\n{rest[rest.index(end) :]}"
    return text


def tables(record: Record) -> dict[str, str]:
    """Return the tables by name."""
    growing = {
        name: case for name, case in record.items() if CASES[name].table == "growing" and case.per_chip
    }
    return {
        "versions": _versions(record),
        **{kind: _steps(record, kind) for kind in dict.fromkeys(case.table for case in CASES.values())},
        "epoch": _epochs(growing),
    }


def _versions(record: Record) -> str:
    plans = [case.planned for case in record.values()]
    versions, dates = plans[0].versions, sorted({case.date for case in plans})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    missing = "; ".join(name for name in CASES if name not in record)
    left_out = f" Not compiled, and left out: {missing}." if missing else ""
    return f"Compiled with libtpu {versions['libtpu']} and jax {versions['jax']} on {when}.{left_out}\n"


def _steps(record: Record, kind: str) -> str:
    """Return memory, collectives, time and price. A chip's efficiency is relative to the first case; a step
    that does not fit has only its memory."""
    head = (
        "Machine",
        "Chips, hosts",
        "Mesh",
        "Rows a step",
        "HBM, GiB",
        "From other chips, GB",
        "Exposed, s",
    )
    times = ("Step, s", "Tokens/s", "Efficiency of a chip", "US$ a million tokens")
    rows = []
    for name, case in record.items():
        if CASES[name].table != kind:
            continue
        memory = case.planned.memory
        row = [
            _machine(name),
            f"{case.chips}, {case.hosts}",
            mesh_axes(case.axes),
            str(case.rows),
            f"{memory.used / 2**30:.1f} of {memory.available / 2**30:.2f}",
        ]
        if case.per_chip is None:
            rows.append([*row, *[""] * 6])
            continue
        base = next(iter(record.values()))
        dcn = f", and {case.dcn / 1e9:.2f} over DCN" if case.dcn else ""
        usd = case.planned.usd_per_million
        rows.append(
            [
                *row,
                f"{case.ici / 1e9:.1f}{dcn}",
                f"{case.exposed:.2f}",
                span(*case.planned.step, 2),
                " to ".join(map(thousands, case.planned.tokens_per_second)),
                f"{case.per_chip / (base.per_chip or math.nan):.0%}",
                span(*usd, 2) if usd else "",
            ]
        )
    return table((*head, *times), rows)


def _epochs(record: Record) -> str:
    """Return the time of an epoch of the published run's size, with its samples packed."""
    head = ("Machine", "Rows a step", "Steps an epoch", "Minutes", "US$")
    rows = []
    for name, case in record.items():
        steps = math.ceil(SAMPLES * SAMPLE_TOKENS / case.planned.tokens)
        low, high = (steps * seconds / 60 for seconds in case.planned.step)
        usd = (case.planned.usd_per_hour or math.nan) / 60
        rows.append(
            (_machine(name), str(case.rows), str(steps), span(low, high, 1), span(low * usd, high * usd, 2))
        )
    return table(head, rows)


def _machine(name: str) -> str:
    case = CASES[name]
    return f"{case.slices} x {case.accelerator}" if case.slices > 1 else case.accelerator


def _plan(names: Sequence[str]) -> None:
    record = {name: case for name, case in read().items() if name in CASES}
    if unknown := set(names) - set(CASES):
        raise ArtifactError(f"there is no {', '.join(sorted(unknown))}", f"{', '.join(CASES)}")
    for name in names or CASES:
        kept = record.get(name)
        if kept is None or kept.planned.key != key(lowered(CASES[name])):
            record[name] = scaled(CASES[name])
            memory = record[name].planned.memory
            print(f"{name}: {memory.used / 2**30:.1f} of {memory.available / 2**30:.2f} GiB", flush=True)
        # Save each result as soon as it is known.
        ordered = {known: record[known] for known in CASES if known in record}
        replace(RECORD, RECORDS.dump_json(ordered, indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
