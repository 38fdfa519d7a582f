"""Show watched runs as lines, as JSON or on a terminal's screen, until all of them have ended."""

from __future__ import annotations

import json
import math
import textwrap
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.text import Text

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install
from recipec.compiler.report.metrics import thin
from recipec.compiler.report.place import Place, open_place
from recipec.compiler.watch.run import (
    DONE,
    FAILED,
    KILLED,
    METRICS,
    STOPPED,
    TRAINING,
    WAITING,
    WatchedRun,
    clean,
)
from recipec.runtime.progress import duration

LOCAL, ELSEWHERE, REDRAWN = 2.0, 15.0, 0.25
"""Seconds between two reads of a folder on this machine, of an address, and of the terminal's size."""
LEAST, MOST, NARROW = 4, 16, 30
"""Least and most rows of a plot with its axis; terminal width in columns below which none is drawn."""
STYLES = {DONE: "green", FAILED: "red", KILLED: "red", STOPPED: "yellow", TRAINING: "cyan"}
FIGURES = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f} (step {eval_step:,})",
    "rewards_accuracy": "rewards_accuracy {:.2f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad_norm {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "step_seconds": "{:.3g} s a step",
    "peak_memory_gib": "peak memory {:.1f} GiB",
}
"""The facts of a run that are shown, in this order."""


class Watch:
    """Runs in folders of checkpoints, or in folders that hold such folders. ArtifactError for a file."""

    def __init__(self, folders: Sequence[str]) -> None:
        for folder in folders:
            if "://" not in folder and Path(folder).expanduser().is_file():
                way_out = "give the folder of checkpoints that train.py writes"
                raise ArtifactError(f"{folder}: a file, not a folder", way_out)
        self._places = [open_place(folder) for folder in folders]
        self._found: dict[str, WatchedRun] = {}
        self.runs: list[WatchedRun] = []
        self.seconds = ELSEWHERE if any(place.system for place in self._places) else LOCAL

    def update(self) -> bool:
        """Read all runs; return whether all have ended."""
        places = [place for given in self._places for place in _runs_of(given)]
        self.runs = [self._found.setdefault(place.name, WatchedRun(place)) for place in places]
        for run in self.runs:
            run.update()
        return bool(self.runs) and all(run.ended for run in self.runs)

    @property
    def well(self) -> bool:
        """Whether each run is running, or ended as requested."""
        return all(run.well for run in self.runs)


def _runs_of(place: Place) -> list[Place]:
    """Return the folder if it holds a run, else its subfolders that do, else the folder to wait for."""
    if place.status(METRICS) is not None:
        return [place]
    inner = [place.below(name) for name in place.folders()]
    return [one for one in inner if one.status(METRICS) is not None] or [place]


def standing(run: WatchedRun) -> str:
    """Return a run's state: "training", "stopped (SIGTERM)", or what it waits for."""
    if run.outcome == WAITING:
        folder = clean(run.place.name)
        if not run.place.is_folder():
            return f"waiting for {folder}, which does not exist yet"
        return f"waiting for the first line of {folder}/{METRICS}"
    if run.outcome == TRAINING and not run.metrics.lines:
        return "starting: no step is done yet"
    return f"{run.outcome} ({run.reason})" if run.reason else run.outcome


def progress(run: WatchedRun) -> str:
    """Return "step 120/400", with the share that is done."""
    if run.total is None:
        return f"step {run.step:,}"
    until = run.until or run.total
    stop = f", stops after {until:,}" if until < run.total and run.outcome == TRAINING else ""
    return f"step {run.step:,}/{run.total:,} ({run.step / run.total:.0%}{stop})"


def parts(run: WatchedRun) -> list[str]:
    """Return the run's progress, its newest numbers, its checkpoint and the remaining time."""
    facts = run.facts()
    peak, age, left = (facts[name] for name in ("peak_memory_bytes", "checkpoint_seconds", "seconds_left"))
    facts["peak_memory_gib"] = peak and peak / 2**30
    figures = [form.format(facts[name], **facts) for name, form in FIGURES.items() if facts[name] is not None]
    old = "" if age is None else f", {duration(age)} old"
    saved = "no checkpoint yet" if facts["checkpoint"] is None else f"checkpoint {facts['checkpoint']:,}{old}"
    return [progress(run), *figures, saved, *([f"{duration(left)} left"] if left is not None else [])]


def line(run: WatchedRun) -> str:
    """Return all of it in one line."""
    if not run.metrics.lines:
        return f"{run.name}: {run.about}: {standing(run)}" if run.about else f"{run.name}: {standing(run)}"
    told = parts(run) if run.outcome == TRAINING else [*parts(run), standing(run)]
    return f"{run.name}: {', '.join(told)}"


def as_json(runs: Iterable[WatchedRun]) -> list[dict[str, object]]:
    """Return the facts of runs, with non-finite numbers written as in metrics.jsonl."""
    words = {math.inf: "Infinity", -math.inf: "-Infinity"}
    return [
        {
            name: value if not isinstance(value, float) or math.isfinite(value) else words.get(value, "NaN")
            for name, value in run.facts().items()
        }
        for run in runs
    ]


class Screen:
    """Runs one below the other, fitted to the console each time they are drawn.

    Args:
        note: the last line.
        whole: whether plots fill the height of the terminal; otherwise each has the least height.
    """

    def __init__(self, runs: Sequence[WatchedRun], note: str = "", whole: bool = True) -> None:
        self.runs, self._note, self._whole = runs, note, whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        facts = [_facts(run, options) for run in self.runs]
        used = len(console.render_lines(Group(*facts), options)) + len(facts)
        rows = (console.height - used) // max(1, len(facts)) - 1 if self._whole else LEAST + 2
        shown = [
            Group(one, *_plot(run, options, min(rows, MOST)), "")
            for one, run in zip(facts, self.runs, strict=True)
        ]
        lines = console.render_lines(Group(*shown), options, pad=False)[:-1]
        for segments in lines[: console.height - 1] if self._whole else lines:
            yield from (*segments, Segment.line())
        if self._note:
            yield _cut(self._note, "dim", options)


def _facts(run: WatchedRun, options: ConsoleOptions) -> Group:
    """Return the lines of a run, without its plot."""
    style = STYLES.get(run.outcome, "")
    shown: list[RenderableType] = [
        _cut(f"{run.name}: {run.about}" if run.about else run.name, "bold", options),
        Text(standing(run), style),
    ]
    if run.metrics.lines:
        # Keep the words of one figure together.
        told = "  ".join(part.replace(" ", "\xa0") for part in parts(run))
        shown.append(Text("\n".join(textwrap.wrap(told, options.max_width)).replace("\xa0", " ")))
        if run.total is not None:
            bar = ProgressBar(run.total, run.step, complete_style=style, finished_style=style)
            shown += [bar, Text("")]  # the bar does not end its own line
    sign = "!" if options.ascii_only else "⚠"
    return Group(*shown, *(Text(f"{sign} {warning}", "yellow") for warning in run.warnings[-3:]))


def _plot(run: WatchedRun, options: ConsoleOptions, height: int) -> list[Text]:
    """Plot the loss by step, drawn with characters."""
    losses = [pair for pair in run.metrics.values.get("loss", {}).items() if math.isfinite(pair[1])]
    evals = [pair for pair in run.evals if math.isfinite(pair[1])]
    if height < LEAST or options.max_width < NARROW or not losses + evals:
        return []
    try:
        import plotext
    except ImportError:
        return [Text(f"plotext, which is not installed, draws the loss: {install('report')}", "dim")]
    marker, mark = ("*", "o") if options.ascii_only else ("braille", "◆")
    plotext.clear_figure()
    plotext.theme("clear")
    plotext.limit_size(False, False)
    plotext.plotsize(options.max_width, height - 1)
    plotext.frame(False)
    plotext.yaxes(True, False)
    kept = thin([loss for _, loss in losses], 4 * options.max_width)
    plotext.plot([losses[i][0] for i in kept], [losses[i][1] for i in kept], marker=marker)
    plotext.scatter([step for step, _ in evals], [loss for _, loss in evals], marker=mark)
    ends = [min(step for step, _ in losses + evals), max(step for step, _ in losses + evals)]
    plotext.xticks(ends, [f"{step:,}" for step in ends])
    drawn = plotext.uncolorize(plotext.build())
    if options.ascii_only:
        drawn = drawn.translate(str.maketrans("┤│", "||"))
    return [
        _cut(f"loss, {mark} eval_loss" if evals else "loss", "dim", options),
        Text(drawn.rstrip("\n"), "cyan"),
    ]


def _cut(text: str, style: str, options: ConsoleOptions) -> Text:
    """Return one line, cut to the terminal's width."""
    return Text(text, style, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")


def watch_once(watch: Watch, with_json: bool, console: Console) -> bool:
    """Show the state of the runs once; return whether all of them are well.

    Raises:
        ArtifactError: when a folder holds no run.
    """
    watch.update()
    for run in watch.runs:
        if run.outcome == WAITING and not run.place.is_folder():
            way_out = (
                "give the folder of checkpoints that train.py writes; without --once, the command waits for "
                "it"
            )
            raise ArtifactError(f"{run.place.name}: there is no such folder", way_out)
    if with_json:
        print(json.dumps(as_json(watch.runs), indent=2, ensure_ascii=False))
    elif console.is_terminal:
        console.print(Screen(watch.runs, whole=False))
    else:
        for run in watch.runs:
            print(line(run), *(f"{run.name}: warning: {text}" for text in run.warnings), sep="\n", flush=True)
    return watch.well


def watch_lines(watch: Watch, interval: float, with_json: bool) -> bool:
    """Print a line for each change until all runs have ended; return whether they ended well."""
    told: dict[str, set[object]] = {}
    while True:
        ended = watch.update()
        for run in watch.runs:
            # Report a silence once, not with every second that passes.
            warnings = {
                text.partition(" for ")[0] if text.startswith("no line") else text: text
                for text in run.warnings
            }
            before = told.get(run.place.name, set())
            told[run.place.name] = {run.told, *warnings}
            if run.told not in before:
                print(
                    json.dumps(as_json([run])[0], ensure_ascii=False) if with_json else line(run), flush=True
                )
            for kind, text in () if with_json else warnings.items():
                if kind not in before:
                    print(f"{run.name}: warning: {text}", flush=True)
        if ended:
            return watch.well
        time.sleep(interval)


def watch_screen(watch: Watch, interval: float, console: Console) -> bool:
    """Draw the runs on the terminal until all have ended; return whether they ended well.

    The last state of the runs stays on the terminal, however the command ends.
    """
    looks = duration(interval) if interval >= 1 else f"{interval:g} s"
    note, size, looked = f"every {looks}; Ctrl-C leaves; the run continues", None, -math.inf
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                if (due := time.monotonic() - looked >= interval) and watch.update():
                    break
                if due or console.size != size:
                    live.update(Screen(watch.runs, note), refresh=True)
                    size, looked = console.size, time.monotonic() if due else looked
                time.sleep(min(REDRAWN, interval))
    finally:
        console.print(Screen(watch.runs, whole=False))
    return watch.well
