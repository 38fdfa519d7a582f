"""Folders of runs in train.py's format, for the tests of `recipe watch`."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LOCK = {
    "name": "support-qlora",
    "recipe": {
        "model": {"id": "Qwen/Qwen3-14B"},
        "lora": {"rank": 16},
        "mesh": {"accelerator": "v5e-8", "topology": None},
        "train": {"steps": 400, "objective": "sft", "log": {"every": 10}},
    },
}


def entry(step: int, **changes: Any) -> dict[str, Any]:
    """Return a training line. The loss falls."""
    return {
        "step": step,
        "loss": 1 + 2 * math.exp(-step / 80),
        "learning_rate": 1e-4,
        "grad_norm": 0.5,
        "tokens": 16000,
        "tokens_per_second": 12345.6,
        "step_seconds": 1.5,
        "peak_memory_bytes": 12 * 2**30,
    } | changes


def lines(first: int, last: int, every: int = 50) -> str:
    """Return lines of metrics.jsonl for the steps [first, last], with their evaluations."""
    out = [] if first > 1 else [{"step": 0, "eval_loss": 3.1}]
    for step in range(first, last + 1):
        out.append(entry(step))
        if step % every == 0:
            out.append({"step": step, "eval_loss": 1.1 + 2 * math.exp(-step / 80)})
    return "".join(json.dumps(line) + "\n" for line in out)


def state(folder: Path, state: str = "training", **changes: Any) -> None:
    """Write state.json of this process."""
    record = {
        "state": state,
        "reason": None,
        "total": 400,
        "until": 400,
        "at": "2026-11-20T10:00:00Z",
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    (folder / "state.json").write_text(json.dumps(record | changes))


def write_run(folder: Path, steps: int = 120, lock: Mapping[str, Any] = LOCK) -> Path:
    """Write the folder of a run in progress."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "recipe.lock.json").write_text(json.dumps(lock))
    (folder / "metrics.jsonl").write_text(lines(1, steps) if steps else "")
    state(folder)
    for step in range(100, steps + 1, 100):
        (folder / str(step)).mkdir(exist_ok=True)
    return folder


def append(folder: Path, text: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(text)
