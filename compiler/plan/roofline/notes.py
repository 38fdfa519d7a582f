"""Write the notes and warnings of a server's plan, as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from recipec.compiler.plan.roofline.cache import LATENT
from recipec.compiler.plan.roofline.results import Cache, ServingPlan
from recipec.compiler.plan.roofline.weights import missing, runs_jax_model
from recipec.compiler.wording import listing, plural
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program


def promise(plan: ServingPlan) -> Diagnostic | None:
    """Return note N1006 if max_num_seqs promises more sequences of max_model_len than the cache holds."""
    if plan.sequences_fit >= plan.max_num_seqs:
        return None
    where = "serve.max_num_seqs"
    if plan.sequences_fit == 0:
        way = "a smaller max_model_len, a larger tensor_parallel_size, or a larger accelerator"
        return Diagnostic("N1006", none_fits(plan.max_model_len, plan.tokens_fit), where, way)
    return too_many(plan.max_num_seqs, plan.max_model_len, plan.sequences_fit)


def notes(program: Program, kinds: Sequence[Cache], windows_bound: bool, share: float) -> Iterator[str]:
    """Yield the notes that apply to this recipe.

    Args:
        share: share of the memory that vLLM uses.
    """
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    yield from _cache_notes(program, kinds, windows_bound)
    if said := missing(program):
        yield said
    yield (
        f"vLLM takes {share:.0%} of the memory for weights and cache; the rest is for what else a step needs"
    )
    idle = accelerator.devices - serve.tensor_parallel_size * serve.data_parallel_size
    if idle > 0:
        yield f"{plural(idle, 'device')} are idle, but are paid for"
    if serve.quantization or program.recipe.merge.quantization:
        yield "arithmetic is bounded by the peak in bfloat16; a chip that multiplies fp8 may do more"
    if program.architecture.routing[0]:
        yield "experts are read as often as evenly routed tokens need them"
    if program.recipe.model.id.startswith((".", "/", "~")):
        yield f"sizes are from {program.model_origin}"
    left_out = [
        n
        for n in program.recipe.benchmark.input_lengths
        if n + program.recipe.benchmark.output_length > serve.max_model_len
    ]
    if left_out:
        yield (
            f"left out of the benchmark: {listing(f'{n:,}' for n in left_out)} tokens in and "
            f"{program.recipe.benchmark.output_length:,} out are more than max_model_len "
            f"{serve.max_model_len:,}, and vLLM refuses them"
        )


def _cache_notes(program: Program, kinds: Sequence[Cache], windows_bound: bool) -> Iterator[str]:
    serve = program.recipe.server
    tp, fp8 = serve.tensor_parallel_size, serve.kv_cache_dtype.startswith("fp8")
    windows = sorted({kind.window for kind in kinds if kind.window})
    if windows and windows_bound:
        yield f"local layers keep their window of {windows[0]:,} tokens and what a step adds to it"
    elif windows:
        why = (
            "tpu-inference's JAX models allocate every layer alike"
            if runs_jax_model(program)
            else "heads of several sizes, or a flag, prevent that"
        )
        yield f"local layers keep every token, not only their window of {windows[0]:,}: {why}"
    for kind in kinds:
        name = "" if kind.name == "all" else f"{kind.name} "
        if kind.name == LATENT:
            if tp > 1:
                yield f"each of {tp} devices stores the same compressed keys and values"
        elif kind.heads < tp:
            wasted = ", for which eight bits take as much as sixteen" if fp8 else ""
            yield (
                f"{name}layers have {plural(kind.heads, 'key/value head')} for {tp} devices: a device stores "
                f"one{wasted}, and {tp // kind.heads} devices the same"
            )
        elif fp8 and kind.device_heads % 2 and kind.head_dim != 64:
            yield (
                f"{name}layers have {plural(kind.device_heads, 'key/value head')} on a device: in eight bits "
                "an odd number is padded to the next even one"
            )
        if kind.shared:
            yield f"{kind.shared} {name}layers read the keys and values of earlier layers and store none"
    if getattr(program.architecture, "k_eq_v", False):
        yield (
            "keys serve as values only in the weights of the global layers: the cache holds both, which are "
            "normalized and rotated differently"
        )


def too_many(promised: int, length: int, fit: int) -> Diagnostic:
    """Return note N1006 for a cache that holds fewer sequences than max_num_seqs promises."""
    return Diagnostic(
        "N1006",
        f"max_num_seqs promises {plural(promised, 'sequence')}, and the key/value cache holds {fit:,} of "
        f"max_model_len {length:,} at once; vLLM delays the others",
        "serve.max_num_seqs",
        f"nothing if requests are shorter; otherwise max_num_seqs: {fit}",
    )


def none_fits(length: int, tokens: int) -> str:
    """Return the message that a cache of `tokens` tokens holds no sequence of max_model_len."""
    return (
        f"the key/value cache holds {tokens:,} tokens, less than one sequence of max_model_len {length:,}, "
        "and vLLM does not start"
    )
