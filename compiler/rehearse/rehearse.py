"""`recipe rehearse`: run a recipe's artifact in miniature on virtual CPU devices.

It writes a miniature of the model, compiles the recipe for it, and runs the generated scripts as a user
would: train, kill, resume, merge, verify.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ruamel.yaml import YAML

from recipec.compiler import catalog
from recipec.compiler.artifacts.artifact import write
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.lowering.backend import Backend, others
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.references import is_inline
from recipec.compiler.miniature.small_checkpoint import LONGEST, shrink, write_checkpoint
from recipec.compiler.miniature.small_recipe import (
    MODEL,
    TEACHER,
    MiniatureChange,
    as_written,
    conversations,
    derive,
    pictured_row,
    processes,
    row_of,
    scale_axes,
)
from recipec.compiler.miniature.template_length import template_tokens
from recipec.compiler.packages import require_packages
from recipec.compiler.rehearse.any_miniature import write_any
from recipec.compiler.rehearse.artifact_run import ArtifactRun, claim
from recipec.compiler.rehearse.pipeline import Pipeline, StepFailed, carry_out, clear_up, new_console, tell
from recipec.compiler.wording import mesh_axes
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

if TYPE_CHECKING:
    from rich.console import Console

STEPS = 12

TRAIN_ROWS, EVAL_ROWS = 96, 8
TEACHER_SCALE = 0.8
"""The standard deviation of the embedding of a miniature's teacher."""
EXPECTED: Mapping[str, float] = {
    **{"miniature": 0.5, "compile": 0.5, "train": 60, "kill": 30},
    **{"resume": 40, "compare": 1, "merge": 2, "verify": 12},
}
"""Seconds that the steps of three recipes took; their ratios are used to estimate the remaining time."""

RECIPE = "recipe.yaml"
TRAIN_FILE, EVAL_FILE = "rehearsal-train.jsonl", "rehearsal-eval.jsonl"


@dataclass(frozen=True)
class Rehearsal:
    """The result of a rehearsal.

    Attributes:
        ok: whether every step passed.
        folder: the miniature, its recipe, the artifact, logs and outputs; removed if the rehearsal passed and
            the folder was not to be kept.
        seconds: duration of each step, by its name.
    """

    ok: bool
    folder: Path
    seconds: Mapping[str, float]


def rehearse(
    program: Program, steps: int = STEPS, folder: Path | None = None, console: Console | None = None
) -> Rehearsal:
    """Rehearse a program and print the progress.

    Args:
        program: of the recipe.
        steps: optimizer steps of the miniature's run, at least 4.
        folder: where everything is written and kept: a new or empty one, or an earlier rehearsal's. If None,
            a temporary folder that is removed on success.

    Raises:
        ArtifactError: when `folder` holds something other than an earlier rehearsal, or the packages for
            training are not installed.
        KeyboardInterrupt: after ending its scripts and printing which files were kept.
    """
    require_packages("rehearsing")
    if not program.family.tunix:
        require_packages(f"rehearsing {program.recipe.model.id}", ("torch", "peft", "torchax"), ("torchax",))
    console = console or new_console()
    work = claim(folder) if folder else Path(tempfile.mkdtemp(prefix=f"rehearse-{program.name}-"))
    pipeline = Pipeline(console, work / "logs", expected=EXPECTED)
    carry_out(pipeline, work, lambda: _run(program, max(4, steps), work, pipeline))
    pipeline.print_table(f"rehearsal of {program.name}")
    clear_up(console, work, pipeline.ok, keep=folder is not None)
    return Rehearsal(pipeline.ok, work, {result.step: result.seconds for result in pipeline.results})


def _run(program: Program, steps: int, work: Path, pipeline: Pipeline) -> None:
    pipeline.step("miniature", lambda: write_miniature(program, work))
    pipeline.step("compile", lambda: _compile(program, steps, work, pipeline.console))
    run = ArtifactRun(
        pipeline,
        artifact=work / "generated" / program.name,
        model=work / "model",
        data=work,
        work=work,
        checkpoints="checkpoints",
        merged="merged",
        cache=program.recipe.cache.directory,
        processes=processes(program),
    )
    pipeline.step("train", run.train)
    pipeline.step("kill", run.kill)
    pipeline.step("resume", run.resume)
    pipeline.step("compare", run.compare)
    pipeline.step("merge", run.merge)
    pipeline.step("verify", run.verify)


def write_miniature(program: Program, work: Path, dtype: str | None = None) -> str:
    """Write the data and the checkpoint, and return a text that says how large the model is.

    Args:
        dtype: type of the weights; None for the recipe's.
    """
    rows = conversations(TRAIN_ROWS + EVAL_ROWS)
    fields = program.recipe.data.fields
    for name, part in ((TRAIN_FILE, rows[EVAL_ROWS:]), (EVAL_FILE, rows[:EVAL_ROWS])):
        form, seeing = program.recipe.data.format, program.recipe.data.images is not None
        values = [
            pictured_row(row, form, number) if seeing else row_of(row, form)
            for number, row in enumerate(part)
        ]
        lines = [json.dumps(_renamed(value, fields)) + "\n" for value in values]
        (work / name).write_text("".join(lines), encoding="utf-8")
    axes, dtype = scale_axes(program.recipe.mesh.axes), dtype or program.recipe.model.dtype
    texts = [message["content"] for row in rows for message in row]
    if not program.family.tunix:
        return write_any(work / "model", program, axes, texts, dtype)
    # A prompt and its completion have to fit the context, however long the chat template is.
    positions = LONGEST if program.recipe.train.objective == "grpo" else 0
    config = shrink(program.config, axes, multimodal=program.multimodal, positions=positions)
    write_checkpoint(work / "model", config, texts, dtype=dtype, added=program.recipe.model.add_tokens)
    if program.teacher is not None:  # the same model, with an embedding of other values
        write_checkpoint(work / f"model{TEACHER}", config, texts, dtype=dtype, embedding_scale=TEACHER_SCALE)
    text = config.get("text_config", config)
    heads = [text["num_attention_heads"], text["num_key_value_heads"]]
    heads += [global_heads] if (global_heads := text.get("num_global_key_value_heads")) else []
    return (
        f"{text['num_hidden_layers']} of {program.architecture.num_layers} layers, hidden size "
        f"{text['hidden_size']}, heads {':'.join(map(str, heads))}"
    )


def _renamed(value: Any, fields: Mapping[str, str]) -> Any:
    """Rename a row's columns as the recipe's `data.fields` says."""
    if isinstance(value, Mapping):
        return {fields.get(key, key): _renamed(item, fields) for key, item in value.items()}
    return [_renamed(item, fields) for item in value] if isinstance(value, list) else value


def write_recipe(program: Program, steps: int, work: Path) -> list[MiniatureChange]:
    """Write recipe.yaml next to the miniature, and return the values it replaces."""
    config = json.loads((work / "model" / "config.json").read_text(encoding="utf-8"))
    small = None if program.family.tunix else catalog.find(MODEL, work).architecture
    longer = template_tokens(program, work / "model")
    recipe, replaced = derive(program, config, TRAIN_FILE, EVAL_FILE, steps, small, longer)
    copy_template(program, recipe, work)
    write_yaml(work / RECIPE, as_written(recipe, program.recipe))
    return replaced


def _compile(program: Program, steps: int, work: Path, console: Console) -> str:
    replaced = write_recipe(program, steps, work)
    small = compile_miniature(program.name, work, backends(program), replaced, console)
    several = f"on {small.accelerator.hosts} processes, " if processes(program) > 1 else ""
    return f"{mesh_axes(small.recipe.mesh.axes)}, {several}{len(replaced)} values replaced"


def compile_miniature(
    name: str, work: Path, backends: Sequence[Backend], replaced: Sequence[MiniatureChange], console: Console
) -> Program:
    """Build the artifact of the miniature's recipe, and return its program.

    Args:
        backends: that the artifact is for; Tunix need not be among them.
        replaced: the values that the recipe replaces, to print.

    Raises:
        StepFailed: when the recipe has errors, or cannot be built.
    """
    lowered = lower(load(work / RECIPE))
    refused = [] if lowered.program is None else diagnosed(lowered.program, backends)
    errors = [item for item in [*lowered.diagnostics, *refused] if item.severity == "error"]
    if lowered.program is None or errors:
        raise StepFailed("the recipe does not compile in miniature", render_text(errors))
    files = emit(lowered.program, others([backend.value for backend in backends]))
    try:
        write(work / "generated", {name: files})
    except ArtifactError as error:
        raise StepFailed(str(error)) from error
    for change in replaced:
        tell(console, f"  {change.path}: {change.before} -> {change.after}", "dim")
    return lowered.program


def backends(program: Program) -> tuple[Backend, ...]:
    """Return the backends that the artifact is built for besides Tunix: TorchAX if Tunix lacks the model."""
    return () if program.family.tunix else (Backend.TORCHAX,)


def copy_template(program: Program, recipe: Mapping[str, Any], work: Path) -> None:
    """Copy the recipe's chat template, if it is a file."""
    template = recipe["data"]["chat_template"]
    if template is None or is_inline(template):
        return
    target = work / template
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(program.source.parent / template, target)


def write_yaml(path: Path, value: Mapping[str, Any]) -> None:
    """Write plain data as YAML in block style."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    with path.open("w", encoding="utf-8") as stream:
        yaml.dump(dict(value), stream)
