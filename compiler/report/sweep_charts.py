"""The plots of serving sweeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from recipec.compiler.report.chart import Chart, Curve, Table
from recipec.compiler.report.numbers import significant
from recipec.compiler.report.sweep import QUANTITIES, Point, Sweep
from recipec.compiler.wording import plural

RATE = "request rate (requests/s)"
FAR_APART = 20.0
"""Longest over shortest time from which on their axis is logarithmic, as in the benchmark's own plots."""


def charts(sweeps: Sequence[Sweep]) -> list[Chart]:
    """Throughput and times against the rate, then times against the throughput; [] where nothing was
    measured."""
    if not any(sweep.measured for sweep in sweeps):
        return []
    return [
        _throughput(sweeps),
        *(_time(sweeps, name) for name in ("ttft", "tpot")),
        *(_against(sweeps, name) for name in ("ttft", "tpot")),
    ]


def _series(sweeps: Sequence[Sweep]) -> Iterator[tuple[int, str, int, Sweep, list[Point]]]:
    """Each sweep's points of one input length, those without figures among them: number of the series, its
    name, the length, the sweep and the points."""
    number = 0
    for sweep in sweeps:
        for length in sweep.lengths:
            whose = f"{sweep.label}, " if len(sweeps) > 1 else ""
            points = [point for point in sweep.points if point.input_length == length]
            yield number, f"{whose}{length:,} tokens in", length, sweep, points
            number += 1


def _rates(sweeps: Sequence[Sweep]) -> list[str]:
    points = {float(point.rate): point.load for sweep in sweeps for point in sweep.points}
    return [points[rate] for rate in sorted(points)]


def _table(sweeps: Sequence[Sweep], head: Sequence[str], cells: Callable[[Point], Sequence[str]]) -> Table:
    several = len(sweeps) > 1
    rows = tuple(
        (*([sweep.label] if several else []), f"{point.input_length:,}", point.load, *cells(point))
        for sweep in sweeps
        for point in sweep.points
    )
    return Table((*(["sweep"] if several else []), "tokens in", "requests/s", *head), rows)


def _throughput(sweeps: Sequence[Sweep]) -> Chart:
    curves, levels = [], set()
    for color, name, length, sweep, points in _series(sweeps):
        y = [point.figures.get("output_tokens_per_s") for point in points]
        curves.append(Curve(name, color, {"x": [point.load for point in points]}, y, "points"))
        for figure in _published(sweep, length):
            level = figure.get("peak_output_tokens_per_s")
            if level is not None and (length, level) not in levels:
                levels.add((length, level))
                rates, called = _rates(sweeps), f"{length:,} tokens in, published peak"
                curves.append(Curve(called, color, {"x": rates}, [level] * len(rates), "dotted"))
    return Chart(
        "throughput",
        "Output tokens a second",
        "Of all requests together, against the rate at which they were sent.",
        "output tokens/s",
        {"x": RATE},
        curves,
        _table(sweeps, ("output tokens/s",), lambda p: (_figure(p, "output_tokens_per_s"),)),
        floor=True,
        categories=_rates(sweeps),
        notes=_failures(sweeps),
    )


def _time(sweeps: Sequence[Sweep], name: str) -> Chart:
    said = QUANTITIES[name].capitalize()
    curves: list[Curve] = []
    values: list[float] = []
    for color, called, length, sweep, points in _series(sweeps):
        loads = {"x": [point.load for point in points]}
        for part, words, style in (("p50", "median", "points"), ("p99", "p99", "dashed-points")):
            y = [point.time(name, part) if point.measured else None for point in points]
            values += [value for value in y if value]
            curves.append(Curve(f"{called}, {words}", color, loads, y, style))
        stars = [
            (load, figure["median_ttft_ms"])
            for figure in _published(sweep, length)
            for load, rate in ((point.load, float(point.rate)) for point in sweep.points)
            if name == "ttft" and "median_ttft_ms" in figure and figure.get("rate") == rate
        ]
        if stars:
            x, heights = zip(*dict.fromkeys(stars), strict=True)
            star = Curve(f"{length:,} tokens in, published median", color, {"x": x}, heights, "stars")
            if all((star.name, star.y) != (other.name, other.y) for other in curves):
                curves.append(star)
    logarithmic = bool(values) and max(values) > FAR_APART * min(values)
    return Chart(
        name,
        f"{said} ({name.upper()})",
        "From sending a request to its answer's first token."
        if name == "ttft"
        else "Of each token after an answer's first one.",
        "ms",
        {"x": RATE},
        curves,
        _table(
            sweeps,
            ("median, ms", "p90, ms", "p99, ms"),
            lambda p: [_time_of(p, name, part) for part in ("p50", "p90", "p99")],
        ),
        logarithmic=logarithmic,
        floor=not logarithmic,
        categories=_rates(sweeps),
        notes=_failures(sweeps),
    )


def _against(sweeps: Sequence[Sweep], name: str) -> Chart:
    curves = []
    for color, called, _, _, points in _series(sweeps):
        known = [point for point in points if point.measured and point.time(name, "p50") is not None]
        known.sort(key=lambda point: point.figures.get("output_tokens_per_s", 0.0))
        x = [point.figures.get("output_tokens_per_s") for point in known]
        y = [point.time(name, "p50") for point in known]
        curves.append(Curve(called, color, {"x": x}, y, "points", [point.load for point in known]))
    said = QUANTITIES[name]
    return Chart(
        f"{name}-against-throughput",
        f"Throughput against {said}",
        f"What a higher load costs each request: the median {said} ({name.upper()}) at the output tokens a "
        "second that were reached. The texts are request rates.",
        f"median {name.upper()} (ms)",
        {"x": "output tokens/s"},
        curves,
        _table(
            sweeps,
            ("output tokens/s", f"median {name.upper()}, ms"),
            lambda p: (_figure(p, "output_tokens_per_s"), _time_of(p, name, "p50")),
        ),
        may_be_logarithmic=True,
        floor=True,
    )


def _published(sweep: Sweep, length: int) -> list[dict[str, float]]:
    figures = sweep.summary.get("published", {}).get("figures", [])
    return [figure for figure in figures if figure.get("input") == length]


def _figure(point: Point, name: str) -> str:
    return significant(point.figures[name], 4) if name in point.figures else point.outcome


def _time_of(point: Point, name: str, part: str) -> str:
    value = point.time(name, part) if point.measured else None
    return "" if value is None else significant(value, 3)


def _failures(sweeps: Sequence[Sweep]) -> tuple[str, ...]:
    lost = sum(not point.measured for sweep in sweeps for point in sweep.points)
    return (f"{plural(lost, 'point')} without figures: the lines have gaps there.",) if lost else ()
