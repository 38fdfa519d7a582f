"""Compare runs: rows, adapters, first gradients, losses, merged weights.

Imports numpy, so the command line imports it when it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from recipec.runtime.training.trace import Trace

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
        quantity: one of compiler.parity.table.WORDS.
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
    step = next((i for i, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), None)
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
    steps = [(_counted(one), _counted(other)) for one, other in zip(a, b, strict=False)]
    apart = [max((one - other).total(), (other - one).total()) for one, other in steps]
    largest = max(count.total() for step in steps for count in step)
    step = next((i for i, count in enumerate(apart) if count), None)
    if step is None:
        note = f"{sum(one.total() for one, _ in steps):,} rows in {len(steps)} steps"
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
        a, b = (_given(one.trace.initial) for one in (left, right))
        yield _arrays("initial", left, right, a, b, tolerances.get("initial"))


def _losses(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    count = min(len(left.trace.losses), len(right.trace.losses))
    a, b = (np.asarray(one.trace.losses[:count]) for one in (left, right))
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
    own = max(float(np.max(np.abs(a))), float(np.max(np.abs(b))))
    return float(np.max(np.abs(a - b))) / own if own > NOISE * largest else 0.0


def _trained(left: ComparedRun, right: ComparedRun, tolerances: Mapping[str, float]) -> Iterator[Deviation]:
    a, b = (_given(one.trace.trained) for one in (left, right))
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

    for one, other, has in ((a, b, left.name), (b, a, right.name)):
        extra = sorted(one.keys() - other.keys())
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
