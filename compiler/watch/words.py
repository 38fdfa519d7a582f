"""A run in words: the facts that the screen, the plain lines and the JSON show."""

from __future__ import annotations

import math
from typing import Any

from compiler.watch.run import KILLED, TRAINING, WAITING, Run, clean
from runtime.progress import duration


def headline(run: Run) -> str:
    """What it is about and how it stands."""
    about = f"{run.name}: {run.about}" if run.about else run.name
    return f"{about}: {standing(run)}"


def standing(run: Run) -> str:
    """ "training", "stopped (SIGTERM)", or what is waited for."""
    if run.outcome == WAITING:
        folder = clean(run.place.name)
        if not run.place.exists():
            return f"waiting for {folder}, which is not there yet"
        return f"waiting for the first line of {folder}/metrics.jsonl"
    if run.outcome == TRAINING and run.series.empty:
        return "starting: no step is done yet"
    if run.outcome == KILLED:
        return "killed"
    return f"{run.outcome} ({run.reason})" if run.reason else run.outcome


def progress(run: Run) -> str:
    """ "step 120/400", with the share that is done."""
    step, total = run.series.step, run.total
    if total is None:
        return f"step {step:,}"
    until = run.until or total
    stop = f", stops after {until:,}" if until < total and run.outcome == TRAINING else ""
    return f"step {step:,}/{total:,} ({step / total:.0%}{stop})"


def left(run: Run) -> str:
    """ "3 min 05 s left", "" where that is not known."""
    seconds = run.seconds_left
    return "" if seconds is None or not math.isfinite(seconds) else f"{duration(seconds)} left"


def figures(run: Run) -> list[str]:
    """The newest numbers."""
    series, out = run.series, []
    loss = run.number("loss")
    if loss is not None:
        out.append(f"loss {loss:.4f}")
    if series.evals:
        step, value = series.evals[-1]
        out.append(f"eval_loss {value:.4f} (step {step:,})")
    accuracy = run.number("rewards_accuracy")
    if accuracy is not None:
        out.append(f"rewards_accuracy {accuracy:.2f}")
    rate, norm = run.number("learning_rate"), run.number("grad_norm")
    if rate is not None:
        out.append(f"lr {rate:.2e}")
    if norm is not None:
        out.append(f"grad_norm {norm:.3g}")
    return out


def pace(run: Run) -> list[str]:
    """Speed and memory."""
    out = []
    if run.series.speed is not None:
        out.append(f"{run.series.speed:,.0f} tokens/s")
    each = run.series.step_seconds
    if each is not None:
        out.append(f"{each:.3g} s a step")
    peak = run.number("peak_memory_bytes")
    if peak is not None and math.isfinite(peak):
        out.append(f"peak memory {peak / 2**30:.1f} GiB")
    return out


def saved(run: Run) -> str:
    """The newest checkpoint and its age."""
    if run.saved is None:
        return "no checkpoint yet"
    old = "" if run.saved.seconds is None else f", {duration(run.saved.seconds)} old"
    return f"checkpoint {run.saved.step:,}{old}"


def line(run: Run) -> str:
    """All of it in one line."""
    if run.series.empty:
        return headline(run)
    parts = [progress(run), *figures(run), *pace(run), saved(run)]
    if left(run):
        parts.append(left(run))
    if run.outcome != TRAINING:
        parts.append(standing(run))
    return f"{run.name}: {', '.join(parts)}"


def as_json(run: Run) -> dict[str, Any]:
    """What scripts read: numbers in the units of metrics.jsonl, seconds, null for what is not known."""
    series = run.series
    evaluated = series.evals[-1] if series.evals else None
    latest = {name: _plain(run.number(name)) for name in ("loss", "learning_rate", "grad_norm")}
    return {
        "name": run.name,
        "directory": run.place.name,
        "state": run.outcome,
        "reason": run.reason or None,
        "step": series.step,
        "total": run.total,
        "until": run.until,
        **latest,
        "eval_loss": _plain(evaluated[1]) if evaluated else None,
        "eval_step": evaluated[0] if evaluated else None,
        "tokens_per_second": _plain(series.speed),
        "step_seconds": _plain(series.step_seconds),
        "seconds_left": _plain(run.seconds_left),
        "peak_memory_bytes": run.series.latest.get("peak_memory_bytes"),
        "checkpoint": run.saved.step if run.saved else None,
        "checkpoint_seconds": _plain(run.saved.seconds) if run.saved else None,
        "silent_seconds": _plain(run.silence),
        "warnings": run.warnings,
    }


def _plain(value: float | None) -> float | str | None:
    """A JSON number, or the text that metrics.jsonl has for one that is not finite."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
