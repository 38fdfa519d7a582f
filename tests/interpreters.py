"""The interpreters of the supported Python versions, wherever they are on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path


@cache
def interpreter(version: str) -> Path:
    """Return an interpreter of a version, such as "3.12", that runs and can create environments.

    Raises:
        RuntimeError: there is none.
    """
    tried = []
    for path in _candidates(version):
        tried.append(str(path))
        code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            done = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if done.stdout.strip() == version:
            return path
    raise RuntimeError(f"no Python {version} among {', '.join(tried) or 'the programs on PATH'}: install it")


def _candidates(version: str) -> Iterator[Path]:
    """Yield possible places: this process's own interpreter, those of pyenv, those on PATH."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        yield Path(sys.base_prefix) / "bin" / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    for folder in os.get_exec_path():
        found = shutil.which(f"python{version}", path=folder)
        if found:
            yield Path(found)
