"""Logged metrics over steps, tokens and hours: one figure, whose plots share their horizontal axis."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from recipec.compiler.pages.document import Plot, Table, Text
from recipec.compiler.pages.html import COLORS, INK, axis, scatter
from recipec.compiler.pages.numbers import significant
from recipec.compiler.report.metrics import MOST, Series, centered_mean, spread, thin
from recipec.compiler.report.recorded_run import ReportedRun
from recipec.compiler.wording import plural
from recipec.runtime.metrics.loggers import EVAL, REWARD

ROWS, MARKS, SMOOTHED = 40, 12, 50
"""Most rows in the table behind a plot, besides evaluated steps; most marks of one kind and run in a plot;
fewest steps for which a mean is drawn over the logged values."""
HEIGHT, TITLE, ENTRY, TICKS, BUTTONS = 230, 30, 20, 50, 80
"""Heights in pixels: of a plot, of its title, of a row of its legend, of what is below it, and of the buttons
above the first."""
SHORT = 18
"""Most letters of a name of which two fit side by side in the window of a phone."""
ACROSS = {"step": "optimizer step", "tokens": "tokens trained on", "hours": "hours in steps"}
STYLES: dict[str, dict[str, Any]] = {
    "line": {},
    "faint": {"width": 1, "opacity": 0.8},
    "dashed": {"dash": "dash"},
    "points": {"mode": "lines+markers"},
    "dashed-points": {"mode": "lines+markers", "dash": "dash"},
}


@dataclass(frozen=True)
class Subplot:
    """A plot: its metrics as (name, label) pairs, and how they are drawn.

    Attributes:
        scale: values are divided by it.
        mean: whether a mean of the first metric's neighboring values is drawn as well.
    """

    key: str
    title: str
    what: str
    unit: str
    metrics: tuple[tuple[str, str], ...]
    scale: float = 1.0
    mean: bool = False
    logarithmic: bool = False
    floor: bool = False


SUBPLOTS = (
    Subplot(
        "loss",
        "Loss",
        "Mean over the targets of a step, in nats a token; of the evaluation data at the steps where it was "
        "evaluated.",
        "loss",
        (("loss", "training"), ("eval_loss", "evaluation")),
        mean=True,
        logarithmic=True,
    ),
    Subplot(
        "rewards",
        "Rewards",
        "Implicit rewards of the preferred and of the other answers: beta times the log probability, or with "
        "a reference its difference from that.",
        "reward",
        (("rewards_chosen", "chosen"), ("rewards_rejected", "rejected")),
    ),
    Subplot(
        "margin",
        "Reward margin",
        "The chosen answers' reward less that of the rejected ones.",
        "reward",
        (("rewards_margin", "margin"),),
    ),
    Subplot(
        "accuracy",
        "Reward accuracy",
        "Share of the pairs in which the chosen answer has the higher reward.",
        "share",
        (("rewards_accuracy", "accuracy"),),
        floor=True,
    ),
    Subplot(
        "kl",
        "Distance from the reference",
        "KTO: what the model gains on prompts with other rows' answers over the reference, in nats an "
        "answer. GRPO: the estimated divergence from the reference, in nats a token.",
        "nats",
        (("kl", "estimate"),),
        floor=True,
    ),
    Subplot(
        "reward",
        "Reward of completions",
        "Weighted sum of the reward functions, averaged over a step's completions; the spread within the "
        "groups of a prompt, averaged over groups; and the mean of held-out prompts at evaluations.",
        "reward",
        (("reward", "mean"), ("reward_std", "spread within groups"), (REWARD.name, "evaluation")),
    ),
    Subplot(
        "flat-groups",
        "Groups without a difference, and cut completions",
        "Share of the groups whose rewards are all the same, from which nothing is learned; and of the "
        "completions that reach the longest length without an end.",
        "share",
        (("frac_reward_zero_std", "groups without a difference"), ("truncated_share", "cut completions")),
        floor=True,
    ),
    Subplot(
        "completion-length",
        "Length of completions",
        "Mean, shortest and longest of a step.",
        "tokens",
        (
            ("completion_length", "mean"),
            ("completion_length_min", "shortest"),
            ("completion_length_max", "longest"),
        ),
        floor=True,
    ),
    Subplot(
        "clipped",
        "Clipped tokens",
        "Share of the completions' tokens whose ratio to the policy that sampled them is clipped.",
        "share",
        (("clip_high", "above"), ("clip_low", "below")),
        floor=True,
    ),
    Subplot(
        "server-difference",
        "Difference of the server's log-probabilities",
        "Mean of a token's log-probability in the training step and in the server that generated it.",
        "nats a token",
        (("sampling_logp_difference", "difference"),),
        floor=True,
    ),
    Subplot(
        "entropy",
        "Entropy",
        "Of the distributions from which the completions' tokens are drawn, on average.",
        "nats a token",
        (("entropy", "entropy"),),
        floor=True,
    ),
    Subplot(
        "parts",
        "Time of a step's parts",
        "Generating completions, scoring them, and the update.",
        "s",
        (("rollout_seconds", "rollout"), ("reward_seconds", "rewards"), ("update_seconds", "update")),
        floor=True,
    ),
    Subplot(
        "expert-shares",
        "Experts' shares",
        "The largest and the smallest share of a layer's tokens that one of its experts gets, of all layers.",
        "share",
        (("expert_share_max", "largest"), ("expert_share_min", "smallest")),
        floor=True,
    ),
    Subplot(
        "balance",
        "Load-balancing loss",
        "Before its weight. Where every expert gets the same, it is the number of experts that a token goes "
        "through.",
        "loss",
        (("aux_loss", "load-balancing loss"),),
    ),
    Subplot(
        "learning-rate",
        "Learning rate",
        "As the schedule gave it.",
        "learning rate",
        (("learning_rate", "learning rate"),),
        floor=True,
    ),
    Subplot(
        "grad-norm",
        "Gradient norm",
        "Of the step's accumulated gradient, before clipping.",
        "norm",
        (("grad_norm", "gradient norm"),),
        mean=True,
        logarithmic=True,
    ),
    Subplot(
        "speed",
        "Tokens a second",
        "Real tokens, over all devices. The first step after each start compiles.",
        "tokens/s",
        (("tokens_per_second", "tokens/s"),),
        floor=True,
    ),
    Subplot(
        "step-time",
        "Step time",
        "Of an optimizer step, averaged over the steps between two readings of the devices.",
        "s",
        (("step_seconds", "step time"),),
        logarithmic=True,
        floor=True,
    ),
    Subplot(
        "memory",
        "Peak memory",
        "Highest so far: of the fullest device, or of the process where devices do not count (CPU).",
        "GiB",
        (("peak_memory_bytes", "peak memory"),),
        scale=2**30,
        floor=True,
    ),
)


def plots_of(runs: Sequence[ReportedRun]) -> list[Subplot]:
    """Return SUBPLOTS, with the evaluation by source for runs that have several sources."""
    named = dict.fromkeys(name for run in runs for name in run.metrics.values if name.startswith(EVAL))
    rewarded = any(REWARD.name in run.metrics.values for run in runs)
    if rewarded:
        named = {name: None for name in named if "reward" in name.split("/") and name != REWARD.name}
    metrics = tuple((name, name.removeprefix(EVAL)) for name in named)
    what = "Mean over the targets of each source of the evaluation data, in nats a token."
    sources = Subplot("eval-sources", "Evaluation by source", what, "loss", metrics, logarithmic=True)
    if rewarded:
        what = (
            "Mean over the completions of held-out prompts, by function, and by source if there are several."
        )
        sources = Subplot("eval-rewards", "Evaluation rewards", what, "reward", metrics)
    return [SUBPLOTS[0], *([sources] if metrics else []), *SUBPLOTS[1:]]


class Across:
    """Positions of a run's steps on each horizontal axis."""

    def __init__(self, run: ReportedRun) -> None:
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


@dataclass(frozen=True)
class Curve:
    """One line: its positions by axis, one of which the figure shows at a time, and its values."""

    x: dict[str, list[Any]]
    trace: dict[str, Any]


def curves(runs: Sequence[ReportedRun]) -> Plot | None:
    """Draw the figure of the logged metrics; None if no run logged any."""
    across = [Across(run) for run in runs]
    kinds = [
        kind
        for kind in plots_of(runs)
        if any(len(run.metrics.get(m)) for run in runs for m, _ in kind.metrics)
    ]
    if not kinds:
        return None
    lines_of = [_curves(kind, runs, across) for kind in kinds]
    above = [TITLE + ENTRY * _legend_rows(drawn) for drawn, _ in lines_of]
    whole = sum(above[1:]) + len(kinds) * (HEIGHT + TICKS) - TICKS
    top = 1.0
    drawn: list[Curve] = []
    shapes: dict[str, list[dict[str, Any]]] = {name: [] for name in ACROSS}
    margin = {"l": 60, "r": 12, "t": above[0] + BUTTONS, "b": 60}
    layout: dict[str, Any] = {
        "height": whole + margin["t"] + margin["b"],
        "hovermode": "x",
        "annotations": [],
    }
    linear: dict[str, Any] = {}
    logarithmic: dict[str, Any] = {}
    after: list[Any] = []
    for place, (kind, (kind_lines, notes)) in enumerate(zip(kinds, lines_of, strict=True)):
        of = str(place + 1) if place else ""
        if place:
            top -= (HEIGHT + TICKS + above[place]) / whole
        domain = [max(0.0, top - HEIGHT / whole), top]
        for curve in kind_lines:
            drawn.append(curve)
            curve.trace.update(meta=kind.key, xaxis=f"x{of}", yaxis=f"y{of}", legend=f"legend{of}")
        for where, mark in _marks(kind, runs, across):
            for name, lines in shapes.items():
                geometry = {"x0": where[name], "x1": where[name], "xref": f"x{of}", "yref": f"y{of} domain"}
                lines.append({**mark, **geometry})
        layout[f"xaxis{of}"] = axis("", matches="x", anchor=f"y{of}")
        if not place:
            del layout["xaxis"]["matches"]
        shown = axis(
            kind.unit, domain=domain, anchor=f"x{of}", rangemode="tozero" if kind.floor else "normal"
        )
        ceiling = _top(runs) if kind.key == "step-time" else None
        if ceiling is not None:
            shown["range"] = [0, ceiling]
            notes.append("At first, steps that compile are above what is shown; logarithmic shows them, too.")
        if kind.logarithmic:
            linear |= {f"yaxis{of}.type": "linear", f"yaxis{of}.autorange": ceiling is None}
            linear |= {f"yaxis{of}.range": shown["range"]} if ceiling is not None else {}
            logarithmic |= {f"yaxis{of}.type": "log", f"yaxis{of}.autorange": True}
        layout[f"yaxis{of}"] = shown
        legend = {"orientation": "h", "x": 0, "y": top, "yanchor": "bottom"}
        layout[f"legend{of}"] = legend | {"tracegroupgap": 0}
        title = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        title |= {
            "yshift": above[place] - TITLE + 4,
            "text": kind.title,
            "font": {"size": 15},
            "showarrow": False,
        }
        layout["annotations"].append(title)
        after += [Text(kind.title, "heading"), Text(kind.what), *map(Text, notes), _table(kind, runs)]
    last = f"xaxis{len(kinds)}" if len(kinds) > 1 else "xaxis"
    layout[last]["title"] = {"text": ACROSS["step"]}
    layout["shapes"] = shapes["step"]
    layout["margin"] = margin
    # Plotly's own buttons switch the figure to another axis or to other scales.
    against = [
        {
            "label": name + ("s" if name == "step" else ""),
            "method": "update",
            "args": [
                {"x": [curve.x[name] for curve in drawn]},
                {"shapes": shapes[name], f"{last}.title.text": label, "xaxis.autorange": True},
            ],
        }
        for name, label in ACROSS.items()
    ]
    scales = [
        {"label": label, "method": "relayout", "args": [args]}
        for label, args in (("linear", linear), ("logarithmic", logarithmic))
    ]
    row = {"type": "buttons", "direction": "right", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    row |= {"bgcolor": "rgba(0,0,0,0)", "font": {"size": 12}}
    layout["updatemenus"] = [
        {**row, "buttons": buttons, "pad": {"b": up}}
        for buttons, up in ((against, above[0] + 40), (scales if linear else [], above[0] + 4))
        if buttons
    ]
    what = "Drag across a plot to look closer, double-click to see all again; the plots move together."
    traces = [{**curve.trace, "x": curve.x["step"]} for curve in drawn]
    return Plot("curves", "", traces, layout, layout["height"], what, after)


def _legend_rows(shown: Sequence[Curve]) -> int:
    """Return the rows that a legend takes in the window of a phone, where two short names fit into one."""
    names = [curve.trace["name"] for curve in shown if curve.trace.get("showlegend", True)]
    return len(names) if any(len(name) > SHORT for name in names) else math.ceil(len(names) / 2)


def _curves(
    kind: Subplot, runs: Sequence[ReportedRun], across: Sequence[Across]
) -> tuple[list[Curve], list[str]]:
    """Return the lines of a plot, and sentences on what they leave out."""
    out: list[Curve] = []
    notes: list[str] = []
    several = len(runs) > 1
    for number, (run, place) in enumerate(zip(runs, across, strict=True)):
        for index, (metric, called) in enumerate(kind.metrics):
            series = run.metrics.get(metric)
            of_both = f"{run.label}, {called}" if len(kind.metrics) > 1 else run.label
            name = of_both if several else called
            out += _lines(
                kind, series, index, COLORS[(number if several else index) % len(COLORS)], name, place
            )
            notes += [*_thinned(series, name, several or len(kind.metrics) > 1), *_lost(series, name)]
    return out, list(dict.fromkeys(notes))


def _top(runs: Sequence[ReportedRun]) -> float | None:
    """Return the upper end of the step time's axis, low enough to tell steps without compilation apart."""
    steady = [seconds for run in runs for _, seconds in run.steady]
    every = [seconds for run in runs for _, seconds in run.metrics.get("step_seconds").finite]
    return 1.25 * max(steady) if steady and max(every) > 2 * max(steady) else None


def _lines(kind: Subplot, series: Series, index: int, color: str, name: str, place: Across) -> list[Curve]:
    """Return a metric's line, and its mean if the line is long."""
    steps, values = [step for step, _ in series.finite], [value / kind.scale for _, value in series.finite]
    if not steps:
        return []
    few = len(steps) <= SMOOTHED

    def drawn(called: str, every: Sequence[float], style: str, **more: Any) -> Curve:
        points: dict[int, float | None] = {steps[i]: every[i] for i in thin(every)}
        points |= dict.fromkeys(series.gaps)  # a missing value breaks the line
        order = sorted(points)
        y = [points[step] for step in order]
        return Curve(place(order), scatter(called, [], y, color, **STYLES[style], **more))

    if index:
        return [drawn(name, values, "dashed-points" if few else "dashed")]
    if not kind.mean or len(steps) < SMOOTHED:
        return [drawn(name, values, "points" if few else "line")]
    window = max(5, len(steps) // 50) | 1
    # One name for both, so that a legend stays short.
    return [
        drawn(name, values, "faint", legendgroup=name, showlegend=False),
        drawn(f"{name}, mean of {window}", centered_mean(values, window), "line", legendgroup=name),
    ]


def _marks(
    kind: Subplot, runs: Sequence[ReportedRun], across: Sequence[Across]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return vertical lines, positioned by axis, where a run was resumed or a value was not finite."""
    out = []
    for run, place in zip(runs, across, strict=True):
        whose = f"{run.label} " if len(runs) > 1 else ""
        lost = [pair for metric, _ in kind.metrics for pair in run.metrics.get(metric).lost[:MARKS]]
        marks = [(step, f"{value} at step {step}", COLORS[7], "solid") for step, value in lost]
        resumed = run.resumed_after[-MARKS:]
        marks += [(step, f"{whose}resumed after step {step:,}", INK, "dot") for step in resumed]
        for step, words, color, dash in marks:
            label = {"text": words, "textangle": -90, "textposition": "end", "font": {"size": 10}}
            label |= {"xanchor": "right", "yanchor": "bottom"}
            shape = {"type": "line", "y0": 0, "y1": 1, "line": {"color": color, "dash": dash, "width": 1}}
            out.append((place.one(step), {**shape, "label": label}))
    return out


def _lost(series: Series, name: str) -> list[str]:
    if not series.lost:
        return []
    steps = series.lost
    first = f"the first at step {steps[0][0]:,}" if len(steps) > 1 else f"at step {steps[0][0]:,}"
    return [f"{name}: {plural(len(steps), 'value')} not a number, {first}; the line has a gap there."]


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


def _table(kind: Subplot, runs: Sequence[ReportedRun]) -> Table:
    """Tabulate evenly spaced steps, and steps of all but the first metric, with the values of every run."""
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
    return Table(
        ("step", *(f"{name}{unit}" for name in head)),
        rows,
        note,
        folded=f"The numbers of this plot: {kind.title.lower()}",
    )
