"""The report's HTML: it stands by itself, without a network, fonts or scripts but its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install
from recipec.compiler.pages import environment, script_hash
from recipec.compiler.report import curves, data, headline, recipe, sweep_charts
from recipec.compiler.report.chart import Chart, Table, as_json
from recipec.compiler.report.outcome import Outcome
from recipec.compiler.report.reality import Reality
from recipec.compiler.report.run import Run
from recipec.compiler.report.sweep import PARTS, Sweep, peak, percentile_rows
from recipec.runtime.serving import bench_report

GENERATOR = "recipec report"
"""By which a page is known, so that nothing else is overwritten."""


@dataclass(frozen=True)
class Compared:
    """What differs from the first run to another one: in words, where both programs are known."""

    label: str
    words: tuple[str, ...]


def run_page(runs: Sequence[Run], reality: Reality | None, outcome: Outcome, why_no_plan: str = "") -> str:
    """The page of runs, of which the first is the one that the others are held against.

    Args:
        reality: a plan beside the first run; None without one.
        outcome: what merging and serving left of the first run.
        why_no_plan: a sentence, where there is none.
    """
    found = data.data(runs)
    plots = curves.charts(runs)
    lengths = [found.lengths] if found and found.lengths else []
    sweeps = sweep_charts.charts(outcome.sweeps)
    return _page(
        "run",
        [*plots, *lengths, *sweeps],
        title=runs[0].name,
        runs=runs,
        first=runs[0],
        plots=plots,
        data=found,
        reality=reality,
        why_no_plan=why_no_plan,
        outcome=outcome,
        sweep_plots=sweeps,
        sections=recipe.sections(runs[0]),
        differences=recipe.differences(runs) if len(runs) > 1 else [],
        compared=[Compared(run.label, tuple(recipe.words(runs[0], run))) for run in runs[1:]],
        headline=headline,
    )


def sweep_page(sweeps: Sequence[Sweep]) -> str:
    """The page of serving sweeps, of which the first is the one that the others are held against."""
    return _page(
        "sweep",
        plots := sweep_charts.charts(sweeps),
        title=f"Serving {sweeps[0].model}",
        sweeps=sweeps,
        first=sweeps[0],
        plots=plots,
        figures=sweep_figures(sweeps[0]),
    )


def sweep_figures(sweep: Sweep) -> list[tuple[str, str, str]]:
    """Name, value and where it was seen, of the figures at the top."""
    from recipec.compiler.report.numbers import NOT_KNOWN, SPACE, significant

    out = []
    for name, key, unit, lowest in (
        ("Highest throughput", "output_tokens_per_s", "tokens/s", False),
        ("Shortest median time to first token", "median_ttft_ms", "ms", True),
        ("Shortest median time per output token", "median_tpot_ms", "ms", True),
        ("Lowest cost of a million output tokens", "usd_per_million_output_tokens", "US$", True),
    ):
        point = peak(sweep.measured, key, lowest)
        if point is None:
            if unit != "US$":
                out.append((name, NOT_KNOWN, ""))
            continue
        value = significant(point.figures[key], 3)
        rate = "all at once" if point.rate == "inf" else f"{point.rate} requests/s"
        said = f"US${point.figures[key]:,.2f}" if unit == "US$" else f"{value}{SPACE}{unit}"
        out.append((name, said, f"{point.input_length:,} tokens in, {rate}"))
    measured = len(sweep.measured)
    out.append(("Points measured", f"{measured} of {len(sweep.points)}", ""))
    return out


def percentiles(sweep: Sweep) -> Table:
    """Every point of a sweep."""
    times = [f"{name.upper()} {part}" for name in ("ttft", "tpot") for part in PARTS]
    head = ("tokens in", "requests/s", "output tokens/s", *times, "US$ a million", "outcome")
    return Table(head, tuple(percentile_rows(sweep)))


def plotly() -> str:
    """Plotly's JavaScript.

    Raises:
        ArtifactError: it is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ArtifactError(
            "recipe report draws with plotly, which is not installed", install("report")
        ) from None
    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def _page(kind: str, charts: Sequence[Chart], **values: Any) -> str:
    template = environment().get_template
    library, script = plotly(), template("pages/report/report.js.j2").render()
    numbers: ModuleType
    from recipec.compiler.report import numbers

    return template(f"pages/report/{kind}.html.j2").render(
        generator=GENERATOR,
        style=template("pages/report/report.css.j2").render(),
        library=library,
        script=script,
        hashes=[script_hash(library), script_hash(script)],
        charts=as_json(charts),
        numbers=numbers,
        percentiles=percentiles,
        published_source=bench_report.source,
        **values,
    )
