"""Check the section `xla` against the accelerator, and against the flags that the pinned libtpu accepts."""

from __future__ import annotations

from collections.abc import Iterator

from recipec.compiler.lowering import libtpu
from recipec.compiler.lowering.facts import Facts
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic

E0223 = Code(
    "E0223",
    "flags of another TPU generation",
    cause="The `xla` profile contains flags that were published for one TPU generation, and the "
    "machine of the recipe belongs to another.",
    cure="Name the machine's own profile, or `none`.",
)

E0224 = Code(
    "E0224",
    "unknown flag of libtpu",
    cause="A run with a flag that libtpu does not know ends with an error at the start. The list "
    "comes from the pinned version.",
    cure="Correct the name, write it without dashes, or remove it.",
)


def check(facts: Facts) -> Iterator[Diagnostic]:
    asked, accelerator = facts.recipe.xla, facts.accelerator
    if accelerator is not None and asked.profile not in ("none", "auto", accelerator.generation):
        yield Diagnostic(
            E0223,
            f"the profile {asked.profile} has flags for another TPU generation than that of "
            f"{accelerator.name}",
            "xla.profile",
            f"profile: {libtpu.own_profile(accelerator.generation)}",
        )
    for name in asked.flags:
        if not libtpu.known(name):
            near = libtpu.near(name)
            yield Diagnostic(
                E0224,
                f"libtpu {libtpu.version()} has no flag `{name}`",
                f"xla.flags.{name}",
                f"did you mean `{near}`?"
                if near
                else "remove it: libtpu stops with an error at an unknown flag",
                at_key=True,
            )
