"""Artifacts that serve a tiny Gemma 4 in a container, and their users' commands."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipec.runtime.clients.client import Client
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests.e2e.docker_engine import Engine
from tests.e2e.merged_models import make_gemma4, merged_in_float32
from tests.ports import free_port
from tests.runtime.runs import lora_section, save_run

SENTINELS = {"VLLM_API_KEY": "sentinel-of-the-api-key-5f1c0a", "HF_TOKEN": "hf_sentinelOfTheTokenb7e9d2"}
"""Secrets in every command of these tests, which may only be in the container's environment."""

RECIPE = """\
recipe: 1
name: {name}
model: {{id: {model}, dtype: float32}}
mesh: {{accelerator: cpu-1, axes: {{fsdp: 1, tp: 1}}}}
lora: {{rank: 3, alpha: 6, targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}}
data:
  train: [{{path: train.jsonl}}]
  format: chat
  max_length: 128
train: {{steps: 4, global_batch_size: 1, micro_batch_size: 1}}
checkpoint: {{directory: checkpoints, every_steps: 4}}
merge: {{output: merged, dtype: float32, adapter: true}}
serve:
  accelerator: v6e-1
  image: {image}
  tensor_parallel_size: 1
  max_model_len: 256
  max_num_seqs: 32
  # An image or a video is not split: 2,496 tokens.
  max_num_batched_tokens: 2560
  kv_cache_dtype: auto
  port: {port}
  # What vLLM on a CPU takes, and what transformers is compared in.
  extra_args: {{dtype: float32, enforce_eager: true}}
  # The image has no C++ compiler, and vLLM would compile what it gathers log probabilities with.
  env: {{TORCHDYNAMO_DISABLE: "1"}}
benchmark: {{input_lengths: [32], output_length: 8, request_rates: [8, inf], prompts: 12}}
"""

CONVERSATION = {"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}


@dataclass(frozen=True)
class Tiny:
    """A tiny Gemma 4 in the multimodal layout, and a run's results in float32."""

    base: Path
    merged: Path
    adapter: Path


def tiny_gemma4(folder: Path) -> Tiny:
    base = folder / "base"
    make_gemma4(base)
    opened = HFCheckpoint.open(base)
    save_run(folder / "run", opened, lora_section(), scale=0.2)
    merged, adapter = merged_in_float32(base, "gemma4", folder / "run", folder / "out")
    return Tiny(base, merged, adapter)


@dataclass
class Artifact:
    """A built artifact whose commands use the tests' engine.

    Attributes:
        said: the output of all commands.
    """

    folder: Path
    url: str
    engine: Engine
    said: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def client(self) -> Client:
        return Client(self.url, SENTINELS["VLLM_API_KEY"])

    def environment(self) -> dict[str, str]:
        return self.engine.environment(**SENTINELS)

    def run(self, *command: str | Path, status: int = 0) -> str:
        """Run a command in serve/ until it ends, which must be with `status`, and return both streams."""
        started = time.monotonic()
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder / "serve",
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        said = ended.stdout
        self.said.append(said)
        words = " ".join(str(word) for word in command)
        took = f"{time.monotonic() - started:.0f} s"
        print(f"\n$ {words}\n{said[-2500:]}[{ended.returncode} after {took}]")
        assert ended.returncode == status, f"{words} ended with {ended.returncode}\n{said[-6000:]}"
        return said

    def recipe(self, *words: str | Path, status: int = 0) -> str:
        return self.run(sys.executable, "-m", "recipec.compiler.cli.main", *words, status=status)

    def inspect(self, container: str) -> dict[str, Any]:
        (told,) = json.loads(self.engine.docker("inspect", container))
        return dict(told)


def build(folder: Path, name: str, engine: Engine, image: str, model: Path) -> Artifact:
    """Build an artifact in `folder`/generated that serves merged weights on a free port."""
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.jsonl").write_text(json.dumps(CONVERSATION) + "\n")
    (folder / f"{name}.yaml").write_text(RECIPE.format(name=name, model=model, image=image, port=port))
    artifact = Artifact(folder / "generated" / name, f"http://127.0.0.1:{port}", engine)
    command = [sys.executable, "-m", "recipec.compiler.cli.main", "build", str(folder / f"{name}.yaml")]
    done = subprocess.run(
        [*command, "-o", str(folder / "generated")],
        env=artifact.environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    artifact.said.append(done.stdout)
    return artifact


def copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


@contextmanager
def watched(secrets: Iterable[str] = tuple(SENTINELS.values())) -> Iterator[set[str]]:
    """Collect the argument lists with a secret, of all processes, until the block ends."""
    found: set[str] = set()
    ended = threading.Event()
    wanted = [value.encode() for value in secrets]

    def watch() -> None:
        while not ended.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    words = path.read_bytes()
                except OSError:
                    continue
                if any(value in words for value in wanted):
                    found.add(words.replace(b"\0", b" ").decode(errors="replace"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


def holding_a_sentinel(*places: Path) -> list[str]:
    """Return the files below `places` whose bytes contain a sentinel."""
    found = []
    wanted = [value.encode() for value in SENTINELS.values()]
    for place in places:
        for folder, _, names in os.walk(place):
            for name in names:
                path = Path(folder, name)
                if path.is_symlink() or not path.is_file():
                    continue
                data = path.read_bytes()
                if any(value in data for value in wanted):
                    found.append(str(path))
    return found
