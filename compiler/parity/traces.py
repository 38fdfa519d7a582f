"""`recipe parity --compare`: compare traces that were written elsewhere, for example on real accelerators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from recipec.compiler.parity.compare import ComparedRun, Deviation, tolerances_of
from recipec.compiler.parity.compare import compare as compare_runs
from recipec.compiler.parity.read_trace import read_trace
from recipec.runtime.errors import UserError
from recipec.runtime.training.trace import Trace


def compare(paths: Sequence[Path], limits: Mapping[str, float]) -> tuple[str, list[Deviation]]:
    """Return a title, and the deviation of every quantity between every two of the files.

    Args:
        paths: two or more trace files.
        limits: tolerances by quantity that replace those of the traces' dtype.

    Raises:
        UserError: when a file is not a trace, or the traces are not of one recipe.
    """
    traces = [read_trace(path) for path in paths]
    for path, trace in zip(paths, traces, strict=True):
        if trace.recipe != traces[0].recipe:
            raise UserError(
                f"{path}: is a trace of the recipe {trace.recipe}, {paths[0]} of {traces[0].recipe}",
                "compare runs of the same recipe",
            )
        if not trace.losses:
            raise UserError(f"{path}: has no steps", "write it again with a run that trains")
    runs = [ComparedRun(name, trace) for name, trace in zip(_names(paths, traces), traces, strict=True)]
    steps = min(len(trace.losses) for trace in traces)
    dtypes = sorted({str(trace.about.get("dtype", "of no known dtype")) for trace in traces})
    title = f"{traces[0].recipe}, {steps} steps, {' and '.join(dtypes)}"
    return title, compare_runs(runs, {**tolerances_of(traces), **limits})


def _names(paths: Sequence[Path], traces: Sequence[Trace]) -> list[str]:
    """Return the backends' names, or the files' names if two traces are of one backend."""
    backends = [trace.backend for trace in traces]
    if len(set(backends)) == len(backends):
        return backends
    short = [path.stem for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
