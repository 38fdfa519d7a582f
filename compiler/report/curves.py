"""The plots of runs: what they logged, against steps, tokens and hours."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from recipec.compiler.report.chart import Chart, Curve, Mark, Table
from recipec.compiler.report.kinds import KINDS, Kind
from recipec.compiler.report.metrics import Series
from recipec.compiler.report.numbers import significant
from recipec.compiler.report.run import Run
from recipec.compiler.report.thin import MOST, spread, thin, trailing_mean
from recipec.compiler.wording import plural

ROWS = 40
"""Steps in the table behind a plot, besides those that were evaluated."""
MARKS = 12
"""Marks of one kind and run in a plot."""
SMOOTHED = 50
"""Steps from which on a mean is drawn over what was logged."""

ACROSS = {"step": "optimizer step", "tokens": "tokens trained on", "hours": "hours in steps"}


class Across:
    """Where steps of a run lie on each horizontal axis."""

    def __init__(self, run: Run) -> None:
        self._sums = {}
        for name, metric, scale in (("tokens", "tokens", 1.0), ("hours", "step_seconds", 3600.0)):
            known = run.metrics.get(metric).finite
            sums = list(accumulate(value / scale for _, value in known))
            self._sums[name] = ([step for step, _ in known], sums)

    def __call__(self, steps: Sequence[int]) -> dict[str, list[Any]]:
        out: dict[str, list[Any]] = {"step": list(steps)}
        for name, (known, sums) in self._sums.items():
            places = (bisect_right(known, step) for step in steps)
            out[name] = [sums[place - 1] if place else 0.0 for place in places]
        return out

    def one(self, step: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self([step]).items()}


def charts(runs: Sequence[Run]) -> list[Chart]:
    """The plots of what was logged; of what no run has, there is none."""
    across = [Across(run) for run in runs]
    return [
        _chart(kind, runs, across)
        for kind in KINDS
        if any(len(run.metrics.get(name)) for run in runs for name, _ in kind.metrics)
    ]


def _chart(kind: Kind, runs: Sequence[Run], across: Sequence[Across]) -> Chart:
    curves: list[Curve] = []
    marks: list[Mark] = []
    notes: list[str] = []
    for number, (run, place) in enumerate(zip(runs, across, strict=True)):
        for index, (metric, called) in enumerate(kind.metrics):
            series = run.metrics.get(metric)
            color = number if len(runs) > 1 else index
            name = (
                called if len(runs) == 1 else f"{run.label}, {called}" if len(kind.metrics) > 1 else run.label
            )
            curves += _curves(kind, series, index, color, name, place)
            notes += _thinned(series, name, len(runs) > 1 or len(kind.metrics) > 1)
            marks += _bad(series, run, place, number)
            notes += _lost(series, name)
        marks += _resumed(run, place, number, len(runs) > 1)
    top = _top(runs) if kind.key == "step-time" else None
    if top is not None:
        notes.append("At first, steps that compile are above what is shown; logarithmic shows them, too.")
    return Chart(
        kind.key,
        kind.title,
        kind.what,
        kind.unit,
        ACROSS,
        curves,
        _table(kind, runs),
        marks,
        may_be_logarithmic=kind.logarithmic,
        linked=True,
        floor=kind.floor,
        top=top,
        notes=tuple(dict.fromkeys(notes)),
    )


def _top(runs: Sequence[Run]) -> float | None:
    """Where the axis of the step time ends, so that steps which do not compile can be told apart."""
    steady = [seconds for run in runs for _, seconds in run.steady]
    every = [seconds for run in runs for _, seconds in run.metrics.get("step_seconds").finite]
    return 1.25 * max(steady) if steady and max(every) > 2 * max(steady) else None


def _curves(kind: Kind, series: Series, index: int, color: int, name: str, place: Across) -> list[Curve]:
    finite = series.finite
    if not finite:
        return []
    values = [value / kind.scale for _, value in finite]
    steps = [step for step, _ in finite]

    def drawn(called: str, every: Sequence[float], style: str) -> Curve:
        kept = thin(every)
        x = place([steps[i] for i in kept])
        y = [every[i] for i in kept]
        return Curve(called, color, *_with_gaps(x, y, [step for step, _ in series.lost]), style)

    few = len(steps) <= SMOOTHED
    if index:
        return [drawn(name, values, "dashed-points" if few else "dashed")]
    if not kind.mean or len(steps) < SMOOTHED:
        return [drawn(name, values, "points" if few else "line")]
    window = max(5, len(steps) // 50)
    mean = trailing_mean(values, window)
    return [drawn(name, values, "faint"), drawn(f"{name}, mean of {window}", mean, "line")]


def _with_gaps(
    x: dict[str, list[Any]], y: list[float], lost: Sequence[int]
) -> tuple[dict[str, list[Any]], list[float | None]]:
    """Breaks a line where values between its points are not numbers."""
    if not lost:
        return x, list(y)
    out: list[float | None] = []
    places: dict[str, list[Any]] = {name: [] for name in x}
    for index, value in enumerate(y):
        step = x["step"][index]
        if index and bisect_right(lost, step) != bisect_right(lost, x["step"][index - 1]):
            out.append(None)
            for name, every in x.items():
                places[name].append(every[index])
        out.append(value)
        for name, every in x.items():
            places[name].append(every[index])
    return places, out


def _bad(series: Series, run: Run, place: Across, color: int) -> list[Mark]:
    return [
        Mark(place.one(step), f"{value} at step {step}", "bad", color) for step, value in series.lost[:MARKS]
    ]


def _lost(series: Series, name: str) -> list[str]:
    if not series.lost:
        return []
    steps = series.lost
    first = f"the first at step {steps[0][0]:,}" if len(steps) > 1 else f"at step {steps[0][0]:,}"
    return [f"{name}: {plural(len(steps), 'value')} not a number, {first}; the line has a gap there."]


def _resumed(run: Run, place: Across, color: int, several: bool) -> list[Mark]:
    whose = f"{run.label} " if several else ""
    return [
        Mark(place.one(step), f"{whose}resumed after step {step:,}", "resumed", color)
        for step in run.resumed_after[-MARKS:]
    ]


def _thinned(series: Series, name: str, named: bool) -> list[str]:
    finite = len(series.finite)
    if finite <= MOST:
        return []
    stretch = math.ceil(finite / (MOST // 4))
    which = f"{name}: " if named else ""
    return [
        f"{which}at most {MOST:,} of {finite:,} points are drawn: the first, lowest, highest and last of "
        f"each {stretch:,}, so that no peak is lost."
    ]


def _table(kind: Kind, runs: Sequence[Run]) -> Table:
    """Steps evenly apart, and those of the second metrics, with their values in every run."""
    columns = [
        (run, metric, called)
        for run in runs
        for metric, called in kind.metrics
        if len(run.metrics.get(metric))
    ]
    steps = sorted({step for run, metric, _ in columns for step in run.metrics.get(metric).steps})
    kept = {steps[index] for index in spread(len(steps), ROWS)}
    evaluated = sorted(
        {step for run in runs for metric, _ in kind.metrics[1:] for step in run.metrics.get(metric).steps}
    )
    kept |= {evaluated[index] for index in spread(len(evaluated), ROWS)}
    values = [
        dict(zip(s.steps, s.values, strict=True)) for s in (run.metrics.get(m) for run, m, _ in columns)
    ]
    head = tuple(
        called if len(runs) == 1 else run.label if len(kind.metrics) == 1 else f"{run.label}, {called}"
        for run, _, called in columns
    )
    rows = tuple(
        (f"{step:,}", *(significant(v[step] / kind.scale) if step in v else "" for v in values))
        for step in sorted(kept)
    )
    unit = f" ({kind.unit})" if kind.unit in ("s", "GiB") else ""
    note = f"{len(rows):,} of {plural(len(steps), 'step')}, evenly apart." if len(rows) < len(steps) else ""
    return Table(("step", *(f"{name}{unit}" for name in head)), rows, note)
