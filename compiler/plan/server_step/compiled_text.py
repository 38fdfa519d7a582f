"""A server's plan that was made by compiling its step, as a document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from recipec.compiler.pages.document import Block, Document, Section, Table, Text
from recipec.compiler.pages.numbers import duration, gb_number, gib_number, milliseconds, traffic
from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.server_step.server_plan import (
    CompiledServing,
    ServingCandidate,
    ServingPoint,
    ServingSearch,
)
from recipec.compiler.wording import listing

WHAT_TO_DO = "a larger tensor_parallel_size, a smaller cache, or fp8 if the chip has it"


def document(planned: CompiledServing) -> Document:
    """Return the plan of one configuration."""
    sections = [_head(planned), _memory(planned)]
    if planned.refusal is not None:
        reason = planned.refusal.strip().splitlines()[0]
        told = ["It does not fit; the compiler says:", reason, f"help: {WHAT_TO_DO}"]
        sections.append(_untitled(told))
    elif not planned.fits:
        short = planned.used - planned.available
        told = [
            f"It does not fit: {gib_number(short)} GiB are missing on each device.",
            f"help: {WHAT_TO_DO}",
        ]
        sections.append(_untitled(told))
    else:
        sections.append(_times(planned))
        if planned.published:
            sections.append(Section("", "Against the published run", (), [*map(Text, planned.published)]))
    compiled = (
        f"Compiled {listing(planned.compiled_layers)} of {planned.layers} layers in "
        f"{duration(planned.compile_seconds)} with {gib_number(planned.peak_rss)} GiB of memory."
    )
    sections.append(_untitled([*(f"note: {note}" for note in planned.notes), compiled]))
    return Document("", sections)


def search_document(search: ServingSearch) -> Document:
    """Return a search: a table, and the recipe lines of the best configuration."""
    head = ("TP", "DP", "cache", "decode blocks", "tokens in cache", "TPOT alone", "full", "tokens/s", "")
    rows = [_row(candidate, index == search.best) for index, candidate in enumerate(search.candidates)]
    sections = [
        _untitled(["Times are estimates: nothing was measured on a TPU."]),
        Section("", "", (), [Table(head, rows, words=(2, 3, 8))]),
    ]
    if search.best is None:
        sections.append(_untitled(["None fits."]))
    elif (best := search.candidates[search.best]).sets:
        lines = Text("\n".join(yaml_lines(best.sets)), "code")
        sections.append(Section("", "The best by its tokens/s; in the recipe:", (), [lines]))
        sections.append(_untitled([_untested(best)]))
    else:
        sections.append(_untitled(["The recipe as it is has the most tokens/s."]))
    return Document("", [*sections, _untitled(_failures(search))])


def _untitled(sentences: Iterable[str]) -> Section:
    return Section("", "", (), [Text(sentence) for sentence in sentences])


def _head(planned: CompiledServing) -> Section:
    versions = planned.versions
    return _untitled(
        [
            f"{planned.recipe}: {planned.model} on {planned.accelerator}, TP {planned.tensor_parallel} x "
            f"DP {planned.data_parallel}, {planned.kv_cache_dtype} cache",
            f"tpu-inference {versions['tpu-inference']}'s step, compiled for {planned.topology} by libtpu "
            f"{versions['libtpu']} without a TPU: times are estimates",
        ]
    )


def _memory(planned: CompiledServing) -> Section:
    decode = next(p for p in planned.programs if p.kind != "head")
    largest = max((p for p in planned.programs if p.kind != "head"), key=lambda p: p.temporaries + p.code)
    rows = [
        ("weights", gib_number(planned.weights), f"{gb_number(planned.weights)} GB"),
        (
            "key/value cache",
            gib_number(planned.cache),
            f"{planned.cache_tokens:,} tokens in pages of {planned.page_tokens}, a replica",
        ),
    ]
    if planned.refusal is None:
        rows += [
            ("temporaries", gib_number(largest.temporaries + largest.outputs), f"of the {largest.kind} step"),
            ("code", gib_number(largest.code), "of one step; each of the server's buckets has its own"),
            ("used", gib_number(planned.used), f"of {gib_number(planned.available)}"),
        ]
    collectives = [
        f"{decode.kind}: {collective.count} {collective.kind} of {traffic(collective.bytes)} together"
        for collective in decode.collectives
    ]
    blocks: list[Block] = [Table((), rows, words=(2,)), *map(Text, collectives)]
    return Section("", "HBM of a device, GiB", (), blocks)


def _times(planned: CompiledServing) -> Section:
    title = (
        "Estimated times: the compiler's cycles, and on paper the cache's reads, attention and collectives"
    )
    alone = (
        f"a decode step takes {milliseconds(planned.decode_alone)} with one sequence and "
        f"{milliseconds(planned.decode_full)} when full of the longest"
    )
    head = ("in", "out", "requests/s", "at a time", "TTFT", "TPOT", "tokens/s")
    rows = [_point(point) for point in planned.points]
    return Section("", title, (), [Text(alone), Table(head, rows)])


def _point(point: ServingPoint) -> list[str]:
    rate = "all at once" if point.request_rate is None else f"{point.request_rate:g}"
    if point.saturated and point.request_rate is not None:
        rate += " (more than it answers)"
    return [
        f"{point.input_length:,}",
        f"{point.output_length:,}",
        rate,
        f"{point.concurrency:.1f}",
        milliseconds(point.ttft),
        milliseconds(point.tpot),
        f"{point.tokens_per_second:,.0f}",
    ]


def _row(candidate: ServingCandidate, best: bool) -> list[str]:
    row = [
        str(candidate.tensor_parallel),
        str(candidate.data_parallel),
        candidate.kv_cache_dtype,
        candidate.decode_blocks or "default",
    ]
    serving = candidate.serving
    if serving is None or not serving.fits:
        return [*row, "", "", "", "", candidate.status]
    mark = "best" if best else "" if candidate.sets else "the recipe"
    return [
        *row,
        f"{serving.cache_tokens * serving.data_parallel:,}",
        milliseconds(serving.decode_alone),
        milliseconds(serving.decode_full),
        f"{serving.throughput:,.0f}",
        mark,
    ]


def _untested(candidate: ServingCandidate) -> str:
    what = "This was estimated, not measured"
    if candidate.decode_blocks:
        what += "; these decode block sizes compile, and are untested on hardware"
    return f"{what}: measure it with serve/bench.sh before relying on it."


def _failures(search: ServingSearch) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for candidate in search.candidates:
        if candidate.reason:
            reasons.setdefault(candidate.reason, []).append(f"TP {candidate.tensor_parallel}")
    for reason, names in reasons.items():
        yield f"{listing(dict.fromkeys(names))}: {reason}"
