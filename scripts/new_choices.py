"""Hold what `recipe new` chooses against other choices, each scheduled by the compiler.

    python -m scripts.new_choices plan [NAME...]   estimate what is missing, or these: some minutes each
    python -m scripts.new_choices compare          the choices of each pair, the fastest first
    python -m scripts.new_choices write            the table of docs/planning.md

A pair is a model and a machine. `recipe new` writes its recipe, and each alternative changes one choice;
the last one has every change that was faster by itself. A time is the first estimate of a plan, from
schedules of a few layers. It cannot compare flags: what products take depends on them, and only a whole plan
has their cycles. The figures are in docs/new-choices.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.hardware import arranged, from_name
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import attention_block
from recipec.compiler.lowering.sizes import tp_sizes
from recipec.compiler.new.data_source import NewData
from recipec.compiler.new.new_recipe import NewRecipeOptions, make
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.first_estimate import first_parts
from recipec.compiler.plan.planner import compiled_or_raise, first_estimate, job
from recipec.compiler.plan.pool import compile_jobs
from recipec.compiler.plan.search import BLOCKS
from recipec.compiler.roofline.remat_policy import POLICIES
from recipec.compiler.roofline.step_estimate import need
from recipec.compiler.wording import mesh_axes
from recipec.spec.core_schema import flow
from recipec.spec.load import load
from scripts.recipe_pages import table
from scripts.recipes import ROOT, guarded

RECORD = ROOT / "docs" / "new-choices.json"
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- new choices -->\n", "<!-- /new choices -->"

DATA = NewData("hf://yahma/alpaca-cleaned", "instruction")

PAIRS: Mapping[str, tuple[str, ...]] = {
    "v5e-1": ("google/gemma-3-1b-it", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-0.6B"),
    "v5e-4": ("Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-3B-Instruct", "Qwen/Qwen3-4B"),
    "v5e-8": ("Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-4b-it"),
    "v6e-1": ("Qwen/Qwen3-4B", "HuggingFaceTB/SmolLM3-3B", "google/gemma-3-4b-it"),
    "v6e-4": ("meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3", "Qwen/Qwen3-14B"),
    "v6e-8": (
        *("Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-8B-Instruct"),
        *("google/gemma-3-12b-it", "google/gemma-2-9b-it", "microsoft/phi-4"),
        *("mistralai/Mistral-Small-24B-Instruct-2501", "Qwen/Qwen3-30B-A3B"),
    ),
    "v5p-8": (
        *("google/gemma-4-31B-it", "meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen3-32B"),
        "allenai/OLMo-2-1124-13B-Instruct",
    ),
    "tpu7x-8": ("Qwen/Qwen3-8B", "google/gemma-3-27b-it"),
}
"""The models of each machine."""

AND = " and "

FASTER = 0.005
"""A change that saves less than this share of the time is not combined with others."""


@dataclass(frozen=True)
class Choice:
    """The first estimate of a recipe, or of an alternative to it.

    Attributes:
        seconds: of an optimizer step; None if the compiler refused it.
        memory: bytes that one device needs.
    """

    seconds: float | None
    memory: float


@dataclass(frozen=True)
class Compared:
    """The choices for a pair.

    Attributes:
        chosen: what `recipe new` chose, in words.
        available: bytes of a device.
        choices: by the changes to the recipe, as the values of --set; "" for the recipe itself.
    """

    chosen: str
    available: float
    choices: Mapping[str, Choice]

    @property
    def fitting(self) -> dict[str, float]:
        """Seconds of an optimizer step, by change, of the choices that fit; the fastest first."""
        fitting = {
            change: choice.seconds
            for change, choice in self.choices.items()
            if choice.seconds is not None and choice.memory <= self.available
        }
        return dict(sorted(fitting.items(), key=lambda item: item[1]))

    @property
    def behind(self) -> float:
        """The recipe's time over that of the fastest choice, less 1."""
        return self.fitting[""] / min(self.fitting.values()) - 1


RECORDS: TypeAdapter[dict[str, Compared]] = TypeAdapter(dict[str, Compared])


def read() -> dict[str, Compared]:
    """Read the record; return an empty one if there is none."""
    return RECORDS.validate_json(RECORD.read_bytes()) if RECORD.exists() else {}


def names() -> list[str]:
    """Return the names of all pairs: a model's id and a machine."""
    return [f"{model} {machine}" for machine, models in PAIRS.items() for model in models]


def new(name: str, folder: Path) -> Path:
    """Write the recipe that `recipe new` makes for a pair."""
    model, _, machine = name.partition(" ")
    path = folder / "new.yaml"
    path.write_text(make(NewRecipeOptions("new", model, from_name(machine), None, DATA, None, path)).text)
    return path


def alternatives(program: Program) -> Iterator[list[tuple[str, ...]]]:
    """Yield changes to a recipe, as values of --set; of each list, the first that fits counts.

    The rows of an optimizer step stay the same: rows of a device change with the mesh.
    """
    recipe, devices = program.recipe, program.accelerator.devices
    policy = recipe.remat.policy
    yield [(f"remat.policy={other}",) for other in POLICIES[: POLICIES.index(policy)]]
    if policy in ("save_attention", "decoder"):
        yield [("remat.policy=offload_dots",)]
    policies = [f"remat.policy={other}" for other in POLICIES]
    tp = recipe.mesh.axes["tp"]
    for size in tp_sizes(program.architecture, devices):
        if size in (tp * 2, tp // 2):
            axes = f"mesh.axes={flow(arranged(1, devices // size, size))}"
            yield [(axes, setting) for setting in policies]
    if program.architecture.expert_layers and recipe.mesh.axes["ep"] != devices:
        axes = f"mesh.axes={flow({'ep': devices})}"
        yield [(axes, setting) for setting in policies]
    rows = recipe.train.micro_batch_size
    for other in [rows * 2] * (program.accumulation_steps % 2 == 0) + [rows // 2] * (rows % 2 == 0):
        yield [(f"train.micro_batch_size={other}", setting) for setting in policies]
    if recipe.model.attention == "splash":
        for block in BLOCKS:
            if block != attention_block(program) and recipe.data.max_length % block == 0:
                yield [(f"model.attention_block={block}",)]


def judged(path: Path, sets: Sequence[str]) -> Choice | None:
    """Return the first estimate of a recipe with these changes; None if it is refused, or needs code."""
    program = lower(load(path, sets), planning=True).program
    if program is None:
        return None
    first = first_parts(program, parts(program), Backend.TUNIX)
    if first is None or not first.quick:
        return None
    results = compiled_or_raise(compile_jobs([job(program, sets, part) for part in first.every]))
    estimated = first_estimate(program, first, dict(zip(first.every, results, strict=True)))
    seconds = estimated.seconds * program.accumulation_steps or None
    return Choice(seconds, estimated.memory.used)


def compared(name: str) -> Compared | None:
    """Estimate the choices for a pair; None if its model's first estimate needs code."""
    with tempfile.TemporaryDirectory() as folder:
        path = new(name, Path(folder))
        program = lower(load(path), planning=True).program
        assert program is not None
        first = judged(path, ())
        if first is None:
            return None
        available = program.accelerator.hbm_bytes_per_device
        out = Compared(chosen(program), available, {"": first})
        for candidates in alternatives(program):
            for sets in candidates:
                varied = lower(load(path, sets), planning=True).program
                if varied is None or need(varied).total > 1.1 * available:
                    continue
                if (choice := judged(path, sets)) is not None:
                    out = replace(out, choices={**out.choices, AND.join(sets): choice})
                    if choice.memory <= available:
                        break
        if (faster := _combined(out)) and (choice := judged(path, faster)) is not None:
            out = replace(out, choices={**out.choices, AND.join(faster): choice})
        return out


def _combined(pair: Compared) -> tuple[str, ...]:
    """Return the fastest change of each key together, if several keys have one that is faster."""
    mine = pair.fitting.get("")
    best: dict[str, tuple[str, ...]] = {}
    for change, seconds in pair.fitting.items():
        if change and mine is not None and seconds < mine * (1 - FASTER):
            best.setdefault(change.partition("=")[0], tuple(change.split(AND)))
    if len(best) < 2:
        return ()
    sets = dict(setting.split("=", 1) for change in reversed(best.values()) for setting in change)
    return tuple(f"{key}={value}" for key, value in sets.items())


def chosen(program: Program) -> str:
    """Return a recipe's choices in words."""
    recipe = program.recipe
    quantized = f", {recipe.model.quantization}" if recipe.model.quantization else ""
    return (
        f"{mesh_axes(recipe.mesh.axes)}, {recipe.train.micro_batch_size} x {recipe.data.max_length:,}, "
        f"`{recipe.remat.policy}`{quantized}"
    )


def page_table(record: Mapping[str, Compared]) -> str:
    """Return the table of docs/planning.md."""
    rows = []
    for name in names():
        if (pair := record.get(name)) is None:
            continue
        model, _, machine = name.partition(" ")
        fastest = next(iter(pair.fitting))
        used = f"{pair.choices[''].memory / 2**30:.1f} of {pair.available / 2**30:.2f}"
        rows.append(
            (
                model.rpartition("/")[2],
                machine,
                pair.chosen,
                used,
                f"{pair.fitting[''] * 1e3:,.0f}",
                str(len(pair.choices) - 1),
                f"{100 * pair.behind:.1f} %",
                f"`{fastest}`" if fastest else "",
            )
        )
    head = ("Model", "Machine", "Chosen", "HBM, GiB", "ms a step", "Others", "Slower by", "Than")
    return table(head, rows)


def write() -> None:
    """Write the table of docs/planning.md."""
    before = PAGE.read_text(encoding="utf-8")
    head, _, rest = before.partition(BEGIN)
    after = f"{head}{BEGIN}\n{page_table(read())}\n{rest[rest.index(END) :]}"
    if after != before:
        PAGE.write_text(after, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: written")


def _plan(asked: Iterable[str]) -> None:
    wanted = list(asked) or [name for name in names() if name not in read()]
    for name in wanted:
        pair = compared(name)
        if pair is None:
            print(f"{name}: its first estimate needs code", flush=True)
            continue
        record = read() | {name: pair}
        ordered = {known: record[known] for known in names() if known in record}
        RECORD.write_bytes(RECORDS.dump_json(ordered, indent=1) + b"\n")
        print(f"{name}: {100 * pair.behind:.1f} % behind {next(iter(pair.fitting)) or 'none'}", flush=True)


def _compare() -> None:
    for name, pair in read().items():
        print(f"{name}: {pair.chosen}")
        for change, choice in sorted(pair.choices.items(), key=lambda item: item[1].seconds or 1e9):
            seconds = "refused" if choice.seconds is None else f"{choice.seconds * 1e3:8,.0f} ms"
            print(f"  {seconds}  {choice.memory / 2**30:6.2f} GiB  {change or 'as written'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.new_choices", description="What new chooses.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="estimate the pairs without a record, or these")
    planning.add_argument("names", nargs="*", metavar="NAME", help='such as "Qwen/Qwen3-8B v6e-8"')
    commands.add_parser("compare", help="print the choices of each pair, the fastest first")
    commands.add_parser("write", help="write the table of docs/planning.md")
    asked = parser.parse_args(argv)
    return guarded({"plan": lambda: _plan(asked.names), "compare": _compare, "write": write}[asked.command])


if __name__ == "__main__":
    sys.exit(main())
