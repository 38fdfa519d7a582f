"""Run every measurement of `make bench`, each next to a baseline of the same run. Write docs/benchmarks.md.

python -m tests.bench [SECTION...]    only some; the page keeps the others: commands, throughput, ...
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench import commands

ROOT = Path(__file__).resolve().parent.parent.parent
CONVERSATIONS = 3000
PACKAGES = ("pydantic", "jax", "google-tunix", "qwix", "transformers", "trl", "datasets")


def throughput() -> str:
    from tests.bench.throughput import CASES, MEAN, P99, measure

    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    ratio, scale = found["recipec"] / found["tunix"], CASES["cpu"].scale
    return f"""Real tokens a second (padding not counted) of a generated train.py, against Tunix's stock path on the same samples:
one CPU device, float32, a Gemma 4 of six layers with a vocabulary of 32,768, LoRA on every projection, the same rows,
accumulation and rematerialization. Lengths are a published run's divided by twelve: mean {MEAN / scale:.0f}, 99th percentile
{P99 / scale:.0f}, at most {CASES["cpu"].cap} tokens. A scaled-down run, and no measurement of a TPU.

| | tokens/s | ratio | target |
|---|---|---|---|
| Tunix's PeftTrainer, padded rows, its own loss (baseline) | {found["tunix"]:,.0f} | 1.00 | |
| generated train.py, packed rows, chunked loss | {found["recipec"]:,.0f} | {ratio:.2f} | {_met(ratio, 2.5)} |
"""


def gpu() -> str:
    from tests.bench.throughput import CAP, CASES, MEAN, P99, measure

    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), "gpu")
    case = CASES["gpu"]
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    card = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    installed = {name: metadata.version(name) for name in (*PACKAGES[1:-1], "torch", "flax")}
    versions = ", ".join(f"{name} {version.rpartition('.')[0]}" for name, version in installed.items())
    names = {
        "tunix": "Tunix's PeftTrainer, padded rows, its own loss (baseline)",
        "trl": "generated train_trl.py, train.py's packed rows",
        "recipec": "generated train.py, packed rows, chunked loss",
    }
    rows = [f"| {names[name]} | {found[name]:,.0f} | {found[name] / found['tunix']:.2f} |" for name in names]
    return f"""As above, on one GPU ({card}; Python {platform.python_version()}, {versions}), in {case.dtype}, with a published
run's own lengths: mean {MEAN}, 99th percentile {P99:,}, at most {CAP:,} tokens. A Gemma 4 of about a billion random parameters:
{case.text["num_hidden_layers"]} layers, hidden size {case.text["hidden_size"]:,}, a vocabulary of {case.text["vocab_size"]:,}; {case.rows} rows a micro-batch, {case.accumulation} micro-batches a step. train.py
and Tunix compute attention in full, TRL's model by torch's scaled_dot_product_attention with a mask. train.py is for TPUs, and its script's mesh was set to the GPU for this run.

| | tokens/s | ratio |
|---|---|---|
{chr(10).join(rows)}
"""


def temporaries() -> str:
    rows = []
    for axes, dtype in ((("8", "1"), "float32"), (("4", "2"), "float32"), (("8", "1"), "bfloat16")):
        found = _json([sys.executable, "-m", "tests.bench.step", *axes, dtype])
        ratio = found["recipec"] / found["tunix"]
        met = "met" if ratio <= 0.25 else "missed"
        rows.append(
            f"| {axes[0]} x {axes[1]}, {dtype} | {found['tunix'] / 2**20:,.0f} | {found['recipec'] / 2**20:,.0f} | "
            f"{ratio:.2f} | at most 0.25: {met} |"
        )
    return f"""Temporaries of the compiled LoRA step on one of eight virtual CPU devices, MiB, at a vocabulary of 262,144 (2 layers,
hidden size 256, 8 rows of 512 tokens): Tunix's default loss, and this project's in chunks. In bfloat16 XLA's CPU
backend makes float32 copies of the output head, which a TPU does not.

| mesh fsdp x tp | Tunix's loss | chunked | ratio | target |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


def decoding() -> str:
    from tests.bench.decoding import CASES, ROWS

    rows, same = [], []
    for which, case in CASES.items():
        found = _json([sys.executable, "-m", "tests.bench.decoding", which])
        same.append(f"{found['same']:.0f}")
        what = f"{case.prompt} + {case.most} tokens, a vocabulary of {case.sizes['vocab_size']:,}"
        for name in ("greedy", "drawn"):
            ours, theirs = found[name], found[f"tunix-{name}"]
            whole = f"{found['whole']:,.0f}" if name == "greedy" else ""
            target = _met(ours / theirs, 1)
            rows.append(f"| {what}, {name} | {theirs:,.0f} | {whole} | {ours:,.0f} | {target} |")
    return f"""Tokens a second of {ROWS} rows, float32, one CPU device: a Gemma 3 of six layers. In the first two lines the output head takes
most of a step, in the others the cache. Tunix's sampler and `runtime/model/decode.py` have the same weights, and {" and ".join(same)} of
{ROWS} rows have the same greedy tokens. Drawn is temperature 1. "All slots" is decode.py if each pass read the whole cache.

| prompt + new tokens | Tunix's sampler | all slots | decode.py | target |
|---|---|---|---|---|
{chr(10).join(rows)}
"""


def data() -> str:
    from tests.bench.bench_data import measure

    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), CONVERSATIONS, 3)
    return f"""{CONVERSATIONS:,} conversations, mean 922 tokens, a byte-level BPE of 32,000 tokens, a chat template with generation
markers; TRL's SFTTrainer preparation with a process for each core, against this project's, alternating.

{found.text()}. Target: at least TRL's speed: {"met" if found.ratio >= 1 else "missed"}.
"""


def merging() -> str:
    from tests.bench.merging import section

    return section()


def start_up() -> str:
    from tests.bench.start_up import section

    return section()


def planning() -> str:
    from tests.bench.planning import section

    return section()


def _json(command: list[str]) -> Any:
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def _met(ratio: float, least: float) -> str:
    return f"at least {least}: {'met' if ratio >= least else 'missed'}"


def commit() -> str:
    """Return the measured commit if there is a repository, and whether files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty=, with changes", "--exclude=*"]
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def processor() -> str:
    """Return the processor's name from Linux, or else from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


SECTIONS: dict[str, tuple[str, Callable[[], str]]] = {
    "commands": ("The command", commands.section),
    "start-up": ("Start-up", start_up),
    "throughput": ("Training on a CPU", throughput),
    "gpu": ("Training on a GPU", gpu),
    "temporaries": ("Memory of the loss", temporaries),
    "decoding": ("Generation", decoding),
    "data": ("Tokenizing and packing", data),
    "merging": ("Merging", merging),
    "planning": ("Planning", planning),
}
"""Title and contents of each section of the page, by the name that the command line takes."""


def main(chosen: list[str]) -> int:
    page = ROOT / "docs" / "benchmarks.md"
    texts = _sections(page.read_text(encoding="utf-8"))
    for name in chosen or (name for name in SECTIONS if name != "gpu" or shutil.which("nvidia-smi")):
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        title, measure = SECTIONS[name]
        texts[title] = f"## {title}\n\n{measure().rstrip()}\n\nMeasured on {today}, at commit {commit()}.\n"
        print(texts[title], flush=True)
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    head = f"""# Benchmarks

Written by `make bench`: {processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, recipec
{metadata.version("recipec")}, {versions}.
A section that was measured elsewhere says so.
"""
    page.write_text("\n".join([head, *texts.values()]), encoding="utf-8")
    return 0


def _sections(text: str) -> dict[str, str]:
    """Return the page's sections by title. Sections that are not measured stay unchanged."""
    parts = re.split(r"(?m)^## ", text)[1:]
    return {part.partition("\n")[0]: f"## {part.rstrip()}\n" for part in parts}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
