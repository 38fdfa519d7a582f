"""The page of runs: what ran, how far, the most important figures, and sections by the other modules."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from recipec.compiler.pages.document import Block, Document, Figure, Items, Section, Table, Text
from recipec.compiler.pages.html import write
from recipec.compiler.pages.numbers import (
    NOT_KNOWN,
    capacity,
    compact,
    gib,
    hours,
    number,
    percent,
    seconds,
    significant,
)
from recipec.compiler.report.curves import curves, plots_of
from recipec.compiler.report.data_rows import data_section
from recipec.compiler.report.live import FAILED, STOPPED
from recipec.compiler.report.metrics import spread
from recipec.compiler.report.recorded_run import ReportedRun
from recipec.compiler.report.run_values import differences, recipe_section
from recipec.compiler.wording import mesh_axes, plural
from recipec.runtime.metrics.loggers import CRITERIA, Criterion

GENERATOR = "recipec report"
"""Identifies a page of this command, so that no other file is overwritten."""
EXTRA = "report"
STEPS, LONGEST = 6, 600
"""Most steps shown for each prompt of train.generations, and most characters of a text."""


def run_page(runs: Sequence[ReportedRun], reality: Section, outcome: Section) -> str:
    """Build the page of runs. The first run is the one that the others are compared with.

    Args:
        reality: on the first run's measurements next to a plan's estimates.
        outcome: on the results of merging and serving the first run.
    """
    first, several = runs[0], len(runs) > 1
    sentence = f"The figures are those of {first.label}, the first run; all of them are compared below."
    blocks = [_beside(runs), *differences(runs)] if several else []
    compared = Section("compared", "Runs compared", (f"Each compared with {first.label}.",), blocks)
    return write(
        Document(
            title=f"Report on {first.name}",
            generator=GENERATOR,
            command=("recipe report", first.badge),
            name=first.name,
            hardware=_hardware(first),
            figures=_figures(first),
            sections=[
                *([compared] if several else []),
                _curves(runs),
                *_generations(first),
                data_section(runs),
                reality,
                outcome,
                recipe_section(first),
                _basis(runs),
            ],
            alarms=_alarms(runs),
            sentence=sentence if several else "",
        ),
        EXTRA,
    )


def _hardware(run: ReportedRun) -> list[tuple[str, str]]:
    """Return (name, value) pairs for what ran, and on which hardware."""
    recipe, devices = run.recipe, run.devices
    out = []
    if recipe is not None:
        out.append(("Model", recipe.model.id))
        lora = recipe.lora
        weights = "some weights" if recipe.train.trainable_modules else "all weights"
        method = weights if lora is None else f"LoRA of rank {lora.rank}"
        if recipe.model.quantization:
            method += f" on {recipe.model.quantization} weights"
            method += " by products in eight bits" if recipe.model.quantized_matmul else ""
        if recipe.train.qat is not None:
            method += f", rounded to {recipe.train.qat.weights} in training"
        objective = recipe.train.objective
        out.append(("Trained", method if objective == "sft" else f"{method}, {objective.upper()}"))
    if devices:
        count, kind = devices.get("count"), str(devices.get("kind"))
        where = f"{count} virtual CPU devices: no TPU" if run.on_cpu else f"{count} x {kind}"
        out.append(("Ran on", where))
    elif run.on_cpu:
        out.append(("Ran on", "CPU: no TPU"))
    if recipe is not None:
        axes = mesh_axes(recipe.mesh.axes)
        out.append(("Recipe's mesh", f"{recipe.mesh.accelerator or recipe.mesh.topology}, {axes}"))
    if run.facts.get("script"):
        out.append(("By", str(run.facts["script"])))
    if run.starts and run.starts[0].get("at"):
        out.append(("Begun", str(run.starts[0]["at"]).replace("T", " ").replace("Z", " UTC")))
    if run.written:
        out.append(("Last logged", run.written))
    return out


def _figures(run: ReportedRun) -> list[Figure]:
    """Return the main figures of a run."""
    loss, evaluated = run.metrics.get("loss"), run.evaluated
    last = loss.values[-1] if len(loss) else None
    first = loss.finite[0] if loss.finite else None
    below = (f"{significant(first[1])} at step {first[0]:,}",) if first else ()
    best = run.best
    tokens = [value for _, value in run.metrics.get("tokens").finite]
    memory, limit = run.peak_memory, run.devices.get("memory_bytes")
    of = (f"of {capacity(limit)}, {percent(memory / limit)}",) if memory and isinstance(limit, int) else ()
    return [
        Figure("Training loss at the end", significant(last), below, bad=bool(loss.lost)),
        *(
            [
                Figure(
                    title_of_best(run.criterion),
                    significant(best[1]),
                    (f"at step {best[0]:,}", *_latest(evaluated, best)),
                )
            ]
            if best
            else []
        ),
        Figure("Tokens a second", number(run.tokens_per_second), ("without the first step of each start",)),
        Figure("Optimizer step", seconds(run.step_seconds), ("median",)),
        Figure("Trained on", compact(sum(tokens)) if tokens else NOT_KNOWN, ("real tokens",)),
        Figure("Time in steps", hours(run.hours), ("without loading, evaluating and saving",)),
        Figure(
            "Peak memory",
            gib(memory) if memory else NOT_KNOWN,
            of or (("of the process",) if run.on_cpu else ()),
        ),
    ]


def title_of_best(criterion: Criterion) -> str:
    """Return the title of the figure of the best evaluation."""
    return f"{criterion.best.capitalize()} {criterion.title}"


BEST = {title_of_best(criterion) for criterion in CRITERIA}


def _latest(evaluated: Sequence[tuple[int, float]], best: tuple[int, float]) -> tuple[str, ...]:
    step, loss = evaluated[-1]
    return () if step == best[0] else (f"{significant(loss)} at step {step:,}, the last",)


def _alarms(runs: Sequence[ReportedRun]) -> list[tuple[str, str]]:
    """Return problems that the reader must not miss, each as a title and a sentence."""
    out = []
    for run in runs:
        whose = f"{run.label}: " if len(runs) > 1 else ""
        for metric, text in (
            ("loss", "loss"),
            ("grad_norm", "gradient's norm"),
            ("eval_loss", "evaluation loss"),
        ):
            lost = run.metrics.get(metric).lost
            if lost:
                more = f", and at {plural(len(lost) - 1, 'later step')}" if len(lost) > 1 else ""
                out.append(
                    (
                        "Not a number.",
                        f"{whose}the {text} is {significant(lost[0][1])} at step {lost[0][0]:,}{more}.",
                    )
                )
        if not run.metrics.series:
            out.append(("Nothing was logged.", f"{whose}{run.folder.name} has no step with numbers."))
        if (run.total or 0) > run.metrics.last_step > 0 and not run.early:
            out.append(_unfinished(run, whose))
    return out


def _unfinished(run: ReportedRun, whose: str) -> tuple[str, str]:
    """Describe that a run has not finished, and why if that is known."""
    far = f"{whose}{run.metrics.last_step:,} of {plural(run.total or 0, 'step')} are done"
    reason = (run.reason or "nothing says why").rstrip(".")
    if run.outcome in (FAILED, STOPPED):
        return (f"{run.outcome.capitalize()}.", f"{far}: {reason}.")
    since = f"; the last line was written at {run.written}" if run.written else ""
    return ("Not finished.", f"{far}{since}. The run is still running, or was killed.")


def _numbers(runs: Sequence[ReportedRun]) -> Table:
    """Tabulate every metric of every run, one per line, for readers without JavaScript."""
    rows = []
    for kind in plots_of(runs):
        for metric, called in kind.metrics:
            for run in runs:
                finite = run.metrics.get(metric).finite
                if not finite:
                    continue
                low = min(finite, key=lambda pair: (pair[1], pair[0]))
                high = max(finite, key=lambda pair: (pair[1], -pair[0]))
                name = f"{kind.title}, {called}" if len(kind.metrics) > 1 else kind.title
                unit = f" ({kind.unit})" if kind.unit in ("s", "GiB") else ""
                rows.append(
                    (
                        f"{name}{unit}",
                        *([run.label] if len(runs) > 1 else []),
                        significant(finite[0][1] / kind.scale),
                        *(f"{significant(value / kind.scale)} at {step:,}" for step, value in (low, high)),
                        significant(finite[-1][1] / kind.scale),
                        f"{len(finite):,}",
                    )
                )
    head = (
        "",
        *(["run"] if len(runs) > 1 else []),
        "first",
        "lowest, at step",
        "highest, at step",
        "last",
        "logged",
    )
    return Table(head, rows, words=(1,) if len(runs) > 1 else (), label="Every metric in numbers")


def _beside(runs: Sequence[ReportedRun]) -> Table:
    """Tabulate the runs side by side, one column each."""
    lines: list[tuple[str, list[str]]] = [("state", [run.badge for run in runs])]
    every = [_figures(run) for run in runs]
    for name in dict.fromkeys(figure.name for figures in every for figure in figures):
        cells = [next((f for f in figures if f.name == name), None) for figures in every]
        lines.append((name.lower(), [_cell(figure) if figure else "" for figure in cells]))
    lines.append(("on", [dict(_hardware(run)).get("Ran on", NOT_KNOWN) for run in runs]))
    lines.append(("folder", [run.folder.name for run in runs]))
    columns = tuple(range(1, len(runs) + 1))
    rows = [(name, *cells) for name, cells in lines]
    return Table(("", *(run.label for run in runs)), rows, words=columns, label="Runs compared")


def _cell(figure: Figure) -> str:
    """Return a figure's value; for the best evaluation, with its step."""
    return f"{figure.value} {figure.below[0]}" if figure.name in BEST else figure.value


def _curves(runs: Sequence[ReportedRun]) -> Section:
    plot = curves(runs)
    resumed = any(run.resumed_after for run in runs)
    aside = ("Dotted lines are where a run was resumed.",) if resumed else ()
    none = Text("Nothing was logged: there is nothing to draw.", "")
    early = [
        Text(f"{run.label}: {run.early}." if len(runs) > 1 else f"{run.early}.") for run in runs if run.early
    ]
    numbers: list[Block] = [Text("In numbers", "heading"), _numbers(runs)]
    blocks: list[Block] = [*early, plot, *numbers] if plot else [none]
    return Section("runs", "The run", aside, blocks)


def _generations(run: ReportedRun) -> list[Section]:
    """Return the section with the answers to each prompt, step by step; none without answers."""
    by_prompt: dict[str, dict[int, Any]] = {}
    for generation in run.generations:
        by_prompt.setdefault(_prompt(generation.get("prompt")), {})[generation["step"]] = generation.get(
            "answer"
        )
    rows = []
    for prompt, answers in by_prompt.items():
        steps = sorted(answers)
        for index in spread(len(steps), STEPS):
            rows.append(
                (prompt if not index else "", f"{steps[index]:,}", _short(str(answers[steps[index]])))
            )
    aside = (
        "Answers to the same prompts, of train.generations or of data.eval, at evaluations from the first to "
        "the last.",
    )
    table = Table(("prompt", "step", "answer"), rows, words=(0, 2), label="Samples")
    return [Section("generations", "Generations", aside, (table,))] if rows else []


def _prompt(prompt: Any) -> str:
    """Return a prompt for display: a text, or the last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    content = last.get("content") if isinstance(last, dict) else last
    return _short(content if isinstance(content, str) else json.dumps(prompt, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def _basis(runs: Sequence[ReportedRun]) -> Section:
    sentences = []
    for run in runs:
        whose = f"{run.label}: " if len(runs) > 1 else ""
        by = f", by {run.lock['compiler']}" if run.lock.get("compiler") else ""
        starts = f", of {len(run.starts)} starts of the script" if len(run.starts) > 1 else ""
        sentences.append(f"{run.folder.name}: {run.metrics.lines:,} lines of metrics.jsonl{by}{starts}.")
        sentences += [f"{whose}{note}" for note in run.notes]
    sentences.append(
        "Step times and speeds are only those of the steps, as the script logged them. The first step after "
        "each start, which compiles, is in the plots, but in no median."
    )
    pinned = runs[0].lock.get("packages")
    packages = pinned.get("train") if isinstance(pinned, dict) else None
    listed = (
        [(str(name), str(version)) for name, version in packages.items()]
        if isinstance(packages, dict)
        else []
    )
    folded = Table(("package", "version"), listed, words=(1,), folded="Packages that the artifact pins")
    return Section("basis", "What this rests on", (), (Items(sentences), *([folded] if listed else [])))
