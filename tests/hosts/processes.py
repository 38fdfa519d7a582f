"""Runs of several processes on this machine: one small artifact, started once for each process."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port
from tests.runtime.artifacts import script
from tests.runtime.lives import Life, Lives

PEER = 6
"""RECIPEC_PEER_TIMEOUT in seconds, for tests of a process that falls silent."""
PATIENT = 60
"""The same for other tests: on a busy machine, a process that compiles is silent for a while."""
LIMITS = {"RECIPEC_START_TIMEOUT": "60", "RECIPEC_BARRIER_TIMEOUT": "60"}

LIGHT = """
import dataclasses

LORA = dataclasses.replace(LORA, targets=("q_proj",), dropout={dropout})
MESH = MeshSettings(platform="cpu", devices={devices}, axes={axes})
DATA = dataclasses.replace(DATA, max_length=32)
"""
"""Code of an artifact that compiles quickly on any mesh."""


def light(axes: Mapping[str, int], dropout: float = 0.1, more: str = "") -> str:
    """Return the `prelude` of such an artifact."""
    devices = 1
    for size in axes.values():
        devices *= size
    return LIGHT.format(dropout=dropout, axes=dict(axes), devices=devices) + more


@dataclass
class Processes:
    """The processes of a run, in the order of their numbers."""

    members: list[Life]
    port: int

    def __getitem__(self, number: int) -> Life:
        return self.members[number]

    def wait(self) -> list[int]:
        """Wait for all exit statuses."""
        return [life.wait() for life in self.members]

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition while all of them run."""
        deadline = time.monotonic() + 120
        while not condition():
            ended = [life.status for life in self.members]
            assert ended == [None] * len(ended), (ended, self.said())
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.01)

    def send(self, signum: int) -> None:
        for life in self.members:
            life.send(signum)

    def said(self) -> str:
        return "\n".join(f"--- {n}\n{life.stderr}" for n, life in enumerate(self.members))

    def errors(self) -> list[list[str]]:
        """Return each process's error lines, without the help."""
        return [
            [line for line in life.stderr.splitlines() if line.startswith("error: ")] for life in self.members
        ]


def place_of(number: int, count: int, port: int, host: str = "127.0.0.1", peer: int = PEER) -> dict[str, str]:
    """Return the variables that tell a process its place."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"{host}:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(number),
        "RECIPEC_PEER_TIMEOUT": str(peer),
        **LIMITS,
    }


def start(
    lives: Lives,
    place: Path,
    output: str,
    count: int,
    *options: str,
    artifact: str = "artifact",
    port: int | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
    numbers: Sequence[int] | None = None,
    peer: int = PEER,
) -> Processes:
    """Start the processes of a run.

    Args:
        own: variables of single processes, by number.
        numbers: the processes to start; all for None.
        peer: RECIPEC_PEER_TIMEOUT.
    """
    port = free_port() if port is None else port
    argv = script(place, output, *options, artifact=artifact)
    members = [
        lives.begin(*argv, environment={**place_of(n, count, port, peer=peer), **(own or {}).get(n, {})})
        for n in (range(count) if numbers is None else numbers)
    ]
    return Processes(members, port)


def kill_all(group: Processes) -> None:
    for life in group.members:
        life.send(signal.SIGCONT)
        life.send(signal.SIGKILL)
        life.wait()


def begun(place: Path, output: str, step: int, number: int = 0) -> bool:
    """Return whether a process's log says that it has given a step to its devices."""
    path = place / output / "logs" / f"process-{number}.log"
    return path.exists() and f" step {step}: " in path.read_text()


def losses(folder: Path) -> list[dict[str, float]]:
    """Return the numbers of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keep = ("step", "loss", "eval_loss", "learning_rate", "grad_norm", "tokens")
    return [{key: line[key] for key in keep if key in line} for line in lines]


DUMPED = """
import json
import os

from runtime.model import sharding

placed = sharding.Rows.place


def dumped(self, batch):
    number = os.environ.get("JAX_PROCESS_ID", "0")
    path = Path(sys.argv[sys.argv.index("--output") + 1]) / f"rows-{number}.jsonl"
    with path.open("a") as file:
        for at, row in enumerate(self.here):
            parts = {name: batch[name][at].tolist() for name in ("tokens", "segment_ids", "loss_mask")}
            numbers = {name: float(batch[name]) for name in ("norm", "index")}
            file.write(json.dumps({"row": row, **numbers, **parts}) + "\\n")
    return placed(self, batch)


sharding.Rows.place = dumped
"""
"""Code of an artifact whose processes record the rows that they place on their devices."""


def dumped_rows(output: Path, count: int) -> list[str]:
    """Return the rows that `count` processes have placed, each as often as one process places it."""
    found: list[set[tuple[int, str]]] = []
    for number in range(count):
        times: dict[str, int] = {}
        rows = set()
        for line in (output / f"rows-{number}.jsonl").read_text().splitlines():
            times[line] = times.get(line, 0) + 1
            rows.add((times[line], line))
        found.append(rows)
    return sorted(line for _, line in set().union(*found))
