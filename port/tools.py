"""The names of the tools for --from and --to: each tool's own, in lower case, and what else people write."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import typer

NAMES: Mapping[str, Sequence[str]] = {
    "axolotl": (),
    "llamafactory": (),
    "llamafactory_v1": (),
    "trl": (),
    "trainer": ("transformers", "hf-trainer"),
    "torchtune": (),
    "automodel": ("nemo-automodel", "nemo"),
    "swift": ("ms-swift",),
    "oumi": (),
    "litgpt": (),
    "open_instruct": (),
    "maxtext": (),
    "tunix": (),
}
"""By the name of the dialect, further names. Case, hyphens, underscores and spaces do not matter."""

WRITTEN = ("trl", "llamafactory", "axolotl")
"""The tools whose configs recipec writes."""


def named(text: str) -> str | None:
    """Return the tool that a text names, in any of its spellings."""
    for name, others in NAMES.items():
        if _folded(text) in map(_folded, (name, *others)):
            return name
    return None


def _folded(text: str) -> str:
    return re.sub(r"[-_ ]", "", text.lower())


def choice(among: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of an option's value, which is one of some tools.

    Raises:
        typer.BadParameter: when the value names none of them.
    """

    def tool(text: str) -> str:
        name = named(text)
        if name is None or name not in among:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(map(repr, among))}.")
        return name

    return tool
