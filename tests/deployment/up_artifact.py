"""An artifact next to its weights, and `recipe serve` on it, in this process or in another one."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from recipec.compiler.artifacts import artifact
from recipec.compiler.emitters.lock import emit_lock
from recipec.compiler.emitters.server import emit_serve
from tests.emit.emitting import program_of

ROOT = Path(__file__).resolve().parents[2]

HANGS = 180.0
"""Seconds after which a command counts as hanging: an engine that builds on a busy machine is slow."""


def build(folder: Path, *sets: str, name: str = "sample") -> Path:
    """Build an artifact's server files into folder/generated, with merged weights."""
    artifact.write(folder / "generated", {name: _files(name, sets)})
    made = folder / "generated" / name
    write_model(made / "merged")
    return made


@functools.cache
def _files(name: str, sets: tuple[str, ...]) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        program = program_of(Path(folder), [f"name={name}", "serve.image=base:1", *sets])
    files = {path: text.encode() for path, text in emit_serve(program).items()}
    return files | {artifact.LOCK: emit_lock(program, files).encode()}


def write_model(folder: Path, shards: int = 1) -> None:
    """Write the smallest folder that passes as a complete model."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    places = {}
    for number in range(shards):
        name = "model.safetensors" if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        places[f"layer.{number}"] = name
        write_safetensors(folder / name, f"layer.{number}")
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def write_adapter(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "generation_config.json").write_text("{}")
    write_safetensors(folder / "adapter_model.safetensors", "lora_A")


def write_safetensors(path: Path, tensor: str) -> None:
    """Write a file with one tensor of two numbers."""
    header = json.dumps({tensor: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


class Command:
    """`recipe serve ...` as a process, whose output is read as it arrives."""

    def __init__(self, *arguments: object, **environ: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "recipec.compiler.cli.main", "serve", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(iter(self.process.stdout.readline, ""))  # as they arrive: extend adds one at a time

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def until(self, words: str, seconds: float = HANGS) -> None:
        """Wait until the output contains some words."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert self.process.poll() is None and time.monotonic() < deadline, (
                f"no {words!r} in:\n{self.text}"
            )
            time.sleep(0.01)

    def signal(self, signum: int = signal.SIGINT) -> None:
        self.process.send_signal(signum)

    def ended(self, seconds: float = HANGS) -> int:
        """Wait for the exit status and all output."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end:\n{self.text}") from None
        self._reader.join(10)
        return status
