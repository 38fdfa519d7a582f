"""Plots of a benchmark against the request rate, as SVG; a line for each input length."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime.serving.bench_points import write_whole

TITLES = {
    "throughput.svg": "Output tokens per second",
    "ttft.svg": "Time to first token",
    "tpot.svg": "Time per output token",
}

AXES = {
    "throughput.svg": "output tokens/s",
    "ttft.svg": "TTFT (ms)",
    "tpot.svg": "TPOT (ms)",
}

SERIES = {
    "throughput.svg": (("output_tokens_per_s", "", "-"),),
    "ttft.svg": (("median_ttft_ms", ", median", "-"), ("p99_ttft_ms", ", p99", "--")),
    "tpot.svg": (("median_tpot_ms", ", median", "-"), ("p99_tpot_ms", ", p99", "--")),
}
"""For each plot: a figure of a point, what its line is called by, and its style."""

COLORS = ("#0072B2", "#D55E00", "#007A5A", "#8F3F71", "#7A5C00", "#333333")
"""Told apart by who sees few colours too, and 4.5 times as dark as white; markers tell them apart as well."""

MARKERS = ("o", "s", "^", "D", "v", "P")
LINE_WIDTH = 1.8
FAR_APART = 20.0
"""Longest over shortest time from which on their axis is logarithmic."""

STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    "text.color": "#222222",
    "axes.labelcolor": "#222222",
    "xtick.color": "#222222",
    "ytick.color": "#222222",
    "axes.edgecolor": "#888888",
}


def draw(folder: Path, summary: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Draws what was measured.

    Returns:
        The names of the plots, and a sentence where they could not be drawn.

    Raises:
        UserError: a file cannot be written.
    """
    for name in TITLES:
        (folder / name).unlink(missing_ok=True)
    if not any(row["outcome"] == "measured" for row in summary["points"]):
        return [], None
    try:
        import matplotlib
    except ImportError:
        return [], "no plots: matplotlib is not installed (python3 -m pip install matplotlib)"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams
        parameters.update(STYLE)
        for name in TITLES:
            write_whole(folder / name, _plot(name, summary))
    return list(TITLES), None


def _plot(name: str, summary: Mapping[str, Any]) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    rows = summary["points"]
    rates = sorted({row["rate"] for row in rows}, key=float)
    lengths = sorted({row["input_length"] for row in rows})
    figure = Figure(figsize=(8.4, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    lines: list[Line2D] = []
    for number, length in enumerate(lengths):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        for key, called, style in SERIES[name]:
            (line,) = axes.plot(
                range(len(rates)),
                _heights(rows, rates, length, key),
                linestyle=style,
                linewidth=LINE_WIDTH,
                markersize=6 if style == "-" else 4.5,
                label=f"{length:,} tokens in{called}",
                gid=f"{key}-{length}",
                color=color,
                marker=marker,
            )
            lines.append(line)
        lines += _failed(axes, rows, rates, length, color)
        lines += _published(axes, name, summary, rates, length, color)
    _scale(axes, name, rows)
    axes.set_xticks(range(len(rates)), ["all at once" if rate == "inf" else rate for rate in rates])
    axes.set_xlim(-0.35, len(rates) - 0.65)
    axes.set_xlabel("request rate (requests/s)")
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{TITLES[name]}, {summary['model']}", loc="left", fontsize=12)
    figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize=10)
    output = io.StringIO()
    description = f"{TITLES[name]} against the request rate. {summary['place']['sentence']}"
    figure.savefig(
        output, format="svg", metadata={"Title": TITLES[name], "Description": description, "Date": None}
    )
    return output.getvalue()


def _failed(
    axes: Any, rows: Sequence[Mapping[str, Any]], rates: Sequence[str], length: int, color: str
) -> list[Any]:
    """Crosses at the foot of the plot, where points failed."""
    at = [
        rates.index(row["rate"])
        for row in rows
        if row["input_length"] == length and row["outcome"] == "failed"
    ]
    if not at:
        return []
    drawn: list[Any] = axes.plot(
        at,
        [0.0] * len(at),
        linestyle="none",
        marker="x",
        markersize=9,
        markeredgewidth=2.2,
        color=color,
        label=f"{length:,} tokens in, failed",
        clip_on=False,
        transform=axes.get_xaxis_transform(),
        gid=f"failed-{length}",
    )
    return drawn


def _scale(axes: Any, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """The vertical axis: from 0; of times that lie far apart logarithmic, so that short ones can be read."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    times = [
        row[key] for row in rows if row["outcome"] == "measured" for key, _, _ in SERIES[name] if row[key] > 0
    ]
    if name != "throughput.svg" and times and max(times) > FAR_APART * min(times):
        axes.set_yscale("log")
        axes.set_ylabel(f"{AXES[name]}, logarithmic")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(bottom=0)
        axes.set_ylabel(AXES[name])
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _heights(rows: Sequence[Mapping[str, Any]], rates: Sequence[str], length: int, key: str) -> list[float]:
    """A figure at each rate; nan, and so a gap in the line, where it was not measured."""
    found = {
        row["rate"]: float(row[key])
        for row in rows
        if row["input_length"] == length and row["outcome"] == "measured"
    }
    return [found.get(rate, float("nan")) for rate in rates]


def _published(
    axes: Any, name: str, summary: Mapping[str, Any], rates: Sequence[str], length: int, color: str
) -> list[Any]:
    """Published figures of an input length: a peak as a dotted line, a single point as a star."""
    drawn: list[Any] = []
    for figure in summary["published"]["figures"]:
        if figure.get("input") != length:
            continue
        if name == "throughput.svg" and "peak_output_tokens_per_s" in figure:
            drawn.append(
                axes.axhline(
                    figure["peak_output_tokens_per_s"],
                    color=color,
                    linestyle=":",
                    linewidth=1.4,
                    label=f"{length:,} tokens in, published peak",
                    gid=f"published-{length}",
                )
            )
        at = [i for i, rate in enumerate(rates) if float(rate) == figure.get("rate")]
        if name == "ttft.svg" and "median_ttft_ms" in figure and at:
            drawn += axes.plot(
                at,
                [figure["median_ttft_ms"]],
                linestyle="none",
                marker="*",
                markersize=13,
                markeredgecolor="#222222",
                color=color,
                label=f"{length:,} tokens in, published median",
                gid=f"published-{length}",
            )
    return drawn
