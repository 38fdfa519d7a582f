"""Read the traces that scripts write with --trace, and compare them, for example of real accelerators."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler.parity.compare import ComparedRun, Deviation, compare, tolerances_of
from recipec.runtime.errors import UserError
from recipec.runtime.training.trace import VERSION, Trace


def read_trace(path: Path) -> Trace:
    """Read a trace.

    Raises:
        UserError: when the file is not a trace.
    """
    try:
        if path.exists() and not path.is_file():  # a device may never end
            raise ValueError("not a regular file")
        # np.load returns an array, not an archive, for a file of a single array.
        with path.open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise ValueError("not an .npz file")
        with np.load(path, allow_pickle=False) as arrays:
            head = json.loads(bytes(arrays["head"]).decode())
            if head.get("version") != VERSION:
                raise UserError(
                    f"{path}: a trace of version {head.get('version')}; this one reads {VERSION}",
                    "write it again with scripts of the same recipec",
                )
            trace = Trace(
                head["backend"],
                head["recipe"],
                head["about"],
                arrays["losses"].tolist(),
                arrays["targets"].tolist(),
            )
            for prefix, values in trace.weights().items():
                values |= _without(prefix, arrays)
            steps = range(trace.first_step, trace.first_step + len(trace.losses))
            trace.rows = [rows for rows in (_without(f"rows/{step}/", arrays) for step in steps) if rows]
            return trace
    except FileNotFoundError:
        raise UserError(f"{path}: no such file", _WRITTEN) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise UserError(f"{path}: is not a trace ({_reason(error)})", _WRITTEN) from None
    except (zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise UserError(f"{path}: is damaged ({_reason(error)})", _WRITTEN) from None


_WRITTEN = "--trace FILE of a script writes one"


def _reason(error: Exception) -> str:
    """Return an error as one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


def _without(prefix: str, arrays: Any) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): arrays[name] for name in arrays.files if name.startswith(prefix)}


def compare_files(paths: Sequence[Path], limits: Mapping[str, float]) -> tuple[str, list[Deviation]]:
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
    return title, compare(runs, {**tolerances_of(traces), **limits})


def _names(paths: Sequence[Path], traces: Sequence[Trace]) -> list[str]:
    """Return the backends' names, or the files' names if two traces are of one backend."""
    backends = [trace.backend for trace in traces]
    if len(set(backends)) == len(backends):
        return backends
    short = [path.stem for path in paths]
    return short if len(set(short)) == len(short) else [str(path) for path in paths]
