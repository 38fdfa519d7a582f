"""`recipe plan --serve`: plan a server by compiling its step, or find the fastest on the recipe's machine.

The search varies the split of the devices over TP and DP, and the type of the key/value cache. For models
with windows it also varies the decode kernel's block size: with the default, a block is the whole context,
and a window saves no reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.document import Document
from recipec.compiler.plan.server_step.compile import Run, Say
from recipec.compiler.plan.server_step.compiled_text import document, search_document
from recipec.compiler.plan.server_step.configuration import BLOCKS, serving
from recipec.compiler.plan.server_step.hlo import AttentionKernel, attention_kernel
from recipec.compiler.plan.server_step.server_plan import (
    COMPILED_SERVING,
    SERVING_SEARCH,
    CompiledServing,
    ServeProgram,
    ServingCandidate,
    ServingSearch,
)
from recipec.compiler.roofline.server_estimate import none_fits, plan_serving
from recipec.compiler.vllm import blocks as block_sizes
from recipec.compiler.vllm.device_memory import memory_share, weight_size
from recipec.compiler.wording import divisors
from recipec.spec.core_schema import flow

BLOCK = 1024
"""Tokens of the decode kernel's block that is tried in addition to its default."""


def plan_serve(
    program: Program, exact: bool = False, search: bool = False, say: Say = print, run: Run | None = None
) -> tuple[str, Document, dict[str, Any]]:
    """Plan a recipe's server, or search for a faster one.

    Args:
        program: the program of a recipe with a `serve` section.
        exact: compile every layer, instead of extrapolating from two depths.
        search: also try other parallelism, cache types and decode blocks.
        say: called with progress messages, one sentence at a time.
        run: answers a job in place of a worker.

    Returns:
        A title, the document to show, and a CompiledServing or a ServingSearch as JSON values.

    Raises:
        ArtifactError: the server cannot be planned by compiling.
    """
    if search:
        result = searched(program, exact, say, run)
        data = SERVING_SEARCH.dump_python(result, mode="json")
        return "Serving, searched by compiling", search_document(result), data
    planned = serving(program, exact, say, run)
    return "Serving, compiled", document(planned), COMPILED_SERVING.dump_python(planned, mode="json")


def searched(program: Program, exact: bool, say: Say, run: Run | None = None) -> ServingSearch:
    """Compile every configuration that is not ruled out on paper.

    Raises:
        ArtifactError: the recipe itself cannot be compiled.
    """
    recipe_choice = _choice(program, *_own(program))
    say("the recipe as it is")
    candidates = [_judged(recipe_choice, serving(program, exact, say, run))]
    # A prefill does not depend on the cache's type or the decode blocks, so each TP needs only one.
    prefills = {c.tensor_parallel: _prefill(c.serving) for c in candidates if c.serving}
    every = [choice for choice in choices(program) if choice != recipe_choice]
    for number, choice in enumerate(every, 1):
        reason = ruled_out(program, choice)
        if reason:
            candidates.append(replace(choice, status="refused", reason=reason))
            continue
        say(
            f"{number} of {len(every)}: TP {choice.tensor_parallel} x DP {choice.data_parallel}, "
            f"{choice.kv_cache_dtype} cache, decode blocks {choice.decode_blocks or 'default'}"
        )
        candidates.append(_compiled(program, choice, exact, say, run, prefills.get(choice.tensor_parallel)))
        if done := candidates[-1].serving:
            prefills.setdefault(choice.tensor_parallel, _prefill(done))
    speeds = [c.serving.throughput if c.serving else 0.0 for c in candidates]
    best = max(range(len(speeds)), key=speeds.__getitem__)
    return ServingSearch(tuple(candidates), best if speeds[best] else None)


def choices(program: Program) -> Iterator[ServingCandidate]:
    """Yield all configurations of the recipe's machine, before anything is compiled."""
    serve, accelerator = program.recipe.server, program.serve_accelerator
    assert accelerator is not None
    types = [serve.kv_cache_dtype, "fp8" if accelerator.fp8_kv_cache else "auto", "auto"]
    blocks: list[str | None] = [None]
    architecture = program.architecture
    if any(map(architecture.window, range(architecture.num_layers))) and serve.max_model_len >= 2 * BLOCK:
        blocks.append(f"1,{BLOCK},1,{BLOCK}")
    for size in reversed(divisors(accelerator.devices)):
        for kind in dict.fromkeys(types):
            for block in blocks:
                yield _choice(program, size, accelerator.devices // size, kind, block)


def ruled_out(program: Program, choice: ServingCandidate) -> str:
    """Return why a configuration cannot work, "" where it may work."""
    architecture, size = program.architecture, choice.tensor_parallel
    accelerator = program.serve_accelerator
    assert accelerator is not None
    if architecture.num_heads % size:
        return f"{size} does not divide the {architecture.num_heads} attention heads"
    for heads in sorted({architecture.kv_heads(i) for i in range(architecture.num_layers)}):
        if heads % size and size % heads:
            return f"{heads} key/value heads can be neither split over {size} devices nor copied evenly"
    gib = weight_size(program.recipe) * program.base_parameters / size / 2**30
    share = memory_share(program.recipe.server.extra_args)
    room = share * (accelerator.hbm_gib or 0) / accelerator.devices_per_chip
    if gib >= room:
        return f"the weights take {gib:.1f} GiB of each device, and vLLM uses {room:.1f} GiB"
    on_paper = plan_serving(
        program.serving(
            tensor_parallel_size=size,
            data_parallel_size=choice.data_parallel,
            kv_cache_dtype=choice.kv_cache_dtype,
        )
    )
    if not on_paper.sequences_fit:
        return none_fits(on_paper.max_model_len, on_paper.tokens_fit)
    return ""


def _choice(
    program: Program, tensor_parallel: int, data_parallel: int, kind: str, blocks: str | None
) -> ServingCandidate:
    sets = _sets(program, (tensor_parallel, data_parallel, kind, blocks))
    return ServingCandidate(sets, tensor_parallel, data_parallel, kind, blocks, status="")


def _own(program: Program) -> tuple[int, int, str, str | None]:
    """Return the recipe's TP, DP, type of the cache and decode blocks."""
    serve = program.recipe.server
    blocks = block_sizes.environment(serve).get(BLOCKS)
    return serve.tensor_parallel_size, serve.data_parallel_size, serve.kv_cache_dtype, blocks


def _prefill(planned: CompiledServing) -> ServeProgram | None:
    """Return a plan's prefill step, or None if the compiler refused it."""
    return next((p for p in planned.programs if p.kind == "prefill" and p.refusal is None), None)


def _compiled(
    program: Program,
    choice: ServingCandidate,
    exact: bool,
    say: Say,
    run: Run | None,
    prefill: ServeProgram | None,
) -> ServingCandidate:
    serve = program.recipe.server
    environment = {name: value for name, value in serve.env.items() if name != BLOCKS}
    if choice.decode_blocks:
        environment[BLOCKS] = choice.decode_blocks
    try:
        planned = serving(
            program,
            exact,
            say,
            run,
            data_parallel=choice.data_parallel,
            prefill=prefill,
            tensor_parallel=choice.tensor_parallel,
            kv_cache_dtype=choice.kv_cache_dtype,
            environment=tuple(sorted(environment.items())),
        )
    except ArtifactError as error:
        return replace(choice, status="failed", reason=str(error))
    if choice.decode_blocks and not _blocks_taken(planned):
        return replace(choice, status="failed", reason="the kernel refused the decode block sizes")
    return _judged(choice, planned)


def _judged(choice: ServingCandidate, planned: CompiledServing) -> ServingCandidate:
    if planned.fits:
        return replace(choice, status="compiled", serving=planned)
    return replace(choice, status="too large", reason="does not fit the devices' HBM", serving=planned)


def _sets(program: Program, settings: Sequence[Any]) -> tuple[str, ...]:
    """Return the --set arguments for what differs from the recipe."""
    recipe_settings, env, blocks = _own(program), dict(program.recipe.server.env), settings[3]
    keys = ("tensor_parallel_size", "data_parallel_size", "kv_cache_dtype")
    pairs = zip(keys, settings, recipe_settings, strict=False)
    sets = [f"serve.{key}={value}" for key, value, present in pairs if value != present]
    if blocks != recipe_settings[3]:
        if BLOCKS in env:
            env = {**env, BLOCKS: blocks} if blocks else {name: env[name] for name in env if name != BLOCKS}
            sets.append(f"serve.env={flow(env)}")
        else:
            sets.append(f"serve.decode_block_sizes={flow(blocks and [*map(int, blocks.split(','))])}")
    return tuple(sets)


def _blocks_taken(planned: CompiledServing) -> bool:
    """Return whether the compiled decode kernels have the requested block size."""
    kernels: list[AttentionKernel] = [
        kernel
        for program in planned.programs
        for name, _ in program.kernels
        if program.kind == "decode" and (kernel := attention_kernel(name)) and kernel.decode
    ]
    asked = int((planned.decode_blocks or "0,0").split(",")[1])
    return bool(kernels) and all(kernel.block == asked for kernel in kernels)
