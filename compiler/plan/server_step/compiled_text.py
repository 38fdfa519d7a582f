"""Write the text of a server's plan that was made by compiling its step."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.server_step.results import (
    CompiledServing,
    ServingCandidate,
    ServingPoint,
    ServingSearch,
)
from recipec.compiler.plan.units import aligned, duration, gib, milliseconds, traffic, wrapped
from recipec.compiler.wording import listing, table

WHAT_TO_DO = "a larger tensor_parallel_size, a smaller cache, or fp8 if the chip has it"


def text(planned: CompiledServing) -> str:
    """Return the text of one configuration, with a line break at the end."""
    return "\n".join(_lines(planned)) + "\n"


def search_text(found: ServingSearch) -> str:
    """Return the text of a search: a table, and the recipe lines of the best configuration."""
    head = ["TP", "DP", "cache", "decode blocks", "tokens in cache", "TPOT alone", "full", "tokens/s", ""]
    rows = [_row(candidate, index == found.best) for index, candidate in enumerate(found.candidates)]
    lines = ["Times are estimates: nothing was measured on a TPU.", "", *table(rows, head)]
    if found.best is None:
        return "\n".join([*lines, "", "None fits.", *_failures(found)]) + "\n"
    best = found.candidates[found.best]
    if best.sets:
        lines += ["", "The best by its tokens/s; in the recipe:", "", *yaml_lines(best.sets)]
        lines += ["", *wrapped(_untested(best))]
    else:
        lines += ["", "The recipe as it is has the most tokens/s."]
    return "\n".join([*lines, *_failures(found)]) + "\n"


def _lines(planned: CompiledServing) -> Iterator[str]:
    yield (
        f"{planned.recipe}: {planned.model} on {planned.accelerator}, TP {planned.tensor_parallel} x "
        f"DP {planned.data_parallel}, {planned.kv_cache_dtype} cache"
    )
    versions = planned.versions
    yield (
        f"tpu-inference {versions['tpu-inference']}'s step, compiled for {planned.topology} by libtpu "
        f"{versions['libtpu']} without a TPU: times are estimates"
    )
    yield ""
    yield from _memory(planned)
    if planned.refusal is not None:
        yield ""
        yield "It does not fit; the compiler says:"
        yield from wrapped(planned.refusal.strip().splitlines()[0], "  ")
        yield f"help: {WHAT_TO_DO}"
    elif not planned.fits:
        short = planned.used - planned.available
        yield ""
        yield f"It does not fit: {gib(short)} GiB are missing on each device."
        yield f"help: {WHAT_TO_DO}"
    else:
        yield from _times(planned)
    yield ""
    for note in planned.notes:
        yield from wrapped(f"note: {note}")
    yield (
        f"Compiled {listing(planned.compiled_layers)} of {planned.layers} layers in "
        f"{duration(planned.compile_seconds)} with {gib(planned.peak_rss)} GiB of memory."
    )


def _memory(planned: CompiledServing) -> Iterator[str]:
    yield "HBM of a device, GiB"
    decode = next(p for p in planned.programs if p.kind != "head")
    largest = max((p for p in planned.programs if p.kind != "head"), key=lambda p: p.temporaries + p.code)
    rows = [
        ("weights", gib(planned.weights), f"{planned.weights / 1e9:.2f} GB"),
        (
            "key/value cache",
            gib(planned.cache),
            f"{planned.cache_tokens:,} tokens in pages of {planned.page_tokens}, a replica",
        ),
    ]
    if planned.refusal is None:
        rows += [
            ("temporaries", gib(largest.temporaries + largest.outputs), f"of the {largest.kind} step"),
            ("code", gib(largest.code), "of one step; each of the server's buckets has its own"),
            ("used", gib(planned.used), f"of {gib(planned.available)}"),
        ]
    yield from aligned(rows, "<><")
    for each in decode.collectives:
        yield f"  {decode.kind}: {each.count} {each.kind} of {traffic(each.bytes)} together"


def _times(planned: CompiledServing) -> Iterator[str]:
    yield ""
    yield "Estimated times: the compiler's cycles, and on paper the cache's reads, attention and collectives"
    yield (
        f"  a decode step takes {milliseconds(planned.decode_alone)} with one sequence and "
        f"{milliseconds(planned.decode_full)} when full of the longest"
    )
    head = ["in", "out", "requests/s", "at a time", "TTFT", "TPOT", "tokens/s"]
    rows = [_point(point) for point in planned.points]
    yield from (f"  {line}" for line in table(rows, head))
    if planned.published:
        yield ""
        yield "Against the published run"
        for sentence in planned.published:
            yield from wrapped(sentence, "  ")


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


def _failures(found: ServingSearch) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for candidate in found.candidates:
        if candidate.reason:
            reasons.setdefault(candidate.reason, []).append(f"TP {candidate.tensor_parallel}")
    if reasons:
        yield ""
    for reason, names in reasons.items():
        yield from wrapped(f"{listing(dict.fromkeys(names))}: {reason}")
