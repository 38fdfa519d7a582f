"""Choose what the backward pass of a step recomputes, by an estimate of the step's memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

from recipec.compiler.lowering.hardware import Accelerator
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.numbers import gib_number, memory_size
from recipec.compiler.roofline.step_estimate import Need, fits, need

POLICIES = ("none", "save_dots", "save_attention", "decoder")
"""The values of `remat.policy` that are tried, the fastest first. The last needs the least memory."""


@dataclass(frozen=True)
class RematChoice:
    """A policy, and the memory of all that were compared.

    Attributes:
        policy: the chosen value of `remat.policy`.
        needs: what a device needs, by policy, the fastest first.
        accelerator: the machine.
    """

    policy: str
    needs: dict[str, Need]
    accelerator: Accelerator

    @property
    def sure(self) -> bool:
        """Whether the step fits even if it takes the most memory that the estimate allows for."""
        return fits(self.accelerator, self.needs[self.policy].most)

    @property
    def reason(self) -> str:
        """The upper bounds of the memory with the policy and with the others, in words, and what may fit."""
        if self.accelerator.platform == "cpu":
            return "nothing is computed twice on a CPU"
        most = {policy: gib_number(of.most, 1) for policy, of in self.needs.items()}
        available = memory_size(self.accelerator.hbm_bytes_per_device)
        takes = f"{self.policy} needs up to {most[self.policy]} of {available} GiB by calculation"
        others = [f"{policy} {size}" for policy, size in most.items() if policy != self.policy]
        faster = list(self.needs)[: list(self.needs).index(self.policy)]
        perhaps = [policy for policy in faster if fits(self.accelerator, self.needs[policy].least)]
        asked = f"; {perhaps[0]} may fit and is faster: recipe plan tells" if perhaps else ""
        return ", ".join([takes, *others]) + asked


def choose(program: Program) -> RematChoice:
    """Choose the fastest policy with which a program's step surely fits, or the one that needs the least."""
    needs = {policy: need(with_policy(program, policy)) for policy in candidates(program)}
    fitting = [policy for policy, of in needs.items() if fits(program.accelerator, of.most)]
    return RematChoice(fitting[0] if fitting else list(needs)[-1], needs, program.accelerator)


def candidates(program: Program) -> tuple[str, ...]:
    """Return the policies that make sense for a program, the fastest first.

    On a CPU that is no recomputation. Without splash attention, the scores are computed again even if the
    result is stored.
    """
    if program.accelerator.platform == "cpu":
        return POLICIES[:1]
    splash = program.recipe.model.attention == "splash"
    return tuple(policy for policy in POLICIES if splash or policy != "save_attention")


def with_policy(program: Program, policy: str) -> Program:
    """Return the program with another `remat.policy`, which stays a default if it is one."""
    remat = program.recipe.remat
    changed = remat.model_copy(update={"policy": policy})
    if "policy" not in remat.model_fields_set:
        changed.model_fields_set.discard("policy")
    return replace(program, recipe=program.recipe.model_copy(update={"remat": changed}))
