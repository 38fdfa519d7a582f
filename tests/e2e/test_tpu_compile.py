"""Tests of splash attention, compiled ahead of time for TPUs that this machine does not have."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tpu_environment import environment

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="session")
def compiled(root: Path) -> dict[str, Any]:
    """Run tests/e2e/tpu_compile.py, and return its results by kernel and topology."""
    command = [sys.executable, str(root / "tests" / "e2e" / "tpu_compile.py")]
    done = subprocess.run(command, env=environment(), text=True, capture_output=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def test_splash_kernels_compile_for_every_model_and_generation(compiled: dict[str, Any]) -> None:
    kernels = compiled["kernels"]
    assert len(kernels) == 14
    for name, one in kernels.items():
        assert one["error"] is None, f"{name}: {one['error']}"
        # The forward kernel, and the kernels of two gradients: of the queries, and of the keys and values.
        assert one["custom_calls"] == 3, name


def test_compiled_kernels_never_hold_the_full_attention_scores(compiled: dict[str, Any]) -> None:
    for name, one in compiled["kernels"].items():
        assert one["temporaries"] < one["scores"], name


def test_save_attention_avoids_the_second_forward_kernel(compiled: dict[str, Any]) -> None:
    assert compiled["recomputed"] == {"decoder": 4, "save_attention": 3}
