"""Made-up runs and sweeps in the runtime's formats, for tests."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recipec.compiler.emitters.emit import emit
from recipec.compiler.lower import lower
from recipec.runtime.clients import bench_report
from recipec.runtime.clients.bench_points import LoadPoint, as_json
from recipec.runtime.clients.bench_report import HourlyPrice, Published
from recipec.runtime.clients.bench_server import ServerFacts, ServerMachine
from recipec.runtime.data.row_counts import DataReport, Problems, SplitReport
from recipec.spec.load import load
from tests.clients import stub_vllm

TPU = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 24}
data: {train: [gs://bucket/train.jsonl]}
train: {steps: 200, global_batch_size: 4}
checkpoint: {directory: gs://bucket/run}
"""


def lines(
    steps: int, rate: float = 1e-2, evaluate: int = 25, preference: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield a run's log: a loss that falls, faster with a higher rate."""
    chance = random.Random(7)
    for step in range(1, steps + 1):
        compiling = step == 1
        entry = {
            "step": step,
            "loss": 2.0 + 5.0 * math.exp(-step * rate / 0.3) + 0.3 * chance.random(),
            "learning_rate": rate * (1 - step / steps),
            "grad_norm": 0.5 + chance.random(),
            "tokens": 900,
            "tokens_per_second": 900 / (45.0 if compiling else 0.9),
            "step_seconds": 45.0 if compiling else 0.9 + 0.02 * chance.random(),
            "peak_memory_bytes": int(1.8 * 2**30),
        }
        if preference:
            chosen = 0.01 * step
            entry |= {"rewards_chosen": chosen, "rewards_rejected": -chosen, "rewards_margin": 2 * chosen}
            entry |= {"rewards_accuracy": min(1.0, 0.5 + 0.01 * step)}
        yield entry
        if step % evaluate == 0:
            yield {"step": step, "eval_loss": 2.3 + 5.0 * math.exp(-step * rate / 0.3)}


def facts(steps: int, resumed: Sequence[int] = (), platform: str = "cpu") -> dict[str, Any]:
    """Return the contents of run.json."""
    train = SplitReport(read=310, kept=302, tokens=10_870, targets=2_752, longest=80, rows=90)
    train.row_tokens, train.row_length = 10_870, 128
    train.malformed = Problems()
    train.malformed.add("train.jsonl:17", "no messages")
    train.overlong = Problems(count=7)
    held = SplitReport(read=30, kept=30, tokens=1_069, targets=278, longest=73, rows=9)
    held.row_tokens, held.row_length = 1_069, 128
    return {
        "run": 1,
        "name": "example",
        "script": "train.py",
        "accumulation": 2,
        "data": DataReport(train, held, 12, steps, True).to_dict(),
        "lengths": {
            "edges": [10, 30, 50, 81],
            "counts": [100, 150, 52],
            "percentiles": {"10": 21.0, "50": 36.0, "90": 52.0, "99": 74.0},
        },
        "devices": {
            "platform": platform,
            "kind": "cpu" if platform == "cpu" else "TPU v5",
            "count": 8 if platform == "cpu" else 4,
            "processes": 1,
            "memory_bytes": None if platform == "cpu" else 95 * 2**30,
        },
        "starts": [
            {"at": f"2026-11-22T1{index}:00:00Z", "after": after, "until": steps}
            for index, after in enumerate((0, *resumed))
        ],
    }


def write(
    folder: Path, entries: Sequence[dict[str, Any]], about: dict[str, Any] | None, recipe: Path | None
) -> Path:
    """Write a run's folder.

    Args:
        about: run.json; None for none.
        recipe: the recipe whose lock and text are written too; None for neither.
    """
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    if about is not None:
        (folder / "run.json").write_text(json.dumps(about))
    if recipe is not None:
        for name, content in _artifact(recipe.read_text(encoding="utf-8")).items():
            (folder / name).write_bytes(content)
    return folder


@functools.cache
def _artifact(text: str) -> dict[str, bytes]:
    """Return the artifact's files that a run keeps."""
    program = lower(load(Path("example.yaml"), text=text), planning=True).program
    assert program is not None
    files = emit(program)
    return {name: files[name] for name in ("recipe.lock.json", "recipe.yaml")}


def recipe(folder: Path, text: str = TPU, **changed: str) -> Path:
    """Write a recipe's file."""
    folder.mkdir(parents=True, exist_ok=True)
    for before, after in changed.items():
        assert before in text
        text = text.replace(before, after)
    path = folder / "example.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def run(
    folder: Path, steps: int = 200, rate: float = 1e-2, text: str = TPU, resumed: Sequence[int] = ()
) -> Path:
    """Write a whole run's folder, with its recipe."""
    given = recipe(folder.parent / f"{folder.name}-recipe", text)
    return write(folder, list(lines(steps, rate)), facts(steps, resumed), given)


def sweep(folder: Path, slower: float = 1.0, told: str = "a stand-in for a server") -> Path:
    """Write the results of a sweep of 2 x 4 points, of which one failed."""
    folder.mkdir(parents=True)
    settings = {"prompts": 100, "output_length": 128}
    records: list[tuple[LoadPoint, dict[str, Any]]] = []
    for length in (512, 4096):
        for number, rate in enumerate(("1", "4", "16", "inf")):
            result = stub_vllm.whole(length, 128, 100, rate)
            load = 1.0 + 0.8 * number + length / 4096
            result["output_throughput"] = (
                1400.0 / slower * (1 - math.exp(-0.7 * (number + 1))) * (1 - length / 16384)
            )
            for name, base in (("ttft", 25.0), ("tpot", 13.5)):
                for part, factor in (("median", 1.0), ("p50", 1.0), ("p90", 1.4), ("p99", 2.1)):
                    result[f"{part}_{name}_ms"] = base * load**1.5 * factor * slower
            failed = (length, rate) == (4096, "16")
            record = {
                "point": {"input_length": length, "rate": rate},
                "settings": settings,
                "measured": "2026-11-22T10:00:00Z",
                "failure": "3 of 100 requests failed: Cannot connect to host" if failed else None,
                "note": None,
                "result": None if failed else result,
            }
            records.append((LoadPoint(length, rate), record))
            (folder / f"input-{length}-rate-{rate}.json").write_text(as_json(record))
    machine = ServerMachine("stand-in", "a machine", {})
    summary = bench_report.Measurements(
        model="tuned",
        settings=settings,
        server=ServerFacts("0.32.0", "/model", 8192, {}),
        place=bench_report.place(machine, "v6e-8", 8, told, "http://127.0.0.1:8000"),
        price=HourlyPrice(21.52, "list price of 2026-05"),
        published=Published(
            "arXiv 2605.25645",
            (
                {"input": 512, "peak_output_tokens_per_s": 1403},
                {"input": 4096, "rate": 4, "median_ttft_ms": 61},
            ),
        ),
        records=records,
        left_out=["16,384 tokens in: more than the server takes"],
    )
    (folder / "summary.json").write_text(as_json(summary.summary()))
    return folder
