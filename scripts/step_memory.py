"""Hold the estimate of a step's memory against the compiler's figures.

    python -m scripts.step_memory plan [NAME...]   compile what is missing, or these: about a minute each
    python -m scripts.step_memory compare          the estimate's error for each step
    python -m scripts.step_memory write            the table of docs/planning.md

Each case is a small recipe. The compiler schedules some of its model's layers, and generates no code. The
figures are in docs/step-memory.json. `recipes/estimates.json` has the whole plans of the shipped recipes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.depth import shortened
from recipec.compiler.plan.pool import compile_jobs
from recipec.compiler.plan.results import Failed, Job
from recipec.compiler.plan.step_memory import with_refusal
from recipec.compiler.roofline.step_estimate import EXCESS, KEPT, MARGIN, need, temporaries
from recipec.compiler.roofline.training_step import state_bytes
from recipec.compiler.wording import split_layer
from recipec.spec.load import load
from scripts.recipe_pages import Planned, table
from scripts.recipes import FOLDER, ROOT, guarded
from scripts.recipes import program as recipe_program
from scripts.recipes import read as recorded

RECORD = ROOT / "docs" / "step-memory.json"
PAGE = ROOT / "docs" / "planning.md"
BEGIN, END = "<!-- step memory -->\n", "<!-- /step memory -->"

RECIPE = """\
recipe: 1
name: case
model: {{id: {model}, attention: {attention}{model_more}}}
mesh: {{accelerator: {machine}, axes: {axes}}}
{lora}
remat: {{policy: {policy}}}
xla: {{profile: {profile}}}
data: {{train: ["hf://owner/name"], chat_template: "{{{{ messages }}}}", max_length: {length}{data_more}}}
train: {{global_batch_size: {rows}, micro_batch_size: {micro}{train_more}}}
"""
METHODS = {
    "lora": ("", "lora: {rank: 16, alpha: 32, dropout: 0.0}", "", ""),
    "dropout": ("", "lora: {rank: 16, alpha: 32, dropout: 0.05}", "", ""),
    "qlora": (", quantization: nf4", "lora: {rank: 16, alpha: 32, dropout: 0.0}", "", ""),
    "full": ("", "", "", ""),
    "dpo": ("", "lora: {rank: 16, alpha: 32, dropout: 0.0}", ", format: preference", ", objective: dpo"),
    "kto": (
        "",
        "lora: {rank: 16, alpha: 32, dropout: 0.0}",
        ", format: unpaired_preference",
        ", objective: kto",
    ),
}
"""By method, what it adds to the sections model, lora, data and train."""


@dataclass(frozen=True)
class Case:
    """A step that is compiled.

    Attributes:
        model: its id.
        machine: of the mesh.
        axes: the mesh's axes, as "fsdp 8" or "fsdp 4 tp 2".
        policy: value of `remat.policy`.
        layers: how many of the model's layers are compiled, from the first; 0 for all.
        method: a key of METHODS.
        length, micro: tokens of a row, and rows of a device's micro-batch.
        profile: value of `xla.profile`.
    """

    model: str
    machine: str
    axes: str
    policy: str
    layers: int = 8
    method: str = "lora"
    length: int = 4096
    micro: int = 1
    profile: str = "auto"
    attention: str = "splash"

    @property
    def name(self) -> str:
        more = [self.method] if self.method != "lora" else []
        more += [f"profile {self.profile}"] if self.profile != "auto" else []
        more += [self.attention] if self.attention != "splash" else []
        parts = (
            self.model.rpartition("/")[2],
            f"{self.machine} {self.axes}",
            self.policy,
            f"{self.length} x {self.micro}",
            f"{self.layers or 'all'} layers",
            *more,
        )
        return ", ".join(parts)

    def text(self) -> str:
        """Return the recipe."""
        names = self.axes.split()
        axes = dict(zip(names[::2], map(int, names[1::2]), strict=True))
        axes.setdefault("tp", 1)
        axes = {"fsdp": axes.pop("fsdp", 1), **axes}
        parallel = axes["fsdp"] * axes.get("ep", 1) * axes.get("dcn", 1)
        model_more, lora, data_more, train_more = METHODS[self.method]
        return RECIPE.format(
            model=self.model,
            attention=self.attention,
            model_more=model_more,
            machine=self.machine,
            axes="{" + ", ".join(f"{name}: {size}" for name, size in axes.items()) + "}",
            lora=lora,
            policy=self.policy,
            profile=self.profile,
            length=self.length,
            data_more=data_more,
            rows=parallel * self.micro,
            micro=self.micro,
            train_more=train_more,
        )


LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"
GEMMA, GEMMA4 = "google/gemma-3-12b-it", "google/gemma-4-31B-it"
A3B, OSS, HYBRID = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b", "Qwen/Qwen3.5-9B"
DENSE = ("none", "save_attention", "decoder")
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *(Case(LLAMA, "v6e-8", "fsdp 8", policy) for policy in (*DENSE, "save_dots", "block")),
        *(Case(LLAMA, "v6e-8", "fsdp 8", policy, profile="none") for policy in DENSE),
        Case(LLAMA, "v6e-8", "fsdp 8", "decoder", layers=16),
        *(Case(LLAMA, "v6e-1", "fsdp 1", policy) for policy in DENSE),
        Case(LLAMA, "v6e-8", "fsdp 8", "save_attention", method="full"),
        *(Case(LLAMA, "v6e-8", "fsdp 8", policy, layers=4, method="full") for policy in ("none", "decoder")),
        *(Case(LLAMA, "tpu7x-8", "fsdp 8", policy, layers=4) for policy in ("none", "save_attention")),
        Case(LLAMA, "tpu7x-8", "fsdp 8", "save_attention", layers=4, method="full"),
        Case(QWEN, "tpu7x-8", "fsdp 8", "save_attention", layers=8, method="full", micro=4),
        *(Case(LLAMA, "v5p-8", "fsdp 4", policy) for policy in DENSE),
        Case(LLAMA, "v5p-16", "dcn 2 fsdp 8", "save_attention", layers=4, profile="none"),
        *(Case(LLAMA, "v6e-8", "fsdp 2 tp 4", policy, layers=4) for policy in DENSE),
        *(Case(LLAMA, "v5e-8", "fsdp 8", policy, layers=4) for policy in ("none", "save_attention")),
        Case(LLAMA, "v6e-8", "fsdp 8", "save_attention", layers=4, length=8192, micro=2),
        Case(LLAMA, "v6e-8", "fsdp 8", "none", layers=4, length=1024, micro=4),
        Case(LLAMA, "v6e-8", "fsdp 8", "decoder", layers=4, method="qlora"),
        Case(LLAMA, "v6e-8", "fsdp 8", "none", layers=4, method="dropout"),
        Case(LLAMA, "v6e-8", "fsdp 8", "decoder", layers=4, attention="dot"),
        Case(LLAMA, "v6e-8", "fsdp 8", "none", layers=4, attention="dot", length=2048),
        *(Case(QWEN, "v6e-8", "fsdp 8", policy, layers=4) for policy in (*DENSE, "save_dots")),
        Case(QWEN, "v6e-8", "fsdp 8", "none", layers=0),
        *(Case(QWEN, "v6e-8", "fsdp 8", policy, layers=4, method="dpo", length=2048) for policy in DENSE),
        Case(QWEN, "v6e-8", "fsdp 8", "save_attention", layers=4, method="kto", length=2048, micro=2),
        *(Case(GEMMA, "v6e-8", "fsdp 8", policy, layers=6) for policy in ("none", "save_attention")),
        Case(GEMMA4, "v6e-8", "fsdp 8", "save_attention", layers=6),
        *(
            Case(A3B, "v6e-8", "fsdp 1 ep 8", policy, layers=4)
            for policy in ("decoder", "save_attention", "none")
        ),
        *(Case(A3B, "v6e-8", "fsdp 8", policy, layers=4) for policy in ("decoder", "save_attention")),
        *(Case(OSS, "v6e-4", "fsdp 1 ep 4", policy, layers=4) for policy in ("decoder", "save_attention")),
        Case(OSS, "v6e-4", "fsdp 4", "decoder", layers=4),
        Case("Qwen/Qwen3.5-35B-A3B", "v6e-8", "fsdp 1 ep 8", "decoder", layers=4, length=2048),
        *(Case(HYBRID, "v6e-8", "fsdp 8", policy, layers=4) for policy in DENSE),
        *(
            Case("ibm-granite/granite-4.0-h-micro", "v6e-1", "fsdp 1", policy, layers=6)
            for policy in ("none", "decoder")
        ),
        Case("LiquidAI/LFM2-1.2B", "v6e-1", "fsdp 1", "none", layers=6),
        Case("deepseek-ai/DeepSeek-V2-Lite", "v6e-8", "fsdp 8", "save_attention", layers=4),
        Case("google/gemma-2-9b-it", "v6e-8", "fsdp 8", "none", layers=4),
        Case("microsoft/phi-4", "v6e-8", "fsdp 8", "save_attention", layers=4),
        *(
            Case("Qwen/Qwen2.5-0.5B", "v5e-1", "fsdp 1", policy, layers=4)
            for policy in ("none", "save_attention")
        ),
    )
}


@dataclass(frozen=True)
class Measured:
    """The compiler's figures of a case, on one device.

    Attributes:
        arguments: bytes of weights, adapters, the optimizer's state and the batch.
        temporaries: bytes of everything else but code.
        instructions: of the scheduled module.
        refused: whether the step did not fit; the bytes are then those of the compiler's message.
    """

    arguments: float
    temporaries: float
    instructions: int
    refused: bool = False


RECORDS: TypeAdapter[dict[str, Measured]] = TypeAdapter(dict[str, Measured])


def read() -> dict[str, Measured]:
    """Read the record; return an empty one if there is none."""
    return RECORDS.validate_json(RECORD.read_bytes()) if RECORD.exists() else {}


def program(case: Case, folder: Path) -> Program:
    """Lower a case's recipe, with all layers.

    Args:
        folder: where the recipe is written.

    Raises:
        ArtifactError: the recipe has errors.
    """
    path = folder / "recipe.yaml"
    path.write_text(case.text(), encoding="utf-8")
    lowered = lower(load(path), planning=True)
    if lowered.program is None:
        errors = [diagnostic.message for diagnostic in lowered.diagnostics if diagnostic.severity == "error"]
        raise ArtifactError(f"{case.name}: {'; '.join(errors)}", "correct the case")
    return lowered.program


def first_layers(program: Program, layers: int) -> Program:
    """Return a program with only the first layers of its model; 0 for all."""
    if not layers:
        return program

    def within(path: str) -> bool:
        number = split_layer(path)[1]
        return number is None or number < layers

    return replace(
        program,
        architecture=shortened(program.architecture, range(layers)),
        parameters=tuple(p for p in program.parameters if within(p.path)),
        adapters=tuple(a for a in program.adapters if a.target.layer < layers),
    )


@dataclass(frozen=True)
class Compared:
    """A step's memory by the estimate, next to the compiler's figure, in bytes on one device.

    Attributes:
        policy: value of `remat.policy`.
        whole: whether all layers were planned, with their code. Otherwise the figures are of some layers,
            without code.
        available: the device's memory.
    """

    name: str
    policy: str
    whole: bool
    estimated: float
    compiled: float
    available: float

    @property
    def error(self) -> float:
        """Return the estimate's error as a share of the device's memory; below 0 if it is too low."""
        return (self.estimated - self.compiled) / self.available

    @property
    def within(self) -> bool:
        """Return whether the error is within BOUNDS, or within those of EXCEPTIONS."""
        low, high = EXCEPTIONS.get(self.name, BOUNDS)
        return low <= self.error <= high


BOUNDS = (-MARGIN, EXCESS)
"""The least and the greatest error of an estimate, as shares of the device's memory."""

EXCEPTIONS: dict[str, tuple[float, float]] = {
    "qwen3-8b-full-tpu7x8": (-0.63, BOUNDS[1]),
    "Qwen3-8B, tpu7x-8 fsdp 8, save_attention, 4096 x 4, 8 layers, full": (-0.13, BOUNDS[1]),
    "qwen35-35b-a3b-v6e8": (-0.1, BOUNDS[1]),
    "gemma4-26b-a4b-qlora-v6e4": (-0.04, BOUNDS[1]),
    "llama4-scout-v5p32": (-0.05, BOUNDS[1]),
}
"""Steps whose error is out of BOUNDS, with their own bounds. docs/planning.md names them. On a tpu7x, full
fine-tuning fills the memory: XLA keeps values that the policy would recompute."""


def compared() -> list[Compared]:
    """Compare the estimate with all recorded figures."""
    whole = [_of_plan(name, planned) for name, planned in recorded().recipes.items()]
    with tempfile.TemporaryDirectory() as folder:
        known = read()
        return whole + [
            _of_case(case, known[name], Path(folder)) for name, case in CASES.items() if name in known
        ]


def _of_plan(name: str, planned: Planned) -> Compared:
    of = recipe_program(FOLDER / f"{name}.yaml")
    available = of.accelerator.hbm_bytes_per_device
    return Compared(name, of.recipe.remat.policy, True, need(of).total, planned.memory.used, available)


def _of_case(case: Case, measured: Measured, folder: Path) -> Compared:
    of = first_layers(program(case, folder), case.layers)
    estimated = state_bytes(of) + sum(temporaries(of).values())
    compiled = measured.arguments + measured.temporaries
    return Compared(case.name, case.policy, False, estimated, compiled, of.accelerator.hbm_bytes_per_device)


def write() -> None:
    """Write the table of docs/planning.md."""
    before = PAGE.read_text(encoding="utf-8")
    head, begin, rest = before.partition(BEGIN)
    if not begin or END not in rest:
        raise ArtifactError("docs/planning.md has no place for the table", f"{BEGIN}{END}")
    after = f"{head}{begin}\n{page_table(compared())}\n{rest[rest.index(END) :]}"
    if after != before:
        PAGE.write_text(after, encoding="utf-8")
        print(f"{PAGE.relative_to(ROOT)}: written")


def page_table(every: Sequence[Compared]) -> str:
    """Return the errors by policy, and the steps that are out of bounds."""
    rows = []
    for policy in sorted({step.policy for step in every}, key=list(KEPT).index):
        for whole in (True, False):
            some = [step for step in every if (step.policy, step.whole) == (policy, whole)]
            usual = [step.error for step in some if step.name not in EXCEPTIONS]
            if usual:
                middle = median(map(abs, usual))
                rows.append(
                    (
                        f"`{policy}`",
                        "whole" if whole else "some layers",
                        str(len(usual)),
                        f"{100 * min(usual):+.1f} %",
                        f"{100 * max(usual):+.1f} %",
                        f"{100 * middle:.1f} %",
                    )
                )
    head = ("Policy", "Planned", "Steps", "Lowest error", "Highest error", "Median size")
    lines = table(head, rows)
    apart = [step for step in every if step.name in EXCEPTIONS]
    if apart:
        names = "; ".join(f"{step.name}: {100 * step.error:+.0f} %" for step in apart)
        lines += f"\nOutside of these bounds, and not counted: {names}.\n"
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.step_memory", description="Memory of steps.")
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan", help="compile the cases without a record, or these")
    planning.add_argument("names", nargs="*", metavar="NAME")
    commands.add_parser("compare", help="print the error of the estimate for each step")
    commands.add_parser("write", help="write the table of docs/planning.md")
    asked = parser.parse_args(argv)
    return guarded({"plan": lambda: _plan(asked.names), "compare": _compare, "write": write}[asked.command])


def _compare() -> None:
    for step in sorted(compared(), key=lambda step: step.error):
        flag = "" if step.within else "  out of bounds"
        sizes = f"{step.estimated / 2**30:6.2f} for {step.compiled / 2**30:6.2f} GiB"
        print(f"{100 * step.error:+6.1f} %  {sizes}  {step.name}{flag}")


def _plan(names: Iterable[str]) -> None:
    wanted = set(names)
    for name, case in CASES.items():
        if name in (read() if not wanted else set(CASES) - wanted):
            continue
        with tempfile.TemporaryDirectory() as folder:
            of = program(case, Path(folder))
            layers = tuple(range(case.layers or of.architecture.num_layers))
            job = Job(of.source.resolve(), (), layers, scheduled=True)
            result = compile_jobs([(of, job)], most=1)[0]
        if isinstance(result, Failed):
            print(f"{name}: {result.message}", flush=True)
            continue
        whole = with_refusal(result)
        measured = Measured(
            arguments=whole.arguments,
            temporaries=whole.temporaries,
            instructions=whole.instructions,
            refused=whole.out_of_memory is not None,
        )
        record = read() | {name: measured}
        ordered = {known: record[known] for known in CASES if known in record}
        RECORD.write_bytes(RECORDS.dump_json(ordered, indent=1) + b"\n")
        seconds = whole.trace_seconds + whole.compile_seconds
        print(f"{name}: {whole.temporaries / 2**30:.2f} GiB of temporaries, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
