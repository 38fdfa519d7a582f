"""A server's plan as a document, which says whether a figure is an estimate or a bound."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.pages.document import Block, Document, Table, Text, sheet
from recipec.compiler.pages.numbers import gb_number, mb_number, ms_number
from recipec.compiler.roofline.server_results import Cache, Comparison, Load, ServingPlan, StepBounds
from recipec.compiler.wording import plural

TYPES = {4: "float32", 2: "bfloat16", 1: "eight bits"}
LONGER = {"TTFT": (1.6, 2.4, 4.4), "TPOT": (1.2, 2.2, 8.6)}
"""How many times their estimates published times are: the least, the median and the most.

docs/planning.md has the times, and tests/plan/test_serving_figures.py compares."""


def document(serving: ServingPlan) -> Document:
    """Return the plan: memory, what fits, lower bounds, the benchmark's points, published figures."""
    parts = [_heading(serving), _weights(serving), _caches(serving), _memory(serving)]
    if serving.decode:
        parts += [_decode(serving), _prefill(serving)]
    if serving.loads:
        parts.append(_loads(serving))
    if serving.comparisons:
        parts.append(_comparisons(serving))
    if serving.notes:
        parts.append([Text(f"note: {note}") for note in serving.notes])
    return sheet("", *parts)


def _heading(serving: ServingPlan) -> list[Block]:
    price = "no price is known"
    if serving.usd_per_hour is not None:
        price = f"US$ {serving.usd_per_hour:,.2f} an hour ({serving.price_source})"
    return [
        Text(f"{serving.recipe}: {serving.model} served on {serving.accelerator}; {price}"),
        Text(
            f"{plural(serving.data_parallel, 'replica')}, each split over "
            f"{plural(serving.tensor_parallel, 'device')}. On paper: estimates and bounds, of one device "
            "unless stated otherwise."
        ),
    ]


def _weights(serving: ServingPlan) -> list[Block]:
    rows = [[w.name, gb_number(w.bytes), TYPES[w.number_bytes], w.placed] for w in serving.weights]
    rows.append(["together", gb_number(serving.weight_bytes)])
    return [Table(("weights", "GB", "type", "placed"), rows, words=(2, 3))]


def _caches(serving: ServingPlan) -> list[Block]:
    rows = [_cache(kind) for kind in serving.caches]
    total = ["together", "", "", "", "", "", f"{serving.cache_bytes_per_token:,.0f}"]
    head = ["cache of layers", "layers", "heads", "on a device", "head size", "window", "bytes a token"]
    table = Table([*head, "without padding"], [*rows, total])
    states = [
        f"the states of {kind.name} layers: {mb_number(kind.bytes_per_sequence)} MB a sequence, of any length"
        for kind in serving.caches
        if kind.bytes_per_sequence
    ]
    return [table, *map(Text, states), Text(f"type {serving.cache_dtype}")]


def _cache(kind: Cache) -> list[str]:
    return [
        kind.name,
        f"{kind.layers} (and {kind.shared} that share)" if kind.shared else str(kind.layers),
        str(kind.heads),
        str(kind.device_heads),
        str(kind.head_dim),
        f"{kind.window:,}" if kind.window else "-",
        f"{kind.bytes_per_token:,.0f}",
        f"{kind.unpadded_bytes_per_token:,.0f}",
    ]


def _memory(serving: ServingPlan) -> list[Block]:
    usable = serving.hbm_bytes * serving.memory_share
    rows = [
        ["of the device", gb_number(serving.hbm_bytes)],
        ["vLLM's share of it", gb_number(usable), f"{serving.memory_share:.0%}"],
        ["weights", gb_number(serving.weight_bytes)],
        *([["pool of states", gb_number(serving.state_bytes)]] if serving.state_bytes else []),
        [
            "left for the cache",
            gb_number(serving.cache_bytes),
            f"{serving.tokens_fit:,} tokens of a replica: {serving.sequences_fit:,} sequences of "
            f"max_model_len {serving.max_model_len:,}, where max_num_seqs is {serving.max_num_seqs:,}",
        ],
    ]
    return [Table(("memory", "GB", ""), rows, words=(2,))]


def _decode(serving: ServingPlan) -> list[Block]:
    rows = [
        [
            f"{step.sequences:g} x {step.tokens:,.0f}",
            gb_number(step.weight_bytes),
            gb_number(step.cache_bytes),
            gb_number(step.whole_cache_bytes),
            *_times(step),
        ]
        for step in serving.decode
    ]
    head = ["decode of", "weights", "cache", "in blocks", "memory", "compute", "all-reduces"]
    return [
        Table([*head, "TPOT at least", "estimate"], rows),
        Text(
            "Sequences x context; what is read in GB, times in ms. TPOT at least: the longest of memory, "
            "compute and all-reduces, with the cache outside of windows skipped: a lower bound. Estimate: "
            "the cache read in the decode kernel's blocks, at vLLM-TPU's default sizes mostly whole, and the "
            f"all-reduces after the rest. {_longer('TPOT')}"
        ),
    ]


def _prefill(serving: ServingPlan) -> list[Block]:
    rows = [[f"{step.tokens:,.0f}", *_times(step)] for step in serving.prefill]
    head = ["prefill of", "memory", "compute", "all-reduces", "TTFT at least", "estimate"]
    note = f"Tokens of a prompt that waits for nothing; times in ms, as above. {_longer('TTFT')}"
    return [Table(head, rows), Text(note)]


def _longer(what: str) -> str:
    least, middle, most = LONGER[what]
    ratios = f"{least:g} to {most:g} times the estimate (median {middle:g})"
    return f"The servers of docs/planning.md took {ratios}."


def _times(step: StepBounds) -> list[str]:
    return [
        ms_number(seconds)
        for seconds in (
            step.memory_seconds,
            step.compute_seconds,
            step.all_reduce_seconds,
            step.bound_seconds,
            step.estimate_seconds,
        )
    ]


def _loads(serving: ServingPlan) -> list[Block]:
    head = ["tokens in", "out", "requests/s", "under way", "limited by", "TTFT at least", "TPOT at least"]
    head += ["tokens/s at most", "US$ at least"]
    return [
        Table(head, [_load(load) for load in serving.loads], words=(4,)),
        Text(
            "The benchmark's points: lower bounds of TTFT and TPOT in ms and of the price of a million "
            "output tokens, upper bounds of output tokens/s of the whole machine."
        ),
    ]


def _load(load: Load) -> list[str]:
    usd = load.usd_per_million_tokens
    return [
        f"{load.input_length:,}",
        f"{load.output_length:,}",
        "all at once" if load.request_rate is None else f"{load.request_rate:g}",
        f"{load.concurrency:,.1f}",
        load.limited_by,
        ms_number(load.ttft_seconds),
        ms_number(load.tpot_seconds),
        f"{load.tokens_per_second:,.0f}",
        "no price" if usd is None else f"{usd:,.2f}",
    ]


def _comparisons(serving: ServingPlan) -> list[Block]:
    head = ["published of this server", "published", "here", "ratio", "estimate", "ratio"]
    return [
        Table(head, [list(_comparison(figure)) for figure in serving.comparisons]),
        Text(
            "Here: the weights that are counted, and lower bounds of times. Ratio: of the published one "
            "to it."
        ),
    ]


def _comparison(comparison: Comparison) -> Iterator[str]:
    yield comparison.what
    yield f"{comparison.published:g} {comparison.unit}"
    digits = 2 if comparison.unit == "GB" else 1
    for value in (comparison.bound, comparison.estimate):
        if value is not None:
            yield f"{value:.{digits}f} {comparison.unit}"
            yield f"{comparison.published / value:.{digits}f}"
