"""The flags of libtpu that a recipe's step is compiled with.

data/libtpu.json lists the flags that the pinned libtpu accepts, as found by `python -m scripts.libtpu_flags`,
and the profiles. A profile holds the accepted flags of published runs on a generation (MaxText's benchmarks,
Google's TPU recipes). v5e's profile also has v6e's threshold of windowed products (docs/planning.md shows its
effect). `experts` holds the values that differ for models with experts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering.hardware import accelerator
from recipec.spec.language.mesh import SCOPED_VMEM

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe

DATA = Path(__file__).parents[1] / "data" / "libtpu.json"


def flags(program: Program) -> tuple[str, ...]:
    """Return the flags as LIBTPU_INIT_ARGS takes them: ("--xla_tpu_scoped_vmem_limit_kib=65536",)."""
    asked, named = program.recipe.xla, profile(program.recipe)
    values: dict[str, Any] = dict(profiles()[named])
    if program.family.expert_targets(program.architecture):
        values |= _data()["experts"].get(named, {})
    if asked.scoped_vmem_kib is not None:
        values[SCOPED_VMEM] = asked.scoped_vmem_kib
    return tuple(f"--{name}={_written(value)}" for name, value in {**values, **asked.flags}.items())


def profile(recipe: Recipe) -> str:
    """Return the name of the profile that a recipe's `xla.profile` selects."""
    asked = recipe.xla.profile
    return own_profile(accelerator(recipe.mesh).generation) if asked == "auto" else asked


def own_profile(generation: str) -> str:
    """Return the name of a generation's profile; "none" for a generation without one."""
    return generation if generation in profiles() else "none"


def profiles() -> Mapping[str, Mapping[str, Any]]:
    """Return the flags of each profile."""
    flags_by_profile: dict[str, dict[str, Any]] = _data()["profiles"]
    return flags_by_profile


def known(name: str) -> bool:
    """Return whether the pinned libtpu accepts a flag."""
    return name in _names()


def near(name: str) -> str | None:
    """Return the known flag with the most similar spelling."""
    return next(iter(get_close_matches(name, _names(), 1)), None)


def version() -> str:
    """Return the version of libtpu that the flags belong to."""
    return str(_data()["libtpu"])


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def _names() -> frozenset[str]:
    return frozenset(_data()["names"])


@functools.cache
def _data() -> Any:
    return json.loads(DATA.read_text(encoding="utf-8"))
