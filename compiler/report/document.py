"""The page of runs, and the page of serving sweeps: sections built from the other modules' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from recipec.compiler.pages.html import Facts, Items, Page, Section, Table, Text, write
from recipec.compiler.pages.numbers import NOT_KNOWN
from recipec.compiler.report import headline, recipe, samples, sweep
from recipec.compiler.report.curves import curves
from recipec.compiler.report.data import data
from recipec.compiler.report.outcome import Outcome
from recipec.compiler.report.reality import Reality
from recipec.compiler.report.run import Run
from recipec.compiler.report.sweep import Sweep, percentiles
from recipec.runtime.serving import bench_report

GENERATOR = "recipec report"
"""Identifies a page of this command, so that no other file is overwritten."""
EXTRA = "report"


def run_page(runs: Sequence[Run], reality: Reality | None, outcome: Outcome, why_no_plan: str = "") -> str:
    """Build the page of runs. The first run is the one that the others are compared with.

    Args:
        reality: a plan's estimates next to the first run's measurements; None without a plan.
        outcome: results of merging and serving the first run.
        why_no_plan: a sentence on why there is no plan.
    """
    first, several = runs[0], len(runs) > 1
    figures = f"The figures are those of {first.label}, the first run; all of them are compared below."
    return write(
        Page(
            title=f"Report on {first.name}",
            generator=GENERATOR,
            command=("recipe report", first.state),
            name=first.name,
            hardware=headline.hardware(first),
            figures=headline.figures(first),
            sections=[
                *([_compared(runs)] if several else []),
                _curves(runs),
                *_samples(first),
                _data(runs),
                _reality(first, reality, why_no_plan),
                _outcome(outcome),
                _recipe(first),
                _basis(runs),
            ],
            alarms=headline.alarms(runs),
            sentence=figures if several else "",
        ),
        EXTRA,
    )


def _compared(runs: Sequence[Run]) -> Section:
    first, differences = runs[0], recipe.differences(runs)
    columns = tuple(range(1, len(runs) + 1))
    values = Table(
        ("value", *(run.label for run in runs)),
        [(path, *cells) for path, cells in differences],
        words=columns,
        label="Values that differ",
    )
    same = Text("No value of their recipes differs, as far as these are known.", "")
    blocks: list[Any] = [
        headline.beside(runs),
        Text("What differs in their recipes", "heading"),
        values if differences else same,
    ]
    for run in runs[1:]:
        if words := recipe.words(first, run):
            blocks += [Text(f"From {first.label} to {run.label}", "heading"), Items(words)]
    return Section("compared", "Runs compared", (f"Each compared with {first.label}.",), blocks)


def _curves(runs: Sequence[Run]) -> Section:
    plot = curves(runs)
    resumed = any(run.resumed_after for run in runs)
    aside = ("Dotted lines are where a run was resumed.",) if resumed else ()
    none = Text("Nothing was logged: there is nothing to draw.", "")
    early = [
        Text(f"{run.label}: {run.early}." if len(runs) > 1 else f"{run.early}.") for run in runs if run.early
    ]
    numbers = [Text("In numbers", "heading"), headline.numbers(runs)]
    blocks = [*early, plot, *numbers] if plot else [none]
    return Section("runs", "The run", aside, blocks)


def _samples(first: Run) -> list[Section]:
    found = samples.table(first.samples)
    aside = ("Greedy answers to the prompts of train.samples, at evaluations from the first to the last.",)
    return [Section("samples", "Samples", aside, (found,))] if found else []


def _data(runs: Sequence[Run]) -> Section:
    found = data(runs)
    if found is None:
        none = (
            "The run left no statistics of its data: it has no run.json, as of a run by an earlier version."
        )
        return Section("data", "Data", (), (Text(none, ""),))
    blocks: list[Any] = [found.table]
    if found.problems:
        blocks += [Text("Left out", "heading"), Items(found.problems)]
    blocks += [found.lengths] if found.lengths else []
    return Section("data", "Data", ("As it was counted when the run last began.",), blocks)


def _reality(first: Run, reality: Reality | None, why_not: str) -> Section:
    if reality is None:
        return Section("reality", "Plan and reality", (), (Text(why_not, ""),))
    head = ("", "estimate", "its interval", "measured", "measured to estimate")
    rows = [(one.name, one.estimate, one.interval, one.measured, one.ratio) for one in reality.lines]
    source = f"Plan from {reality.source}, for {reality.plan.accelerator}. {reality.plan.run.note}"
    blocks = (
        Text(reality.place, "alarm" if first.on_cpu else "muted"),
        Table(head, rows, label="Plan and reality"),
        Text(source),
        *(Text(sentence, "alarm") for sentence in reality.mismatches),
    )
    aside = ("Estimates of libtpu's compiler next to the measurements.",)
    return Section("reality", "Plan and reality", aside, blocks)


def _outcome(outcome: Outcome) -> Section:
    blocks: list[Any] = []
    for result in outcome.results:
        blocks += [Facts(result.facts, f"{result.kind} {result.title}"), *result.tables]
        blocks += [Text(sentence, "alarm") for sentence in result.problems]
        blocks += [Text(sentence) for sentence in result.notes]
    for one in outcome.sweeps:
        said = f"{one.sentence} TTFT is the time to the first token, TPOT the time per output token."
        blocks += [Text(f"benchmark {one.name}", "heading"), Text(said), percentiles(one)]
    none = (
        "No results of a merge or a server were found next to the run. --results PATH names a merged folder, "
        "results of bench.sh or eval.sh, or what `recipe serve verify --json` printed."
    )
    blocks += sweep.plots(outcome.sweeps)
    return Section("outcome", "Merging and serving", (), blocks or [Text(none, "")])


def _recipe(first: Run) -> Section:
    sections = recipe.sections(first)
    if not sections:
        none = "The recipe is not known: there is no recipe.lock.json that this version reads."
        return Section("recipe", "Recipe", (), (Text(none, ""),))
    known = "Each value with its place in the recipe."
    not_known = (
        "From recipe.lock.json; the recipe's own file, which has the line of each value, is not known: "
        "--recipe FILE names it."
    )

    def rows(values: Sequence[recipe.Value], folded: str = "") -> Table:
        lines = [(one.path, one.value, one.origin) for one in values]
        return Table(("key", "value", "from"), lines, words=(1, 2), folded=folded, label="Values")

    blocks: list[Any] = []
    for section in sections:
        if section.given or section.meaning:
            blocks.append(Text(section.name or "recipe", "heading"))
        blocks += [rows(section.given)] if section.given else []
        blocks += [Items(section.meaning)] if section.meaning else []
    defaults = [value for section in sections for value in section.values if value.default]
    blocks.append(rows(defaults, "Values that the recipe does not give"))
    return Section("recipe", "Recipe", (known if first.loaded else not_known,), blocks)


def _basis(runs: Sequence[Run]) -> Section:
    sentences = []
    for run in runs:
        whose = f"{run.label}: " if len(runs) > 1 else ""
        by = f", by {run.lock['compiler']}" if run.lock.get("compiler") else ""
        starts = f", of {len(run.starts)} starts of the script" if len(run.starts) > 1 else ""
        sentences.append(f"{run.place.name}: {run.metrics.lines:,} lines of metrics.jsonl{by}{starts}.")
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


def sweep_page(sweeps: Sequence[Sweep]) -> str:
    """Build the page of serving sweeps. The first is the one that the others are compared with."""
    first, several = sweeps[0], len(sweeps) > 1
    plots = sweep.plots(sweeps)
    alarms = []
    for one in sweeps:
        for point in one.points:
            if not point.measured:
                load = "all requests at once" if point.rate == "inf" else f"{point.rate} requests/s"
                whose, why = f"{one.label}, " if several else "", f": {point.reason}" if point.reason else ""
                said = f"{whose}{point.input_length:,} tokens in, {load}{why}"
                alarms.append((f"{point.outcome.capitalize()}.", said))
    compared = f"{', '.join(one.label for one in sweeps)} compared; the figures are those of {first.label}."
    places = [f"{one.label}: {one.sentence}" if several else one.sentence for one in sweeps]
    measured = (
        "TTFT is the time from a request to its first token, TPOT the time per output token after it. Drag "
        "across a plot to look closer, double-click to see all again."
    )
    points = (
        "TTFT (time to first token) and TPOT (time per output token) in ms: p50 is the median over the "
        "requests of a point, p99 what 99 % of them do not exceed."
    )
    none = Text("No point was measured: there is nothing to draw.", "")
    tables = [
        block
        for one in sweeps
        for block in (*([Text(one.label, "heading")] if several else []), percentiles(one))
    ]
    return write(
        Page(
            title=f"Report on Serving {first.model}",
            generator=GENERATOR,
            command=("recipe report", "serving sweep"),
            name=f"Serving {first.model}",
            hardware=(),
            figures=sweep.figures(first),
            sections=[
                Section("measured", "Measured", (measured,), plots or [none]),
                Section("points", "Every point", (points,), tables),
                *(_published(one, number, several) for number, one in enumerate(sweeps, 1) if one.published),
                Section(
                    "basis", "What this rests on", (), [block for one in sweeps for block in _rests_on(one)]
                ),
            ],
            alarms=alarms,
            sentence=" ".join([*([compared] if several else []), *places]),
        ),
        EXTRA,
    )


def _published(one: Sweep, number: int, several: bool) -> Section:
    head = ("", "published", f"measured, {one.label}" if several else "measured")
    table = Table(head, one.published, label="Published figures")
    source = bench_report.source(one.summary)
    return Section(f"published-{number}", "Compared with published figures", (source,), (table,))


def _rests_on(one: Sweep) -> list[Any]:
    settings, price = one.summary["settings"], one.summary.get("price")
    version = (one.summary.get("server") or {}).get("vllm")
    facts = [
        ("folder", one.name),
        ("requests of a point", settings.get("prompts", NOT_KNOWN)),
        ("tokens of an answer", settings.get("output_length", NOT_KNOWN)),
        ("server", f"vLLM {version}" if version else "does not report its version"),
        ("price", f"US$ {price['usd_per_hour']:.2f} an hour, {price['source']}" if price else "none"),
    ]
    return [Facts(facts, one.label), *map(Text, one.notes)]
