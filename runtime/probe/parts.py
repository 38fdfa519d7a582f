"""Split the time of a step by a profiler trace: the kind of each operation, and its duration."""

from __future__ import annotations

import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData, ProfileOptions

TRACED = 3
"""Number of steps in a trace."""
PARTS = ("products", "other", "kernels", "collectives", "copies", "idle")
"""What a device does in a step: the parts of `recipe plan`, with waits for collectives and copies."""

COLLECTIVE = re.compile(r"all-|reduce-scatter|collective-|ragged-all-|send|recv")
COPY = re.compile(r"(?:copy|slice|async)-(?:start|update|done)")
PRODUCTS = ("dot", "ragged-dot", "convolution")
HEAD = re.compile(r"(?:ENTRY )?%?([\w.-]+) .*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.-]+) = .*? ([a-z][\w-]*)\(%?([\w.-]*)")
CALLED = re.compile(r"\b(?:calls|to_apply)=%?([\w.-]+)")
CHANNEL = re.compile(r"\bchannel_id=\d+")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
START = "AsyncCollectiveStart"
TARGETS = {"tpu_custom_call": "kernels", START: "collectives", "AsyncCollectiveDone": "collectives"}
TPU = re.compile(r"/device:TPU:\d+")

Operation = tuple[float, float, str]
"""One run of an operation: start and end in nanoseconds, and its name."""


def parts(run: Callable[[], Any], text: str) -> dict[str, float]:
    """Trace steps, into a folder that is removed afterwards.

    Args:
        run: runs a step to its end.
        text: text of the compiled step.

    Returns:
        Seconds of a step by the keys of PARTS, the mean of this process's devices; empty if the trace has
        no operations.

    Raises:
        OSError, RuntimeError: tracing is not possible here.
    """
    options = ProfileOptions()
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            for _ in range(TRACED):
                run()
        finally:
            jax.profiler.stop_trace()
        files = list(Path(folder).glob("**/*.xplane.pb"))
        return summed(ProfileData.from_file(str(files[0])), kinds(text)) if files else {}


def summed(trace: ProfileData, kind: Mapping[str, str]) -> dict[str, float]:
    """Return the result of `parts` for a trace of TRACED steps.

    Args:
        kind: one of PARTS by the name of an operation; others count as `other`.
    """
    devices, found = _devices(trace), dict.fromkeys(PARTS, 0.0)
    for lines in devices:
        for name, taken in (one for line in lines for one in _alone(line)):
            found[kind.get(name, "other")] += taken
            found["idle"] -= taken
        every = [operation for line in lines for operation in line]
        found["idle"] += max(end for _, end, _ in every) - min(start for start, *_ in every)
    found["idle"] = max(0.0, found["idle"])  # a CPU's threads run some operations of a device in parallel
    return {part: taken / len(devices) / TRACED / 1e9 for part, taken in found.items() if devices}


def kinds(text: str) -> dict[str, str]:
    """Return one of PARTS for each operation of a compiled step. A fusion with a product is a product."""
    bodies = dict[str, list[tuple[str, str, str, str]]]()
    for line in text.splitlines():
        if head := HEAD.match(line):
            body = bodies.setdefault(head[1], [])
        elif bodies and (found := INSTRUCTION.match(line)):
            body.append((found[1], found[2], found[3], line))
    # A collective in parallel with others is in pieces, one in each of these: its start, others, its end.
    whole = ("".join(line for *_, line in body) for body in bodies.values())
    begun = {channel for one in whole if START in one for channel in CHANNEL.findall(one)}
    known = dict[str, str]()

    def kind(opcode: str, operand: str, line: str) -> str:
        if opcode in PRODUCTS:
            return "products"
        if opcode == "custom-call":
            return TARGETS.get("".join(TARGET.findall(line)), "other")
        if COLLECTIVE.match(opcode):
            return "other" if begun.intersection(CHANNEL.findall(line)) else "collectives"
        inner = {
            known.get(name, "") for called in CALLED.findall(line) for name, *_ in bodies.get(called, ())
        }
        inner |= {known.get(operand, "")} if opcode.startswith("async-") else set()
        alone = "copies" if COPY.match(opcode) else "other"
        return next((which for which in ("products", "kernels", "collectives") if which in inner), alone)

    for every in bodies.values():  # a called computation is printed before its caller
        for name, opcode, operand, line in every:
            known[name] = kind(opcode, operand, line)
    return known


def _devices(trace: ProfileData) -> list[list[list[Operation]]]:
    """Return the operations of each device, line by line. A TPU has a plane of its own, where an operation's
    name is its whole text. On a CPU's threads each operation names its device."""
    found = defaultdict[Any, list[list[Operation]]](list)
    for plane in trace.planes:
        for line in plane.lines:
            threads = defaultdict[Any, list[Operation]](list)
            tpu = TPU.fullmatch(plane.name) and line.name == "XLA Ops"
            for event in line.events if tpu or plane.name == "/host:CPU" else ():
                told = {} if tpu else dict(event.stats)
                name = event.name.partition(" = ")[0].removeprefix("%") if tpu else told.get("hlo_op")
                if name:
                    threads[told.get("device_ordinal", plane.name)].append(
                        (event.start_ns, event.end_ns, name)
                    )
            for device, those in threads.items():
                found[device].append(those)
    return list(found.values())


def _alone(line: Iterable[Operation]) -> Iterator[tuple[str, float]]:
    """Return each operation's name and its own time, without the operations within it (as in a loop)."""
    open_: list[list[Any]] = []  # end, name, time
    for start, end, name in (*sorted(line, key=lambda one: (one[0], -one[1])), (math.inf, math.inf, "")):
        while open_ and open_[-1][0] <= start:
            yield tuple(open_.pop()[1:])
        if open_:
            open_[-1][2] -= end - start
        open_.append([end, name, end - start])
