"""Find which arrays of a compiled program are alive at the same time, and give them readable names.

The text of a scheduled module has the order of its instructions, not the addresses of their results. The
result is the least memory that this order needs. The compiler's own figure adds gaps between arrays.

An array's name comes from the tracer's note (op_name) of each operation. A note such as
`jit(_train)/transpose(jvp(BTD,NDH->BTNH))/dot_general` has the operation and its pass, but not the layer. The
layer comes from the weight that the operation reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from recipec.compiler.plan.hlo.parse import Array, Instruction, Module, split
from recipec.compiler.plan.results import Temporary

MOVES = ("bitcast", "copy", "convert", "reshape", "transpose", "slice", "all-gather", "all-to-all")
"""Operations that return a weight in another place or form."""
ASYNC = ("copy-start", "copy-done", "all-gather-start", "all-gather-done", "async-start", "async-done")
PLUMBING = re.compile(
    r"(jit|pjit|vmap|shard_map|remat\d*|checkpoint|rematted_computation|closed_call|cond|branch_\d+_fun|body"
    r"|einsum|pallas_call|custom_vjp_call|core_call|aten::.*)(\(.*\))?$"
)
"""Parts of a note that describe how an operation was traced, not the operation."""
TRANSFORM = re.compile(r"(jvp|transpose)\((.*)\)$")
TRACED = "jit("
"""How an operation's note begins. Other notes name arguments, or are the compiler's own: "convert.38"."""
MADE_UP = re.compile(r"[\w-]+\.\d+$")
SCOPE = re.compile(r"layers?_\d+$")
LAYER = "layers.{}"
KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(mu|nu)\b")
TORCH = re.compile(r"^model\.|\.base_layer\b")
"""Parts of torch's names that come from wrappers around a weight."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Names:
    """The names of one module's instructions."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._by_name = {i.name: i for body in module.computations.values() for i in body}
        self._loop_of: dict[str, Instruction] = {}
        self._home: dict[str, str] = {}
        for computation, body in module.computations.items():
            for instruction in body:
                self._home[instruction.name] = computation
                if instruction.opcode == "while":
                    self._loop_of |= dict.fromkeys(instruction.calls, instruction)

    def of(self, instruction: Instruction) -> str:
        """Name an instruction: "layers.{}.mlp.gate_proj.kernel / dot_general (backward)".

        The name has the weight that it reads, the operation and the pass, as far as they are known. Layer
        numbers are left out.
        """
        moved = self._weight(instruction)
        if moved is not None:
            return f"{weight_path(moved.op_name)} / {instruction.opcode.removesuffix('-start')}"
        note = self._note(instruction)
        what, phase = operation(note) if note else (instruction.opcode, "")
        weight = self._read_weight(instruction)
        where = f"{weight_path(weight.op_name)} / " if weight else ""
        if where.startswith(LAYER):
            what = what.removeprefix(f"{LAYER} / ")
        return f"{where}{what or instruction.opcode}{f' ({phase})' if phase else ''}"

    def _note(self, instruction: Instruction) -> str:
        """Return the tracer's note of an instruction.

        For a fusion without a note, it is the note of the fusion's last operation that has one. For a move
        without a note, it is the note of what is moved.
        """
        if instruction.op_name.startswith(TRACED):
            return instruction.op_name
        if instruction.opcode == "fusion":
            inside = self._module.body(next(iter(instruction.calls), ""))
            return next((i.op_name for i in reversed(inside) if i.op_name.startswith(TRACED)), "")
        if instruction.opcode in (*MOVES, *ASYNC, "get-tuple-element"):
            moved = self._by_name.get(instruction.operands[0])
            return self._note(moved) if moved else ""
        return ""

    def _read_weight(self, instruction: Instruction) -> Instruction | None:
        """Return the largest argument that an instruction reads."""
        read = (self._weight(self._by_name[name]) for name in instruction.operands if name in self._by_name)
        return max((w for w in read if w), key=lambda w: sum(a.bytes for a in w.arrays), default=None)

    def _weight(self, instruction: Instruction | None) -> Instruction | None:
        """Return the argument that an instruction passes on unchanged, or None when it computes something."""
        while instruction is not None:
            opcode = instruction.opcode
            if opcode == "parameter":
                entry = self._home[instruction.name] == self._module.entry
                return instruction if entry and _is_argument(instruction.op_name) else None
            if opcode == "get-tuple-element":
                instruction = self._element(instruction)
            elif (
                opcode in MOVES or opcode in ASYNC or (opcode == "fusion" and len(instruction.operands) == 1)
            ):
                instruction = self._by_name.get(instruction.operands[0])
            else:
                return None
        return None

    def _element(self, picked: Instruction) -> Instruction | None:
        """Return the instruction behind an element of a tuple; within a loop, the loop's initial value."""
        source = self._by_name.get(picked.operands[0])
        if source is not None and source.opcode == "parameter":
            loop = self._loop_of.get(self._home[source.name])
            source = self._by_name.get(loop.operands[0]) if loop else None
        if source is None or picked.index is None:
            return None
        if source.opcode != "tuple":
            return source if source.opcode == "fusion" else None
        return self._by_name.get(source.operands[picked.index])


def operation(note: str) -> tuple[str, str]:
    """Return an operation's name and its pass: "" for forward, "backward", "recomputed" or "update".

    `jit(_train)/transpose(jvp(attention))/einsum/BTD,NDH->BTNH/dot_general` is "attention / BTD,NDH->BTNH",
    "backward".
    """
    note = note.partition(";")[0]
    parts: list[str] = []
    for part in split(note, "/", "(", ")"):
        inner: str | None = part
        while inner and (match := TRANSFORM.match(inner)):
            inner = match[2]
        inner = LAYER if inner and SCOPE.match(inner) else inner
        parts += [inner] if inner and not PLUMBING.match(inner) and inner not in parts else []
    if len(parts) > 1 and parts[-1] == "dot_general" and "->" in parts[-2]:
        parts.pop()
    phase = "" if "jvp(" in note else "update"
    if "rematted_computation" in note:
        phase = "recomputed"
    elif "transpose(" in note:
        phase = "backward"
    return " / ".join("loop" if part == "while" else part for part in parts[-4:]), phase


def weight_path(note: str) -> str:
    """Return the path of an argument from its note.

    `base['layers'][3]['attn']['q_proj']['w'].value` is "layers.{}.attn.q_proj.w". A path in the
    optimizer's state begins with the moment: "mu.layers.{}.attn.q_proj.w". A torch name is a single key.
    """
    keys = [
        "{}" if number else NUMBER.sub("{}", TORCH.sub("", text)) or moment
        for text, number, moment in KEY.findall(note.replace("\\'", "'"))
    ]
    moment = next((i for i, key in enumerate(keys) if key in ("mu", "nu")), None)
    if moment is not None:
        keys = keys[moment:]
    first = next((i for i, key in enumerate(keys) if key != "{}"), len(keys))
    return ".".join(keys[first:]) or note


def _is_argument(note: str) -> bool:
    return bool(note) and "/" not in note and not note.startswith(TRACED) and not MADE_UP.match(note)


SAME_ARRAYS = ("bitcast", "opt-barrier", "while", "add-dependency", "async-update")
"""Operations whose result has the memory of their first operand. A loop works in place."""
REFERENCES = (*SAME_ARRAYS, "tuple", "get-tuple-element")
"""Operations that only refer to their operands' memory. The loop is the only one that reads it."""
BLOCKS = ("while", "call", "conditional")
"""Operations that run other computations. Their arrays are alive in addition to those outside."""
ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")
MAY_SHARE = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{"indices":\[[^\]]*\]\},?)*)\]')
INDICES = re.compile(r"\[([^\]]*)\]")


@dataclass(eq=False)
class _Buffer:
    """The memory of one array, or of several that use it one after the other.

    Attributes:
        array, source: the first array in it, and the instruction that writes the array.
        bytes: its size; 0 if it is not in HBM.
        outside: whether it belongs to the caller of the computation: a parameter or a result.
        first, last: positions in the schedule between which it is alive.
        merged: the buffer that it was merged into.
    """

    array: Array
    source: Instruction
    bytes: int
    first: int
    last: int
    outside: bool = False
    merged: _Buffer | None = None

    def whole(self) -> _Buffer:
        buffer = self
        while buffer.merged is not None:
            buffer = buffer.merged
        return buffer


@dataclass(frozen=True)
class _Peak:
    """The most bytes that a computation's own arrays take at once, and these arrays."""

    bytes: int = 0
    alive: tuple[_Buffer, ...] = ()


def largest(module: Module, most: int = 12) -> tuple[float, tuple[Temporary, ...]]:
    """Return the peak bytes of the temporaries, and the largest arrays that are alive at the peak.

    The program's arguments and results are not temporaries.

    Args:
        module: a scheduled module.
        most: entries of the list at most, the largest first. Arrays of the same name and shape are one entry.
    """
    peak = _Analysis(module).peak(module.entry)
    names = Names(module)
    buffers: dict[tuple[str, str], list[int]] = {}
    for buffer in peak.alive:
        shape = f"{buffer.array.dtype}[{','.join(map(str, buffer.array.dimensions))}]"
        buffers.setdefault((names.of(buffer.source), shape), []).append(buffer.bytes)
    arrays = [Temporary(name, shape, len(sizes), sum(sizes)) for (name, shape), sizes in buffers.items()]
    arrays.sort(key=lambda array: (-array.bytes, array.name, array.shape))
    return float(peak.bytes), tuple(arrays[:most])


@dataclass
class _Analysis:
    module: Module
    _peaks: dict[str, _Peak] = field(default_factory=dict)

    def peak(self, computation: str) -> _Peak:
        """Return the peak of a computation, including the computations that it runs."""
        if computation not in self._peaks:
            instructions = self.module.computations[computation]
            buffers = [b for b in _Buffers(instructions).all if not b.outside and b.merged is None]
            self._peaks[computation] = self._highest(instructions, buffers)
        return self._peaks[computation]

    def _highest(self, instructions: tuple[Instruction, ...], buffers: list[_Buffer]) -> _Peak:
        change = [0] * (len(instructions) + 1)
        for buffer in buffers:
            change[buffer.first] += buffer.bytes
            change[buffer.last + 1] -= buffer.bytes
        alive, best, at, within = 0, -1, 0, _Peak()
        for position, instruction in enumerate(instructions):
            alive += change[position]
            inner = self._inner(instruction)
            if alive + inner.bytes > best:
                best, at, within = alive + inner.bytes, position, inner
        here = (b for b in buffers if b.bytes and b.first <= at <= b.last)
        return _Peak(max(best, 0), (*here, *within.alive))

    def _inner(self, instruction: Instruction) -> _Peak:
        if instruction.opcode not in BLOCKS:
            return _Peak()
        peaks = [self.peak(name) for name in instruction.calls if name in self.module.computations]
        return max(peaks, key=lambda peak: peak.bytes, default=_Peak())


class _Buffers:
    """The buffers of one computation."""

    def __init__(self, instructions: tuple[Instruction, ...]) -> None:
        self.all: list[_Buffer] = []
        self._of: dict[str, list[_Buffer]] = {}
        self._outputs: dict[str, list[_Buffer]] = {}
        for position, instruction in enumerate(instructions):
            self._of[instruction.name] = self._result(instruction, position)
            if instruction.opcode not in REFERENCES or instruction.opcode == "while":
                for buffer in self._operands(instruction):
                    buffer.last = position
        root = next((i for i in instructions if i.root), instructions[-1])
        for buffer in self._of[root.name]:
            buffer.outside = True
        for position, instruction in enumerate(instructions):
            self._share(instruction, position)

    def _operands(self, instruction: Instruction) -> list[_Buffer]:
        return [buffer for name in instruction.operands for buffer in self._of.get(name, ())]

    def _new(self, array: Array, instruction: Instruction, position: int) -> _Buffer:
        stored = array.memory_space == 0 and instruction.opcode != "constant"
        outside = instruction.opcode == "parameter"
        buffer = _Buffer(array, instruction, array.bytes if stored else 0, position, position, outside)
        self.all.append(buffer)
        return buffer

    def _result(self, instruction: Instruction, position: int) -> list[_Buffer]:
        """Return the buffer of each array of an instruction's result."""
        opcode, operands = instruction.opcode, self._operands(instruction)
        count = len(instruction.arrays)
        if opcode == "tuple":
            return operands
        if opcode in SAME_ARRAYS and len(operands) >= count:
            return operands[:count]
        if opcode == "get-tuple-element":
            start = instruction.index or 0
            if len(operands) >= start + count:
                return operands[start : start + count]
        if opcode.endswith("-done") and instruction.operands[0] in self._outputs:
            return self._outputs[instruction.operands[0]][:count]
        values = dict(self._given(instruction, operands))
        buffers = [
            values[number] if number in values else self._new(array, instruction, position)
            for number, array in enumerate(instruction.arrays)
        ]
        if opcode.endswith("-start"):
            self._outputs[instruction.name] = [b for i, b in enumerate(buffers) if i not in values]
        return buffers

    def _given(self, instruction: Instruction, operands: list[_Buffer]) -> Iterator[tuple[int, _Buffer]]:
        """Yield (number, buffer) for the arrays of a result that have an operand's memory."""
        if instruction.opcode == "copy-start":
            yield from ((1, buffer) for buffer in operands[:1])
        elif instruction.opcode.endswith("-start") and len(instruction.arrays) > len(operands):
            # A "-start" operation keeps its operands alive and lists them before its new arrays.
            yield from enumerate(operands)
        elif "output_to_operand_aliasing=" in instruction.attributes:
            text = instruction.attributes.partition("output_to_operand_aliasing=")[2]
            for output, operand, index in ALIASED.findall(text.partition("}}")[0] + "}"):
                buffers = self._of.get(instruction.operands[int(operand)], [])
                if len(buffers) > int(index or 0):
                    yield int(output or 0), buffers[int(index or 0)]

    def _share(self, instruction: Instruction, position: int) -> None:
        """Let a result reuse the memory of an operand that nothing reads later, where the compiler may."""
        match = MAY_SHARE.search(instruction.attributes)
        if match is None:
            return
        operands, results = self._operands(instruction), self._of[instruction.name]
        for group in INDICES.findall(match[1]):
            numbers = [int(number) for number in re.findall(r"\d+", group)]
            before = [operands[n].whole() for n in numbers if n < len(operands)]
            after = [results[n - len(operands)] for n in numbers if 0 <= n - len(operands) < len(results)]
            for result in after:
                self._merge(result.whole(), before, position)

    def _merge(self, result: _Buffer, candidates: Iterable[_Buffer], position: int) -> None:
        for operand in candidates:
            free = operand.last == position and not operand.outside and operand is not result
            if free and result.first == position:
                operand.last = result.last
                operand.bytes = max(operand.bytes, result.bytes)
                operand.outside |= result.outside
                result.merged = operand
                return
