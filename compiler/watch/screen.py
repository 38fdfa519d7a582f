"""Runs on a terminal's screen: as much of each as its size has room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from compiler.watch import words
from compiler.watch.plot import EVAL, EVAL_ASCII, plot
from compiler.watch.run import DONE, FAILED, KILLED, STOPPED, TRAINING, Run
from runtime.progress import duration

STYLES = {DONE: "green", FAILED: "red", KILLED: "red", STOPPED: "yellow", TRAINING: "cyan"}
LABELS = 9
"""Columns left of a plot."""
LEAST, MOST = 4, 16
"""Rows of a plot: below the first it is left out."""
AROUND = 3
"""Rows of a plot's title and axis, and the empty one below a run."""
NARROW = 20
"""Columns below which nothing is drawn."""


class Screen:
    """Runs one below the other, fitted to the console each time that they are drawn.

    Args:
        runs: what is watched.
        note: the last line.
        whole: fill the height of the terminal with plots; otherwise each has the least height.
    """

    def __init__(self, runs: Sequence[Run], note: str = "", whole: bool = True) -> None:
        self.runs, self._note, self._whole = runs, note, whole
        self._plots: dict[str, tuple[object, list[Text]]] = {}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width, console.height
        unicode = not options.ascii_only
        blocks = [_facts(run, width, unicode) for run in self.runs]
        # What is left of the height is the plots', after the note.
        used = sum(map(len, blocks)) + (1 if self._note else 0)
        room = (height - used) // max(1, len(blocks)) - AROUND if self._whole else LEAST
        lines: list[Text] = []
        for run, facts in zip(self.runs, blocks, strict=True):
            lines += facts
            if room >= LEAST and width >= LABELS + NARROW:
                lines += self._plot(run, width, min(room, MOST), unicode)
            lines.append(Text(""))
        lines = lines[:-1]
        if self._note:
            space = height - 1 if self._whole else len(lines)
            lines = [*lines[:space], Text(_fit(self._note, width, unicode), style="dim")]
        yield Text("\n").join(lines)

    def _plot(self, run: Run, width: int, height: int, unicode: bool) -> list[Text]:
        """A run's plot, drawn anew when it or its size has changed."""
        key = (run.told, run.restarted, width, height)
        known = self._plots.get(run.place.name)
        if known is None or known[0] != key:
            known = key, _drawn(run, width, height, unicode)
            self._plots[run.place.name] = known
        return known[1]


def _facts(run: Run, width: int, unicode: bool) -> list[Text]:
    """The lines of a run but for its plot."""
    style = STYLES.get(run.outcome, "")
    title = Text(_fit(f"{run.name}: {run.about}" if run.about else run.name, width, unicode), style="bold")
    lines = [title, *(Text(line, style=style) for line in _wrapped([words.standing(run)], width))]
    if not run.series.empty:
        lines += [Text(line) for line in _wrapped([words.progress(run), words.left(run)], width)]
        if run.total is not None:
            lines.append(_bar(run.series.step / run.total, width, style, unicode))
        for parts in (words.figures(run), [*words.pace(run), words.saved(run)]):
            lines += [Text(line) for line in _wrapped(parts, width)]
    sign = "⚠ " if unicode else "! "
    for warning in run.warnings[-3:]:
        lines += [Text(line, style="yellow") for line in _wrapped([sign + warning], width)]
    return lines


def _bar(share: float, width: int, style: str, unicode: bool) -> Text:
    done = round(min(1.0, max(0.0, share)) * width)
    full, rest = ("━", "─") if unicode else ("#", "-")
    return Text.assemble((full * done, style), (rest * (width - done), "dim"))


def _drawn(run: Run, width: int, height: int, unicode: bool) -> list[Text]:
    """The loss by step, with its axes."""
    series = run.series
    drawn = plot(series.steps, series.losses, series.evals, width - LABELS, height, unicode)
    if drawn is None:
        return []
    labels = {0: f"{drawn.high:.4g}", height - 1: f"{drawn.low:.4g}"}
    mark = EVAL if unicode else EVAL_ASCII
    title = "loss" + (f", {mark} eval_loss" if series.evals else "")
    if drawn.merged > 1:
        title += f" (means of {drawn.merged:,.0f} steps)"
    lines = [Text(_fit(title, width, unicode), style="dim")]
    for row, text in enumerate(drawn.rows):
        lines.append(Text.assemble((f"{labels.get(row, ''):>{LABELS - 1}} ", "dim"), (text, "cyan")))
    every = [*series.steps, *(step for step, _ in series.evals)]
    first, last = f"{min(every):,}", f"{max(every):,}"
    gap = max(1, width - LABELS - len(first) - len(last))
    lines.append(Text(_fit(" " * LABELS + first + " " * gap + last, width, unicode), style="dim"))
    return lines


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """Parts side by side, as many on a line as fit; one that is too long is broken at its words."""
    lines: list[str] = []
    for part in filter(None, parts):
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
            continue
        line = ""
        for word in part.split(" "):
            while len(word) > width:
                lines += [line] if line else []
                lines.append(word[:width])
                line, word = "", word[width:]
            if line and len(line) + 1 + len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
        lines.append(line)
    return lines


def _fit(text: str, width: int, unicode: bool) -> str:
    """A text cut to a width."""
    if len(text) <= width:
        return text
    end = "…" if unicode else "..."
    return text[: max(0, width - len(end))] + end[:width]


def footer(interval: float) -> str:
    """What the last line of the screen says."""
    looks = duration(interval) if interval >= 1 else f"{interval:g} s"
    return f"every {looks}; Ctrl-C leaves, the run goes on"
