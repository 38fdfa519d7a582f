"""What happened to the data of runs: rows read, kept, and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from recipec.compiler.pages.html import COLORS, Plot, Table, axis, bar
from recipec.compiler.pages.numbers import NOT_KNOWN, number, percent
from recipec.compiler.report.run import Run
from recipec.compiler.wording import plural

SPLITS = {"train": "trained on", "eval": "evaluated on"}
PERCENTILES = ("10", "50", "90", "99")


@dataclass(frozen=True)
class Data:
    """The page's section on data.

    Attributes:
        table: a column for each split of each run.
        lengths: the histogram; None if no run recorded lengths.
        problems: sentences on rows that were left out.
    """

    table: Table
    lengths: Plot | None
    problems: tuple[str, ...]


def data(runs: Sequence[Run]) -> Data | None:
    """Build the section; None if no run recorded its data."""
    columns = [
        (run, name, split) for run in runs for name in SPLITS if (split := _split(run, name)) is not None
    ]
    if not columns:
        return None
    several = len(runs) > 1
    head = tuple(f"{run.label}, {SPLITS[name]}" if several else SPLITS[name] for run, name, _ in columns)
    rows = [
        (said, *cells)
        for said, read in _LINES.items()
        if any(cells := [read(split) for _, _, split in columns])
    ]
    rows += _lengths(columns)
    rows += _steps(columns)
    problems = [
        f"{f'{run.label}: ' if several else ''}{sentence}"
        for run, _, split in columns
        for sentence in _problems(split)
    ]
    return Data(
        Table(("", *head), rows, label="What happened to the data"),
        _histogram(runs),
        tuple(dict.fromkeys(problems)),
    )


def _split(run: Run, name: str) -> Mapping[str, Any] | None:
    found = run.facts.get("data")
    split = found.get(name) if isinstance(found, dict) else None
    return split if isinstance(split, dict) and split else None


def _count(split: Mapping[str, Any], key: str) -> int:
    value = split.get(key)
    value = value.get("count") if isinstance(value, dict) else value
    return value if isinstance(value, int) else 0


def _left_out(split: Mapping[str, Any]) -> str:
    from recipec.runtime.data.report import KINDS

    parts = [f"{_count(split, key):,} {said}" for key, said in KINDS.items() if _count(split, key)]
    if _count(split, "removed"):
        parts.append(f"{_count(split, 'removed'):,} by the transform")
    return ", ".join(parts) or "none"


def _share(split: Mapping[str, Any]) -> str:
    tokens, targets = _count(split, "tokens"), _count(split, "targets")
    return f"{targets:,} ({percent(targets / tokens)})" if tokens else number(targets)


def _full(split: Mapping[str, Any]) -> str:
    places = _count(split, "rows") * _count(split, "row_length")
    return percent(_count(split, "row_tokens") / places) if places else NOT_KNOWN


_LINES = {
    "rows read": lambda split: number(_count(split, "read")),
    "kept": lambda split: number(_count(split, "kept")),
    "left out": _left_out,
    "cut to fit": lambda split: number(_count(split, "truncated")) if _count(split, "truncated") else "",
    "tokens": lambda split: number(_count(split, "tokens")),
    "of them targets": _share,
    "mean length": lambda split: number(split.get("mean_length")),
    "longest": lambda split: number(_count(split, "longest")),
    "rows of an epoch": lambda split: f"{_count(split, 'rows'):,} of {_count(split, 'row_length'):,} tokens",
    "of their places filled": _full,
}
"""Label of each line of the table, and how to read its value from a split; "" if the split lacks it."""


def _lengths(columns: Sequence[tuple[Run, str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    cells = [_percentiles(run) if name == "train" else "" for run, name, _ in columns]
    return [("length: 10, 50, 90, 99 % are shorter than", *cells)] if any(cells) else []


def _percentiles(run: Run) -> str:
    found = run.facts.get("lengths")
    values = found.get("percentiles") if isinstance(found, dict) else None
    if not isinstance(values, dict) or not all(isinstance(values.get(k), int | float) for k in PERCENTILES):
        return ""
    return ", ".join(f"{values[key]:,.0f}" for key in PERCENTILES)


def _steps(columns: Sequence[tuple[Run, str, Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    cells = [
        number(run.facts["data"].get("steps_per_epoch")) if name == "train" else ""
        for run, name, _ in columns
    ]
    return [("optimizer steps of an epoch", *cells)] if any(cells) else []


def _problems(split: Mapping[str, Any]) -> list[str]:
    """Return the rows that are named as left out, and how many more there are."""
    from recipec.runtime.data.report import KINDS

    out = []
    for key, said in KINDS.items():
        value = split.get(key)
        named = value.get("first", []) if isinstance(value, dict) else []
        shown = [one for one in named if isinstance(one, dict)]
        out += [f"{one.get('origin')}: {said}: {one.get('reason')}" for one in shown]
        if _count(split, key) > len(shown) > 0:
            out.append(f"and {plural(_count(split, key) - len(shown), 'row')} more, {said}")
    return out


def _histogram(runs: Sequence[Run]) -> Plot | None:
    drawn, rows = [], []
    for color, run in enumerate(runs):
        found = run.facts.get("lengths")
        if not isinstance(found, dict) or not found.get("counts"):
            continue
        edges, counts = found["edges"], found["counts"]
        bars = [f"{low:,}" if high - low == 1 else f"{low:,}-{high - 1:,}" for low, high in pairwise(edges)]
        drawn.append(bar(run.label, bars, counts, COLORS[color % len(COLORS)]))
        rows += [
            (*([run.label] if len(runs) > 1 else []), bar, number(n))
            for bar, n in zip(bars, counts, strict=True)
        ]
    if not drawn:
        return None
    head = (*(["run"] if len(runs) > 1 else []), "tokens", "samples")
    return Plot(
        "lengths",
        "Lengths of the training samples",
        drawn,
        {"xaxis": axis("tokens of a sample", type="category"), "yaxis": axis("samples")},
        what="In tokens, after what is too long was left out or cut; of a preference, each of its answers.",
        after=[Table(head, rows, folded="The numbers of this plot: lengths of the training samples")],
    )
