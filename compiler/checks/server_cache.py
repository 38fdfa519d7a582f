"""Check the planned server: what fits its key/value cache, and settings that its compiled step recommends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from recipec.compiler.checks import server as hardware
from recipec.compiler.checks.server_flags import E0625
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import gb_number, kib_number
from recipec.compiler.roofline.server_estimate import none_fits, server_of
from recipec.compiler.roofline.server_memory import decode_block
from recipec.compiler.vllm import blocks
from recipec.compiler.vllm import flags as vllm
from recipec.compiler.vllm.lengths import longest_request
from recipec.compiler.wording import divisors, line, listing, plural
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, has_errors
from recipec.spec.key_paths import join

if TYPE_CHECKING:
    from recipec.compiler.roofline.server_estimate import Server
    from recipec.compiler.roofline.server_results import Cache
    from recipec.spec.language import Serve

BLOCK = 1024
"""Tokens of the recommended decode blocks: the size with which the compiled step was examined."""

LEAST_GAIN = 0.05
"""The share of a decode step's estimated time that block sizes have to save to be worth a note."""

SIZED_BY_HAND = ("num-gpu-blocks-override", "kv-cache-memory-bytes")
"""Flags that set the cache's size directly, so that it does not follow from the memory."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    yield from _lengths(facts, serve)
    malformed = list(_malformed_blocks(serve))
    yield from malformed
    server = None if malformed else _planned(facts, serve)
    if isinstance(server, Diagnostic):
        yield server
    elif server is not None:
        yield from _cache(server, serve)
        yield from _heads(facts, server, serve)
        yield from _blocks(server, serve)


W0640 = Code(
    "W0640",
    "benchmark beyond max_model_len",
    cause="A prompt and its answer together exceed the server's limit.",
    cure="Use smaller input_lengths or a smaller output_length, or a larger max_model_len.",
)


def _lengths(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    """Report requests that the client scripts would send and vLLM would refuse."""
    recipe, most = facts.recipe, serve.max_model_len
    output = recipe.benchmark.output_length
    refused = [n for n in recipe.benchmark.input_lengths if n + output > most]
    fits = [n for n in recipe.benchmark.input_lengths if n not in refused]
    has_benchmark = "benchmark" in recipe.model_fields_set
    place = facts.first_given("benchmark.input_lengths", "benchmark.output_length", "serve.max_model_len")
    if refused and (has_benchmark or len(refused) == len(recipe.benchmark.input_lengths)):
        yield Diagnostic(
            W0640,
            f"prompts of {listing(f'{n:,}' for n in refused)} tokens with answers of {output:,} exceed "
            f"max_model_len {most:,}: vLLM refuses such requests",
            place,
            line("benchmark.input_lengths", fits or [most - output], place)
            if most > output
            else _room(facts, serve, max(recipe.benchmark.input_lengths) + output, place),
        )


def _room(facts: Facts, serve: Serve, needed: int, place: str) -> str:
    """Suggest a server for a prompt and its answer, or shorter answers if the model has too few positions."""
    most = longest_request(facts.model, serve)
    if most is None or needed <= most:
        return line("serve.max_model_len", needed, place)
    return line("benchmark.output_length", max(1, serve.max_model_len // 2), place)


def _planned(facts: Facts, serve: Serve) -> Server | Diagnostic | None:
    """Plan one replica of the server; return a diagnostic if it cannot be planned, and None if another check
    says why."""
    model, accelerator = facts.model, facts.serve_accelerator
    if model is None or accelerator is None or accelerator.hbm_gib is None:
        return None
    if has_errors(hardware.check(facts)):
        # Estimates of a server that does not start are useless.
        return None
    program = Program(
        recipe=facts.recipe,
        source=facts.source,
        family=model.family,
        architecture=model.architecture,
        config=model.config,
        model_origin=model.origin,
        accelerator=accelerator,
        serve_accelerator=accelerator,
        data_parallel=1,
        accumulation_steps=1,
        parameters=facts.defaults,
        lora=None,
        adapters=(),
        rules=(),
        text="",
    )
    try:
        server = server_of(program)
        server.limits  # noqa: B018 (raises if a flag's value is invalid)
        return server
    except ArtifactError as error:
        share = next((n for n in serve.extra_args if vllm.dashed(n) == "gpu-memory-utilization"), "")
        return Diagnostic(E0625, str(error), join(("serve", "extra_args", share)), error.help)


E0634 = Code(
    "E0634",
    "key/value cache too small for one sequence",
    cause="The memory that the weights leave free cannot hold one sequence of max_model_len, by the "
    "estimate. vLLM does not start.",
    cure="Use a smaller max_model_len, or a larger tensor_parallel_size or accelerator.",
)


def _cache(server: Server, serve: Serve) -> Iterator[Diagnostic]:
    if any(vllm.dashed(str(name)) in SIZED_BY_HAND for name in serve.extra_args):
        return
    more = "a larger tensor_parallel_size, or a larger accelerator"
    if server.limits.sequences_fit == 0:
        yield Diagnostic(
            E0634,
            none_fits(serve.max_model_len, server.limits.tokens_fit),
            "serve.max_model_len",
            f"max_model_len: {server.limits.tokens_fit}, {more}" if server.limits.tokens_fit else more,
        )


N0607 = Code(
    "N0607",
    "fewer key/value heads than tensor_parallel_size",
    cause="Every device stores one head, and several devices store the same one. With fewer devices a "
    "replica, all caches together would hold more tokens, although each replica stores the weights. The "
    "bytes of a token are estimated from shapes.",
    cure="Use the smaller tensor_parallel_size of the message, with data_parallel_size.",
)


def _heads(facts: Facts, server: Server, serve: Serve) -> Iterator[Diagnostic]:
    """Note where fewer devices per replica would leave room for more tokens, because devices store copies or
    padding of key/value heads."""
    tp, assumed = serve.tensor_parallel_size, server.caches
    short = [kind for kind in assumed if kind.heads < tp]
    if not short or facts.model is None:
        return
    least = min(kind.heads for kind in short)
    size = max(n for n in divisors(tp) if n <= least)
    replicas = tp * serve.data_parallel_size // size
    other = server_of(server.program.serving(tensor_parallel_size=size, data_parallel_size=replicas))
    before, after = (_token_bytes(variant.caches, n) for variant, n in ((server, tp), (other, size)))
    if after >= before:
        return
    fits = [serve.data_parallel_size * server.limits.tokens_fit, replicas * other.limits.tokens_fit]
    if fits[1] <= fits[0]:
        return
    names = listing(
        f"{kind.layers} {kind.name}" if kind.name != "all" else f"all {kind.layers}" for kind in short
    )
    fp8 = ", and fp8 saves nothing" if serve.kv_cache_dtype.startswith("fp8") else ""
    yield Diagnostic(
        N0607,
        f"{facts.model.title} has {plural(least, 'key/value head')} in {names} layers, fewer than "
        f"tensor_parallel_size {tp}: each device stores one{fp8}. A token takes {kib_number(before)} KiB of "
        f"a replica's cache, and would take {kib_number(after)} KiB at {size} (an estimate)",
        "serve.tensor_parallel_size",
        f"tensor_parallel_size: {size}, data_parallel_size: {replicas}; each replica then stores the "
        f"weights, and all caches together hold {fits[1]:,} tokens instead of {fits[0]:,}",
    )


def _token_bytes(kinds: Sequence[Cache], devices: int) -> float:
    """Return the bytes of one token in all layers, summed over all devices of a replica."""
    return sum(kind.bytes_per_token for kind in kinds) * devices


E0636 = Code(
    "E0636",
    "block sizes that the decode kernel refuses",
    cause="The kernel needs four positive numbers: sizes that divide evenly into blocks, and blocks "
    "of whole cache pages.",
    cure="Use the sizes that the message gives.",
)


def _malformed_blocks(serve: Serve) -> Iterator[Diagnostic]:
    """Report block sizes that the decode kernel refuses."""
    where = "serve.decode_block_sizes"
    if serve.decode_block_sizes is None:
        where = f"serve.env.{blocks.VARIABLE}"
    recommended = f"[1, {BLOCK}, 1, {BLOCK}]"
    try:
        sizes = blocks.decode_blocks(serve)
    except ValueError:
        yield Diagnostic(
            E0636,
            f"{blocks.VARIABLE} must be four positive whole numbers, not `{serve.env[blocks.VARIABLE]}`",
            where,
            f"remove it, and write decode_block_sizes: {recommended}",
        )
        return
    if sizes is None:
        return
    queries, tokens, queries_at_once, tokens_at_once = sizes
    page = blocks.page_tokens(serve)
    if queries % queries_at_once or tokens % tokens_at_once:
        yield Diagnostic(
            E0636,
            f"a block of {queries} x {tokens} cannot be divided into parts of {queries_at_once} x "
            f"{tokens_at_once}: the decode kernel refuses it",
            where,
            f"decode_block_sizes: {recommended}",
        )
    elif tokens % page or tokens_at_once % page:
        yield Diagnostic(
            E0636,
            f"blocks of {tokens} and {tokens_at_once} tokens are not whole pages: the cache has pages of "
            f"{page} tokens, and the decode kernel refuses such blocks",
            where,
            f"decode_block_sizes: {recommended}, or other multiples of {page}",
        )


N0635 = Code(
    "N0635",
    "large decode blocks",
    cause="The decode kernel skips blocks before a sliding window, but by default a block is (nearly) "
    "the whole context. Smaller blocks compile. Their times are estimates.",
    cure="Write `decode_block_sizes: [1, 1024, 1, 1024]`, and measure it with serve/bench.sh.",
)

W0637 = Code(
    "W0637",
    "block sizes without effect",
    cause="Blocks of that size are never skipped, or the server runs a kernel without these sizes.",
    cure="Write `decode_block_sizes: null`.",
)


def _blocks(server: Server, serve: Serve) -> Iterator[Diagnostic]:
    """Recommend decode blocks where they save reads, and report them where they have no effect."""
    windowed = [kind for kind in server.caches if kind.window and kind.head_dim != blocks.SMALL_HEAD]
    sizes = blocks.decode_blocks(serve)
    if sizes is not None:
        if useless := _useless(serve, server, windowed, sizes[1]):
            named = "decode_block_sizes" if serve.decode_block_sizes else f"env.{blocks.VARIABLE}"
            help = "decode_block_sizes: null" if serve.decode_block_sizes else "remove it"
            yield Diagnostic(W0637, useless, f"serve.{named}", help)
        return
    if not windowed or blocks.batched_kernel(serve) or BLOCK % blocks.page_tokens(serve):
        return
    benchmark = server.program.recipe.benchmark
    context = min(max(benchmark.input_lengths), serve.max_model_len)
    sequences = max(1, min(serve.max_num_seqs, int(server.limits.tokens_fit // context)))
    recommended = (1, BLOCK, 1, BLOCK)
    other = replace(server, program=server.program.serving(decode_block_sizes=list(recommended)))
    before, after = (variant.decode(sequences, context) for variant in (server, other))
    if after.estimate_seconds > before.estimate_seconds * (1 - LEAST_GAIN):
        return
    block = max(decode_block(kind, serve) or 0 for kind in windowed)
    read = [gb_number(step.whole_cache_bytes, 1) for step in (before, after)]
    took = [step.estimate_seconds * 1e3 for step in (before, after)]
    yield Diagnostic(
        N0635,
        f"the decode kernel reads {block:,} tokens at a time, and skips few or no tokens before a window of "
        f"{windowed[0].window:,}. For {plural(sequences, 'sequence')} of {context:,} tokens a step reads "
        f"{read[0]} GB of each device's cache in about {took[0]:.1f} ms. With blocks of {BLOCK:,} it "
        f"would read {read[1]} GB in {took[1]:.1f} ms (an estimate, untested on hardware)",
        "serve.decode_block_sizes",
        f"decode_block_sizes: {list(recommended)}",
    )


def _useless(serve: Serve, server: Server, windowed: list[Cache], block: int) -> str | None:
    """Return why the given block sizes do not change reads, None if they may."""
    if blocks.batched_kernel(serve):
        return f"{blocks.BATCHED} runs another kernel, which ignores these block sizes"
    if not windowed:
        if any(kind.window for kind in server.caches):
            return f"heads of {blocks.SMALL_HEAD} use another kernel, which ignores these block sizes"
        return "the model has no layers with a sliding window: blocks of any size are all read"
    window = min(kind.window or 0 for kind in windowed)
    if serve.max_model_len < window + block:
        return (
            f"blocks of {block:,} tokens are never skipped: the window is {window:,} and max_model_len "
            f"{serve.max_model_len:,}"
        )
    return None
