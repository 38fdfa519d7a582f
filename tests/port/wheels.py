"""Keep the wheels and archives that port/data/dialects.json is made from, in build/dialects."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from recipec.port.scripts import dialects

OPTIMIZERS = {"torch_optimi": "0.3.3", "flashoptim": "0.1.4", "torchao": "0.18.0"}
"""Packages of optimizers that Axolotl constructs."""

FOLDER = Path(__file__).resolve().parents[2] / "build" / "dialects"


def fetch(packages: Mapping[str, str] | None = None) -> Path:
    """Return the folder with every file in it, those of the tools or of the given packages by version.

    Missing files are downloaded.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    named = dialects.WHEELS if packages is None else packages
    wanted = {f"{name}-{version}-*.whl": "--only-binary" for name, version in named.items()}
    if packages is None:
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
