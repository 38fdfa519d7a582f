"""Steps that libtpu compiles for tests: a small recipe, a model's config.json and the environment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.pool import compile_jobs
from recipec.compiler.plan.results import Compiled, Job
from recipec.spec.load import load
from tests.tpu_environment import environment

RECIPE = """
recipe: 1
name: small
model: {id: ./model, attention: splash}
mesh: {accelerator: v5p-8, axes: {fsdp: 2, tp: 2}}
lora: {rank: 16, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}
data: {train: [gs://bucket/train.jsonl], chat_template: "{{ messages }}", max_length: 512}
train: {steps: 10, global_batch_size: 2, optimizer: {max_grad_norm: 1.0}}
remat: {policy: none}
"""


def small(folder: Path, config: Mapping[str, Any], recipe: str = RECIPE) -> Path:
    """Write a recipe, with a model's config.json next to it."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    return folder / "recipe.yaml"


@contextmanager
def compiler(cache: Path) -> Iterator[None]:
    """Give the workers libtpu, and put their cache into `cache`."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        patch.setenv("RECIPEC_CACHE", str(cache))
        patch.setattr(
            "recipec.compiler.plan.pool.require_compiler", lambda: None
        )  # only the workers use libtpu
        yield


def program_of(recipe: Path, *sets: str) -> Program:
    """Lower a recipe with --set arguments."""
    found = lower(load(recipe, sets), planning=True)
    assert found.program is not None, [d.message for d in found.diagnostics if d.severity == "error"]
    return found.program


def compiled(work: Mapping[str, tuple[Program, Job]]) -> dict[str, Compiled]:
    """Compile jobs, and return their steps by name. Each must compile or run out of memory."""
    out = dict(zip(work, compile_jobs(list(work.values())), strict=True))
    assert all(isinstance(one, Compiled) for one in out.values()), out
    return {name: one for name, one in out.items() if isinstance(one, Compiled)}
