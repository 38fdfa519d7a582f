"""Find collectives that the TPU compiler overlaps with other operations, by fusing a part of them with each.

One fusion starts the collective. Other fusions continue it while they compute something else. A last fusion
waits for its end. Each of these fusions contains the collective's instruction, with the same channel.
"""

from __future__ import annotations

import re

from recipec.compiler.plan.hlo.parse import Instruction, Module

COLLECTIVES = frozenset(
    (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    )
)
START = 'custom_call_target="AsyncCollectiveStart"'
DONE = 'custom_call_target="AsyncCollectiveDone"'
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
"""A result, and the operand whose memory it reuses, in output_to_operand_aliasing."""


class Overlap:
    """The fusions of a module that are parts of such collectives."""

    def __init__(self, module: Module) -> None:
        self._module = module
        starts = (body for body in module.computations.values() if _holds(body, START))
        self._channels = {channel(i) for body in starts for i in body if i.opcode in COLLECTIVES}

    def part(self, instruction: Instruction) -> str:
        """Return "start", "step" or "done" for a part of a collective; "" for any other operation."""
        if not self._channels or instruction.opcode != "fusion" or not instruction.calls:
            return ""
        body = self._module.computations.get(instruction.calls[0], ())
        collectives = [i for i in body if i.opcode in COLLECTIVES]
        if not any(channel(i) in self._channels for i in collectives):
            return ""
        return "start" if _holds(body, START) else "done" if _holds(body, DONE) else "step"


def kept(instruction: Instruction) -> tuple[set[int], set[int]]:
    """Return the numbers of the operands, and of the results, that share memory with each other."""
    pairs = ALIAS.findall(instruction.attributes)
    return {int(operand) for _, operand in pairs}, {int(result or 0) for result, _ in pairs}


def _holds(body: tuple[Instruction, ...], target: str) -> bool:
    return any(i.opcode == "custom-call" and target in i.attributes for i in body)


def channel(instruction: Instruction) -> str:
    """Return an instruction's channel id, "" where it has none."""
    match = CHANNEL.search(instruction.attributes)
    return match[1] if match else ""
