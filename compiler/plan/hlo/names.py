"""Give readable names to a compiled program's arrays, from the tracer's note (op_name) of each operation.

A note such as `jit(_train)/transpose(jvp(BTD,NDH->BTNH))/dot_general` has the operation and its pass, but not
the layer. The layer comes from the weight that the operation reads.
"""

from __future__ import annotations

import re

from recipec.compiler.plan.hlo.parse import Instruction, Module, split

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

    `base['layers'][3]['attn']['q_einsum']['w'].value` is "layers.{}.attn.q_einsum.w". A path in the
    optimizer's state begins with the moment: "mu.layers.{}.attn.q_einsum.w". A torch name is a single key.
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
