"""The numbers in a run's logs, read by TensorBoard's and wandb's own readers, in metrics.jsonl's form."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

Numbers = dict[tuple[str, int], float]
"""Numbers by the name in TensorBoard ("train/loss") and the step."""

IN_SINGLE = 1e-6
"""A relative tolerance, because TensorBoard's files hold float32."""


def of_lines(folder: Path) -> Numbers:
    """Return the numbers of metrics.jsonl."""
    out: Numbers = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for name, value in entry.items():
            if name != "step":
                evaluated = name.startswith(("eval_", "eval/"))
                mode, kind = ("eval", name[5:]) if evaluated else ("train", name)
                assert (f"{mode}/{kind}", entry["step"]) not in out, "a step twice"
                out[f"{mode}/{kind}", entry["step"]] = float(value)
    return out


def of_tensorboard(folder: Path) -> Numbers:
    """Return the numbers of the event files, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    out: Numbers = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            assert (name, event.step) not in out, "a step twice"
            out[name, event.step] = event.value
    return out


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records that wandb wrote offline below a folder, process after process."""
    from wandb.util import get_core_path

    out = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        # The function behind `wandb leet inspect --json FILE`.
        options = ["--no-observability", "--json", "--run-file", str(file), str(file.parents[1])]
        command = [get_core_path(), "leet", "inspect", *options]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        out += [json.loads(line) for line in found.stdout.splitlines()]
    return out


def of_wandb(records: list[dict[str, Any]]) -> Numbers:
    out: Numbers = {}
    for record in records:
        if record["type"] == "history":
            for name, value in record["history"]["item"].items():
                if not name.startswith("_"):
                    step = record["history"]["step"]["num"]
                    assert (name, step) not in out, "a step twice"
                    out[name, step] = float(value)
    return out


def assert_same(found: Numbers, expected: Numbers, relative: float = 0.0) -> None:
    """Check that two logs hold the same numbers for the same steps."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for key, value in expected.items():
        if math.isfinite(value):
            assert np.isclose(found[key], value, rtol=relative, atol=0), key
        else:
            assert str(found[key]) == str(value), key
