"""Keep the wheels and archives that compiler/data/dialects.json is made from, in build/dialects."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts import dialects

FOLDER = Path(__file__).resolve().parents[2] / "build" / "dialects"


def fetch() -> Path:
    """Return the folder with every file in it; download the missing files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    wanted = {f"{name}-{version}-*.whl": "--only-binary" for name, version in dialects.WHEELS.items()}
    wanted |= {f"{name}-{dialects.WHEELS[name]}.tar.gz": "--no-binary" for name in dialects.ARCHIVES}
    for pattern, kind in wanted.items():
        if any(FOLDER.glob(pattern)):
            continue
        name, version = pattern.removesuffix(".tar.gz").split("-")[:2]
        with tempfile.TemporaryDirectory(dir=FOLDER) as place:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
            command += ["--ignore-requires-python", kind, name]  # they are read, not run
            subprocess.run([*command, f"{name}=={version}"], check=True)
            for file in Path(place).iterdir():
                os.replace(file, FOLDER / file.name)
    return FOLDER
