"""A sweep of a fake server, measured by a fake of vLLM's client."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipec.runtime.clients import bench
from recipec.runtime.clients.bench_runner import Processes

STUB = Path(__file__).with_name("stub_vllm.py")


class Bench:
    """A folder with a fake `vllm`, a server's address and results.

    Attributes:
        bin: the fake's folder, to be put on PATH.
        results: the results' folder.
        words: the flags of a sweep of 2 x 2 points.
        folders: the folders of the measurements that `calls` returned.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.bin, self.results = folder / "bin", folder / "results"
        self.bin.mkdir()
        shutil.copy(STUB, self.bin / "stub_vllm.py")
        (self.bin / "vllm").write_text(
            f'#!/bin/sh\nexec {sys.executable} -S "{self.bin}/stub_vllm.py" "$@"\n'
        )
        (self.bin / "vllm").chmod(0o755)
        self.folders: set[str] = set()
        self.words = [
            *("--url", url, "--model", "tuned", "--tokenizer", "/model", "--results", str(self.results)),
            *("--input-lengths", "512,1024", "--output-length", "16", "--request-rates", "0.5,inf"),
            *("--prompts", "10"),
        ]

    @property
    def path(self) -> str:
        return f"{self.bin}:{os.environ['PATH']}"

    def plan(self, faults: Mapping[str, str]) -> None:
        """Set the client's behavior at points, by their names."""
        (self.bin / "plan.json").write_text(json.dumps(faults))

    def run(self, *more: str, runner: Processes | None = None) -> int:
        return bench.main([*self.words, *more], runner)

    def calls(self) -> list[dict[str, Any]]:
        """Return the client's calls since the last time."""
        path = self.bin / "calls.jsonl"
        if not path.is_file():
            return []
        calls = [json.loads(line) for line in path.read_text().splitlines()]
        path.unlink()
        self.folders |= {call["words"][call["words"].index("--result-dir") + 1] for call in calls}
        return calls

    def measured(self) -> list[str]:
        """Return the points of these calls."""
        return [point_of(call["words"]) for call in self.calls()]

    def record(self, name: str) -> dict[str, Any]:
        record: dict[str, Any] = json.loads((self.results / f"{name}.json").read_text())
        return record

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.results / "summary.json").read_text())
        return summary

    def outcomes(self) -> dict[str, str]:
        """Return each point's outcome from the summary."""
        return {
            f"input-{row['input_length']}-rate-{row['rate']}": row["outcome"]
            + (f": {row['reason']}" if row["reason"] else "")
            for row in self.summary()["points"]
        }


def point_of(words: Sequence[str]) -> str:
    length = words[words.index("--random-input-len") + 1]
    return f"input-{length}-rate-{words[words.index('--request-rate') + 1]}"
