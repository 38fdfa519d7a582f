"""Install the environment that compiles the serving step: Python 3.12 with vllm-tpu.

vllm-tpu cannot share the training environment, because it pins other versions of jax, qwix and transformers.

The environment is installed once, into $RECIPEC_SERVE_ENV or the user's cache folder. It is built under
another name and renamed when it is complete, so that a partial installation is never used. Its packages are
listed in data/serve_environment.json, which scripts/pins.py writes. They are vllm-tpu's packages, without
those that only a GPU, a cluster or a running server needs.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import pins
from recipec.compiler.pages.numbers import gb_number

VARIABLE = "RECIPEC_SERVE_ENV"
PYTHON = "3.12"
"""vllm-tpu's wheel supports only this version."""

PACKAGES = Path(__file__).parents[2] / "data" / "serve_environment.json"
"""Versions by package. They include CUDA's libraries, because PyPI has no other build of torch for Linux."""

BATCHES = ("nvidia-", "torch", "")
"""Name prefixes of packages that are installed together, so that pip does not hold all wheels at once."""

UNUSED = ("nvidia/cudnn/lib/libcudnn_*", "torch/lib/libtorch_cuda_linalg.so", "torch/test", "torch/include")
"""Files in site-packages, 1.3 GB, that torch loads only on a GPU, or never."""

GIGABYTES = 7
DISK_BYTES = 9e9
"""Peak disk space of an installation, with the wheels that pip keeps while it installs."""

STAMP = "installed.txt"
"""The file that names the installed requirement. It is written last."""

Say = Callable[[str], None]


def requirement() -> str:
    """Return the requirement that is installed: "vllm-tpu==0.32.0"."""
    return f"vllm-tpu=={pins.sets()['serve']['vllm-tpu']}"


def location() -> Path:
    """Return the environment's folder, which may not exist."""
    if path := os.environ.get(VARIABLE):
        return Path(path).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "recipec" / f"serve-{pins.sets()['serve']['vllm-tpu']}"


def find() -> Path | None:
    """Return the environment's interpreter, or None without a complete environment of these versions."""
    folder = location()
    python = folder / "bin" / "python"
    try:
        whole = (folder / STAMP).read_text(encoding="utf-8") == requirement()
    except OSError:
        return None
    return python if whole and python.exists() else None


def make(say: Say = lambda line: None) -> Path:
    """Return the environment's interpreter, and first install the environment (about 7 GB) if it is missing.

    Args:
        say: called with progress messages, one sentence at a time.

    Raises:
        ArtifactError: no Python 3.12, too little disk, another file in its place, or pip failed.
    """
    if interpreter := find():
        return interpreter
    folder = location()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, say):
            # Another process may have installed it while this process waited.
            return find() or _install(folder, say)
    except OSError as error:
        raise ArtifactError(
            f"{folder} cannot be written: {error.strerror}",
            f"name a folder that can be written by the environment variable {VARIABLE}",
        ) from None


def interpreter() -> Path:
    """Return a Python 3.12 interpreter of this machine.

    Raises:
        ArtifactError: when there is none.
    """
    for candidate in _candidates():
        with suppress(OSError, subprocess.SubprocessError):
            # The file may be a shim without an installed version, so run it to find out.
            question = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([candidate, "-c", question], text=True, capture_output=True, timeout=30)
            if done.returncode == 0 and done.stdout.strip() == PYTHON:
                return Path(candidate)
    raise ArtifactError(
        f"planning by compiling the serving step needs Python {PYTHON}, for which {requirement()} is made, "
        "and this machine has none",
        f"install it, for example with `uv python install {PYTHON}`, and run the command again",
    )


def _candidates() -> Iterator[str]:
    if on_path := shutil.which(f"python{PYTHON}"):
        yield on_path
    with suppress(OSError, subprocess.SubprocessError):
        command = ["uv", "python", "find", PYTHON]
        done = subprocess.run(command, text=True, capture_output=True, timeout=30)
        if done.returncode == 0:
            yield done.stdout.strip()
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    yield from sorted(map(str, versions.glob(f"{PYTHON}*/bin/python{PYTHON}")), reverse=True)


@contextmanager
def process_group(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process group of its own, which is killed at the end."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Keep other processes from installing the same environment. The lock ends with the process."""
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that installs {folder}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(folder: Path, say: Say) -> Path:
    if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not _is_venv(folder))):
        raise ArtifactError(
            f"{folder} is in the way: this command did not make it",
            f"remove it, or name another folder by the environment variable {VARIABLE}",
        )
    python = interpreter()
    for left in folder.parent.glob(f".{folder.name}.*"):
        # With the lock held, no other process builds here. This folder is left from a killed installation.
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_BYTES:
        raise ArtifactError(
            f"the serving environment takes up to {gb_number(DISK_BYTES, 0)} GB of disk, and "
            f"{folder.parent} has {gb_number(free, 1)} GB left",
            f"free disk space, or name a folder on another disk by the environment variable {VARIABLE}",
        )
    say(f"installing {requirement()} into {folder} once: about {GIGABYTES} GB, 2 to 5 minutes")
    building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _run([str(python), "-m", "venv", str(building)], building)
        for batch in _batches():
            _run(_pip(building, batch), building)
            _remove_unused(building)
        (building / STAMP).write_text(requirement(), encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)
        # Scripts in bin/ still name the temporary folder. Only the interpreter is used, which can be moved.
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"installed {requirement()}")
    return folder / "bin" / "python"


def _batches() -> list[list[str]]:
    """Return the pinned requirements, grouped by what is installed together."""
    versions = json.loads(PACKAGES.read_text(encoding="utf-8"))
    batches: list[list[str]] = [[] for _ in BATCHES]
    for name, version in versions.items():
        first = next(i for i, beginning in enumerate(BATCHES) if name.startswith(beginning))
        batches[first].append(f"{name}=={version}")
    return batches


def _pip(building: Path, requirements: list[str]) -> list[str]:
    command = [str(building / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    # The list is complete, so --no-deps. Python compiles modules on their first import, so --no-compile. A
    # copy of the wheels in pip's cache would take half as much disk again, so --no-cache-dir.
    return [*command, "--quiet", "--no-deps", "--no-compile", "--no-cache-dir", *requirements]


def _remove_unused(building: Path) -> None:
    for pattern in UNUSED:
        for path in building.glob(f"lib/python*/site-packages/{pattern}"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def _is_venv(folder: Path) -> bool:
    return (folder / "pyvenv.cfg").is_file()


def _run(command: list[str], building: Path) -> None:
    """Run one step of the installation, and kill the step if this call is interrupted.

    Raises:
        ArtifactError: the step failed; the message has the end of its output.
    """
    # pip downloads into this folder, because its disk has room. If pip is killed, both are removed.
    variables = {**os.environ, "TMPDIR": str(building)}
    with process_group(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate()
    if process.returncode != 0:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]
        message = " ".join(errors[-2:]) or output.strip().rpartition("\n")[2]
        raise ArtifactError(
            f"the serving environment could not be installed: {message or f'exit {process.returncode}'}",
            f"it is `pip install {requirement()}` under Python {PYTHON}: check the network and the index",
        )
