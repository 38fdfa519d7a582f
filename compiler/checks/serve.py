"""Serving: the accelerator's data types, devices and memory; vLLM's limits; the image."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from compiler.facts import Facts
from compiler.hardware import Accelerator
from compiler.serving.container import FAMILY_FLAGS
from compiler.serving.flags import dashed, version
from compiler.wording import divisors, listing, plural
from spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from spec.language import Recipe, Serve

MEDIA_TOKENS = {"gemma4": 32 * (70 + 2 + 6)}
"""The longest medium: a video's frames, each with its borders and its time (vLLM 0.32, gemma4_mm.py)."""

EXPERIMENTAL = ("v4", "v5p")
"""Generations that tpu-inference's compatibility table calls experimental."""

WITHOUT_KERNEL = ("v4",)
"""Generations for which tpu-inference's ragged paged attention raises NotImplementedError."""

MEMORY_SHARE = 0.92
"""vLLM 0.32's default for --gpu-memory-utilization."""


def check(facts: Facts) -> Iterator[Diagnostic]:
    serve = facts.recipe.serve
    if serve is None:
        return
    accelerator = facts.serve_accelerator
    if accelerator is not None:
        yield from _devices(serve, accelerator)
        yield from _types(serve, accelerator)
    yield from _heads(facts, serve)
    yield from _memory(facts, serve)
    yield from _limits(facts, serve)
    yield from _image(serve)


def _devices(serve: Serve, accelerator: Accelerator) -> Iterator[Diagnostic]:
    tp, dp = serve.tensor_parallel_size, serve.data_parallel_size
    need = tp * dp
    product = f"tensor_parallel_size {tp} x data_parallel_size {dp} = {plural(need, 'device')}"
    has = f"{accelerator.name} has {plural(accelerator.devices, 'device')}"
    if accelerator.devices != accelerator.chips or accelerator.name_counts == "tensorcores":
        has += f" ({plural(accelerator.chips, 'chip')})"
    other = [size for size in divisors(accelerator.devices) if size <= tp]
    better = f"tensor_parallel_size: {other[-1]}, data_parallel_size: {accelerator.devices // other[-1]}"
    if need > accelerator.devices:
        yield Diagnostic("E0602", f"{product}, and {has}", "serve.tensor_parallel_size", better)
    elif need < accelerator.devices:
        yield Diagnostic(
            "W0602", f"{product}, and {has}: the rest stay idle", "serve.tensor_parallel_size", better
        )
    if accelerator.hosts > 1:
        yield Diagnostic(
            "E0915",
            f"{accelerator.name} is {accelerator.hosts} hosts, and serving over several hosts is not in "
            "this version",
            "serve.accelerator",
            "choose a slice of one host, for example v6e-8",
        )
    if accelerator.generation in EXPERIMENTAL:
        yield Diagnostic(
            "N0609",
            f"vllm-tpu calls {accelerator.generation} experimental; v5e, v6e and tpu7x are the ones it is "
            "tested on",
            "serve.accelerator",
        )
    if accelerator.generation in WITHOUT_KERNEL:
        yield Diagnostic(
            "W0609",
            f"tpu-inference {version()} has no sizes of its attention kernel for {accelerator.generation}: "
            "by its "
            "sources the server ends with the first compilation",
            "serve.accelerator",
            "serve on v5e, v6e or tpu7x",
        )


def _types(serve: Serve, accelerator: Accelerator) -> Iterator[Diagnostic]:
    where = f"{accelerator.generation} has no fp8"
    if serve.kv_cache_dtype.startswith("fp8") and not accelerator.fp8_kv_cache:
        yield Diagnostic(
            "E0603",
            f"kv_cache_dtype {serve.kv_cache_dtype}: {where}; vllm-tpu accepts the flag there and keeps "
            "the cache in bfloat16, at twice the size that was planned with",
            "serve.kv_cache_dtype",
            "kv_cache_dtype: auto, or serve on v6e or tpu7x",
        )
    if serve.quantization == "fp8" and not accelerator.fp8_matmul:
        yield Diagnostic(
            "E0604",
            f"quantization fp8: {where}, and vllm-tpu does not run fp8 weights on it",
            "serve.quantization",
            "quantization: null, or serve on v6e or tpu7x",
        )


def _heads(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    if facts.model is None:
        return
    architecture, title, tp = facts.model.architecture, facts.model.title, serve.tensor_parallel_size
    heads = architecture.num_heads
    if heads % tp:
        fits = [size for size in divisors(heads) if size <= tp]
        yield Diagnostic(
            "E0606",
            f"tensor_parallel_size {tp} does not divide the {heads} attention heads of {title}: vLLM "
            "refuses it",
            "serve.tensor_parallel_size",
            f"tensor_parallel_size can be {listing(fits, 'or')}",
        )
        return
    for count in sorted({architecture.kv_heads(i) for i in range(architecture.num_layers)}):
        if max(count, tp) % min(count, tp):
            fits = [n for n in divisors(heads) if n <= tp and not max(count, n) % min(count, n)]
            yield Diagnostic(
                "E0606",
                f"{title} has {plural(count, 'key/value head')}, which tensor_parallel_size {tp} can neither "
                "split nor copy evenly: tpu-inference refuses it",
                "serve.tensor_parallel_size",
                f"tensor_parallel_size can be {listing(fits, 'or')}",
            )


def _memory(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    sizes = _weight_gib(facts)
    if sizes is not None and sizes[0] > sizes[1]:
        assert facts.model is not None and facts.serve_accelerator is not None
        yield Diagnostic(
            "E0608",
            f"the weights of {facts.model.title} take {sizes[0]:.1f} GiB of each device at "
            f"tensor_parallel_size {serve.tensor_parallel_size}, and vLLM uses {sizes[1]:.1f} GiB "
            f"({MEMORY_SHARE:.0%}) of a {facts.serve_accelerator.generation} device, with no room for a "
            "key/value cache",
            "serve.tensor_parallel_size",
            "a larger tensor_parallel_size, a larger accelerator, or quantization: fp8 where it has fp8",
        )


def _weight_gib(facts: Facts) -> tuple[float, float] | None:
    """GiB of a device that the weights take, and that vLLM uses; None where they cannot be told."""
    serve, accelerator = facts.recipe.serve, facts.serve_accelerator
    if serve is None or facts.model is None or accelerator is None or accelerator.hbm_gib is None:
        return None
    numbers = sum(math.prod(p.shape) for p in facts.defaults if p.sources)
    gib = numbers * weight_size(facts.recipe) / serve.tensor_parallel_size / 2**30
    return gib, accelerator.hbm_gib / accelerator.devices_per_chip * MEMORY_SHARE


def weight_size(recipe: Recipe) -> int:
    """Bytes of each of the served weights' numbers; the few that are never quantised are counted alike."""
    assert recipe.serve is not None
    merged = recipe.merge.quantization if recipe.serve.weights == "merged" else None
    return 1 if recipe.serve.quantization or merged else 2


def _limits(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    if serve.max_num_batched_tokens < serve.max_num_seqs:
        yield Diagnostic(
            "E0605",
            f"max_num_batched_tokens {serve.max_num_batched_tokens} is below max_num_seqs "
            f"{serve.max_num_seqs}: each request needs a token of every step, and vLLM refuses it",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {max(2048, serve.max_num_seqs)}",
        )
    given = {dashed(name): value for name, value in serve.extra_args.items()}
    whole = given.get("no-enable-chunked-prefill") is True or given.get("enable-chunked-prefill") is False
    if whole and serve.max_num_batched_tokens < serve.max_model_len:
        yield Diagnostic(
            "E0610",
            f"without chunked prefill a prompt is handled in one step: max_num_batched_tokens "
            f"{serve.max_num_batched_tokens} is below max_model_len {serve.max_model_len}, and vLLM "
            "refuses it",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {serve.max_model_len}, or leave chunked prefill on",
        )
    yield from _media(facts, serve, given)
    if serve.max_num_batched_tokens > serve.max_model_len * serve.max_num_seqs:
        yield Diagnostic(
            "W0611",
            f"max_num_batched_tokens {serve.max_num_batched_tokens} is more than {serve.max_num_seqs} "
            f"requests of {serve.max_model_len} tokens can fill",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {serve.max_model_len * serve.max_num_seqs}",
        )
    if serve.max_model_len < facts.recipe.data.max_length:
        yield Diagnostic(
            "W0617",
            f"it is trained on up to {facts.recipe.data.max_length:,} tokens and serves "
            f"{serve.max_model_len:,}: longer requests are refused",
            "serve.max_model_len",
            f"max_model_len: {facts.recipe.data.max_length} or more",
        )


def _media(facts: Facts, serve: Serve, given: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """A picture or video that no step is large enough for, where it may not be cut."""
    if facts.model is None:
        return
    family = facts.model.family.name
    tokens = MEDIA_TOKENS.get(family, 0)
    whole = {**FAMILY_FLAGS.get(family, {}), **given}.get("disable-chunked-mm-input") is True
    if whole and "limit-mm-per-prompt" not in given and serve.max_num_batched_tokens < tokens:
        yield Diagnostic(
            "E0641",
            f"{facts.model.title} is served with media in one piece, a video in {tokens:,} tokens: "
            f"max_num_batched_tokens {serve.max_num_batched_tokens:,} is below, and vLLM refuses it",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {tokens} or more, or extra_args: {{limit_mm_per_prompt: {{video: 0}}}}",
        )


def _image(serve: Serve) -> Iterator[Diagnostic]:
    if "@sha256:" in serve.image:
        if not re.fullmatch(r".+@sha256:[0-9a-f]{64}", serve.image):
            yield Diagnostic(
                "E0612",
                f"`{serve.image}` does not end in a digest of 64 hexadecimal digits",
                "serve.image",
                "write name@sha256: and the digest that the registry shows",
            )
        return
    tag = serve.image.rpartition("/")[2].partition(":")[2]
    if tag in ("", "latest", "nightly"):
        moving = f"the tag {tag} moves" if tag else "it has no tag, which means latest"
        yield Diagnostic(
            "W0613",
            f"the image `{serve.image}` is another one tomorrow: {moving}",
            "serve.image",
            f"pin it by digest: {serve.image.removesuffix(f':{tag}')}@sha256:...",
        )
    else:
        yield Diagnostic(
            "N0614",
            f"the image's tag `{tag}` may be moved by its publisher; a digest pins it",
            "serve.image",
        )
