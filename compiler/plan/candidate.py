"""A configuration that passed the checks, with the least that it can take."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.plan.bound import bound, rows
from compiler.plan.pareto import Objectives
from compiler.plan.run import usd_per_hour
from compiler.plan.variants import Variant
from compiler.program import Program


@dataclass(frozen=True)
class Candidate:
    """A configuration that can be compiled.

    Attributes:
        tokens: real ones of a micro-batch over all devices.
        lowest: lower bounds of its objectives.
    """

    variant: Variant
    program: Program
    tokens: float
    lowest: Objectives

    @classmethod
    def of(cls, variant: Variant, program: Program, tokens_per_row: float | None) -> Candidate:
        """The candidate of a variant.

        Args:
            tokens_per_row: real tokens of a row on average; data.max_length when None.
        """
        length = program.recipe.data.max_length
        least = bound(program, length)
        tokens = rows(program) * (length if tokens_per_row is None else tokens_per_row)
        return cls(variant, program, tokens, objectives(program, least.seconds / tokens, least.memory_bytes))

    @property
    def memory(self) -> float:
        """Bytes of HBM that a device needs at the least."""
        return self.lowest[1]

    def needs_more(self, other: Candidate) -> bool:
        """Whether this is another configuration with more rows on each device."""
        a, b = self.variant, other.variant
        same = (a.axes, a.remat, a.attention) == (b.axes, b.remat, b.attention)
        return same and a.micro_batch > b.micro_batch and self.memory >= other.memory


def objectives(program: Program, seconds_per_token: float, memory: float) -> Objectives:
    """What is to be small: seconds a token, bytes of HBM, and what a token costs: US$, or device-seconds
    where there is no price."""
    price = usd_per_hour(program)
    rate = program.accelerator.devices if price is None else price / 3600
    return seconds_per_token, memory, seconds_per_token * rate
