"""What the language can say and this version does not do yet: never left out silently."""

from __future__ import annotations

from collections.abc import Iterator

from compiler.facts import Facts
from spec.diagnostics import Diagnostic


def check(facts: Facts) -> Iterator[Diagnostic]:
    yield from _attention(facts)


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
