"""The wheels of the tools whose keys compiler/data/dialects.json lists, in build/dialects."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import dialects

FOLDER = Path(__file__).resolve().parents[2] / "build" / "dialects"


def fetch() -> Path:
    """The folder, with every wheel in it; those that are missing are downloaded."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, version in dialects.WHEELS.items():
        if any(FOLDER.glob(f"{name}-{version}-*.whl")):
            continue
        with tempfile.TemporaryDirectory(dir=FOLDER) as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
            command += ["--ignore-requires-python"]  # they are read, not run
            subprocess.run([*command, f"{name}=={version}"], check=True)
            for wheel in Path(place).glob("*.whl"):
                os.replace(wheel, FOLDER / wheel.name)
    return FOLDER
