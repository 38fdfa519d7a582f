"""The environment that compiles the serving step: Python 3.12 with vllm-tpu, which cannot share the one of
training (it pins another jax, qwix and transformers).

It is made once and kept: in $RECIPEC_SERVE_ENV, or below the user's cache folder. It is built under another
name and renamed when it is whole, so that what lies at its place is never half an installation. It holds the
packages of data/serve_environment.json, which scripts/pins.py writes: vllm-tpu's, but for those that only a
GPU, a cluster or a served model needs.
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

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering import pins

VARIABLE = "RECIPEC_SERVE_ENV"
PYTHON = "3.12"
"""vllm-tpu's wheel is made for this version alone."""

PACKAGES = Path(__file__).parents[2] / "data" / "serve_environment.json"
"""Versions by package. CUDA's libraries are among them: PyPI has no other build of torch for Linux."""

BATCHES = ("nvidia-", "torch", "")
"""How the names begin of what is installed together, so that pip does not hold all wheels at once."""

UNUSED = ("nvidia/cudnn/lib/libcudnn_*", "torch/lib/libtorch_cuda_linalg.so", "torch/test", "torch/include")
"""In site-packages, 1.3 GB: what torch loads on a GPU alone, or not at all."""

GIGABYTES = 7
DISK_BYTES = 9e9
"""What an installation needs at its worst: with the wheels that pip keeps while it installs."""

STAMP = "installed.txt"
"""Holds what was installed. It is written last."""

Say = Callable[[str], None]


def requirement() -> str:
    """What pip installs: "vllm-tpu==0.32.0"."""
    return f"vllm-tpu=={pins.sets()['serve']['vllm-tpu']}"


def location() -> Path:
    """The environment's folder, whether it exists or not."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser().absolute()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "recipec" / f"serve-{pins.sets()['serve']['vllm-tpu']}"


def find() -> Path | None:
    """The environment's interpreter, None where there is no whole environment of these versions."""
    folder = location()
    python = folder / "bin" / "python"
    try:
        whole = (folder / STAMP).read_text(encoding="utf-8") == requirement()
    except OSError:
        return None
    return python if whole and python.exists() else None


def make(say: Say = lambda line: None) -> Path:
    """The environment's interpreter; installs it (about 7 GB, some minutes) where there is none.

    Args:
        say: is told what is happening, a sentence at a time.

    Raises:
        ArtifactError: no Python 3.12, too little disk, something else in its place, or pip failed.
    """
    if found := find():
        return found
    folder = location()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, say):
            # Another process may have installed it while this one waited.
            return find() or _install(folder, say)
    except OSError as error:
        raise ArtifactError(
            f"{folder} cannot be written: {error.strerror}",
            f"name a folder that can be written by the environment variable {VARIABLE}",
        ) from None


def interpreter() -> Path:
    """A Python 3.12 of this machine.

    Raises:
        ArtifactError: when there is none.
    """
    for candidate in _candidates():
        with suppress(OSError, subprocess.SubprocessError):
            # A shim of that name may stand for no version at all: only running it tells.
            question = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
            done = subprocess.run([candidate, "-c", question], text=True, capture_output=True, timeout=30)
            if done.returncode == 0 and done.stdout.strip() == PYTHON:
                return Path(candidate)
    raise ArtifactError(
        f"planning by compiling the serving step needs Python {PYTHON}, which {requirement()} is made for, "
        "and there is none on this machine",
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
def _locked(folder: Path, say: Say) -> Iterator[None]:
    """Keeps other processes from installing the same environment; the lock ends with the process."""
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
            f"{folder} is in the way: it is no environment that this command made",
            f"remove it, or name another folder by the environment variable {VARIABLE}",
        )
    python = interpreter()
    for left in folder.parent.glob(f".{folder.name}.*"):
        # Under the lock nobody else builds here: this is what a killed installation left.
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < DISK_BYTES:
        raise ArtifactError(
            f"the serving environment takes up to {DISK_BYTES / 1e9:.0f} GB of disk, and "
            f"{folder.parent} has {free / 1e9:.1f} GB left",
            f"free some, or name a folder on another disk by the environment variable {VARIABLE}",
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
        # Scripts in bin/ name the temporary folder; only the interpreter is used, and it finds its own place.
        os.rename(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    say(f"installed {requirement()}")
    return folder / "bin" / "python"


def _batches() -> list[list[str]]:
    """Requirements of one version each, by what is installed together."""
    versions = json.loads(PACKAGES.read_text(encoding="utf-8"))
    batches: list[list[str]] = [[] for _ in BATCHES]
    for name, version in versions.items():
        first = next(i for i, beginning in enumerate(BATCHES) if name.startswith(beginning))
        batches[first].append(f"{name}=={version}")
    return batches


def _pip(building: Path, requirements: list[str]) -> list[str]:
    command = [str(building / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    # All that is needed is in the list. Modules are compiled when they are first imported, those that are at
    # all; and a copy of the wheels in pip's cache would take half as much disk again.
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
    """Runs one step of the installation, which ends with this process.

    Raises:
        ArtifactError: with the end of what the step said.
    """
    process = subprocess.Popen(
        command,
        # What pip downloads lies on the disk that has room for it, and goes with the folder.
        env={**os.environ, "TMPDIR": str(building)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if process.returncode != 0:
        errors = [line for line in output.splitlines() if line.startswith("ERROR")]
        said = " ".join(errors[-2:]) or output.strip().rpartition("\n")[2]
        raise ArtifactError(
            f"the serving environment could not be installed: {said or f'exit {process.returncode}'}",
            f"it is `pip install {requirement()}` under Python {PYTHON}: check the network and the index",
        )
