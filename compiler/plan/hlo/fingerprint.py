"""Fingerprint operations: two operations have the same fingerprint if libtpu makes the same code for them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from recipec.compiler.plan.hlo.costs import LABELS, WINDOW
from recipec.compiler.plan.hlo.parse import Instruction, Module

NOTES = re.compile(r",? ?(?:metadata|backend_config)=.*", re.DOTALL)
"""The end of an instruction's attributes, on which its work does not depend."""
NAMES = re.compile(r"%[^\s,(){}]+|\bchannel_id=\d+|/\*index=\d+\*/")
MEMORY = re.compile(r"S\(\d+\)")
PRODUCTS = ("convolution", "dot")


@dataclass
class Fingerprints:
    """The fingerprints of a module's operations."""

    module: Module
    _bodies: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def of(self, instruction: Instruction, computation: str) -> tuple[str, str, str]:
        """Return three digests of an operation.

        The first is of its computation with shapes, layouts and memories. The second leaves out the memories.
        The third is of its matrix products alone, "" without any.
        """
        named = self.module.by_name[computation]
        operands = [named[name].shape for name in instruction.operands if name in named]
        text = self._line(instruction, operands)
        products = self._products(instruction, computation)
        alike = " ".join(MEMORY.sub("", text).split())
        return _digest(text), _digest(alike), _digest("\n".join(products)) if products else ""

    def _line(self, instruction: Instruction, operands: Sequence[str]) -> str:
        attributes = NAMES.sub("", NOTES.sub("", instruction.attributes))
        literal = instruction.literal if instruction.opcode == "parameter" else ""
        bodies = [self._body(name)[0] for name in instruction.calls if name in self.module.computations]
        shapes = NAMES.sub("", ";".join((instruction.shape, *operands)))
        return f"{shapes} {instruction.opcode} {literal} {attributes} {' '.join(bodies)}"

    def _body(self, computation: str) -> tuple[str, tuple[str, ...]]:
        """Return a computation's text without names, and its matrix products."""
        if computation not in self._bodies:
            instructions = self.module.computations[computation]
            numbers = {instruction.name: str(number) for number, instruction in enumerate(instructions)}
            lines = [self._line(i, [numbers.get(name, "") for name in i.operands]) for i in instructions]
            products = sorted(one for i in instructions for one in self._products(i, computation))
            text = "\n".join(lines)
            memories = " ".join(MEMORY.findall(text))  # separate, because `of` removes them
            self._bodies[computation] = f"{_digest(MEMORY.sub('', text))} {memories}", tuple(products)
        return self._bodies[computation]

    def _products(self, instruction: Instruction, computation: str) -> tuple[str, ...]:
        if instruction.opcode == "fusion":
            return tuple(one for name in instruction.calls for one in self._body(name)[1])
        if instruction.opcode not in PRODUCTS:
            return ()
        named = self.module.by_name[computation]
        arrays = [instruction.arrays[0], *(named[name].arrays[0] for name in instruction.operands[:2])]
        shapes = " ".join(f"{array.dtype}{array.dimensions}" for array in arrays)
        labels, window = LABELS.search(instruction.attributes), WINDOW.search(instruction.attributes)
        return (f"{shapes} {labels and labels[0]} {window and window[0]}",)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
