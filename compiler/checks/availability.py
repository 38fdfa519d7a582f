"""What the language can say and this version does not do yet: never left out silently."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.facts import Facts
from spec.diagnostics import Diagnostic


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _training(facts)
    yield from _attention(facts)
    yield from _unused(facts)


def _training(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    hosts = max(recipe.mesh.hosts, accelerator.hosts if accelerator else 1)
    if hosts > 1:
        path = (
            "mesh.hosts"
            if recipe.mesh.hosts > 1
            else "mesh.slices"
            if recipe.mesh.slices > 1
            else ("mesh.topology" if recipe.mesh.topology else "mesh.accelerator")
        )
        named = recipe.mesh.topology or recipe.mesh.accelerator
        what = f"`{named}` is {hosts} hosts" if recipe.mesh.hosts == 1 else f"hosts: {hosts}"
        if recipe.mesh.slices > 1:
            what = f"slices: {recipe.mesh.slices}"
        yield Diagnostic(
            "E0902",
            f"{what}, and training on several hosts is not in this version",
            path,
            "choose one slice of one host, such as v5p-8, v6e-8 or v5e-8, and hosts: 1; `recipe plan` "
            "compiles for more",
        )


def _attention(facts: Facts) -> Iterator[Diagnostic]:
    recipe, accelerator = facts.recipe, facts.accelerator
    if recipe.model.attention != "splash":
        return
    if accelerator is not None and accelerator.platform != "tpu":
        yield Diagnostic(
            "E0903",
            f"splash attention is a kernel of the TPU, and {accelerator.name} is a CPU",
            "model.attention",
            "attention: dot",
        )


def _unused(facts: Facts) -> Iterator[Diagnostic]:
    recipe = facts.recipe
    if recipe.launch.kind != type(recipe.launch)().kind:
        message = "this version makes nothing from `launch.kind`: it is recorded in recipe.lock.json alone"
        yield Diagnostic("N0916", message, "launch.kind")
