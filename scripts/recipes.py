"""The estimates of recipes/: compiled, recorded in recipes/estimates.json, and shown in pages and recipes.

    python -m scripts.recipes plan [NAME...]     plan what changed, or these: minutes each
    python -m scripts.recipes first [NAME...]    first estimates of recorded plans: half a minute each
    python -m scripts.recipes fits               the bounds of docs/recipes.md's second table (a minute)
    python -m scripts.recipes rehearse NAME...   run `recipe rehearse`, and record the results: minutes each
    python -m scripts.recipes write              the heads of the recipes, docs/recipes.md and the cards' data

Planning needs the extras train and plan. The record holds the compiler's figures. tests/recipes/ compares
heads and page with the record, and the record with the current recipes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from recipec.compiler import card, store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import depth, identity
from recipec.compiler.plan.first_estimate import first_parts
from recipec.compiler.plan.kernels import GROUPED
from recipec.compiler.plan.planner import compiled_or_raise, first_estimate, job, plan
from recipec.compiler.plan.pool import compile_jobs
from recipec.compiler.plan.results import Estimate, Generation, Plan
from recipec.compiler.plan.search import received
from recipec.compiler.roofline.training_step import bound, rows
from recipec.spec.load import load
from scripts.recipe_pages import (
    MACHINES,
    METHODS,
    First,
    Parts,
    Planned,
    Record,
    head,
    page,
    verified,
    with_head,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "recipes"
RECORD = FOLDER / "estimates.json"
CARDS = ROOT / "compiler" / "data" / "verified.json"
REHEARSED = FOLDER / "rehearsed.json"
PROOFS = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "recipes.md"

RECORDS: TypeAdapter[Record] = TypeAdapter(Record)

REHEARSAL = ("--steps", "4")

MODELS = (
    "google/gemma-3-4b-it",
    "google/gemma-3-12b-it",
    "google/gemma-3-27b-it",
    "google/gemma-4-E4B-it",
    "google/gemma-4-26B-A4B-it",
    "google/gemma-4-31B-it",
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
)
"""The models in the table of what fits where."""

CELL = """\
recipe: 1
name: cell
model: {{id: {model}, attention: splash{quantization}}}
mesh: {{accelerator: {machine}, axes: {{fsdp: {devices}, tp: 1}}}}
{lora}
remat: {{policy: decoder}}
data: {{train: ["hf://owner/name"], chat_template: "{{{{ messages }}}}", max_length: 2048}}
train: {{global_batch_size: {devices}}}
"""
METHOD_KEYS = {
    "lora": ("", "lora: {rank: 32}"),
    "qlora": (", quantization: nf4", "lora: {rank: 32}"),
    "full": ("", ""),
}
"""By method, what it adds to the `model` section, and its `lora` section."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.recipes", description="Estimates of recipes/.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="plan recipes that changed, or all that are named")
    planning.add_argument("names", nargs="*", metavar="NAME", help="of a recipe; without names: what changed")
    early = commands.add_parser("first", help="estimate recorded recipes from schedules of a few layers")
    early.add_argument("names", nargs="*", metavar="NAME", help="such as phi4-v5e8; all when none is given")
    commands.add_parser("fits", help="work out where the models fit")
    rehearsing = commands.add_parser("rehearse", help="rehearse recipes, and keep what is found")
    rehearsing.add_argument("names", nargs="+", metavar="NAME", help="of a recipe")
    commands.add_parser("write", help="write heads, docs/recipes.md and cards from the records")
    asked = parser.parse_args(argv)
    chosen = {
        "plan": lambda: _plan(asked.names),
        "first": lambda: _first_estimates(asked.names),
        "fits": _fits,
        "rehearse": lambda: _rehearse(asked.names),
        "write": write,
    }
    return guarded(chosen[asked.command])


def guarded(command: Callable[[], None]) -> int:
    """Run a command; return its exit status."""
    try:
        command()
    except ArtifactError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted: what was compiled is kept", file=sys.stderr)
        return 130
    return 0


def paths() -> list[Path]:
    """Return the paths of the shipped recipes."""
    return sorted(FOLDER.glob("*.yaml"))


def program(path: Path, sets: Sequence[str] = ()) -> Program:
    """Lower a recipe.

    Raises:
        ArtifactError: the recipe has errors.
    """
    lowered = lower(load(path, sets), planning=True)
    if lowered.program is None:
        errors = [diagnostic.message for diagnostic in lowered.diagnostics if diagnostic.severity == "error"]
        raise ArtifactError(f"{path}: {'; '.join(errors)}", "recipe check shows where")
    return lowered.program


def key(of: Program) -> str:
    """Return a digest of everything in a resolved recipe that its record depends on."""
    further: list[Any] = []
    if of.recipe.train.grpo is not None:
        further.append(of.recipe.rollout.model_dump(mode="json", exclude_defaults=True))
    return store.key(identity.step(of), of.accumulation_steps, of.usd_per_hour, *further)


def planned(of: Program, estimated: Plan, first: Plan | None = None) -> Planned:
    """Convert a program's plan, and the plan of its first estimate, to a record."""
    estimate = estimated.estimate
    return Planned(
        key=key(of),
        date=datetime.now(UTC).date().isoformat(),
        versions=estimated.versions,
        compiled_layers=estimate.compiled_layers,
        memory=estimate.memory,
        seconds=estimate.seconds,
        interval=(estimate.interval.low, estimate.interval.high),
        micro_batches=of.accumulation_steps,
        tokens=rows(of) * of.recipe.data.max_length * of.accumulation_steps,
        mfu=estimate.mfu,
        usd_per_hour=estimated.run.usd_per_hour,
        parts=parts(of, estimate) if of.architecture.expert_layers else None,
        first=None if first is None else _first(first.estimate),
        generation=None if estimated.generation is None else generated(of, estimated.generation, estimate),
    )


def generated(of: Program, rolled: Generation, estimate: Estimate) -> tuple[float, float]:
    """Return the fewest and the most seconds that an optimizer step takes besides the compiled step."""
    update = estimate.seconds * of.accumulation_steps
    most = sum(rolled.parts(update).values()) - update
    return most - (rolled.seconds - rolled.bound) / rolled.iterations, most


def _first(estimate: Estimate) -> First:
    return First(estimate.scheduled_layers, estimate.memory.used, estimate.seconds)


def parts(of: Program, estimate: Estimate) -> Parts:
    """Return the share of a micro-batch that the experts take."""
    axes = of.recipe.mesh.axes
    moved = {
        kind: sum(
            received(collective, axes) for collective in estimate.collectives if collective.kind == kind
        )
        for kind in ("ragged-all-to-all", "all-gather")
    }
    inwards = (of.accelerator.ici_gb_per_s or 0.0) * 1e9 / 2 / of.accelerator.devices_per_chip
    return Parts(
        experts=sum(kernel.seconds for kernel in estimate.kernels if GROUPED.fullmatch(kernel.name)),
        dispatched=moved["ragged-all-to-all"],
        dispatch=moved["ragged-all-to-all"] / inwards,
        gathered=moved["all-gather"],
        gathers=moved["all-gather"] / inwards,
    )


def read() -> Record:
    """Read the record; return an empty one if there is none."""
    return RECORDS.validate_json(RECORD.read_bytes()) if RECORD.exists() else Record({}, {})


def texts(record: Record) -> Iterator[tuple[Path, str]]:
    """Yield every file that is written from the record, with the text that it should have."""
    programs = {}
    for path in paths():
        programs[path.stem] = program(path)
        known = record.recipes.get(path.stem)
        yield path, with_head(path.read_text(encoding="utf-8"), head(known) if known else [])
    rehearsals = json.loads(REHEARSED.read_text(encoding="utf-8")) if REHEARSED.exists() else {}
    proofs = json.loads(PROOFS.read_text(encoding="utf-8"))["proofs"]
    current = {
        name: recipe
        for name, recipe in record.recipes.items()
        if name in programs and recipe.key == key(programs[name])
    }
    known = verified(programs, current, rehearsals, proofs)
    yield CARDS, card.dumped(known)
    yield PAGE, page(programs, record, known)


def write() -> None:
    """Write the heads of the recipes, docs/recipes.md and compiler/data/verified.json."""
    for path, text in list(texts(read())):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: written")


def cell(model: str, machine: str, method: str, folder: Path) -> float | None:
    """Return a lower bound, in GiB of a device, of a model's memory; None if it does not fit or cannot train.

    Args:
        folder: for the recipe to plan.
    """
    from recipec.compiler.lowering.hardware import from_name

    devices, (quantization, lora) = from_name(machine).devices, METHOD_KEYS[method]
    path = folder / "cell.yaml"
    path.write_text(
        CELL.format(model=model, machine=machine, devices=devices, quantization=quantization, lora=lora),
        encoding="utf-8",
    )
    fitted = lower(load(path), planning=True).program
    if fitted is None:
        return None
    least = bound(fitted, fitted.recipe.data.max_length).memory_bytes
    return None if least > fitted.accelerator.hbm_bytes_per_device else round(least / 2**30, 3)


def figures(path: Path, *options: str) -> dict[str, str]:
    """Run `recipe rehearse`, and return what it prints about each of its steps.

    Raises:
        ArtifactError: a step fails.
    """
    command = ["-m", "recipec.compiler.cli.main", "rehearse", str(path), *REHEARSAL, *options]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ArtifactError(f"{path} is not rehearsed: {done.stdout}", "recipe rehearse shows where")
    return dict(re.findall(r"^(\w+) +ok +[\d.]+ s  (.*)$", done.stdout, re.MULTILINE))


def _rehearse(names: Sequence[str]) -> None:
    for name in names:
        path = FOLDER / f"{name}.yaml"
        of = program(path)
        record = {
            "key": card.key(of),
            "date": datetime.now(UTC).date().isoformat(),
            "versions": identity.versions(),
            "figures": figures(path),
        }
        kept = json.loads(REHEARSED.read_text(encoding="utf-8")) if REHEARSED.exists() else {}
        REHEARSED.write_text(
            json.dumps(kept | {name: record}, indent=1, sort_keys=True) + "\n", encoding="utf-8"
        )


def _plan(names: Sequence[str]) -> None:
    record = read()
    known = {path.stem for path in paths()}
    if unknown := set(names) - known:
        raise ArtifactError(f"there is no recipe {', '.join(sorted(unknown))}", f"{', '.join(sorted(known))}")
    for path in paths():
        of = program(path)
        kept = record.recipes.get(path.stem)
        if of.accelerator.platform != "tpu" or (names and path.stem not in names):
            continue
        if names or kept is None or kept.key != key(of) or kept.seconds is None:
            firsts: list[Plan] = []
            result = planned(of, plan(of, on_first=firsts.append), *firsts)
            memory = result.memory
            if memory.headroom < 0:
                raise ArtifactError(f"{of.name} does not fit", "recipe plan shows a way out")
            record.recipes[path.stem] = result
            _keep(record)  # save each result as soon as it is known
            print(f"{path.stem}: {memory.used / 2**30:.1f} of {memory.available / 2**30:.2f} GiB", flush=True)
    for gone in set(record.recipes) - known:
        del record.recipes[gone]
    _keep(record)


def _first_estimates(names: Sequence[str]) -> None:
    for path in paths():
        of, kept = program(path), read().recipes.get(path.stem)
        if kept is None or kept.key != key(of) or (names and path.stem not in names):
            continue
        first = first_parts(of, depth.parts(of), Backend.TUNIX)
        if first is not None:
            results = compiled_or_raise(compile_jobs([job(of, (), part) for part in first.every]))
            estimated = first_estimate(of, first, dict(zip(first.every, results, strict=True)))
            record = read()
            record.recipes[path.stem] = dataclasses.replace(kept, first=_first(estimated))
            _keep(record)
            apart = (estimated.seconds / (kept.seconds or 1), estimated.memory.used / kept.memory.used)
            print(path.stem, " ".join(f"{100 * (ratio - 1):+.1f} %" for ratio in apart), flush=True)


def _fits() -> None:
    record = read()
    with tempfile.TemporaryDirectory() as folder:
        result = {
            model: {
                machine: {method: cell(model, machine, method, Path(folder)) for method in METHODS}
                for machine in MACHINES
            }
            for model in MODELS
        }
    _keep(Record(record.recipes, result))


def _keep(record: Record) -> None:
    ordered = Record(dict(sorted(record.recipes.items())), record.fits)
    replace(RECORD, RECORDS.dump_json(ordered, indent=1) + b"\n")


def replace(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    beside = path.with_suffix(".new")
    beside.write_bytes(content)
    beside.replace(path)


if __name__ == "__main__":
    sys.exit(main())
