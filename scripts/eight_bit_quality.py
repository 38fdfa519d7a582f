"""Measure the quality cost of 8-bit products: train the real Gemma 3 270M with each kind of step.

    python -m scripts.eight_bit_quality run [NAME...]  build, train, merge, ask: minutes each
    python -m scripts.eight_bit_quality table          docs/numerics-quantized.md's table of the finished runs

Each variant is recipes/gemma3-270m-cpu.yaml with SAME and its own values. Its artifact's train.py trains it
from build/gemma-3-270m (scripts/gemma3_270m.py), and its merge.py merges it. Rows, their order, the initial
adapters and dropout are the same. Results go to build/eight-bits/NAME.json, the trace next to them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler.parity.compare import read_trace
from scripts.gemma3_answers import answers, in_format, load, questions

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "gemma3-270m-cpu"
BASE = ROOT / "build" / "gemma-3-270m"
FOLDER = ROOT / "build" / "eight-bits"
STEPS = (1, 50, 100, 200)
TEN = 10
"""Number of losses to average, up to and including a step of STEPS; the first step is not averaged."""

SAME = {
    "train.steps": STEPS[-1],
    "train.eval_every": STEPS[-1],
    "checkpoint.every_steps": STEPS[-1],
    "train.global_batch_size": 1,
    "train.micro_batch_size": 1,
    "data.max_length": 64,
    "merge.adapter": "false",
}
VARIANTS: dict[str, dict[str, str]] = {
    "float32": {"model.dtype": "float32"},
    "int8-both": {"model.dtype": "bfloat16", "model.quantization": "int8", "model.quantized_matmul": "both"},
    "int8-forward": {
        "model.dtype": "bfloat16",
        "model.quantization": "int8",
        "model.quantized_matmul": "forward",
    },
    "bfloat16": {"model.dtype": "bfloat16"},
    "fp8-both": {"model.dtype": "bfloat16", "model.quantization": "fp8", "model.quantized_matmul": "both"},
    "fp8-forward": {
        "model.dtype": "bfloat16",
        "model.quantization": "fp8",
        "model.quantized_matmul": "forward",
    },
    "int8-stored": {"model.dtype": "bfloat16", "model.quantization": "int8"},
    "fp8-stored": {"model.dtype": "bfloat16", "model.quantization": "fp8"},
}
"""The most informative ones first; the others' gradients and answers are compared with float32."""


def run(name: str) -> None:
    """Train, merge and query one variant, unless it is done. Keep only the trace of its files."""
    if (FOLDER / f"{name}.json").exists():
        return
    work = FOLDER / name
    shutil.rmtree(work, ignore_errors=True)
    values = [f"--set={path}={value}" for path, value in {**SAME, **VARIANTS[name]}.items()]
    python("-m", "recipec.compiler.cli.main", "build", f"recipes/{RECIPE}.yaml", "-o", work, *values)
    artifact, places = work / RECIPE, ("--model", BASE, "--output", work / "run")
    trace = FOLDER / f"{name}.npz"
    python(artifact / "train.py", *places, "--data-dir", ROOT / "recipes", "--trace", trace)
    python(artifact / "merge.py", *places, "--checkpoint", work / "run" / "checkpoints")
    metrics = (work / "run" / "checkpoints" / "metrics.jsonl").read_text("utf-8").splitlines()
    held_out = [row["eval_loss"] for row in map(json.loads, metrics) if "eval_loss" in row]
    texts = answers(*load(work / "run" / "merged"), questions("eval.jsonl"))
    record = {"values": VARIANTS[name], "eval_loss": held_out, "answers": texts}
    (FOLDER / f"{name}.json").write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", "utf-8")
    shutil.rmtree(work)


def python(*arguments: str | Path) -> None:
    """Run one of the project's scripts on one device; raise if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, check=True)


def table() -> str:
    """Return a row in Markdown for each finished variant."""
    names = [name for name in VARIANTS if (FOLDER / f"{name}.json").exists()]
    records = {name: json.loads((FOLDER / f"{name}.json").read_text("utf-8")) for name in names}
    traces = {name: read_trace(FOLDER / f"{name}.npz") for name in names}
    head = (
        "Step",
        *(f"loss at {step}" for step in STEPS),
        "held-out loss before",
        "and after",
        "answers in the form",
        "answers as float32's",
        "cosine, median",
        "least, of layer",
    )
    rows = [head, ("---",) * len(head)]
    for name in names:
        losses, texts = traces[name].losses, records[name]["answers"]
        same = sum(a == b for a, b in zip(texts, records["float32"]["answers"], strict=True))
        cosines = by_layer(traces[name].gradients, traces["float32"].gradients)
        worst = min(cosines, key=lambda layer: cosines[layer])
        rows.append(
            (
                words(records[name]["values"]),
                *(f"{np.mean(losses[max(0, step - TEN) : step]):.3f}" for step in STEPS),
                *(f"{records[name]['eval_loss'][at]:.4f}" for at in (0, -1)),
                f"{round(in_format(texts) * len(texts))} of {len(texts)}",
                f"{same} of {len(texts)}",
                f"{np.median(list(cosines.values())):.4f}",
                f"{cosines[worst]:.4f}, {worst}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def words(values: Mapping[str, Any]) -> str:
    """Return a variant's name in the table."""
    kind, products = values.get("model.quantization"), values.get("model.quantized_matmul")
    weights = "" if kind is None else f", {kind} weights" + (f", products {products}" if products else "")
    return values["model.dtype"] + weights


def by_layer(gradients: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> dict[int, float]:
    """Return the cosine between two gradients of each layer's adapters."""
    out: dict[int, float] = {}
    for layer in sorted({int(name.split(".")[1]) for name in other}):
        names = [name for name in other if name.startswith(f"layers.{layer}.")]
        gradient, two = (
            np.concatenate([arrays[name].ravel() for name in names]) for arrays in (gradients, other)
        )
        out[layer] = float(gradient @ two / np.linalg.norm(gradient) / np.linalg.norm(two))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="what products in eight bits cost in quality")
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("names", nargs="*", choices=[*VARIANTS, []], metavar="NAME")
    arguments = parser.parse_args()
    if arguments.what == "run":
        for name in arguments.names or VARIANTS:
            run(name)
    else:
        print(table())


if __name__ == "__main__":
    main()
