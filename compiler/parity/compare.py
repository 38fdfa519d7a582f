"""Compare runs: rows, adapters, first gradients, losses, merged weights; of traces that scripts wrote, too.

Imports numpy, so the command line imports it when it runs.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler.pages.document import Document, Table, Text, sheet
from recipec.runtime.errors import UserError
from recipec.runtime.training.trace import VERSION, Trace

TOLERANCES: dict[str, dict[str, float]] = {
    "float32": {"initial": 1e-6, "gradients": 1e-5, "losses": 1e-4, "merged": 1e-5},
    "float32 on an accelerator": {"initial": 1e-6, "gradients": 1e-4, "losses": 1e-4, "merged": 1e-5},
    "bfloat16": {"gradients": 0.15, "losses": 2e-2},
}
"""How far two runs of one dtype may differ, by measured runs (docs/numerics-runs.md). A limit of OF_THEIR_OWN
or more for gradients is a share of the largest entry.

A quantity without a tolerance is shown but not judged. Adam makes a full step even from the smallest
gradient, so a trained number whose gradient is only rounding may differ by several steps. The effect on the
model shows in the merged weights."""

OF_THEIR_OWN = 1e-2
"""Largest deviation of one array's gradient, relative to that array's own largest entry. It finds an adapter
that one run does not train: its gradient is small next to others, but deviates by its whole size."""
NOISE = 1e-6
"""Gradients below this share of the largest entry are treated as rounding noise around zero."""

CONTROL = 10.0
"""How many times the control's deviation two runs may reach. Their rounding differs at every step, whereas
the control's differs only at the start."""


@dataclass(frozen=True)
class Deviation:
    """The deviation of one quantity between two runs.

    Attributes:
        quantity: one of WORDS.
        left, right: names of the runs.
        difference: the largest difference between two numbers; None if they cannot be compared.
        largest: the largest absolute value of the quantity.
        limit: largest allowed difference; None if the quantity is not judged.
        ok: whether the difference is within the limit; True if it is not judged.
        note: where the difference is, or why no comparison was possible.
    """

    quantity: str
    left: str
    right: str
    difference: float | None
    largest: float
    limit: float | None
    ok: bool
    note: str = ""

    @property
    def relative(self) -> float | None:
        """The difference as a share of the largest value."""
        if self.difference is None:
            return None
        return self.difference / self.largest if self.largest else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = ("quantity", "left", "right", "difference", "largest", "limit", "ok", "note")
        return {name: getattr(self, name) for name in names} | {"relative": self.relative}


Arrays = Mapping[str, Callable[[], np.ndarray]]
"""Arrays by name, each read when its function is called."""


@dataclass(frozen=True)
class ComparedRun:
    """A run to be compared.

    Attributes:
        name: of its backend, or of its file.
        merged: the tensors of its merged checkpoint, None if there is none.
    """

    name: str
    trace: Trace
    merged: Arrays | None = field(default=None, repr=False)


def compare(
    runs: Sequence[ComparedRun], tolerances: Mapping[str, float], control: Sequence[Deviation] = ()
) -> list[Deviation]:
    """Return the deviation of every quantity between every two runs.

    Args:
        tolerances: by quantity; a quantity without a tolerance is only shown.
        control: how far a run deviates from itself if its initial adapters are perturbed slightly.
            Differences up to CONTROL times as large are accepted as well.
    """
    pairs = list(combinations(runs, 2))
    rows = [row for quantity in QUANTITIES for pair in pairs for row in quantity(*pair, tolerances)]
    yardstick = {row.quantity: row.difference for row in control if row.difference is not None}
    return [_by(row, yardstick) for row in rows]


def _by(row: Deviation, yardstick: Mapping[str, float]) -> Deviation:
    drift = CONTROL * yardstick.get(row.quantity, 0.0)
    if row.limit is None or row.difference is None or drift <= row.limit:
        return row
    return replace(row, limit=drift, ok=row.difference <= drift)


def tolerances_of(traces: Iterable[Trace]) -> dict[str, float]:
    """Return the tolerances of the runs' coarsest dtype; bfloat16's if a run does not state its dtype."""
    every = [trace.about for trace in traces]
    if any(about.get("dtype") != "float32" for about in every):
        return dict(TOLERANCES["bfloat16"])
    cpu = all(about.get("device", "cpu") == "cpu" for about in every)
    return dict(TOLERANCES["float32" if cpu else "float32 on an accelerator"])


def _targets(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    """Compare the number of tokens that carry loss in each step."""
    a, b = left.trace.targets, right.trace.targets
    step = next((i for i, (count, other) in enumerate(zip(a, b, strict=False)) if count != other), None)
    if len(a) != len(b):
        note = f"{len(a)} steps and {len(b)}"
    elif step is not None:
        note = f"step {step + 1}: {a[step]:,} and {b[step]:,}"
    else:
        note = f"{sum(a):,} tokens in {len(a)} steps"
    difference = (
        None if len(a) != len(b) else float(max((abs(x - y) for x, y in zip(a, b, strict=True)), default=0))
    )
    largest = float(max([*a, *b], default=0))
    yield Deviation("targets", left.name, right.name, difference, largest, 0.0, a == b, note)


def _rows(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    """Compare the rows of each step, in any order and however micro-batches divide them."""
    a, b = left.trace.rows, right.trace.rows
    if not a or not b:
        return
    steps = [(_counted(left_rows), _counted(other)) for left_rows, other in zip(a, b, strict=False)]
    apart = [max((left_rows - other).total(), (other - left_rows).total()) for left_rows, other in steps]
    largest = max(count.total() for step in steps for count in step)
    step = next((i for i, count in enumerate(apart) if count), None)
    if step is None:
        note = f"{sum(left_rows.total() for left_rows, _ in steps):,} rows in {len(steps)} steps"
    else:
        note = f"step {step + 1}: {apart[step]} of its rows"
    yield Deviation("rows", left.name, right.name, float(max(apart)), float(largest), 0.0, step is None, note)


def _counted(step: Mapping[str, np.ndarray]) -> Counter[bytes]:
    """Count a step's rows without padding, each with its tokens, positions, segments and loss mask."""
    names = ("tokens", "positions", "segment_ids", "loss_mask")
    flat = [step[name].reshape(-1, step[name].shape[-1]).astype(np.int32) for name in names]
    every = np.stack(flat, axis=1)
    return Counter(row[:, row[2] > 0].tobytes() for row in every if row[2].any())


def _initial(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    """Compare the initial adapters. A trace of an older version, or of full fine-tuning, has none."""
    if left.trace.initial and right.trace.initial:
        a, b = (_given(side.trace.initial) for side in (left, right))
        yield _arrays("initial", left, right, a, b, tolerances.get("initial"))


def _losses(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    count = min(len(left.trace.losses), len(right.trace.losses))
    a, b = (np.asarray(side.trace.losses[:count]) for side in (left, right))
    limit = tolerances.get("losses")
    if not count:
        yield Deviation("losses", left.name, right.name, None, 0.0, limit, False, "there are none")
        return
    apart = np.abs(a - b)
    step = int(np.argmax(np.where(np.isnan(apart), np.inf, apart)))
    difference = float(apart[step])
    largest = float(np.max(np.abs([a, b])))
    ok = limit is None or difference <= limit
    yield Deviation("losses", left.name, right.name, difference, largest, limit, ok, f"step {step + 1}")


def _gradients(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    """Compare the first gradients: a fine limit is absolute up to 1 and relative above; also per array."""
    limit = tolerances.get("gradients")
    a, b = left.trace.gradients, right.trace.gradients
    row = _arrays("gradients", left, right, _given(a), _given(b), None)
    if row.difference is None:
        yield replace(row, limit=limit)
        return
    if limit is not None:
        limit *= row.largest if limit >= OF_THEIR_OWN else max(1.0, row.largest)
    ok = limit is None or row.difference <= limit
    note = row.note
    name, share = max(((name, _share(a[name], b[name], row.largest)) for name in a), key=lambda item: item[1])
    if share > OF_THEIR_OWN and tolerances.get("gradients", 1.0) < OF_THEIR_OWN:
        ok, note = False, f"{name} is off by {share:.0%} of its own largest entry"
    yield replace(row, limit=limit, ok=ok, note=note)


def _share(a: np.ndarray, b: np.ndarray, largest: float) -> float:
    scale = max(float(np.max(np.abs(a))), float(np.max(np.abs(b))))
    return float(np.max(np.abs(a - b))) / scale if scale > NOISE * largest else 0.0


def _trained(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    a, b = (_given(side.trace.trained) for side in (left, right))
    yield _arrays("trained", left, right, a, b, tolerances.get("trained"))


def _merged(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    if left.merged is not None and right.merged is not None:
        yield _arrays("merged", left, right, left.merged, right.merged, tolerances.get("merged"))


QUANTITIES = (_targets, _rows, _initial, _gradients, _losses, _trained, _merged)
"""In the order of the table: earlier quantities explain deviations of later ones."""


def _given(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {name: lambda array=array: array for name, array in arrays.items()}  # type: ignore[misc]


def _arrays(
    quantity: str, left: ComparedRun, right: ComparedRun, a: Arrays, b: Arrays, limit: float | None
) -> Deviation:
    """Return the largest difference between two sets of arrays, which must have the same names and shapes."""

    def unequal(note: str) -> Deviation:
        return Deviation(quantity, left.name, right.name, None, 0.0, limit, False, note)

    for left_arrays, other, has in ((a, b, left.name), (b, a, right.name)):
        extra = sorted(left_arrays.keys() - other.keys())
        if extra:
            return unequal(f"only {has} has {extra[0]}" + (f" and {len(extra) - 1} more" * (len(extra) > 1)))
    if not a:
        return unequal("there are none")
    difference, largest, where = 0.0, 0.0, ""
    for name in sorted(a):
        x, y = (np.asarray(arrays[name]()).astype(np.float32, copy=False) for arrays in (a, b))
        if x.shape != y.shape:
            return unequal(f"{name} has shape {list(x.shape)} and {list(y.shape)}")
        if not x.size:
            continue
        apart = float(np.max(np.abs(x - y)))
        if not apart < np.inf:
            return unequal(f"{name} holds values that are not finite")
        largest = max(largest, float(np.max(np.abs(x))), float(np.max(np.abs(y))))
        if not where or apart > difference:
            difference, where = apart, name
    return Deviation(
        quantity,
        left.name,
        right.name,
        difference,
        largest,
        limit,
        limit is None or difference <= limit,
        where,
    )


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


WORDS = {
    "targets": "target tokens",
    "rows": "rows",
    "initial": "first adapters",
    "gradients": "first gradients",
    "losses": "losses",
    "trained": "what was trained",
    "merged": "merged weights",
}


def document(
    title: str,
    deviations: Sequence[Deviation],
    control: Sequence[Deviation] = (),
    left_out: Mapping[str, str] = {},
) -> Document:
    """Return the table, then what it leaves out.

    Args:
        control: deviations of a run from its repetition with perturbed initial adapters.
        left_out: why a backend did not take part, by its name.
    """
    head = ("quantity", "runs", "difference", "of", "relative", "limit", "result", "where")
    rows = [_cells(deviation, _result(deviation)) for deviation in deviations]
    rows += [_cells(replace(deviation, limit=None), "control") for deviation in control]
    failed = tuple(index for index, deviation in enumerate(deviations) if not deviation.ok)
    sentences = [f"left out: {name}: {reason}" for name, reason in left_out.items()]
    if control:
        sentences.insert(
            0,
            f"control: {control[0].left} against itself, its first adapters moved by 1e-7. A small random "
            f"model may be chaotic: a limit is {CONTROL:g} times the control, or the tolerance if that "
            "is larger",
        )
    return sheet(title, [Table(head, rows, words=(1, 6, 7), bad=failed), *map(Text, sentences)])


def _result(deviation: Deviation) -> str:
    if not deviation.ok:
        return "failed"
    return "" if deviation.limit is None else "ok"


def _cells(deviation: Deviation, result: str) -> list[str]:
    return [
        WORDS[deviation.quantity],
        f"{deviation.left} - {deviation.right}",
        number(deviation.difference),
        number(deviation.largest),
        number(deviation.relative),
        "" if result == "control" else number(deviation.limit),
        result,
        deviation.note,
    ]


def to_dict(
    rows: Iterable[Deviation], control: Iterable[Deviation] = (), left_out: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the comparison as plain JSON values."""
    rows = list(rows)
    return {
        "ok": all(row.ok for row in rows),
        "rows": [row.to_dict() for row in rows],
        "control": [row.to_dict() for row in control],
        "left_out": dict(left_out),
    }


def number(value: float | None) -> str:
    """Write a number: "3.1e-7", "0", "1,024"; "-" for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
