"""Measure merging at full size: a generated merge.py against `cp -r` and against PEFT, in one run.

The base is synthetic, with the tensor shapes of Gemma 4 31B and one period of its layers. The adapters are of
a made-up run. Each measurement is a new process. It starts when no write is pending and the page cache holds
none of the base's files.

The measurement needs 27 GB of disk for temporary files, and 16 GB of memory for PEFT.

python -m tests.bench.merging [--sizes 1x4096 2x4096] [--rounds N]    layers and vocabulary of each base
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from tests.bench.merged_base import MODEL, RANK, ROOT, SHARD, write_base, write_run

RECIPE = "recipes/gemma4-31b-v5p8.yaml"
"""The recipe whose merge.py is measured: bfloat16, files of at most 5 GB, the PEFT adapter next to them."""

WHOLE = 62.5
"""GB of Gemma 4 31B."""

SIZES = ((2, 32_768), (4, 32_768), (6, 262_144))
"""Layers and vocabulary of each merged size. The last one is compared with copies and PEFT."""
ROUNDS = 3
SLOWEST, FASTER, MEMORY = 1.8, 2.0, 1.5
"""Targets: times the seconds of `cp -r`; times faster than PEFT; GB above the interpreter."""

SETTLE = 10
"""Seconds of rest before each measurement.

A virtual machine's host may take freed memory back, and its first use then costs more.
"""
POLL = 0.02
"""Seconds between two samples of a process's memory."""

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
DIRECT = """
mkdir "$2"
for file in "$1"/*; do
    dd if="$file" of="$2/${file##*/}" bs=16M iflag=direct oflag=direct status=none || exit 1
done
"""
NAMES = {
    "cp": "`cp -r` (baseline)",
    "synced": "`cp -r`, then `sync -f` of the copy",
    "direct": "`dd` of each file, both sides direct",
    "merge": "merge.py",
    "peft": "PEFT",
}
INTERPRETER = f"import time, numpy, jax, orbax.checkpoint; time.sleep({10 * POLL})"


@dataclass(frozen=True)
class Run:
    """The cost of a process and its children.

    Attributes:
        seconds: from start to end.
        anonymous: the maximum of bytes that belong to no file.
        resident: the maximum of bytes, including mapped files.
    """

    seconds: float
    anonymous: int
    resident: int


@dataclass(frozen=True)
class Size:
    """The rounds of one base size.

    Attributes:
        layers, vocabulary: of the base.
        size: bytes of the base's weights.
        adapters: bytes of the merged adapters.
        runs: by what ran: "merge", and for a compared size also NAMES.
    """

    layers: int
    vocabulary: int
    size: int
    adapters: int
    runs: dict[str, list[Run]]

    @property
    def merges(self) -> list[Run]:
        return self.runs["merge"]


def section(sizes: Sequence[tuple[int, int]] = SIZES, rounds: int = ROUNDS) -> str:
    """Return the merge's part of docs/benchmarks.md.

    Args:
        sizes: layers and vocabulary of each base: at least two, the largest last.
    """
    with tempfile.TemporaryDirectory() as folder:
        interpreter = watched([sys.executable, "-c", INTERPRETER], Path(folder))
        found = []
        for number, (layers, vocabulary) in enumerate(sizes):
            last = number == len(sizes) - 1
            found.append(measure(Path(folder, str(number)), layers, vocabulary, rounds, against=last))
    return text(found, interpreter)


def text(sizes: Sequence[Size], interpreter: Run) -> str:
    """Describe the comparison at the last size, and how the merge grows over all sizes."""
    whole = sizes[-1]
    taken = {name: seconds(runs) for name, runs in whole.runs.items()}
    copy, merge, peft = taken["cp"], taken["merge"], taken["peft"]
    targets = {"merge": f"at most {SLOWEST}: {_verdict(merge <= SLOWEST * copy)}"}
    rows = []
    for name, label in NAMES.items():
        median = taken[name]
        each = ", ".join(f"{run.seconds:.1f}" for run in whole.runs[name])
        cells = [label, f"{median:.1f}", each, f"{whole.size / median / 1e9:.2f}", f"{median / copy:.2f}"]
        rows.append(f"| {' | '.join([*cells, targets.get(name, '')])} |")
    anonymous, resident = _above(whole.merges, interpreter)
    theirs = _above(whole.runs["peft"], interpreter)
    growth = []
    for one in sizes:
        median = seconds(one.merges)
        memory = _above(one.merges, interpreter)
        figures = (one.size / 1e9, one.adapters / 1e9, median, one.size / median / 1e9, *memory)
        growth.append(f"| {' | '.join(f'{figure:.2f}' for figure in figures)} |")
    gigabytes = [one.size / 1e9 for one in sizes]
    time_line = line(gigabytes, [seconds(one.merges) for one in sizes])
    memory_line = line(gigabytes, [_above(one.merges, interpreter)[1] for one in sizes])
    return f"""A generated merge.py on a synthetic base of {whole.size / 1e9:.1f} GB in bfloat16: {MODEL}'s tensor shapes, its
vocabulary of {whole.vocabulary:,} and {whole.layers} of its 60 layers, in files of at most {SHARD / 1e9:.0f} GB; LoRA of rank {RANK} on all seven
projections; output in files of at most 5 GB, with the PEFT adapter. Whole processes, imports included, one after the
other in {len(whole.merges)} rounds, every other one in reverse, and PEFT once: the median's seconds, each round's, GB of the base a
second. Before each, what was written before is on the disk, the base's files are dropped from the page cache, and the
machine rests {SETTLE} s. The merge's files are synced and hashed when it ends; those of `cp -r` and of PEFT need not be on
the disk. `dd` shows what the disk does without the page cache, whose pages cost time of their own, most of all in a
virtual machine whose host takes unused memory back. PEFT {metadata.version("peft")}: from_pretrained in
bfloat16, merge_and_unload, save_pretrained; samples of its weights and of the merge's are equal, but for a last bit.

| | seconds | rounds | GB/s | ratio | target |
|---|---|---|---|---|---|
{chr(10).join(rows)}

Against PEFT the merge is {peft / merge:.2f} times as fast; target at least {FASTER:.0f}: {_verdict(peft >= FASTER * merge)}. Against the synced
copy its ratio is {merge / taken["synced"]:.2f}, against the direct one {merge / taken["direct"]:.2f}.

Peak memory above that of an interpreter that imports numpy, jax and orbax ({interpreter.resident / 1e9:.2f} GB), looked at every {POLL * 1000:.0f} ms:
resident {resident:.2f} GB, the base's mapped pages included, of which {anonymous:.2f} GB are not a file's. Target, of the
former, at most {MEMORY} GB: {_verdict(resident <= MEMORY)}. PEFT's: {theirs[1]:.2f} and {theirs[0]:.2f} GB.

How the merge grows, with bases of {", ".join(str(one.layers) for one in sizes)} layers; memory above the interpreter's:

| base, GB | adapters, GB | seconds | GB/s | not a file's, GB | resident, GB |
|---|---|---|---|---|---|
{chr(10).join(growth)}

A line through them has {time_line[1]:.2f} s a GB and {time_line[0]:.1f} s besides. Memory is that of the blocks in flight, which does not grow,
and of the adapters, which have a rank's numbers for each layer: {memory_line[0]:.2f} GB and {memory_line[1]:.3f} GB a GB of the base. By these
lines, and not measured, all of {WHOLE} GB would take {time_line[0] + time_line[1] * WHOLE:,.0f} s and {memory_line[0] + memory_line[1] * WHOLE:.1f} GB.
"""


def measure(folder: Path, layers: int, vocabulary: int, rounds: int, against: bool) -> Size:
    """Merge a base of this many layers several times, in a new folder that is removed at the end.

    Args:
        against: whether to measure copies in each round, and PEFT at the end.

    Raises:
        AssertionError: the merge's weights are not PEFT's.
    """
    folder.mkdir()
    base, run, script = folder / "base", folder / "run", folder / "generated" / Path(RECIPE).stem / "merge.py"
    write_base(base, layers, vocabulary)
    adapters = write_run(run, base)
    recipe = Path(sys.executable).with_name("recipe")
    subprocess.run(
        [recipe, "build", RECIPE, "-o", folder / "generated"], cwd=ROOT, check=True, capture_output=True
    )
    work, copied, theirs = folder / "work", folder / "copy", folder / "peft"
    copy = ["cp", "-r", "--reflink=never", base, copied]
    commands: dict[str, list[str | Path]] = {
        "cp": copy,
        "synced": ["sh", "-c", '"$@" && sync -f "$0"', copied, *copy],
        "direct": ["sh", "-c", DIRECT, "sh", base, copied],
        "merge": [sys.executable, script, "--model", base, "--checkpoint", run, "--output", work],
    }
    names = list(commands) if against else ["merge"]
    found = Size(layers, vocabulary, _weights(base), adapters, {name: [] for name in names})
    for number in range(rounds):
        for name in reversed(names) if number % 2 else names:
            shutil.rmtree(work if name == "merge" else copied, ignore_errors=True)
            found.runs[name].append(watched(commands[name], folder, base))
            print(f"{found.size / 1e9:.1f} GB: {name}: {found.runs[name][-1]}", file=sys.stderr, flush=True)
    shutil.rmtree(copied, ignore_errors=True)
    if against:
        peft = [sys.executable, "-c", PEFT, base, work / "merged-adapter", theirs]
        found.runs["peft"] = [watched(peft, folder, base)]
        check_same(work / "merged", theirs)
    shutil.rmtree(folder)
    return found


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
    anonymous = resident = 0
    with (folder / "log").open("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                process.wait(POLL)
                break
            except subprocess.TimeoutExpired:
                pass
            seen = [_memory(pid) for pid in _family(process.pid)]
            anonymous = max(anonymous, sum(one.get("RssAnon", 0) + one.get("RssShmem", 0) for one in seen))
            # The first process's own high-water mark includes peaks between two samples.
            resident = max(resident, sum(one.get("VmRSS", 0) for one in seen), seen[0].get("VmHWM", 0))
        taken = time.perf_counter() - start
        if process.returncode:
            log.seek(0)
            raise RuntimeError(f"{command[:2]}: exit status {process.returncode}\n{log.read()[-4000:]}")
    return Run(taken, anonymous, resident)


def _family(pid: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # the thread has ended
            continue
        for child in children:
            yield from _family(int(child))


def _memory(pid: int) -> dict[str, int]:
    """Return bytes by their names in /proc/PID/status, or nothing for an ended process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(number) * 1024 for name, number, _ in fields}


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


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


def seconds(runs: Iterable[Run]) -> float:
    """Return the median of the seconds."""
    return statistics.median(run.seconds for run in runs)


def _above(runs: Iterable[Run], interpreter: Run) -> tuple[float, float]:
    """Return the largest anonymous and resident memory of the runs, in GB above the interpreter's."""
    runs = list(runs)
    anonymous, resident = (max(run.anonymous for run in runs), max(run.resident for run in runs))
    return (anonymous - interpreter.anonymous) / 1e9, (resident - interpreter.resident) / 1e9


def line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Fit a line by least squares, and return its value at 0 and its slope."""
    slope, start = np.polyfit(x, y, 1)
    return float(start), float(slope)


def _verdict(met: bool) -> str:
    return "met" if met else "missed"


def main(arguments: Iterable[str] | None = None) -> None:
    """Print the section for smaller bases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["1x4096", "2x4096"], metavar="LAYERSxVOCABULARY")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(None if arguments is None else list(arguments))
    sizes = [tuple(map(int, size.split("x"))) for size in options.sizes]
    print(section([(layers, vocabulary) for layers, vocabulary in sizes], options.rounds))


if __name__ == "__main__":
    sys.exit(main())
