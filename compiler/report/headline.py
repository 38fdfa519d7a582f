"""The top of the page: what ran, on which hardware, how far, and the most important figures."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.pages.html import Figure, Table
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
from recipec.compiler.report.curves import kinds_of
from recipec.compiler.report.run import Run
from recipec.compiler.wording import mesh_axes, plural

BEST = "Lowest evaluation loss"


def hardware(run: Run) -> list[tuple[str, str]]:
    """Return (name, value) pairs for what ran, and on which hardware."""
    recipe, devices = run.recipe, run.devices
    out = []
    if recipe is not None:
        out.append(("Model", recipe.model.id))
        lora = recipe.lora
        weights = "some weights" if recipe.train.only else "all weights"
        method = weights if lora is None else f"LoRA of rank {lora.rank}"
        if lora is not None and lora.quantize:
            method += f" on {lora.quantize} weights"
            method += " by products in eight bits" if lora.products else ""
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


def figures(run: Run) -> list[Figure]:
    """Return the main figures of a run."""
    loss, evaluated = run.metrics.get("loss"), run.metrics.get("eval_loss").finite
    last = loss.values[-1] if len(loss) else None
    first = loss.finite[0] if loss.finite else None
    below = (f"{significant(first[1])} at step {first[0]:,}",) if first else ()
    best = min(evaluated, key=lambda pair: (pair[1], pair[0]), default=None)
    tokens = [value for _, value in run.metrics.get("tokens").finite]
    memory, limit = run.peak_memory, run.devices.get("memory_bytes")
    of = (f"of {capacity(limit)}, {percent(memory / limit)}",) if memory and isinstance(limit, int) else ()
    return [
        Figure("Training loss at the end", significant(last), below, bad=bool(loss.lost)),
        *(
            [
                Figure(
                    BEST,
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


def _latest(evaluated: Sequence[tuple[int, float]], best: tuple[int, float]) -> tuple[str, ...]:
    step, loss = evaluated[-1]
    return () if step == best[0] else (f"{significant(loss)} at step {step:,}, the last",)


def alarms(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return problems that the reader must not miss, each as a title and a sentence."""
    out = []
    for run in runs:
        whose = f"{run.label}: " if len(runs) > 1 else ""
        for metric, said in (
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
                        f"{whose}the {said} is {significant(lost[0][1])} at step {lost[0][0]:,}{more}.",
                    )
                )
        if not run.metrics.series:
            out.append(("Nothing was logged.", f"{whose}{run.place.name} has no step with numbers."))
        if (run.steps_total or 0) > run.metrics.last_step > 0 and not run.early:
            out.append(_unfinished(run, whose))
    return out


def _unfinished(run: Run, whose: str) -> tuple[str, str]:
    """Describe that a run has not finished, and why if that is known."""
    far = f"{whose}{run.metrics.last_step:,} of {plural(run.steps_total or 0, 'step')} are done"
    reason = str(run.ended.get("reason") or "nothing says why").rstrip(".")
    if run.ended.get("state") == "failed":
        return ("Failed.", f"{far}: {reason}.")
    if run.ended.get("state") == "stopped":
        return ("Stopped.", f"{far}: {reason}.")
    since = f"; the last line was written at {run.written}" if run.written else ""
    return ("Not finished.", f"{far}{since}. The run is still running, or was killed.")


def numbers(runs: Sequence[Run]) -> Table:
    """Tabulate every metric of every run, one per line, for readers without JavaScript."""
    rows = []
    for kind in kinds_of(runs):
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


def beside(runs: Sequence[Run]) -> Table:
    """Tabulate the runs side by side, one column each."""
    lines: list[tuple[str, list[str]]] = [("state", [run.state for run in runs])]
    every = [figures(run) for run in runs]
    for name in dict.fromkeys(figure.name for one in every for figure in one):
        cells = [next((f for f in one if f.name == name), None) for one in every]
        lines.append((name.lower(), [_cell(figure) if figure else "" for figure in cells]))
    lines.append(("on", [dict(hardware(run)).get("Ran on", NOT_KNOWN) for run in runs]))
    lines.append(("folder", [run.place.name for run in runs]))
    columns = tuple(range(1, len(runs) + 1))
    rows = [(name, *cells) for name, cells in lines]
    return Table(("", *(run.label for run in runs)), rows, words=columns, label="Runs compared")


def _cell(figure: Figure) -> str:
    """Return a figure's value; for the lowest loss, with its step."""
    return f"{figure.value} {figure.below[0]}" if figure.name == BEST else figure.value
