"""`recipe parity`: run a recipe's artifact in miniature, with each backend's script run as a user would."""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import facts_of
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_recipe import (
    NO_PART,
    MiniatureChange,
    as_written,
    derive,
    replacements,
)
from recipec.compiler.miniature.template_length import template_tokens
from recipec.compiler.packages import missing_packages, require_packages
from recipec.compiler.pages import text
from recipec.compiler.rehearse.artifact_run import claim, done_line, script_environment
from recipec.compiler.rehearse.pipeline import Pipeline, StepFailed, carry_out, clear_up, new_console
from recipec.compiler.rehearse.rehearse import (
    RECIPE,
    TRAIN_FILE,
    compile_miniature,
    copy_template,
    write_miniature,
    write_yaml,
)
from recipec.compiler.wording import listing, mesh_axes
from recipec.runtime.errors import UserError
from recipec.runtime.model.partition_rules import data_parallel
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, in_order
from recipec.spec.load import locate

if TYPE_CHECKING:
    from rich.console import Console

    from recipec.compiler.lowering.program import Program
    from recipec.compiler.parity.compare import ComparedRun, Deviation
    from recipec.spec.load import Loaded


STEPS = 20

EXPECTED: Mapping[str, float] = {
    **{"miniature": 0.5, "compile": 0.5, "tunix": 36, "torchax": 35, "trl": 21},
    **{"control": 21, "merge": 51, "compare": 0.5},
}
"""Seconds that the steps of a flagship in miniature took; their ratios give the estimate of the time left."""


LEARNING_RATE = 1e-3
"""Small enough that in most models rounding errors do not grow from step to step, and large enough that
twenty steps move every adapter by far more than the tolerance."""


@dataclass
class Parity:
    """The result of a comparison.

    Attributes:
        ok: whether every run finished and every quantity is within its limit.
        folder: the miniature, its recipe, the artifact, traces, logs and outputs; removed if the comparison
            passed and the folder was not to be kept.
        rows: deviations between every two runs.
        control: deviations of one run from its perturbed repetition; () without one.
        left_out: why a backend did not take part, by its name.
        seconds: duration of each step, by its name.
    """

    ok: bool
    folder: Path
    rows: Sequence[Deviation] = ()
    control: Sequence[Deviation] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        from recipec.compiler.parity.compare import to_dict

        return to_dict(self.rows, self.control, self.left_out) | {
            "ok": self.ok,
            "seconds": dict(self.seconds),
        }


def parity(
    program: Program,
    backends: Backends,
    steps: int = STEPS,
    folder: Path | None = None,
    tolerances: Mapping[str, float] | None = None,
    console: Console | None = None,
) -> Parity:
    """Compare backends on a program's miniature, and print the progress.

    Args:
        program: of the recipe.
        backends: the backends that take part, at least two.
        steps: optimizer steps.
        folder: where everything is written and kept: a new or empty one, or an earlier comparison's. If None,
            a temporary folder that is removed on success.
        tolerances: limits by quantity that replace float32's.

    Raises:
        ArtifactError: when `folder` holds something else, or the packages for training are not installed.
        KeyboardInterrupt: after ending its scripts and printing which files were kept.
    """
    require_packages("comparing backends")
    console = console or new_console()
    work = claim(folder) if folder else Path(tempfile.mkdtemp(prefix=f"parity-{program.name}-"))
    pipeline = Pipeline(console, work / "logs", expected=_expected(program, backends.chosen))
    result = Parity(False, work, left_out=backends.left_out)
    carry_out(
        pipeline, work, lambda: _run(program, backends.chosen, steps, tolerances or {}, pipeline, result)
    )
    if not pipeline.ok:
        pipeline.print_table(f"parity of {program.name}")
    result.ok = pipeline.ok and bool(result.rows) and all(row.ok for row in result.rows)
    result.seconds = {step.step: step.seconds for step in pipeline.results}
    if result.rows:
        from recipec.compiler.parity.compare import document

        title = f"parity of {program.name}, {steps} steps"
        text.show(document(title, result.rows, result.control, result.left_out), stream=console.file)
    clear_up(console, work, result.ok, keep=folder is not None)
    return result


def _run(
    program: Program,
    backends: Sequence[Backend],
    steps: int,
    tolerances: Mapping[str, float],
    pipeline: Pipeline,
    result: Parity,
) -> None:
    work = result.folder
    miniatures: list[Program] = []
    pipeline.step("miniature", lambda: write_miniature(program, work, dtype="float32"))
    pipeline.step("compile", lambda: _compile(program, backends, steps, work, pipeline.console, miniatures))
    small = miniatures[0]
    runs = {backend: Trained(pipeline, work, small, backend.value, backend) for backend in backends}
    for run in runs.values():
        pipeline.step(run.name, run.train)
    control = None
    if _has_control(program, backends):
        control = Trained(pipeline, work, small, "control", Backend.TRL)
        pipeline.step("control", functools.partial(_control, control, small, work))
    merged = [*runs.values(), *([control] if control else [])]
    pipeline.step("merge", lambda: _merge(merged))
    pipeline.step("compare", lambda: _compare(runs, control, tolerances, result))


def _has_control(program: Program, backends: Sequence[Backend]) -> bool:
    """Return whether a control run shows how small differences grow. There is none if adapters are
    initialized from the base model's weights: a perturbed adapter cannot then be given as the start."""
    if program.lora is None or program.lora.principal or Backend.TRL not in backends:
        return False
    return facts_of(program.family.name).chaotic


def _expected(program: Program, backends: Sequence[Backend]) -> Mapping[str, float]:
    """Return the relative durations of a comparison's steps."""
    left_out = {backend.value for backend in Backend if backend not in backends}
    if not _has_control(program, backends):
        left_out.add("control")
    return {step: seconds for step, seconds in EXPECTED.items() if step not in left_out}


def _compile(
    program: Program,
    backends: Sequence[Backend],
    steps: int,
    work: Path,
    console: Console,
    miniatures: list[Program],
) -> str:
    replaced = write_recipe(program, steps, work)
    miniatures.append(compile_miniature(program.name, work, backends, replaced, console))
    return f"{mesh_axes(miniatures[0].recipe.mesh.axes)}, {len(replaced)} values replaced"


@dataclass(frozen=True)
class Trained:
    """A backend's run, and where its results are.

    Attributes:
        pipeline: runs the scripts.
        work: folder for all files of the comparison.
        program: the miniature's program.
        name: of the run: its backend's, or "control".
        backend: the backend whose script runs.
    """

    pipeline: Pipeline
    work: Path
    program: Program
    name: str
    backend: Backend

    @property
    def artifact(self) -> Path:
        return self.work / "generated" / self.program.name

    @property
    def output(self) -> Path:
        return self.work / self.name

    @property
    def trace(self) -> Path:
        return self.work / "traces" / f"{self.name}.npz"

    @property
    def merged(self) -> Path:
        """The checkpoint merged from base and adapter, or the one that full fine-tuning wrote."""
        if self.backend is not Backend.TUNIX and self.program.lora is None:
            return self.output / "model"
        return self.output / self.program.recipe.merge.output

    def train(self, *options: str) -> str:
        """Run the script; return its loss."""
        script = str(self.artifact / SCRIPTS[self.backend])
        paths = ["--data-dir", str(self.work), "--output", str(self.output), "--trace", str(self.trace)]
        text = self._script([script, *self._model(), *paths, *options], self.name)
        summary = done_line(text)
        if not self.trace.is_file():
            raise StepFailed(f"{Path(script).name} wrote no trace to {self.trace}")
        return f"{summary.get('steps', '?')} steps, loss {summary.get('loss', '?')}"

    def merge(self) -> None:
        """Merge the adapter with merge.py; another backend's adapter is first read with --import-adapter."""
        if self.merged == self.output / "model":
            return
        script = [str(self.artifact / "merge.py"), *self._model(), "--output", str(self.output)]
        if self.backend is not Backend.TUNIX:
            adapter = str(self.output / "adapter")
            self._script([*script, "--import-adapter", adapter], f"import-{self.name}")
        self._script(script, f"merge-{self.name}")

    def subject(self) -> ComparedRun:
        """Return the run for the comparison."""
        from recipec.compiler.parity.compare import ComparedRun, read_trace
        from recipec.runtime.weights.checkpoint import HFCheckpoint

        base = HFCheckpoint.open(self.merged)
        tensors = {name: functools.partial(base.read, name) for name in base.tensors}
        return ComparedRun(self.name, read_trace(self.trace), tensors)

    def _model(self) -> list[str]:
        return ["--model", str(self.work / "model")]

    def _script(self, command: list[str], log: str) -> str:
        # On models this small, torch's threads mostly wait for each other.
        environment = script_environment(self.work) | {"OMP_NUM_THREADS": "1"}
        return self.pipeline.script([sys.executable, *command], log, environment)


def _control(run: Trained, program: Program, work: Path) -> str:
    from recipec.compiler.parity.control import PERTURBATION, write_perturbed

    write_perturbed(work / "perturbed", program, work / "model")
    return f"{run.train('--adapter', str(work / 'perturbed'))}, from adapters moved by {PERTURBATION:.0e}"


def _merge(runs: Sequence[Trained]) -> str:
    for run in runs:
        run.merge()
    return ", ".join(str(run.merged.relative_to(run.work)) for run in runs)


def _compare(
    runs: Mapping[Backend, Trained], control: Trained | None, tolerances: Mapping[str, float], result: Parity
) -> str:
    from recipec.compiler.parity.compare import TOLERANCES, compare

    limits = {**TOLERANCES["float32"], **tolerances}
    try:
        subjects = [run.subject() for run in runs.values()]
        if control is not None:
            # The control's gradients at step 0 are its own: it measures how differences grow from there.
            pair = [runs[control.backend].subject(), control.subject()]
            inputs = ("targets", "rows", "initial")
            result.control = [row for row in compare(pair, {}) if row.quantity not in inputs]
    except UserError as error:
        raise StepFailed(error.message) from error
    result.rows = compare(subjects, limits, result.control)
    failed = sum(not row.ok for row in result.rows)
    if failed:
        return f"{failed} of {len(result.rows)} differ more than allowed"
    return f"{len(result.rows)} quantities within their limits"


def write_recipe(program: Program, steps: int, work: Path) -> list[MiniatureChange]:
    """Write the recipe that backends are compared on, next to `compiler.rehearse.rehearse`'s miniature, and
    return the values it replaces.

    It keeps what determines the training: packing, accumulation, the loss and the tokens that carry it,
    optimizer, clipping, schedule and adapters. The type becomes float32, in which small deviations are
    meaningful.
    Dropout is zero, because no two libraries draw the same random numbers.
    """
    config = json.loads((work / "model" / "config.json").read_text(encoding="utf-8"))
    longer = template_tokens(program, work / "model")
    recipe, _ = derive(program, config, TRAIN_FILE, TRAIN_FILE, steps, template=longer)
    recipe["model"] |= {"dtype": "float32", "quantization": None, "quantized_matmul": None}
    recipe["mesh"]["hosts"] = None  # a trace belongs to one process
    if recipe["lora"] is not None:
        recipe["lora"] |= {"dropout": 0.0, "dtype": "float32"}
    recipe["data"] |= {"eval": [], "eval_fraction": None}
    recipe["train"]["optimizer"]["learning_rate"] = LEARNING_RATE
    recipe["train"]["log"] |= {"tensorboard": False, "wandb_project": None, "mlflow_experiment": None}
    if recipe["train"]["loss_normalization"] == "micro_batches":
        _one_group(recipe)
    recipe["checkpoint"] |= {"every_steps": steps, "local": None}
    recipe["merge"] |= {"dtype": "float32", "quantization": None}
    replaced = replacements(program.recipe.model_dump(mode="json", exclude=NO_PART), recipe)
    del recipe["data"]["eval_seed"]  # it has no meaning without eval_fraction
    copy_template(program, recipe, work)
    write_yaml(work / RECIPE, as_written(recipe, program.recipe))
    return replaced


def _one_group(recipe: dict[str, Any]) -> None:
    """Remove the axes of data parallelism.

    TRL runs in one process here, and its micro-batches are those of one device. A mean over micro-batches'
    means depends on how the rows are divided into them.
    """
    axes, train = recipe["mesh"]["axes"], recipe["train"]
    train["global_batch_size"] //= data_parallel(axes)
    axes["fsdp"] = 1
    for axis in ("dcn", "ep"):
        axes.pop(axis, None)
    recipe["mesh"]["accelerator"] = f"cpu-{math.prod(axes.values())}"


SCRIPTS = {
    Backend.TUNIX: "train.py",
    Backend.TRL: "baseline/train_trl.py",
    Backend.TORCHAX: "train_torchax.py",
}
"""The script of each backend in an artifact."""
PACKAGES = {
    Backend.TUNIX: (),
    Backend.TRL: ("torch", "peft", "accelerate", "trl"),
    Backend.TORCHAX: ("torch", "peft", "torchax"),
}
"""Packages that a backend's script imports besides those of train.py."""


@dataclass(frozen=True)
class Backends:
    """The backends that take part, and why others do not.

    Attributes:
        chosen: in the order of Backend.
        left_out: reasons by backend name.
    """

    chosen: tuple[Backend, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


E1050 = Code(
    "E1050",
    "fewer than two backends to compare",
    cause="`recipe parity` compares backends that run the same recipe. At most one of the requested "
    "backends can run this one. The others refuse it, or their packages are not installed.",
    cure="Name other backends, change the refused key, or install the missing packages.",
)


def choose(
    loaded: Loaded, program: Program, wanted: Sequence[Backend]
) -> tuple[Backends | None, list[Diagnostic]]:
    """Choose the wanted backends that can run a recipe here, or report why there are too few.

    Returns:
        None for the backends when fewer than two are left, with the refusals and E1050.
    """
    chosen: list[Backend] = []
    left_out: dict[str, str] = {}
    refusals: list[Diagnostic] = []
    for backend in (backend for backend in Backend if backend in wanted):
        diagnostics = locate(diagnosed(program, [backend]), loaded.sources)
        refused = [item for item in diagnostics if item.severity == "error"]
        missing = missing_packages(PACKAGES[backend])
        if refused:
            left_out[backend.value] = "; ".join(f"{item.code}, {item.message}" for item in refused)
            refusals += refused
        elif program.recipe.train.objective == "grpo" and backend is not Backend.TUNIX:
            left_out[backend.value] = "each backend trains on completions that it draws itself"
        elif missing:
            left_out[backend.value] = f"{listing(missing)} cannot be imported"
        else:
            chosen.append(backend)
    if len(chosen) > 1:
        return Backends(tuple(chosen), left_out), []
    reasons = "".join(f"; {name} cannot: {reason}" for name, reason in left_out.items())
    able = listing(backend.value for backend in chosen) or "none"
    message = f"a comparison needs two backends, and of those given {able} can run this recipe here{reasons}"
    help = "--backend NAME of another one, or no --backend for all of them"
    if program.recipe.train.objective == "grpo":
        help = "train with both scripts, and compare the rewards in their metrics.jsonl"
    elif left_out and not refusals:
        name = next(iter(left_out))
        help = (
            f"recipe build --backend {name} writes the list of what its script needs: requirements-{name}.txt"
        )
    return None, in_order([*refusals, Diagnostic(E1050, message, help=help)])
