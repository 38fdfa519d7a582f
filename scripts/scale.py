"""The flagship on more and more chips: compiled, recorded in recipes/scale.json, and shown in docs/scale.md.

    python -m scripts.scale plan [NAME...]       compile what changed: minutes each
    python -m scripts.scale write                the tables of docs/scale.md

Planning needs the extras train and plan. The record holds the compiler's figures. tests/recipes/ compares the
page with the record, and the record with the current recipe.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import arranged, from_name
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.planner import plan
from recipec.spec.core_schema import flow
from scripts.recipes import FOLDER, ROOT, guarded, key, planned, program, replace
from scripts.scale_pages import Record, Scaled, page

RECIPE = FOLDER / "gemma4-31b-v5p8.yaml"
RECORD = FOLDER / "scale.json"
PAGE = ROOT / "docs" / "scale.md"

RECORDS: TypeAdapter[Record] = TypeAdapter(Record)

REMAT = {"v5p": "none", "v6e": "decoder"}
"""A v6e has a third of a v5p's memory, too little for a row's activations in addition to the weights."""
V5P = ("v5p-8", "v5p-16", "v5p-32", "v5p-64", "v5p-128", "v5p-256")
V6E = ("v6e-8", "v6e-16", "v6e-32", "v6e-64", "v6e-128", "v6e-256")
SLICES = (("v5p-64", 1), ("v6e-32", 4))
"""The accelerator and tp of runs with two and four slices; a slice has 32 chips."""


@dataclass(frozen=True)
class Case:
    """The flagship on one machine.

    Attributes:
        accelerator: of one slice.
        rows: of an optimizer step.
        micro: rows of a micro-batch on each data-parallel device.
    """

    accelerator: str
    slices: int
    fsdp: int
    tp: int
    rows: int
    micro: int = 1

    @property
    def name(self) -> str:
        """Return the case's name: "v5p-32", "v5p-32 tp 2, 4 rows", "2 x v5p-32"."""
        several = f"{self.slices} x " if self.slices > 1 else ""
        split = f" tp {self.tp}, {self.rows} rows" if self.tp > 1 else ""
        return f"{several}{self.accelerator}{split}"

    @property
    def sets(self) -> tuple[str, ...]:
        """Return the changes to the recipe, as values of --set."""
        generation = self.accelerator.split("-")[0]
        axes = arranged(self.slices, self.fsdp, self.tp)
        return (
            f"mesh={flow({'accelerator': self.accelerator, 'axes': axes})}",
            f"train.global_batch_size={self.rows}",
            f"train.micro_batch_size={self.micro}",
            f"remat.policy={REMAT[generation]}",
            "xla.profile=none",
            "model.attention_block=512",
        )


def cases() -> list[Case]:
    """Return all cases. A step has one row per chip, unless rows are split over more chips."""
    chips = {name: from_name(name).chips for name in (*V5P, *V6E)}

    def growing(name: str, tp: int, micro: int = 1) -> Case:
        return Case(name, 1, chips[name] // tp, tp, chips[name], micro)

    found = [growing(name, 1) for name in V5P]
    found += [growing(name, 2, micro=2) for name in V5P[-2:]]
    found += [growing(name, 1) for name in (V6E[0], V6E[-1])]
    found += [growing(name, 4) for name in V6E]
    rows = chips[V5P[0]]
    found += [Case(name, 1, rows, chips[name] // rows, rows) for name in V5P[1:3]]
    for name, tp in SLICES:
        each = chips[name]
        found += [Case(name, count, each // tp, tp, each * count) for count in (2, 4)]
    return found


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.scale", description="The flagship at scale.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="compile the steps that changed")
    planning.add_argument("names", nargs="*", metavar="NAME", help="such as v5p-32; all when none is given")
    commands.add_parser("write", help="write the tables of docs/scale.md from the record")
    asked = parser.parse_args(given)
    return guarded({"plan": lambda: _plan(asked.names), "write": write}[asked.command])


def lowered(case: Case) -> Program:
    """Lower the recipe for a case's machine.

    Raises:
        ArtifactError: the recipe has errors.
    """
    return program(RECIPE, case.sets)


def read() -> Record:
    """Read the record; return an empty one if there is none."""
    return RECORDS.validate_json(RECORD.read_bytes()) if RECORD.exists() else Record({})


def written(text: str, record: Record) -> str:
    """Return docs/scale.md with the tables of a record."""
    return page(text, record, [case.name for case in cases() if case.name not in record.cases])


def write() -> None:
    """Write the page's tables."""
    before = PAGE.read_text(encoding="utf-8")
    if (after := written(before, read())) != before:
        PAGE.write_text(after, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: written")


def scaled(case: Case) -> Scaled:
    """Compile a case for its machine.

    Raises:
        ArtifactError: it cannot be compiled.
    """
    of = lowered(case)
    made = plan(of, case.sets)
    accelerator = of.accelerator
    return Scaled(
        accelerator=case.accelerator,
        generation=accelerator.generation,
        chips=accelerator.chips,
        hosts=accelerator.hosts,
        slices=accelerator.slices,
        axes=dict(of.recipe.mesh.axes),
        rows=case.rows,
        collectives=made.estimate.collectives,
        planned=planned(of, made),
    )


def _plan(names: Sequence[str]) -> None:
    record, known = read(), {case.name: case for case in cases()}
    if unknown := set(names) - set(known):
        raise ArtifactError(f"there is no {', '.join(sorted(unknown))}", f"{', '.join(known)}")
    for name in names or known:
        kept = record.cases.get(name)
        if kept is None or kept.planned.key != key(lowered(known[name])):
            record.cases[name] = scaled(known[name])
            _keep(record, list(known))  # save each result as soon as it is known
            memory = record.cases[name].planned.memory
            print(f"{name}: {memory.used / 2**30:.1f} of {memory.available / 2**30:.2f} GiB", flush=True)
    _keep(record, list(known))


def _keep(record: Record, names: Sequence[str]) -> None:
    ordered = Record({name: record.cases[name] for name in names if name in record.cases})
    replace(RECORD, RECORDS.dump_json(ordered, indent=1) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
