"""The files of runtime/, which every artifact runs on: whole, as a copy or in a wheel."""

from __future__ import annotations

import functools
import os
from pathlib import Path, PurePosixPath

from recipec import runtime


@functools.cache
def runtime_files() -> dict[str, bytes]:
    """Return the modules and scripts of runtime/ by path relative to it."""
    folder = Path(runtime.__file__).parent
    return {path: (folder / path).read_bytes() for path in modules(folder)}


def modules(folder: Path) -> list[str]:
    """Return the Python modules and shell scripts below a folder, relative to it, sorted."""
    paths = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        within = PurePosixPath(Path(place).relative_to(folder).as_posix())
        paths += [str(within / name) for name in names if name.endswith((".py", ".sh"))]
    return sorted(paths)


def launch_scripts() -> dict[str, bytes]:
    """Return the shell scripts of runtime/launch/, which run before anything is installed."""
    return {path: content for path, content in runtime_files().items() if path.startswith("launch/")}
