"""Install missing programs from Debian's packages, in one pytest worker at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

LOCK = Path(__file__).resolve().parents[2] / "build" / "apt.lock"


def program(name: str, package: str, path: str | None = None) -> str:
    """Return a program's path, and install its package if it is missing.

    Args:
        package: the Debian package with the program.
        path: the search path; None for PATH.
    """
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if shutil.which(name, path=path) is None:
            environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
            for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", package]):
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    found = shutil.which(name, path=path)
    assert found is not None, f"Debian's package {package} has no program {name}"
    return found
