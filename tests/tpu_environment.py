"""libtpu for tests and measurements that compile ahead of time; its compiler needs no TPU.

This module is not called libtpu: pytest puts this folder on the path, and jax would import it as libtpu.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from recipec.compiler.lowering import pins

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "libtpu"


def environment() -> dict[str, str]:
    """Return the environment in which jax finds libtpu; install libtpu (0.7 GB) if it is missing."""
    if find_spec("libtpu") is None:
        _install()
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return inherited | {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(FOLDER))),
    }


def _install() -> None:
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:  # another worker of pytest may be installing it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (FOLDER / "libtpu").exists():
            return
        wanted = f"libtpu=={pins.sets()['train-tpu']['transitive']['libtpu']}"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps"]
        subprocess.run([*command, "--target", str(FOLDER), wanted], check=True)
