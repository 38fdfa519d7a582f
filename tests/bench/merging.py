"""Measure merging at full size: a generated merge.py against `cp -r` and against PEFT, in one run.

The base is synthetic, with the tensor shapes of Gemma 4 31B and one period of its layers. The adapters are of
a made-up run. Each measurement is a new process. It starts when no write is pending and the page cache holds
none of the base's files.

The measurement needs 27 GB of disk for temporary files, and 16 GB of memory for PEFT.
`python -m tests.bench.merging` measures a smaller base.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.bench.merged_base import MODEL, RANK, ROOT, SHARD, write_base, write_run

RECIPE = "recipes/gemma4-31b-v5p8.yaml"
"""The recipe whose merge.py is measured: bfloat16, files of at most 5 GB, the PEFT adapter next to them."""

LAYERS, VOCABULARY, ROUNDS = 6, 262_144, 3
SLOWEST, FASTER, MEMORY = 1.8, 2.0, 1.5
"""Targets: times the seconds of `cp -r`; times faster than PEFT; GB above the interpreter."""

SETTLE = 10
"""Seconds of rest before each measurement.

A virtual machine's host may take freed memory back, and its first use then costs more.
"""
PEFT = """
import sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, output = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
merged = PeftModel.from_pretrained(model, adapter).merge_and_unload()
merged.save_pretrained(output, max_shard_size="5GB")
"""
NAMES = {"cp": "`cp -r` (baseline)", "merge": "merge.py", "peft": "PEFT"}
INTERPRETER = "import time, numpy, jax, orbax.checkpoint; time.sleep(0.2)"


class Run(NamedTuple):
    """The seconds of a process, and the most bytes that it had in memory, mapped files included."""

    seconds: float
    resident: int


def section(layers: int = LAYERS, vocabulary: int = VOCABULARY, rounds: int = ROUNDS) -> str:
    """Return the merge's part of docs/benchmarks.md, of a base with this many layers and tokens."""
    with tempfile.TemporaryDirectory() as folder:
        interpreter = watched([sys.executable, "-c", INTERPRETER], Path(folder))
        size, runs = measure(Path(folder, "base"), layers, vocabulary, rounds)
    taken = {name: statistics.median(run.seconds for run in found) for name, found in runs.items()}
    copy, merge, peft = taken["cp"], taken["merge"], taken["peft"]
    targets = {"merge": f"at most {SLOWEST}: {_verdict(merge <= SLOWEST * copy)}"}
    rows = []
    for name, label in NAMES.items():
        median = taken[name]
        each = ", ".join(f"{run.seconds:.1f}" for run in runs[name])
        cells = [label, f"{median:.1f}", each, f"{size / median / 1e9:.2f}", f"{median / copy:.2f}"]
        rows.append(f"| {' | '.join([*cells, targets.get(name, '')])} |")
    resident, theirs = (
        (max(run.resident for run in runs[name]) - interpreter.resident) / 1e9 for name in ("merge", "peft")
    )
    return f"""A generated merge.py on a synthetic base of {size / 1e9:.1f} GB in bfloat16: {MODEL}'s tensor shapes, its
vocabulary of {vocabulary:,} and {layers} of its 60 layers, in files of at most {SHARD / 1e9:.0f} GB; LoRA of rank {RANK} on all seven
projections; output in files of at most 5 GB, with the PEFT adapter. Whole processes, imports included, one after the
other in {rounds} rounds, every other one in reverse, and PEFT once: the median's seconds, each round's, GB of the base a
second. Before each, what was written before is on the disk, the base's files are dropped from the page cache, and the
machine rests {SETTLE} s. The merge's files are synced and hashed when it ends; those of `cp -r` and of PEFT need not be on
the disk. PEFT {metadata.version("peft")}: from_pretrained in bfloat16, merge_and_unload, save_pretrained; samples of its weights and
of the merge's are equal, but for a last bit.

| | seconds | rounds | GB/s | ratio | target |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Against PEFT the merge is {peft / merge:.2f} times as fast; target at least {FASTER:.0f}: {_verdict(peft >= FASTER * merge)}.

Peak memory above that of an interpreter that imports numpy, jax and orbax ({interpreter.resident / 1e9:.2f} GB):
resident {resident:.2f} GB, the base's mapped pages included; target at most {MEMORY} GB: {_verdict(resident <= MEMORY)}. PEFT's: {theirs:.2f} GB.
"""


def measure(folder: Path, layers: int, vocabulary: int, rounds: int) -> tuple[int, dict[str, list[Run]]]:
    """Copy and merge a base several times, and merge it with PEFT once, in a new folder that is removed.

    Returns:
        The bytes of the base's weights, and the runs by NAMES.

    Raises:
        AssertionError: the merge's weights are not PEFT's.
    """
    folder.mkdir()
    base, run, script = folder / "base", folder / "run", folder / "generated" / Path(RECIPE).stem / "merge.py"
    write_base(base, layers, vocabulary)
    write_run(run, base)
    recipe = Path(sys.executable).with_name("recipe")
    subprocess.run(
        [recipe, "build", RECIPE, "-o", folder / "generated"], cwd=ROOT, check=True, capture_output=True
    )
    work, copied, theirs = folder / "work", folder / "copy", folder / "peft"
    commands: dict[str, list[str | Path]] = {
        "cp": ["cp", "-r", "--reflink=never", base, copied],
        "merge": [sys.executable, script, "--model", base, "--checkpoint", run, "--output", work],
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for number in range(rounds):
        for name in reversed(commands) if number % 2 else commands:
            shutil.rmtree(work if name == "merge" else copied, ignore_errors=True)
            runs[name].append(watched(commands[name], folder, base))
            print(f"{name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    shutil.rmtree(copied, ignore_errors=True)
    peft = [sys.executable, "-c", PEFT, base, work / "merged-adapter", theirs]
    runs["peft"] = [watched(peft, folder, base)]
    check_same(work / "merged", theirs)
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    shutil.rmtree(folder)
    return size, runs


def watched(command: Sequence[str | Path], folder: Path, source: Path | None = None) -> Run:
    """Run a command until it ends.

    Args:
        folder: for its output.
        source: a folder whose files are dropped from the page cache before.

    Raises:
        RuntimeError: it failed.
    """
    os.sync()
    for path in source.iterdir() if source else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(SETTLE)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    with (folder / "log").open("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        taken = time.perf_counter() - start
        if status:
            log.seek(0)
            raise RuntimeError(f"{command[:2]}: status {status}\n{log.read()[-4000:]}")
    return Run(taken, 1024 * usage.ru_maxrss)


def check_same(ours: Path, theirs: Path, rows: int = 64) -> None:
    """Compare `rows` evenly spread rows of every tensor of two checkpoints.

    Raises:
        AssertionError: the tensors' names differ, or values differ by more than a rounding.
    """
    from recipec.runtime.weights.checkpoint import HFCheckpoint

    one, other = HFCheckpoint.open(ours), HFCheckpoint.open(theirs)
    assert set(one.tensors) == set(other.tensors), set(one.tensors) ^ set(other.tensors)
    for name in one.tensors:
        step = max(1, math.prod(one.tensors[name].shape[:1]) // rows)
        a, b = (np.atleast_1d(found.read(name))[::step].astype(np.float32) for found in (one, other))
        assert np.all(np.abs(a - b) <= 1e-6 + 2.0**-7 * np.abs(b)), f"{name} is not what PEFT makes of it"


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


if __name__ == "__main__":
    print(section(2, 4096, 2))
