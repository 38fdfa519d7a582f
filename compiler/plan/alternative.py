"""The cost of the mesh that note N0227 of the checks suggests: fsdp 2 x tp 2."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from recipec.compiler.emitters.backends import Backend
from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import identity
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.estimate import estimate
from recipec.compiler.plan.planner import job
from recipec.compiler.plan.pool import cached
from recipec.compiler.plan.results import Plan
from recipec.compiler.plan.units import gib, milliseconds
from recipec.spec.load import load

CODE = "N0227"
OTHER = "mesh.axes={fsdp: 2, tp: 2}"


def note(program: Program, plan: Plan, sets: Sequence[str], exact: bool) -> str:
    """Return a sentence with the time of an optimizer step and a device's memory on the other mesh.

    The figures come from earlier plans in the cache. Without them, the sentence has the command that plans
    the other mesh. Nothing is compiled.

    Args:
        program: a recipe's program for which the checks give the note. If the checks refuse the recipe on
            the other mesh, the sentence says so.
        plan: the program's own plan.
        sets, exact: the --set arguments and --exact of that plan.
    """
    every, backend = (*sets, OTHER), Backend(plan.backend)
    other = lower(load(program.source, every), planning=True).program
    name = "fsdp 2 x tp 2, which note N0227 names,"
    if other is None:
        return f"{name} is refused for this recipe; recipe check --set {shlex.quote(OTHER)} shows the reason"
    jobs = [job(other, every, part, backend) for part in parts(other, exact)]
    results = [found for found in (cached(identity.name(*one)) for one in jobs) if found is not None]
    if len(results) < len(jobs):
        words = ["recipe", "plan", str(program.source), *(["--exact"] if exact else [])]
        words += ["--backend", backend.value] if backend is not Backend.TUNIX else []
        words += [word for one in every for word in ("--set", one)]
        return f"{name} is not planned yet; its time and memory: {shlex.join(words)}"
    made = estimate(other, results)
    if not made.seconds:
        return f"{name} does not fit: it takes {gib(made.memory.used)} GiB of {gib(made.memory.available)}"
    step = milliseconds(made.seconds * other.accumulation_steps)
    own = milliseconds(plan.estimate.seconds * program.accumulation_steps)
    return (
        f"{name} takes an estimated {step} for an optimizer's step and {gib(made.memory.used)} GiB of a "
        f"device, where this mesh takes {own} and {gib(plan.estimate.memory.used)} GiB"
    )
