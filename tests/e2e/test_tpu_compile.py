"""Splash attention compiled ahead of time for TPUs that this machine does not have."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

LIBTPU = "libtpu==0.0.42.1"
"""What jax[tpu]==0.10.2 asks for: 0.7 GB, kept in build/."""


@pytest.fixture(scope="session")
def compiled(root: Path) -> dict[str, Any]:
    """What tests/e2e/tpu_compile.py found, by kernel and topology."""
    folder = root / "build" / "libtpu"
    if importlib.util.find_spec("libtpu") is None and not (folder / "libtpu").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), LIBTPU]
        subprocess.run(install, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": os.pathsep.join((str(root), str(folder))),
    }
    command = [sys.executable, str(root / "tests" / "e2e" / "tpu_compile.py")]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return found


def test_forward_and_backward_compile_for_every_model_and_topology(compiled: dict[str, Any]) -> None:
    kernels = compiled["kernels"]
    assert len(kernels) == 18
    for name, one in kernels.items():
        assert one["error"] is None, f"{name}: {one['error']}"
        # The forward kernel, and those of the gradients in the queries and in the keys and values.
        assert one["custom_calls"] == 3, name


def test_no_device_holds_the_scores(compiled: dict[str, Any]) -> None:
    for name, one in compiled["kernels"].items():
        assert one["temporaries"] < one["scores"], name


def test_saved_residuals_spare_the_second_forward_kernel(compiled: dict[str, Any]) -> None:
    assert compiled["recomputed"] == {"decoder": 4, "save_attention": 3}
