"""Train the real Gemma 3 270M on a GPU, by train.py and by TRL, in float32, bfloat16 and eight bits.

    python -m scripts.gpu_runs run DATA.json [RESULT.json] [--seconds N]    on a machine with a GPU
    python -m scripts.gpu_runs table RESULT.json                              the tables of docs/

DATA.json holds Alpaca samples: a list of {"instruction", "input", "output"}. The last HELD_OUT are held out.
The base is build/gemma-3-270m (scripts/gemma3_270m.py). Artifacts are built for one CPU device, which takes
every variant, and their MESH is then set to the GPU. Needs jax with CUDA, and torch with CUDA for TRL.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from recipec.compiler.parity.compare import ComparedRun, compare, read_trace, tolerances_of
from recipec.runtime.training.trace import Trace
from scripts.eight_bit_quality import STEPS as AT
from scripts.eight_bit_quality import TEN, VARIANTS, by_layer, words

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "build" / "gemma-3-270m"
FOLDER = ROOT / "build" / "gpu-runs"
TEMPLATE = ROOT / "recipes" / "data" / "gemma3-270m" / "chat_template.jinja"
HELD_OUT = 100
STEPS = AT[-1]
RECIPE = f"""\
recipe: 1
name: gpu
model: {{id: google/gemma-3-270m, dtype: bfloat16, attention: dot}}
mesh: {{accelerator: cpu-1, axes: {{fsdp: 1, tp: 1}}}}
lora:
  rank: 16
  alpha: 32
  dropout: 0.0
  targets: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
remat: {{policy: none}}
data:
  train: [{{path: train.jsonl}}]
  eval: [{{path: eval.jsonl}}]
  format: chat
  chat_template: chat_template.jinja
  loss_on: assistant
  max_length: 512
  packing: true
train:
  steps: {STEPS}
  global_batch_size: 4
  micro_batch_size: 2
  optimizer: {{learning_rate: 2.0e-4, weight_decay: 0.01, max_grad_norm: 1.0}}
  schedule: {{name: cosine, warmup_steps: 10}}
  eval_every: {STEPS}
  log: {{every: 1, tensorboard: false}}
checkpoint: {{directory: checkpoints, every_steps: {STEPS}, keep: 1}}
cache: {{directory: null}}
"""
RUNS = [("trl", "float32"), ("trl", "bfloat16"), *(("train", name) for name in VARIANTS)]
"""Script and variant of each run."""
AT_ONCE = 7


def run(data: Path, result: Path, seconds: float) -> None:
    """Build the artifacts, run RUNS on the GPU, a few at a time, and write what the tables need.

    Args:
        seconds: no run starts later.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    samples = [json.dumps({"messages": messages(row)}) + "\n" for row in json.loads(data.read_text("utf-8"))]
    (FOLDER / "train.jsonl").write_text("".join(samples[:-HELD_OUT]), "utf-8")
    (FOLDER / "eval.jsonl").write_text("".join(samples[-HELD_OUT:]), "utf-8")
    (FOLDER / "recipe.yaml").write_text(RECIPE, "utf-8")
    shutil.copy(TEMPLATE, FOLDER)
    begun = time.monotonic()

    def in_time(run_key: tuple[str, str]) -> int | None:
        return train(run_key) if time.monotonic() < begun + seconds else None

    with ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(in_time, RUNS))
    record: dict[str, Any] = {"device": device(), "runs": {}, "parity": {}}
    first: Trace | None = None
    for run_key, status in zip(RUNS, statuses, strict=True):
        if status is None:
            continue
        if status:
            record["runs"][title(run_key)] = {"failed": (folder(run_key) / "log").read_text("utf-8")[-1500:]}
            continue
        trace = read_trace(folder(run_key) / "trace.npz")
        if run_key == ("train", "float32"):
            first = trace
        record["runs"][title(run_key)] = {
            "losses": trace.losses,
            "held_out": held_out(run_key),
            "cosines": by_layer(trace.gradients, first.gradients) if first else None,
        }
    for name in ("float32", "bfloat16"):
        if not all("losses" in record["runs"].get(title((script, name)), {}) for script in ("train", "trl")):
            continue
        pair = [read_trace(folder((script, name)) / "trace.npz") for script in ("train", "trl")]
        compared = [ComparedRun(trace.backend, trace) for trace in pair]
        record["parity"][name] = [row.to_dict() for row in compare(compared, tolerances_of(pair))]
        record["parity"][name].append(
            {"quantity": "cosines", "value": by_layer(*(t.gradients for t in pair))}
        )
    result.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def messages(row: Mapping[str, str]) -> list[dict[str, str]]:
    """Return an Alpaca sample as a chat of two turns."""
    question = "\n\n".join(text for text in (row["instruction"], row.get("input")) if text)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]


def title(run_key: tuple[str, str]) -> str:
    return "{}, {}".format(*run_key)


def folder(run_key: tuple[str, str]) -> Path:
    return FOLDER / "{}-{}".format(*run_key)


def train(run_key: tuple[str, str]) -> int:
    """Build one run's artifact, set its mesh to the GPU, and run it. Return the exit status."""
    script, name = run_key
    work = folder(run_key)
    build = [
        *("-m", "recipec.compiler.cli.main", "build", FOLDER / "recipe.yaml", "-o", work),
        *(("--backend", "trl") if script == "trl" else ()),
        *(f"--set={path}={value}" for path, value in VARIANTS[name].items()),
    ]
    artifact = work / "gpu"
    file = artifact / ("train.py" if script == "train" else "baseline/train_trl.py")
    places = ("--model", BASE, "--output", work, "--data-dir", FOLDER, "--trace", work / "trace.npz")
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    work.mkdir()
    started = time.monotonic()
    with (work / "log").open("w") as log:
        for command in (build, [file, *places]):
            if command is not build and script == "train":
                file.write_text(file.read_text("utf-8").replace('platform="cpu"', 'platform="gpu"'), "utf-8")
            line = [sys.executable, *map(str, command)]
            done = subprocess.run(line, cwd=ROOT, env=environment, stdout=log, stderr=log)
            if done.returncode:
                break
    print(f"{title(run_key)}: {done.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    return done.returncode


def held_out(run_key: tuple[str, str]) -> list[float]:
    """Return the held-out loss before and after the run."""
    (file,) = folder(run_key).glob("checkpoints*/metrics.jsonl")
    rows = map(json.loads, file.read_text("utf-8").splitlines())
    return [row["eval_loss"] for row in rows if "eval_loss" in row]


def device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(record: Mapping[str, Any]) -> str:
    """Return train.py's runs in Markdown, a row for each variant that was run."""
    head = (
        "Step",
        *(f"loss at {step}" for step in AT),
        "held-out loss before",
        "and after",
        "cosine, median",
        "least, of layer",
    )
    rows = [head, ("---",) * len(head)]
    for name, values in VARIANTS.items():
        figures = record["runs"].get(title(("train", name)), {})
        if "losses" not in figures:
            continue
        losses, cosines = figures["losses"], figures["cosines"]
        worst = min(cosines, key=lambda layer: cosines[layer])
        rows.append(
            (
                words(values),
                *(f"{np.mean(losses[max(0, step - TEN) : step]):.3f}" for step in AT),
                *(f"{figures['held_out'][at]:.4f}" for at in (0, -1)),
                f"{np.median(list(cosines.values())):.4f}",
                f"{cosines[worst]:.4f}, {worst}",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="train.py and TRL on a GPU")
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("file", type=Path, help="the samples, or the result of a run")
    parser.add_argument("result", type=Path, nargs="?", default=FOLDER.with_suffix(".json"))
    parser.add_argument("--seconds", type=float, default=3600, help="start no run later than that")
    arguments = parser.parse_args()
    if arguments.what == "run":
        run(arguments.file, arguments.result, arguments.seconds)
        return
    record = json.loads(arguments.file.read_text("utf-8"))
    print(record["device"], table(record), json.dumps(record["parity"], indent=1), sep="\n\n")


if __name__ == "__main__":
    main()
