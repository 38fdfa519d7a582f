"""What happened to the data of runs: rows read, kept, and left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from recipec.compiler.pages.document import Items, Plot, Section, Table, Text
from recipec.compiler.pages.html import COLORS, axis, bar
from recipec.compiler.pages.numbers import NOT_KNOWN, number, percent
from recipec.compiler.report.recorded_run import ReportedRun
from recipec.compiler.wording import plural
from recipec.runtime.data.row_counts import KINDS

SPLITS = {"train": "trained on", "eval": "evaluated on"}
PERCENTILES = ("10", "50", "90", "99")
NONE = "The run left no statistics of its data: it has no run.json, as of a run by an earlier version."


def data_section(runs: Sequence[ReportedRun]) -> Section:
    """Return the section on the runs' data, with a column for each split of each run."""
    columns = [(run, name) for run in runs for name in SPLITS if _split(run, name)]
    if not columns:
        return Section("data", "Data", (), (Text(NONE, ""),))
    several, splits = len(runs) > 1, [_split(run, name) for run, name in columns]
    head = [f"{run.label}, {SPLITS[name]}" if several else SPLITS[name] for run, name in columns]
    lines = [(label, [read(split) for split in splits]) for label, read in LINES.items()]
    train = [run if name == "train" else None for run, name in columns]
    lines.append(
        ("length: 10, 50, 90, 99 % are shorter than", [_percentiles(run) if run else "" for run in train])
    )
    steps = [number(run.data.get("steps_per_epoch")) if run else "" for run in train]
    lines.append(("optimizer steps of an epoch", steps))
    rows = [(label, *cells) for label, cells in lines if any(cells)]
    blocks: list[Any] = [Table(("", *head), rows, label="What happened to the data")]
    problems = dict.fromkeys(
        f"{run.label}: {sentence}" if several else sentence
        for run, name in columns
        for sentence in _problems(_split(run, name))
    )
    if problems:
        blocks += [Text("Left out", "heading"), Items([*problems])]
    blocks += _histogram(runs)
    return Section("data", "Data", ("As it was counted when the run last began.",), blocks)


def _split(run: ReportedRun, name: str) -> Mapping[str, Any]:
    split = run.data.get(name)
    return split if isinstance(split, dict) else {}


def _count(split: Mapping[str, Any], key: str) -> int:
    value = split.get(key)
    value = value.get("count") if isinstance(value, dict) else value
    return value if isinstance(value, int) else 0


def _left_out(split: Mapping[str, Any]) -> str:
    parts = [f"{_count(split, key):,} {label}" for key, label in KINDS.items() if _count(split, key)]
    if _count(split, "removed"):
        parts.append(f"{_count(split, 'removed'):,} by the transform")
    return ", ".join(parts) or "none"


def _divided(split: Mapping[str, Any]) -> str:
    texts = _count(split, "split")
    return f"{texts:,} into {_count(split, 'pieces'):,}" if texts else ""


def _share(split: Mapping[str, Any]) -> str:
    tokens, targets = _count(split, "tokens"), _count(split, "targets")
    return f"{targets:,} ({percent(targets / tokens)})" if tokens else number(targets)


def _full(split: Mapping[str, Any]) -> str:
    places = _count(split, "rows") * _count(split, "row_length")
    return percent(_count(split, "row_tokens") / places) if places else NOT_KNOWN


LINES = {
    "rows read": lambda split: number(_count(split, "read")),
    "kept": lambda split: number(_count(split, "kept")),
    "left out": _left_out,
    "cut to fit": lambda split: number(_count(split, "truncated")) if _count(split, "truncated") else "",
    "split into samples": _divided,
    "also trained on": lambda split: number(_count(split, "shared")) if _count(split, "shared") else "",
    "tokens": lambda split: number(_count(split, "tokens")),
    "of them targets": _share,
    "mean length": lambda split: number(split.get("mean_length")),
    "longest": lambda split: number(_count(split, "longest")),
    "rows of an epoch": lambda split: f"{_count(split, 'rows'):,} of {_count(split, 'row_length'):,} tokens",
    "of their places filled": _full,
}
"""Label of each line of the table, and how to read its value from a split; "" if the split lacks it."""


def _lengths(run: ReportedRun) -> Mapping[str, Any]:
    lengths = run.facts.get("lengths")
    return lengths if isinstance(lengths, dict) else {}


def _percentiles(run: ReportedRun) -> str:
    values = _lengths(run).get("percentiles")
    if not isinstance(values, dict) or not all(isinstance(values.get(k), int | float) for k in PERCENTILES):
        return ""
    return ", ".join(f"{values[key]:,.0f}" for key in PERCENTILES)


def _problems(split: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rows that are named as left out, and how many more there are."""
    for key, label in KINDS.items():
        value = split.get(key)
        named = value.get("first", []) if isinstance(value, dict) else []
        shown = [sample for sample in named if isinstance(sample, dict)]
        yield from (f"{sample.get('origin')}: {label}: {sample.get('reason')}" for sample in shown)
        if _count(split, key) > len(shown) > 0:
            yield f"and {plural(_count(split, key) - len(shown), 'row')} more, {label}"


def _histogram(runs: Sequence[ReportedRun]) -> list[Plot]:
    """Return the plot of the samples' lengths; none if no run recorded them."""
    several, drawn, rows = len(runs) > 1, [], []
    for color, run in enumerate(runs):
        lengths = _lengths(run)
        if not lengths.get("counts"):
            continue
        edges, counts = lengths["edges"], lengths["counts"]
        bars = [f"{low:,}" if high - low == 1 else f"{low:,}-{high - 1:,}" for low, high in pairwise(edges)]
        drawn.append(bar(run.label, bars, counts, COLORS[color % len(COLORS)]))
        labels = [run.label] if several else []
        rows += [(*labels, tokens, number(count)) for tokens, count in zip(bars, counts, strict=True)]
    head = (*(["run"] if several else []), "tokens", "samples")
    plot = Plot(
        "lengths",
        "Lengths of the training samples",
        drawn,
        {
            "xaxis": axis("tokens of a sample", type="category"),
            "yaxis": axis("samples"),
            # The axis's words, and below them the legend of several runs.
            "margin": {"l": 56, "r": 12, "t": 12, "b": 84},
        },
        what="In tokens, after what is too long was left out or cut; of a preference, each of its answers.",
        after=[Table(head, rows, folded="The numbers of this plot: lengths of the training samples")],
    )
    return [plot] if drawn else []
