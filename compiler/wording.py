"""Format counts, lists, paths and layer numbers for messages."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.runtime.model.families.family import CHUNKED, FULL, HYBRID, LINEAR, NONE, SLIDING

if TYPE_CHECKING:
    from recipec.spec.language.train import FakeQuantization


def listing(items: Iterable[object], last: str = "and") -> str:
    """Join items: "1", "1 and 2", "1, 2 and 4"."""
    words = [str(item) for item in items]
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: "1 chip", "4 chips", "1,244 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def as_typed(path: Path) -> Path:
    """Return a path as the user would type it: relative to the working folder if it lies below it."""
    relative = Path(os.path.relpath(path))
    return path if relative.parts[:1] == ("..",) else relative


def line(path: str, value: object, place: str) -> str:
    """Format a key and its value for a help: "keep: 3" in its section, else "checkpoint: {keep: 3}".

    Args:
        path: the key's path: its section and its name.
        value: the value to write.
        place: the path that the help is about.
    """
    section, _, key = path.partition(".")
    return f"{key}: {value}" if place.startswith(f"{section}.") else f"{section}: {{{key}: {value}}}"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers as ranges: 0-4, 6-10, 12."""
    out: list[list[int]] = []
    for number in sorted(set(numbers)):
        if out and number == out[-1][1] + 1:
            out[-1][1] = number
        else:
            out.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in out)


KINDS = {
    **{SLIDING: "local", CHUNKED: "chunked", LINEAR: "linear", HYBRID: "hybrid", FULL: "global"},
    NONE: "feed-forward",
}
"""Names of layers by their kind of attention."""


def which_layers(types: Sequence[str], layers: Sequence[int]) -> str:
    """Describe layers: "all 60", "10 global", "50 local", or their numbers.

    Args:
        types: the kind of every layer of the model, as in `Architecture.layer_types`.
        layers: the layers' indices in ascending order.
    """
    if len(layers) == len(types):
        return f"all {len(types)}"
    for kind, name in KINDS.items():
        if list(layers) == [i for i, k in enumerate(types) if k == kind]:
            return f"{len(layers)} {name}"
    return ranges(layers)


def in_layers(types: Sequence[str], layers: Sequence[int]) -> str:
    """Describe layers within a sentence: "each of its 34 layers", "its 10 global layers", "its layers
    3-7"."""
    words = which_layers(types, layers)
    if words == f"all {len(types)}":
        return f"each of its {len(types)} layers"
    if words.endswith(tuple(KINDS.values())):
        return f"its {words} layer{'' if len(layers) == 1 else 's'}"
    return f"its layer{'' if len(layers) == 1 else 's'} {words}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [i for i in range(1, math.isqrt(number) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def anywhere(pattern: str) -> str:
    """Return a regular expression that matches whole names that contain a match of the pattern, quoted for
    YAML."""
    core = pattern.strip("^$")
    return json.dumps(f".*({core}).*" if "|" in core else f".*{core}.*", ensure_ascii=False)


@functools.lru_cache(maxsize=1 << 14)
def split_layer(path: str) -> tuple[str, int | None]:
    """Split a parameter's path into a pattern and its layer number: ("layers.{}.attn.q_proj.w", 7)."""
    match = re.match(r"layers\.(\d+)\.", path)
    if match is None:
        return path, None
    return f"layers.{{}}.{path[match.end() :]}", int(match[1])


def grouped(paths: Sequence[str]) -> dict[str, list[int]]:
    """Group paths by pattern, with the layers that have each; [] for a path outside the layers."""
    out: dict[str, list[int]] = {}
    for path in paths:
        pattern, layer = split_layer(path)
        numbers = out.setdefault(pattern, [])
        if layer is not None:
            numbers.append(layer)
    return out


def quantity(number: float) -> str:
    """Format a large number in words that are easy to compare: 3.1e9 becomes "3.1 billion"."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size * 0.9995:  # 999.9 million is written as 1 billion
            return f"{number / size:.3g} {word}"
    return f"{number:,.0f}"


def mesh_axes(axes: Mapping[str, int]) -> str:
    """Format the sizes of mesh axes: "fsdp 4 x tp 1"."""
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def rounded(qat: FakeQuantization) -> str:
    """Name what train.qat rounds: "weights to int4 in groups of 32, activations to int8"."""
    inputs = f", activations to {qat.activations}" if qat.activations else ""
    return f"weights to {qat.weights} in groups of {qat.group_size}{inputs}"
