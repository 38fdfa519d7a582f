"""Check serving: the accelerator's data types, devices and memory; vLLM's limits; the image."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import facts_of
from recipec.compiler.checks.quantized import E0604
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.facts import Facts
from recipec.compiler.lowering.hardware import Accelerator, from_name, known_names, supported_by_vllm
from recipec.compiler.vllm.device_memory import DEFAULT_SHARE, memory_share, weight_size
from recipec.compiler.vllm.flags import by_flag, version
from recipec.compiler.vllm.image_name import ImageName
from recipec.compiler.vllm.lengths import ALLOWED, allows_longer, longest_request
from recipec.compiler.wording import divisors, line, listing, plural
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.spec.language import Serve

RELEASES = "vllm/vllm-tpu"
"""The repository of vLLM-TPU's releases on Docker Hub, whose tags are v and the version."""

SHARE_OF_WEIGHTS = 0.95
"""The most of vLLM's memory that weights take in a suggestion, which leaves the rest to the cache."""


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


E0602 = Code(
    "E0602",
    "more devices than the accelerator has",
    cause="tensor_parallel_size x data_parallel_size is larger than the number of devices.",
    cure="Use the sizes that the message gives.",
)

W0602 = Code(
    "W0602",
    "idle devices",
    cause="tensor_parallel_size x data_parallel_size leaves devices of the accelerator unused, and "
    "you pay for them.",
    cure="Use the sizes that the message gives, or a smaller accelerator.",
)

N0609 = Code(
    "N0609",
    "experimental generation",
    cause="tpu-inference's compatibility table calls v3, v4 and v5p experimental.",
    cure="Use v5e, v6e or tpu7x.",
)

W0609 = Code(
    "W0609",
    "generation without an attention kernel",
    cause="tpu-inference 0.32 has block sizes only for v5, v6 and v7, and raises an error on v4.",
    cure="Use v5e, v6e or tpu7x.",
)

E0915 = Code(
    "E0915",
    "serving on several hosts",
    cause="The serving accelerator has several machines.",
    cure="Use a slice with one host.",
)


def _devices(serve: Serve, accelerator: Accelerator) -> Iterator[Diagnostic]:
    tp, dp = serve.tensor_parallel_size, serve.data_parallel_size
    need = tp * dp
    product = f"tensor_parallel_size {tp} x data_parallel_size {dp} = {plural(need, 'device')}"
    has = f"{accelerator.name} has {plural(accelerator.devices, 'device')}"
    if accelerator.devices != accelerator.chips or accelerator.name_counts == "tensorcores":
        has += f" ({plural(accelerator.chips, 'chip')})"
    other = [size for size in divisors(accelerator.devices) if size <= tp]
    better = f"tensor_parallel_size: {other[-1]}, data_parallel_size: {accelerator.devices // other[-1]}"
    sizes = ("tensor_parallel_size", "data_parallel_size", "accelerator")
    place = f"serve.{next((name for name in sizes if name in serve.model_fields_set), sizes[0])}"
    if need > accelerator.devices:
        yield Diagnostic(E0602, f"{product}, and {has}", place, better)
    elif need < accelerator.devices:
        yield Diagnostic(W0602, f"{product}, and {has}: the others are idle", place, better)
    if accelerator.hosts > 1:
        yield Diagnostic(
            E0915,
            f"{accelerator.name} has {accelerator.hosts} hosts, and this version cannot serve on several "
            "hosts",
            "serve.accelerator",
            _one_host(serve),
        )
    if accelerator.generation in supported_by_vllm("experimental"):
        yield Diagnostic(
            N0609,
            f"vllm-tpu calls {accelerator.generation} experimental; it is tested on "
            f"{listing(supported_by_vllm('advised', 'tested'))}",
            "serve.accelerator",
            _one_host(serve),
        )
    if accelerator.generation in supported_by_vllm("no kernel"):
        yield Diagnostic(
            W0609,
            f"tpu-inference {version()} has no block sizes of its attention kernel for "
            f"{accelerator.generation}: by its source code the server stops at the first compilation",
            "serve.accelerator",
            _one_host(serve),
        )


def _one_host(serve: Serve) -> str:
    """Suggest a slice of one host with as many devices as the server needs."""
    need = serve.tensor_parallel_size * serve.data_parallel_size
    (generation,) = supported_by_vllm("advised")
    slices = [from_name(name) for name in known_names() if name.startswith(f"{generation}-")]
    slices = [slice for slice in slices if slice.hosts == 1]
    for slice in slices:
        if need <= slice.devices:
            return f"accelerator: {slice.name}"
    largest = slices[-1]
    tp = max(size for size in divisors(largest.devices) if size <= serve.tensor_parallel_size)
    replicas = largest.devices // tp
    return f"accelerator: {largest.name}, tensor_parallel_size: {tp}, data_parallel_size: {replicas}"


E0603 = Code(
    "E0603",
    "no fp8 key/value cache",
    cause="This chip generation has no fp8. On v5e, vllm-tpu accepts the flag but keeps a bfloat16 "
    "cache (tpu-inference issue 3126).",
    cure="Write `kv_cache_dtype: auto`, or use v6e or tpu7x.",
)


def _types(serve: Serve, accelerator: Accelerator) -> Iterator[Diagnostic]:
    where = f"{accelerator.generation} has no fp8"
    if serve.kv_cache_dtype.startswith("fp8") and not accelerator.fp8_kv_cache:
        yield Diagnostic(
            E0603,
            f"kv_cache_dtype {serve.kv_cache_dtype}: {where}; vllm-tpu accepts the flag there but keeps the "
            "cache in bfloat16, at twice the planned size",
            "serve.kv_cache_dtype",
            "kv_cache_dtype: auto, or accelerator: v6e-8",
        )
    if serve.quantization == "fp8" and not accelerator.fp8_matmul:
        yield Diagnostic(
            E0604,
            f"quantization fp8: {where}, and vllm-tpu does not run fp8 weights on it",
            "serve.quantization",
            "quantization: null, or accelerator: v6e-8",
        )


E0606 = Code(
    "E0606",
    "tensor_parallel_size does not divide the heads",
    cause="vLLM refuses this size.",
    cure="Use a size that the message gives.",
)


def _heads(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    if facts.model is None:
        return
    architecture, title, tp = facts.model.architecture, facts.model.title, serve.tensor_parallel_size
    heads = architecture.num_heads
    if heads % tp:
        yield Diagnostic(
            E0606,
            f"tensor_parallel_size {tp} does not divide the {heads} attention heads of {title}: vLLM "
            "refuses it",
            "serve.tensor_parallel_size",
            _split(facts, tp),
        )
        return
    for count in sorted({architecture.kv_heads(i) for i in range(architecture.num_layers)}):
        if max(count, tp) % min(count, tp):
            yield Diagnostic(
                E0606,
                f"{title} has {plural(count, 'key/value head')}, which tensor_parallel_size {tp} can neither "
                "split nor copy evenly: tpu-inference refuses it",
                "serve.tensor_parallel_size",
                _split(facts, tp),
            )


def _possible_sizes(facts: Facts) -> list[int]:
    """Return the sizes of tensor_parallel_size that the model's heads and the accelerator's devices allow."""
    assert facts.model is not None
    architecture, accelerator = facts.model.architecture, facts.serve_accelerator
    counts = {architecture.kv_heads(i) for i in range(architecture.num_layers)}
    return [
        n
        for n in divisors(architecture.num_heads)
        if (accelerator is None or accelerator.devices % n == 0)
        and not any(max(count, n) % min(count, n) for count in counts)
    ]


def _split(facts: Facts, most: int) -> str:
    """Return the largest possible size up to `most`, with the number of replicas that then fit."""
    size = max(n for n in _possible_sizes(facts) if n <= most)
    accelerator = facts.serve_accelerator
    replicas = f", data_parallel_size: {accelerator.devices // size}" if accelerator else ""
    return f"tensor_parallel_size: {size}{replicas}"


E0608 = Code(
    "E0608",
    "weights do not fit",
    cause="The weights need more than the share of memory that vLLM uses.",
    cure="Use a larger tensor_parallel_size or accelerator.",
)


def _memory(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    sizes = _weight_gib(facts)
    if sizes is not None and sizes[0] > sizes[1]:
        assert facts.model is not None and facts.serve_accelerator is not None
        yield Diagnostic(
            E0608,
            f"the weights of {facts.model.title} take {sizes[0]:.1f} GiB of each device at "
            f"tensor_parallel_size {serve.tensor_parallel_size}, and vLLM uses {sizes[1]:.1f} GiB "
            f"({_share(serve):.0%}) of a {facts.serve_accelerator.generation} device, which leaves no "
            "memory for a key/value cache",
            "serve.tensor_parallel_size",
            _fitting(facts, serve),
        )


def _weight_gib(facts: Facts) -> tuple[float, float] | None:
    """Return the GiB per device of the weights, and the GiB that vLLM uses; None if they are unknown."""
    serve, accelerator = facts.recipe.serve, facts.serve_accelerator
    if serve is None or facts.model is None or accelerator is None or accelerator.hbm_gib is None:
        return None
    numbers = sum(math.prod(p.shape) for p in facts.defaults if p.sources)
    gib = numbers * weight_size(facts.recipe) / serve.tensor_parallel_size / 2**30
    return gib, accelerator.hbm_gib / accelerator.devices_per_chip * _share(serve)


def _fitting(facts: Facts, serve: Serve) -> str:
    """Suggest the smallest tensor_parallel_size with which the weights fit, or another way to make them
    fit."""
    accelerator, sizes = facts.serve_accelerator, _weight_gib(facts)
    assert facts.model is not None and accelerator is not None and sizes is not None
    whole, most = sizes[0] * serve.tensor_parallel_size, sizes[1] * SHARE_OF_WEIGHTS
    possible = _possible_sizes(facts)
    for size in possible:
        if whole / size <= most:
            return _split(facts, size)
    if weight_size(facts.recipe) == 2 and accelerator.fp8_matmul and whole / 2 / possible[-1] <= most:
        return f"{_split(facts, possible[-1])}, quantization: fp8"
    return "use an accelerator with more memory, or a smaller model"


def _share(serve: Serve) -> float:
    """Return the share of the device's memory for weights: vLLM's default, or the recipe's if it is
    larger."""
    try:
        return max(DEFAULT_SHARE, memory_share(serve.extra_args))
    except ArtifactError:
        return DEFAULT_SHARE


E0605 = Code(
    "E0605",
    "fewer tokens than requests in a step",
    cause="vLLM refuses a max_num_batched_tokens below max_num_seqs.",
    cure="Use a larger max_num_batched_tokens.",
)

E0610 = Code(
    "E0610",
    "prompt does not fit one step",
    cause="Chunked prefill is off and max_num_batched_tokens is below max_model_len. vLLM refuses this.",
    cure="Use a larger max_num_batched_tokens, or chunked prefill.",
)

W0611 = Code(
    "W0611",
    "more tokens in a step than requests can fill",
    cause="max_num_batched_tokens exceeds max_model_len x max_num_seqs. This wastes memory and "
    "compiled shapes.",
    cure="Use a smaller max_num_batched_tokens.",
)

W0617 = Code(
    "W0617",
    "serves less than it was trained on",
    cause="max_model_len is below data.max_length.",
    cure="Use a larger max_model_len, as far as the model's positions allow, or a smaller data.max_length.",
)


def _limits(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    if serve.max_num_batched_tokens < serve.max_num_seqs:
        yield Diagnostic(
            E0605,
            f"max_num_batched_tokens {serve.max_num_batched_tokens} is below max_num_seqs "
            f"{serve.max_num_seqs}: each request needs a token in every step, and vLLM refuses this",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {max(2048, serve.max_num_seqs)}",
        )
    flags = by_flag(serve.extra_args)
    whole = flags.get("no-enable-chunked-prefill") is True or flags.get("enable-chunked-prefill") is False
    if whole and serve.max_num_batched_tokens < serve.max_model_len:
        yield Diagnostic(
            E0610,
            f"without chunked prefill a prompt is processed in one step: max_num_batched_tokens "
            f"{serve.max_num_batched_tokens} is below max_model_len {serve.max_model_len}, and vLLM refuses "
            "this",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {serve.max_model_len}, or remove the flag from extra_args",
        )
    yield from _media(facts, serve, flags)
    if serve.max_num_batched_tokens > serve.max_model_len * serve.max_num_seqs:
        yield Diagnostic(
            W0611,
            f"max_num_batched_tokens {serve.max_num_batched_tokens} is more than {serve.max_num_seqs} "
            f"requests of {serve.max_model_len} tokens can fill",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {serve.max_model_len * serve.max_num_seqs}",
        )
    yield from _positions(facts, serve)
    trained, most = facts.recipe.data.max_length, longest_request(facts.model, serve)
    if serve.max_model_len < trained:
        served = trained if most is None else min(trained, most)
        shorter = line("data.max_length", served, "serve.max_model_len")
        helps = [f"max_model_len: {served}"] if served > serve.max_model_len else []
        yield Diagnostic(
            W0617,
            f"the model is trained on up to {trained:,} tokens and serves {serve.max_model_len:,}: longer "
            "requests are refused",
            "serve.max_model_len",
            ", and ".join([*helps, *([shorter] if served < trained else [])]),
        )


E0666 = Code(
    "E0666",
    "requests longer than the model's positions",
    cause="max_model_len is above the positions in the model's config.json, with its rope scaling and "
    "`hf_overrides` counted. vLLM refuses to start.",
    cure="Use the max_model_len that the message names.",
)

W0666 = Code(
    "W0666",
    "requests longer than the model's positions, which the server permits",
    cause="VLLM_ALLOW_LONG_MAX_MODEL_LEN makes vLLM start although max_model_len is above the model's "
    "positions. Answers beyond them are arbitrary.",
    cure="Use the max_model_len that the message names.",
)


def _positions(facts: Facts, serve: Serve) -> Iterator[Diagnostic]:
    """Report requests for which the model has no positions."""
    most = longest_request(facts.model, serve)
    if facts.model is None or most is None or serve.max_model_len <= most:
        return
    code, then = E0666, "vLLM refuses to start"
    if allows_longer(serve):
        code, then = W0666, f"{ALLOWED} permits it, and answers beyond them are arbitrary"
    yield Diagnostic(
        code,
        f"max_model_len is {serve.max_model_len:,}, and {facts.model.title} has {most:,} positions: {then}",
        "serve.max_model_len",
        f"max_model_len: {most}",
    )


E0641 = Code(
    "E0641",
    "a video does not fit one step",
    cause="Gemma 4's media are processed in one piece (--disable-chunked-mm-input), and "
    "max_num_batched_tokens is below the tokens of a video. vLLM refuses this.",
    cure="Use a larger max_num_batched_tokens, or limit_mm_per_prompt in serve.extra_args.",
)


def _media(facts: Facts, serve: Serve, flags: Mapping[str, Any]) -> Iterator[Diagnostic]:
    """Report a step too small for a video, if media may not be split over several steps."""
    if facts.model is None:
        return
    served = facts_of(facts.model.family.name).served
    tokens = served.media_tokens
    whole = {**served.flags, **flags}.get("disable-chunked-mm-input") is True
    if whole and "limit-mm-per-prompt" not in flags and serve.max_num_batched_tokens < tokens:
        yield Diagnostic(
            E0641,
            f"{facts.model.title} is served with media in one piece, and a video has {tokens:,} tokens: "
            f"max_num_batched_tokens {serve.max_num_batched_tokens:,} is smaller, and vLLM refuses this",
            "serve.max_num_batched_tokens",
            f"max_num_batched_tokens: {tokens}, or extra_args: {{limit_mm_per_prompt: {{video: 0}}}}",
        )


E0612 = Code(
    "E0612",
    "malformed image digest",
    cause="A digest is sha256: and 64 hexadecimal digits.",
    cure="Leave it out: `recipe serve pin RECIPE` asks the registry for it. Or copy all of it from there.",
)

W0613 = Code(
    "W0613",
    "image can change",
    cause="An image without a tag, or with a tag such as latest, changes over time. Its version of "
    "vLLM is not known either.",
    cure="Use the tag of the pinned version, which is the default, or pin the image by digest: "
    "`recipe serve pin RECIPE`.",
)

N0662 = Code(
    "N0662",
    "version of the image is not the pinned one",
    cause="Flags, features and limits of the server are checked against the pinned vllm-tpu. Releases "
    "are tagged `vllm/vllm-tpu:v` and the version. Another tag, or a digest alone, says nothing "
    "about the version, and the server may refuse a flag that passed the check. The publisher can "
    "also move such a tag.",
    cure="Use the default image, with or without its digest (`name:tag@sha256:...`). For another "
    "image, run `serve/smoke.sh`, which asks the server for its version.",
)


def _image(serve: Serve) -> Iterator[Diagnostic]:
    """Report an image that can change, or whose version of vLLM is not the one that flags are checked
    against."""
    image = ImageName.read(serve.image)
    if "@" in serve.image and not image.valid_digest:
        yield Diagnostic(
            E0612,
            f"`{serve.image}` does not end in a digest of 64 hexadecimal digits",
            "serve.image",
            f"image: {image.tagged}; `recipe serve pin RECIPE` adds its digest",
        )
        return
    if not image.digest and image.tag in ("", "latest", "nightly"):
        moving = f"the tag {image.tag} moves" if image.tag else "without a tag it is latest"
        yield Diagnostic(
            W0613,
            f"the image `{serve.image}` can change at any time ({moving}), and its version of vLLM is not "
            f"known: flags and features are checked against vllm-tpu {version()}",
            "serve.image",
            f"image: {RELEASES}:v{version()}",
        )
        return
    a_release = image.repository.rpartition("/")[2] == RELEASES.rpartition("/")[2]
    release = re.fullmatch(r"v(\d+\.\d+\.\d+)", image.tag) if a_release else None
    if release is None or release[1] != version():
        holds = f"has vllm-tpu {release[1]}" if release else "has a version of vLLM that is not known"
        yield Diagnostic(
            N0662,
            f"the image `{image.tagged}` {holds}: flags and features are checked against vllm-tpu "
            f"{version()}",
            "serve.image",
            f"image: {RELEASES}:v{version()}; or run smoke.sh, which asks the server for its version",
        )
