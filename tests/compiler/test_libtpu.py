"""Tests of the libtpu flags that a recipe's `xla` section sets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipec.compiler.lower import lower
from recipec.compiler.lowering.libtpu import flags, profiles
from recipec.spec.language.mesh import Xla
from recipec.spec.load import load


@pytest.mark.parametrize(
    ("machine", "profile"),
    [
        ("v5p-8", "v5p"),
        ("v5litepod-8", "v5e"),
        ("v6e-8", "v6e"),
        ("tpu7x-8", "tpu7x"),
        ("v4-8", "none"),
        ("cpu-8", "none"),
    ],
)
def test_auto_profile_follows_the_tpu_generation(root: Path, machine: str, profile: str) -> None:
    program = lower(load(root / "recipes" / "gemma4-31b-v5p8.yaml"), True).program
    assert program is not None
    mesh = program.recipe.mesh.model_copy(update={"accelerator": machine})
    asked = Xla(profile="auto", flags={"xla_enable_async_all_gather": False})
    recipe = program.recipe.model_copy(update={"mesh": mesh, "xla": asked})
    found = flags(replace(program, recipe=recipe))
    names = [flag.removeprefix("--").partition("=")[0] for flag in found]
    assert set(names) == set(profiles()[profile]) | {"xla_enable_async_all_gather"}
    assert "--xla_enable_async_all_gather=false" in found and len(names) == len(set(names))
