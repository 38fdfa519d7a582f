"""`recipe watch`: read the files of runs again and again, and show them as lines, JSON or on a screen."""

from __future__ import annotations

import itertools
import json
import math
import textwrap
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment, Segments
from rich.text import Text

from recipec.compiler.packages import install
from recipec.compiler.report.live import (
    DONE,
    FAILED,
    KILLED,
    STOPPED,
    TRAINING,
    WAITING,
    LiveRun,
    clean,
    positive,
)
from recipec.compiler.report.metrics import NOT_FINITE, thin
from recipec.compiler.report.run_folder import METRICS, existing_folder, open_folder
from recipec.runtime.metrics.loggers import LOSS, REWARD, Criterion
from recipec.runtime.progress import duration

RECENT, ENOUGH, SPREADS, RATIO = 50, 10, 6.0, 1.5
"""A loss spikes if it exceeds the mean of the RECENT losses before it (at least ENOUGH) by SPREADS standard
deviations, and also exceeds RATIO times that mean. A step's time is the mean of RECENT steps."""
RISES, KEPT = 3, 8
"""Number of consecutive rising evaluations that cause a warning; number of loss warnings that are kept."""
SILENCE, SILENCE_STEPS, DEFAULT_EVERY = 60.0, 5.0, 10
"""A run is silent after SILENCE seconds, and SILENCE_STEPS times the usual time until the next line."""
EVENTS = ("state", "reason", "step", "eval_step", "checkpoint")
"""The facts whose change is worth a new line."""
LOCAL, ELSEWHERE, REDRAWN = 2.0, 15.0, 0.25
"""Seconds between two reads of a folder on this machine, of an address, and of the terminal's size."""
LEAST, MOST, NARROW = 4, 16, 30
"""Least and most rows of a plot with its axis; terminal width in columns below which none is drawn."""
STYLES = {DONE: "green", FAILED: "red", KILLED: "red", STOPPED: "yellow", TRAINING: "cyan"}
FIGURES = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f} (step {eval_step:,})",
    "eval_reward": "eval/reward {:.3f} (step {eval_step:,})",
    "rewards_accuracy": "rewards_accuracy {:.2f}",
    "reward": "reward {:.3f}",
    "learning_rate": "lr {:.2e}",
    "grad_norm": "grad_norm {:.3g}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "step_seconds": "{:.3g} s a step",
    "peak_memory_gib": "peak memory {:.1f} GiB",
}
"""The facts of a run that are shown, in this order."""


class WatchedRun(LiveRun):
    """A run that is watched: what its folder shows so far, derived figures, and warnings."""

    def forget(self) -> None:
        super().forget()
        self.latest: dict[str, float] = {}
        self._problems: deque[str] = deque(maxlen=KEPT)
        self._recent: deque[float] = deque(maxlen=RECENT)

    def look(self, entry: dict[str, float]) -> None:
        """Check a step's loss and gradient norm for problems."""
        if "loss" not in entry:
            return
        self.latest, step, loss = entry, int(entry["step"]), entry["loss"]
        for name, value in (("loss", loss), ("gradient's norm", entry.get("grad_norm", 0.0))):
            if not math.isfinite(value):
                self._problems.append(f"step {step:,}: the {name} is {value}")
        if not math.isfinite(loss):
            return
        mean = sum(self._recent) / max(1, len(self._recent))
        if len(self._recent) >= ENOUGH and loss > RATIO * mean:
            spread = math.sqrt(sum((loss - mean) ** 2 for loss in self._recent) / len(self._recent))
            if loss > mean + SPREADS * spread:
                self._problems.append(f"step {step:,}: the loss jumped to {loss:.4g}, from {mean:.4g}")
        self._recent.append(loss)

    @property
    def evals(self) -> list[tuple[int, float]]:
        """Step and loss of each evaluation."""
        return self._evaluated(LOSS)

    def _evaluated(self, criterion: Criterion) -> list[tuple[int, float]]:
        return list(self.metrics.values.get(criterion.name, {}).items())

    @property
    def step_seconds(self) -> float | None:
        """The mean of the latest steps, without the first, which compiles, unless it is the only one."""
        every = self.metrics.values.get("step_seconds", {})
        times = list(itertools.islice(reversed(every.values()), RECENT))
        if len(times) == len(every) > 1:
            times.pop()
        times = [value for value in times if math.isfinite(value)]
        return sum(times) / len(times) if times else None

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's until the run's record exists."""
        return clean(self.lock.get("name") or self.folder.name.rpartition("/")[2])

    @property
    def title(self) -> str:
        """The name, with the model, what is trained in it, and the hardware, once the record exists."""
        rank, objective = self.recorded("lora", "rank"), self.recorded("train", "objective")
        what = "some weights" if self.recorded("train", "trainable_modules") else "all weights"
        parts = [
            self.recorded("model", "id"),
            what if rank is None else f"LoRA {rank}",
            None if objective == "sft" else objective,
            self.recorded("mesh", "topology") or self.recorded("mesh", "accelerator"),
        ]
        about = ", ".join(clean(part) for part in parts if part)
        return self.name if parts[0] is None else f"{self.name}: {about}"

    @property
    def over(self) -> bool:
        """Whether it has ended and is not waited for. A run that was killed or stopped can be resumed."""
        return self.ended and (self.well or self.outcome == FAILED)

    @property
    def well(self) -> bool:
        """Whether it is running, or ended as requested."""
        return not self.ended or self.outcome == DONE or self.reason.startswith("--steps")

    @property
    def silence(self) -> float | None:
        """Seconds since the last line; None if there is none, or if its time is not known."""
        return self.logged.age if self.logged and self.metrics.lines else None

    @property
    def warnings(self) -> list[str]:
        """Warnings about the run, the newest last."""
        messages, last = list(self._problems), self.evals[-(RISES + 1) :]
        if len(last) > RISES and all(a[1] < b[1] for a, b in itertools.pairwise(last)):
            (first, low), (_, high) = last[0], last[-1]
            messages.append(f"eval_loss has risen since step {first:,}, from {low:.4g} to {high:.4g}")
        if self.outcome == TRAINING and (silence := self.silence) is not None:
            every = positive(self.recorded("train", "log", "every")) or DEFAULT_EVERY
            pace = every * (self.step_seconds or 0.0)
            if silence > max(SILENCE, SILENCE_STEPS * pace):
                usual = f"; {every} steps take {duration(pace)}" if pace else ""
                messages.append(f"no line for {duration(silence)}{usual}")
        if self.outcome == KILLED:
            process = f"its process ({self.state.get('pid')})"
            messages.append(f"{process} ended without an error message; continue it with --resume")
        return messages

    def facts(self) -> dict[str, Any]:
        """Return the content of `--json`: units as in metrics.jsonl, times in seconds, None if unknown."""
        evals, step_seconds, step = self.evals, self.step_seconds, self.metrics.last_step
        rewards = self._evaluated(REWARD)
        until = positive(self.state.get("until")) or self.total
        names = ("loss", "reward", "learning_rate", "grad_norm", "rewards_accuracy", "tokens_per_second")
        going = self.outcome == TRAINING and step_seconds is not None and until is not None
        return {
            "name": self.name,
            "directory": self.folder.name,
            "state": self.outcome,
            "reason": self.reason or None,
            "step": step,
            "total": self.total,
            "until": until,
            **{name: self.latest.get(name) for name in (*names, "peak_memory_bytes")},
            "eval_loss": evals[-1][1] if evals else None,
            "eval_reward": rewards[-1][1] if rewards else None,
            "eval_step": max((step for step, _ in evals + rewards), default=None),
            "step_seconds": step_seconds,
            "seconds_left": (step_seconds or 0.0) * max(0, (until or 0) - step) if going else None,
            "checkpoint": self.saved and self.saved[0],
            "checkpoint_seconds": self.saved and self.saved[1],
            "silent_seconds": self.silence,
            "warnings": self.warnings,
        }


def standing(run: WatchedRun) -> str:
    """Return a run's state: "training", "stopped (SIGTERM)", or what it waits for."""
    if run.outcome == WAITING:
        folder = clean(run.folder.name)
        if not run.folder.exists():
            return f"waiting for {folder}, which does not exist yet"
        return f"waiting for the first line of {folder}/{METRICS}"
    if run.outcome == TRAINING and not run.metrics.lines:
        return "starting: no step is done yet"
    return f"{run.outcome} ({run.reason})" if run.reason else run.outcome


def parts(run: WatchedRun) -> list[str]:
    """Return the run's progress, its newest numbers, its checkpoint and the remaining time."""
    facts = run.facts()
    step, total, until, left = (facts[name] for name in ("step", "total", "until", "seconds_left"))
    progress = f"step {step:,}"
    if total is not None:
        stop = f", stops after {until:,}" if until < total and run.outcome == TRAINING else ""
        progress += f"/{total:,} ({step / total:.0%}{stop})"
    facts["peak_memory_gib"] = (facts["peak_memory_bytes"] or 0) / 2**30 or None
    figures = [form.format(facts[name], **facts) for name, form in FIGURES.items() if facts[name] is not None]
    age = facts["checkpoint_seconds"]
    old = "" if age is None else f", {duration(age)} old"
    saved = "no checkpoint yet" if facts["checkpoint"] is None else f"checkpoint {facts['checkpoint']:,}{old}"
    return [progress, *figures, saved, *([f"{duration(left)} left"] if left is not None else [])]


def line(run: WatchedRun) -> str:
    """Return all of it in one line."""
    if not run.metrics.lines:
        return f"{run.title}: {standing(run)}"
    told = parts(run) if run.outcome == TRAINING else [*parts(run), standing(run)]
    return f"{run.name}: {', '.join(told)}"


def as_json(run: WatchedRun) -> dict[str, object]:
    """Return the facts of a run, with non-finite numbers written as in metrics.jsonl."""
    words = {repr(number): word for word, number in NOT_FINITE.items()}
    return {name: words.get(repr(value), value) for name, value in run.facts().items()}


def screen(console: Console, runs: Sequence[WatchedRun], note: str = "", whole: bool = True) -> Segments:
    """Draw runs one below the other. They fill the console if it shows nothing else, with a note below."""
    options = console.options
    facts = [_facts(run, options) for run in runs]
    used = len(console.render_lines(Group(*facts), options)) + len(facts)
    rows = (console.height - used) // max(1, len(facts)) - 1 if whole else LEAST + 2
    plots = [_plot(run, options, min(rows, MOST)) for run in runs]
    shown = [Group(fact, *plot, "") for fact, plot in zip(facts, plots, strict=True)]
    lines = console.render_lines(Group(*shown), options, pad=False)[:-1]
    lines = lines[: console.height - 1] if whole else lines
    last = console.render_lines(_cut(note, "dim", options), options, pad=False, new_lines=True)[0]
    ended = [segment for line in lines for segment in (*line, Segment.line())]
    return Segments([*ended, *(last if note else [])])


def _facts(run: WatchedRun, options: ConsoleOptions) -> Group:
    """Return the lines of a run, without its plot."""
    style = STYLES.get(run.outcome, "")
    shown: list[RenderableType] = [_cut(run.title, "bold", options), Text(standing(run), style)]
    if run.metrics.lines:
        # Keep the words of one figure together.
        told = "  ".join(part.replace(" ", "\xa0") for part in parts(run))
        shown.append(Text("\n".join(textwrap.wrap(told, options.max_width)).replace("\xa0", " ")))
        if run.total is not None:
            bar = ProgressBar(run.total, run.metrics.last_step, complete_style=style, finished_style=style)
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
    head = _cut(f"loss, {mark} eval_loss" if evals else "loss", "dim", options)
    return [head, Text(drawn.rstrip("\n"), "cyan")]


def _cut(text: str, style: str, options: ConsoleOptions) -> Text:
    """Return one line, cut to the terminal's width."""
    return Text(text, style, no_wrap=True, overflow="crop" if options.ascii_only else "ellipsis")


class Watch:
    """Runs in folders of checkpoints, or in folders of such folders.

    Args:
        once: whether they are watched once; then they have to exist.
        wait: whether to wait for --resume of a run that was killed or stopped.
    """

    def __init__(self, names: Sequence[str], once: bool = False, wait: bool = True) -> None:
        self._wait = wait
        self._folders = [existing_folder(name) if once else open_folder(name) for name in names]
        self._found: dict[str, WatchedRun] = {}
        self.runs: list[WatchedRun] = []
        self.seconds = ELSEWHERE if any(folder.system for folder in self._folders) else LOCAL

    def update(self) -> bool:
        """Read all runs; return whether there is nothing left to wait for."""
        folders = [folder for watched in self._folders for folder in watched.runs()]
        self.runs = [self._found.setdefault(folder.name, WatchedRun(folder)) for folder in folders]
        for run in self.runs:
            run.update()
        return bool(self.runs) and all(run.over if self._wait else run.ended for run in self.runs)


def watch_once(watch: Watch, with_json: bool, console: Console) -> None:
    """Show the state of the runs once."""
    watch.update()
    if with_json:
        print(json.dumps([as_json(run) for run in watch.runs], indent=2, ensure_ascii=False))
    elif console.is_terminal:
        console.print(screen(console, watch.runs, whole=False), end="")
    else:
        watch_lines(watch, None, with_json=False)


def watch_lines(watch: Watch, interval: float | None, with_json: bool) -> None:
    """Print a line for each change until nothing is left to wait for; for None as an interval, only once."""
    told: dict[str, set[object]] = {}
    while True:
        ended = watch.update()
        for run in watch.runs:
            # Report a silence once, not with every second that passes.
            warnings = {
                text.partition(" for ")[0] if "no line" in text else text: text for text in run.warnings
            }
            before = told.get(run.folder.name, set())
            event = tuple(run.facts()[name] for name in EVENTS)
            told[run.folder.name] = {event, *warnings}
            if event not in before:
                print(json.dumps(as_json(run), ensure_ascii=False) if with_json else line(run), flush=True)
            for kind, text in () if with_json else warnings.items():
                if kind not in before:
                    print(f"{run.name}: warning: {text}", flush=True)
        if ended or interval is None:
            return
        time.sleep(interval)


def watch_screen(watch: Watch, interval: float, console: Console) -> None:
    """Draw the runs on the terminal until nothing is left to wait for. Their last state stays on it."""
    looks = duration(interval) if interval >= 1 else f"{interval:g} s"
    note, size, looked = f"every {looks}; Ctrl-C leaves; the run continues", None, -math.inf
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            while True:
                if (due := time.monotonic() - looked >= interval) and watch.update():
                    break
                if due or console.size != size:
                    live.update(screen(console, watch.runs, note), refresh=True)
                    size, looked = console.size, time.monotonic() if due else looked
                time.sleep(min(REDRAWN, interval))
    finally:
        console.print(screen(console, watch.runs, whole=False), end="")
