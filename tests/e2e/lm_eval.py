"""lm-evaluation-harness in its own environment in build/, installed from requirements-eval.txt."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "lm-eval"


def install(requirements: str) -> Path:
    """Return the program lm_eval, and install its environment if it is out of date (1 GB, a minute).

    Args:
        requirements: the text of requirements-eval.txt.
    """
    program, stamp = FOLDER / "bin" / "lm_eval", FOLDER / "installed"
    wanted = hashlib.sha256("\0".join((sys.version, requirements)).encode()).hexdigest()
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return program
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        (FOLDER / "requirements-eval.txt").write_text(requirements)
        # Without --no-deps, pip checks that the pinned set is complete and consistent.
        command = [str(FOLDER / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        command += [
            "--disable-pip-version-check",
            "--no-cache-dir",
            "-r",
            str(FOLDER / "requirements-eval.txt"),
        ]
        done = subprocess.run(command, text=True, capture_output=True)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"
        stamp.write_text(wanted)
    return program
