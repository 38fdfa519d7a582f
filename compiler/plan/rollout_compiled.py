"""Take a rollout's passes and memory from compiles of its program, in place of the estimate from shapes.

The program of `runtime/model/decode.py` has one pass over the prompts, and a loop with a pass for each token.
The compiler does not know how often the loop runs. So its schedule is timed with one pass and with two: the
difference is a pass. Attention reads one of several numbers of slots, each about equally often, and counts
with its mean. As for a step, schedules of few layers foretell all layers (`depth.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import rates
from recipec.compiler.plan.depth import Part, parts
from recipec.compiler.plan.first_estimate import foretold, foretold_time
from recipec.compiler.plan.results import COPIES, Collective, Compiled, Generation, Memory, Pass, Timeline
from recipec.compiler.plan.schedule import priced, with_turns
from recipec.compiler.plan.step_memory import code_bytes, with_refusal
from recipec.compiler.plan.timeline import timeline
from recipec.compiler.roofline.rollout import RolloutNeed, axes_of, cache_bytes, differs


def rollout_parts(program: Program, backend: Backend) -> tuple[Part, ...]:
    """Return the compiles of a program's rollout, the one to the end first; () where it generates nothing."""
    if program.generated is None or program.recipe.rollout.engine != "mesh" or backend is not Backend.TUNIX:
        return ()
    compiles = parts(program)
    return compiles.few or (*compiles.refined[1:], compiles.whole)


def compiled_generation(
    program: Program, estimated: Generation, compiled: Mapping[Part, Compiled], memory: Memory
) -> Generation:
    """Return an estimate with the figures of compiles.

    If the compiler refused one of them, return only its memory: the rollout does not fit.

    Args:
        compiled: the results of `rollout_parts`.
        memory: of the training step, whose state stays while completions are generated.
    """
    compiles, axes = parts(program), dict(axes_of(program))
    end = compiled[compiles.end or compiles.whole]
    few, shares = (compiles.shallow, compiles.shares) if compiles.few else ((compiles.whole,), (1.0,))
    shallow = [compiled[part] for part in few]
    refused = next((result for result in shallow if result.out_of_memory is not None), None)
    whole = with_refusal(refused) if refused is not None else foretold(shallow, shares)
    layers = tuple(dict.fromkeys(result.layers for result in (end, *shallow)))
    cache = cache_bytes(program, axes)
    need = RolloutNeed(
        state=memory.weights + memory.adapters + memory.optimizer + memory.padding,
        weights=whole.arguments if differs(program, axes) else 0.0,
        cache=cache,
        work=max(0.0, whole.temporaries + code_bytes(whole, end) - cache),
    )
    out = replace(estimated, need=need, compiled_layers=layers, estimated=estimated)
    if refused is not None:
        return out
    reached = rates.reached(program.accelerator.generation)
    once, twice = (
        foretold_time(
            [timeline(with_turns(priced(result.schedule, end.prices), turns), reached) for result in shallow],
            shares,
        )
        for turns in (1, 2)
    )
    seconds, waits = twice.seconds - once.seconds, max(0.0, twice.exposed - once.exposed)
    exchanged = tuple(_between(once, twice))
    return replace(
        out,
        prefill=replace(
            estimated.prefill,
            compiled=max(0.0, once.seconds - seconds),
            waits=max(0.0, once.exposed - waits),
        ),
        decode=_with_bytes(replace(estimated.decode, compiled=seconds, waits=waits), exchanged),
        collectives=exchanged,
    )


def _with_bytes(decode: Pass, exchanged: tuple[Collective, ...]) -> Pass:
    """Return a pass with the bytes of its collectives: weights are gathered over other axes than tp."""
    weights = sum(total.bytes for total in exchanged if total.kind == "all-gather" and "tp" not in total.axes)
    return replace(decode, gathered=weights, summed=sum(total.bytes for total in exchanged) - weights)


def _between(once: Timeline, twice: Timeline) -> list[Collective]:
    """Return the collectives that the second timeline has in addition to the first, by kind and axes."""
    totals: dict[tuple[str, tuple[str, ...], bool], list[float]] = {}
    for sign, times in ((-1, once), (1, twice)):
        for moved in times.transfers:
            if moved.kind not in COPIES:
                total = totals.setdefault((moved.kind, moved.axes, moved.over_dcn), [0.0, 0.0])
                total[0] += sign * moved.count
                total[1] += sign * moved.bytes
    every = [Collective(*key, count=round(count), bytes=size) for key, (count, size) in totals.items()]
    return sorted((total for total in every if total.count > 0), key=lambda total: -total.bytes)
